"""Run as a program: Triton's gRPC clients, synchronous, streaming and asyncio, against the server whose address is given.

The clients of Triton and KServe cannot be loaded by one process, so each has a program of its own.
"""

import asyncio
import queue
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.utils.shared_memory as memory

ROW = np.arange(16, dtype=np.int32).reshape(1, 16)


def inputs(array: Any, datatype: str = "INT32") -> list[Any]:
    """Return both inputs of `simple`."""
    made = [triton.InferInput(name, list(array.shape), datatype) for name in ("INPUT0", "INPUT1")]
    for tensor in made:
        tensor.set_data_from_numpy(array)
    return made


def shown(client: Any) -> None:
    """Health, metadata, configuration."""
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("simple") and not client.is_model_ready("nope")
    assert client.get_server_metadata().name == "weir"
    assert client.get_model_metadata("simple").inputs[0].datatype == "INT32"
    assert client.get_model_metadata("simple", as_json=True)["platform"] == "python"
    assert client.get_model_config("simple").config.max_batch_size == 64
    assert client.get_inference_statistics("simple").model_stats[0].name == "simple"


def inferred(client: Any) -> None:
    """One request, one answer."""
    result = client.infer("simple", inputs(ROW), request_id="7", priority=1, timeout=60_000_000)
    assert result.get_response().id == "7"
    assert (result.as_numpy("OUTPUT0") == 2 * ROW).all() and not result.as_numpy("OUTPUT1").any()
    texts = np.array([[str(n).encode() for n in range(16)]], object)
    result = client.infer("simplestring", inputs(texts, "BYTES"))
    assert result.as_numpy("OUTPUT0").tolist() == [[str(2 * n).encode() for n in range(16)]]
    wanted = [triton.InferRequestedOutput("OUTPUT1")]
    result = client.infer("simple", inputs(ROW), outputs=wanted, compression_algorithm="gzip")
    assert result.as_numpy("OUTPUT0") is None and result.as_numpy("OUTPUT1") is not None
    answers: queue.Queue[Any] = queue.Queue()
    client.async_infer("simple", inputs(ROW), lambda result, error: answers.put((result, error)))
    result, failed = answers.get(timeout=60)
    assert failed is None and result.as_numpy("OUTPUT0") is not None


def refuses(call: Any, status: str, text: str) -> None:
    """Check the status and the text of the error of a call."""
    try:
        call()
    except triton.InferenceServerException as error:
        assert error.status() == f"StatusCode.{status}" and text in error.message(), error
    else:
        raise AssertionError("it was not refused")


def streamed(client: Any) -> None:
    """Many requests under way, several answers to one, an error, and the stream goes on."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(20):
        client.async_stream_infer("simple", inputs(ROW), request_id=str(number))
    found = [answers.get(timeout=60) for _ in range(20)]
    assert {result.get_response().id for result, _ in found} == set(map(str, range(20)))
    assert all(error is None for _, error in found)
    document = triton.InferInput("input", [1], "BYTES")
    document.set_data_from_numpy(np.array([b"3"], object))
    client.async_stream_infer("count", [document], enable_empty_final_response=True)
    results = [answers.get(timeout=60)[0] for _ in range(4)]
    assert [each.as_numpy("output").tolist() for each in results[:3]] == [[b"1"], [b"2"], [b"3"]]
    assert [each.get_response().parameters["triton_final_response"].bool_param for each in results] == [
        False, False, False, True
    ]  # fmt: skip
    client.async_stream_infer("nope", inputs(ROW), request_id="x")
    _, error = answers.get(timeout=60)
    assert "Request for unknown model" in error.message()
    client.async_stream_infer("simple", inputs(ROW), request_id="y")
    assert answers.get(timeout=60)[0].get_response().id == "y"
    client.stop_stream()


def shared(client: Any) -> None:
    """Inputs and an output in system shared memory."""
    size = ROW.nbytes
    regions = {name: memory.create_shared_memory_region(name, f"/region-test-{name}", size) for name in ("in", "out")}
    try:
        memory.set_shared_memory_region(regions["in"], [ROW])
        for name in regions:
            client.register_system_shared_memory(name, f"/region-test-{name}", size)
        assert set(client.get_system_shared_memory_status().regions) == set(regions)
        assert client.get_system_shared_memory_status("in").regions["in"].byte_size == size
        tensors = inputs(ROW)
        tensors[0].set_shared_memory("in", size)
        wanted = triton.InferRequestedOutput("OUTPUT0")
        wanted.set_shared_memory("out", size)
        result = client.infer("simple", tensors, outputs=[wanted, triton.InferRequestedOutput("OUTPUT1")])
        assert (memory.get_contents_as_numpy(regions["out"], np.int32, [1, 16]) == 2 * ROW).all()
        assert result.get_output("OUTPUT0").parameters["shared_memory_region"].string_param == "out"
        assert not result.as_numpy("OUTPUT1").any()
        client.unregister_system_shared_memory()
        assert not client.get_system_shared_memory_status().regions
    finally:
        for region in regions.values():
            memory.destroy_shared_memory_region(region)


def changed(client: Any) -> None:
    """The model repository: index, load, unload."""
    assert {each.name: each.state for each in client.get_model_repository_index().models}["simple"] == "READY"
    client.unload_model("simplestring")
    assert not client.is_model_ready("simplestring")
    client.load_model("simplestring", config='{"max_batch_size": 3}')
    assert client.get_model_config("simplestring").config.max_batch_size == 3
    refuses(lambda: client.load_model("nope"), "NOT_FOUND", "nope")


async def concurrently(address: str) -> None:
    """Many calls, and a stream, with the asyncio client."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(5):
            yield {"model_name": "simple", "inputs": inputs(ROW), "request_id": str(number)}

    async with triton_aio.InferenceServerClient(address) as client:
        assert await client.is_server_live() and await client.is_model_ready("simple")
        assert (await client.get_server_metadata()).name == "weir"
        results = await asyncio.gather(*[client.infer("simple", inputs(ROW)) for _ in range(20)])
        assert all((result.as_numpy("OUTPUT0") == 2 * ROW).all() for result in results)
        found = [answer async for answer in client.stream_infer(requests())]
        assert {result.get_response().id for result, error in found if error is None} == set("01234")


if __name__ == "__main__":
    asyncio.run(concurrently(sys.argv[1]))
    with triton.InferenceServerClient(sys.argv[1]) as made:
        for part in (shown, inferred, streamed, shared, changed):
            part(made)
