"""Compatibility with bert-as-service: its ZeroMQ sockets, HTTP endpoints, status answers, flags and checkpoints. All code for it is in this folder."""
