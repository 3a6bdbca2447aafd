"""Runs batches inside a worker, wherever that is: bytes come in, bytes go out, and one bad item fails alone."""
