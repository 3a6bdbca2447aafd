"""What is sent by the Open Inference Protocol: one number as a tensor."""

import json
import struct

import numpy as np

from weir.wire.inference import InferenceRequest, TensorValue
from weir.wire.kserve_grpc import write_request

JSON_BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [3.0]}]})


def call_body(model: str) -> bytes:
    """Return the message of a call of ModelInfer."""
    return write_request(InferenceRequest(model, [TensorValue("x", "FP32", np.array([[3.0]], np.float32))]))


def binary_body() -> tuple[bytes, str]:
    """Return the body with a binary tensor, and the line that its head needs."""
    data = struct.pack("<f", 3.0)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + data, f"Inference-Header-Content-Length: {len(head)}"
