"""Runs batches: in worker processes, threads, or on the event loop, and replaces workers that die or hang."""
