"""The servers that speak the Open Inference Protocol, with the same two models, and what is sent to them."""

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy

from benchmarks.harness.servers import Server, free_port, python_of, script, serving

WEIR, TRITON, MLSERVER = "Weir", "Triton", "MLServer"
SIMPLE, MEAN = "/v2/models/simple/infer", "/v2/models/mean/infer"
IMAGE_SHAPE = [1, 3, 224, 224]
LENGTH_HEADER = "Inference-Header-Content-Length"


def simple_body() -> bytes:
    """Two rows of 16 numbers, as JSON."""
    names = ("INPUT0", "INPUT1")
    inputs = [{"name": name, "datatype": "INT32", "shape": [1, 16], "data": list(range(16))} for name in names]
    return json.dumps({"inputs": inputs}).encode()


def binary_body() -> tuple[bytes, dict[str, str]]:
    """One image of 602 KB as a binary tensor, and the headers that belong to it."""
    image = numpy.zeros(IMAGE_SHAPE, numpy.float32).tobytes()
    parameters = {"binary_data_size": len(image)}
    tensor = {"name": "IMAGE", "datatype": "FP32", "shape": IMAGE_SHAPE, "parameters": parameters}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + image, {LENGTH_HEADER: str(len(head))}


def servers(names: Sequence[str], path: str, grpc: dict[str, int]) -> list[AbstractContextManager[Server]]:
    """Return the servers of these names, to be entered. The gRPC port of each is put into `grpc`."""
    return [_server(name, path, grpc) for name in names]


def _server(name: str, path: str, grpc: dict[str, int]) -> AbstractContextManager[Server]:
    grpc[name] = free_port()
    if name == WEIR:
        command = [
            sys.executable, "-m", "weir", "serve", "benchmarks.models:Simple", "benchmarks.models:Mean", "--port", "{port}",
            "--grpc-port", str(grpc[name]), "--host", "127.0.0.1", "--log-level", "warning", "--max-batch-size", "64",
        ]  # fmt: skip
    else:
        starter = {TRITON: "triton.py", MLSERVER: "mlserver_start.py"}[name]
        command = [python_of(name.lower()), script(starter), "--http", "{port}", "--grpc", str(grpc[name])]
    return serving(name, command, path=SIMPLE, body=simple_body(), expected=None)
