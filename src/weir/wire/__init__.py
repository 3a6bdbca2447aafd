"""What workers, servers and clients send to each other: bytes of frames, tensors, JSON, protobuf, and back."""
