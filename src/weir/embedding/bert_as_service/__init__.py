"""What bert-as-service's users know: its ZeroMQ sockets, its HTTP endpoints, its status answers, and its checkpoints. Nothing else of embedding knows it."""
