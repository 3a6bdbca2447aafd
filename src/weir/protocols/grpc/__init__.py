"""The Open Inference Protocol (KServe v2) over gRPC, with Triton's calls and those of the AMD Inference Server.

settings.py    where and how it is served
opening.py     makes the door, if grpcio is installed
server.py      the door: address, TLS, limits, drain
call.py       one call: bytes in, bytes out, errors as status codes
inference.py   ModelInfer; inference.py: ModelStreamInfer
inference.py       what requests share that differ in nothing but the bytes of their tensors
services.py what only shows: health, metadata, configuration, statistics
services.py what changes the server: repository, workers, shared memory
services.py      gRPC's standard health service; services.py: its reflection service
services.py calls that are known and not offered
services.py    all calls by their paths
"""
