"""Bounded shared memory for large payloads and results."""
