"""The Open Inference Protocol (KServe v2) over gRPC, with Triton's calls and those of the AMD Inference Server.

frontend.py   whether and how it is served: its settings, and what makes it
server.py     the frontend: address, TLS, limits, drain
core.py       a server on grpcio's private core; aio.py: the same on the public grpc.aio, where that core has changed
call.py       one call: bytes in, bytes out, errors as status codes
inference.py  ModelInfer and ModelStreamInfer
services.py   all other calls by their paths: health, metadata, repository, workers, shared memory, reflection, and calls that are known and not offered
"""
