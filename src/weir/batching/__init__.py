"""Queues of requests and the batches that are cut from them, without I/O and without a clock."""
