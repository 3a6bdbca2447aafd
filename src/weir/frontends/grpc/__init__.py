"""The Open Inference Protocol (KServe v2) over gRPC, with Triton's calls and those of the AMD Inference Server.

frontend.py   the settings of gRPC, and the function that makes the frontend
server.py     the frontend: address, TLS, limits, draining
core.py       a server on grpcio's private core
aio.py        the same server on the public grpc.aio, which is used where the private core has changed; and a relay to another server
call.py       one call: bytes in, bytes out, errors as status codes
inference.py  ModelInfer and ModelStreamInfer
services.py   all other calls: health, metadata, repository, workers, shared memory, reflection, and calls that are refused

Sources: grpc_predict_v2.proto of the Open Inference Protocol (https://github.com/kserve/open-inference-protocol) and grpc_service.proto of Triton
(https://github.com/triton-inference-server/common, protobuf/).
"""
