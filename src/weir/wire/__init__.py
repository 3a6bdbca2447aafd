"""What a worker and a server, a client and a server, say to each other: bytes of frames, tensors, JSON, protobuf, and back."""
