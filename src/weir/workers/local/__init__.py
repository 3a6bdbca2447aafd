"""Executors in the server's own process: on the event loop, and in threads."""
