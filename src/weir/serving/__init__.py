"""One running model: its service, the driver of its batches, its callers, hooks and streams."""
