"""Listens, never decides: metrics and logs."""
