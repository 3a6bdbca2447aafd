"""Listens, never decides: one recorder of what happens, what is shown of it (metrics), logs, and traces."""
