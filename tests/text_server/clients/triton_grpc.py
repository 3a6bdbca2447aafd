"""Run as a program: Triton's gRPC client asks the model `small` at the address given for the vectors of pairs, given as JSON, of which the
second is too long.

The clients of Triton and of others cannot be loaded by one process, so it has a program of its own.
"""

import json
import sys

import numpy as np
import tritonclient.grpc as triton


def main(address: str, pairs: list[list[str]]) -> None:
    """Ask, and print the vectors, line by line."""
    with triton.InferenceServerClient(address) as client:
        described = client.get_model_metadata("small", as_json=True)
        assert [each["datatype"] for each in described["outputs"]][:2] == ["FP32", "BOOL"], described
        array = np.array([[text.encode() for text in pair] for pair in pairs], object)
        tensor = triton.InferInput("input", list(array.shape), "BYTES")
        tensor.set_data_from_numpy(array)
        result = client.infer("small", [tensor], parameters={"dimensions": 3, "client": "stock"})
    assert result.as_numpy("truncated").tolist() == [False, True]
    assert result.get_response().parameters["truncated"].int64_param == 1
    vectors = result.as_numpy("output")
    assert vectors.dtype == np.float32
    for vector in vectors:
        print(*vector.tolist())


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
