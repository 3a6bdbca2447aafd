"""Wire formats between clients, servers and workers: reads and writes frames, tensors, JSON and protobuf."""
