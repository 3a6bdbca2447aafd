"""Compatibility with bert-as-service: its ZeroMQ sockets, HTTP endpoints, status responses, flags and checkpoints. All code for it is in this folder."""
