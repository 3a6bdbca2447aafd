"""Triton's own client and its shared memory, with a real server process."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import shared_memory

FIRST = np.arange(16, dtype=np.int32).reshape(1, 16)
SECOND = np.full((1, 16), 3, np.int32)


@pytest.fixture
def stock(address: str) -> Iterator[triton.InferenceServerClient]:
    """Triton's client; no region is left behind."""
    with triton.InferenceServerClient(address) as client:
        yield client
        client.unregister_system_shared_memory()


@contextmanager
def region(name: str, size: int) -> Iterator[tuple[str, Any]]:
    """Give the key of shared memory and what Triton's client calls it by."""
    key = f"region_test_{uuid4().hex}"
    handle = shared_memory.create_shared_memory_region(name, key, size)
    try:
        yield key, handle
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def tensors() -> list[triton.InferInput]:
    """Return the inputs of `simple`, their values elsewhere."""
    return [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]


def test_inputs_and_outputs_in_regions(stock: triton.InferenceServerClient) -> None:
    with region("region", 256) as (key, handle):
        shared_memory.set_shared_memory_region(handle, [FIRST, SECOND])
        stock.register_system_shared_memory("region", key, 256)
        assert stock.get_system_shared_memory_status("region") == stock.get_system_shared_memory_status()
        assert stock.get_system_shared_memory_status()[0]["byte_size"] == 256
        inputs = tensors()
        inputs[0].set_shared_memory("region", 64)
        inputs[1].set_shared_memory("region", 64, offset=64)
        output = triton.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("region", 64, offset=128)
        result = stock.infer("simple", inputs, outputs=[output, triton.InferRequestedOutput("OUTPUT1")])
        there = shared_memory.get_contents_as_numpy(handle, np.int32, [1, 16], offset=128)
        np.testing.assert_array_equal(there, FIRST + SECOND)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), FIRST - SECOND)
        stock.unregister_system_shared_memory("region")
        assert stock.get_system_shared_memory_status() == []


def test_what_lies_in_a_region_has_no_bytes_in_the_body(
    client: httpx.Client, stock: triton.InferenceServerClient
) -> None:
    """Triton's C++ client reads how many from the parameters of every output that has any."""
    with region("sizes", 128) as (key, handle):
        stock.register_system_shared_memory("sizes", key, 128)
        given = [
            {"name": name, "shape": [1, 16], "datatype": "INT32", "data": array.tolist()}
            for name, array in (("INPUT0", FIRST), ("INPUT1", SECOND))
        ]
        place = {"shared_memory_region": "sizes", "shared_memory_byte_size": 64}
        outputs = [{"name": "OUTPUT0", "parameters": place}, {"name": "OUTPUT1", "parameters": {"binary_data": True}}]
        answer = client.post("/v2/models/simple/infer", json={"inputs": given, "outputs": outputs})
        length = int(answer.headers["inference-header-content-length"])
        first, second = json.loads(answer.content[:length])["outputs"]
        assert first["parameters"] == {**place, "shared_memory_offset": 0, "binary_data_size": 0}
        assert (second["parameters"], len(answer.content)) == ({"binary_data_size": 64}, length + 64)
        np.testing.assert_array_equal(np.frombuffer(answer.content[length:], np.int32), (FIRST - SECOND)[0])
        there = shared_memory.get_contents_as_numpy(handle, np.int32, [1, 16])
        np.testing.assert_array_equal(there, FIRST + SECOND)
