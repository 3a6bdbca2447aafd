"""Triton's own client and its shared memory, with a real server process."""

from collections.abc import Iterator
from uuid import uuid4

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tests.served import Served
from tritonclient.utils import InferenceServerException, shared_memory

FIRST = np.arange(16, dtype=np.int32).reshape(1, 16)
SECOND = np.full((1, 16), 3, np.int32)


@pytest.fixture
def stock(address: str) -> Iterator[triton.InferenceServerClient]:
    """Triton's client; no region is left behind."""
    with triton.InferenceServerClient(address) as client:
        yield client
        client.unregister_system_shared_memory()


def tensors() -> list[triton.InferInput]:
    """Return the inputs of `simple`, their values elsewhere."""
    return [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]


def test_inputs_and_outputs_in_regions(stock: triton.InferenceServerClient) -> None:
    key = f"weir_test_{uuid4().hex}"
    handle = shared_memory.create_shared_memory_region("region", key, 256)
    try:
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
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def test_what_is_wrong_is_named(stock: triton.InferenceServerClient) -> None:
    inputs = tensors()
    inputs[0].set_shared_memory("nowhere", 64)
    inputs[1].set_data_from_numpy(SECOND)
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'nowhere'"):
        stock.infer("simple", inputs)
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'nowhere'"):
        stock.get_system_shared_memory_status("nowhere")
    with pytest.raises(InferenceServerException, match="Unable to open shared memory region: 'r'"):
        stock.register_system_shared_memory("r", f"weir_absent_{uuid4().hex}", 64)


def test_pages_in_a_browser_and_proxies_may_not(client: httpx.Client) -> None:
    for header in ("origin", "x-forwarded-for"):
        answer = client.get("/v2/systemsharedmemory/status", headers={header: "https://evil.example"})
        assert (answer.status_code, list(answer.json())) == (403, ["error"])


def test_it_is_off_unless_allowed() -> None:
    with Served("examples.square:Square") as served:
        served.until_ready()
        answer = httpx.get(served.url + "/v2/systemsharedmemory/status")
        assert answer.status_code == 403 and "--allow-shared-memory" in answer.json()["error"]
        assert "system_shared_memory" not in httpx.get(served.url + "/v2").json()["extensions"]
