"""Asks a server with Triton's client whatever is in a file, at the same time, and writes the answers into another.

The file holds, pickled, a list of (model, arrays by name); the other then holds the arrays of each answer, or its error as text.
"""

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype


def call(address: str, model: str, given: dict[str, Any]) -> dict[str, Any] | str:
    """Return the answer to one request, or its error."""
    inputs = [triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)) for name, array in given.items()]
    for each, array in zip(inputs, given.values(), strict=True):
        each.set_data_from_numpy(array)
    with triton.InferenceServerClient(address) as client:
        try:
            result = client.infer(model, inputs)
        except InferenceServerException as error:
            return str(error.message())
        return {each.name: result.as_numpy(each.name) for each in result.get_response().outputs}


if __name__ == "__main__":
    address, source, target = sys.argv[1:]
    requests = pickle.loads(Path(source).read_bytes())
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda request: call(address, *request), requests))
    Path(target).write_bytes(pickle.dumps(answers))
