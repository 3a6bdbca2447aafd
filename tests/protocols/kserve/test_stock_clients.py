"""Clients that nobody here wrote, against a real server process: Triton's (sync, gevent, asyncio) and KServe's."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from numpy.typing import NDArray
from tests.late import kserve, triton_aio
from tests.protocols.kserve.models import TYPES
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from weir._version import __version__

FIRST = np.arange(16, dtype=np.int32).reshape(1, 16)
SECOND = np.full((1, 16), 3, np.int32)


def inputs(*arrays: NDArray[Any], kind: str = "INT32", binary: bool = True) -> list[Any]:
    """Return INPUT0, INPUT1 … for Triton's client."""
    made = [triton.InferInput(f"INPUT{index}", list(array.shape), kind) for index, array in enumerate(arrays)]
    for each, array in zip(made, arrays, strict=True):
        each.set_data_from_numpy(array, binary_data=binary)
    return made


def requested(*names: str, binary: bool = True) -> list[Any]:
    """Return the outputs to ask for."""
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in names]


class Both:
    """Triton's two clients behind one face: what the asyncio one returns is awaited."""

    def __init__(self, address: str, flavour: str) -> None:
        self._address = address
        self._flavour = flavour

    def __call__(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call `method` of a new client."""
        if self._flavour == "sync":
            with triton.InferenceServerClient(self._address) as client:
                return getattr(client, method)(*arguments, **options)

        async def main() -> Any:
            async with triton_aio.InferenceServerClient(self._address) as client:
                return await getattr(client, method)(*arguments, **options)

        return asyncio.run(main())


@pytest.fixture(params=["sync", "asyncio"])
def call(request: pytest.FixtureRequest, address: str) -> Both:
    """Ask through each of Triton's clients."""
    return Both(address, request.param)


def test_health(call: Both) -> None:
    assert call("is_server_live") is call("is_server_ready") is call("is_model_ready", "simple") is True
    assert call("is_model_ready", "nobody") is call("is_model_ready", "simple", "7") is False


def test_metadata(call: Both) -> None:
    server = call("get_server_metadata")
    assert (server["name"], server["version"]) == ("stock", __version__)
    assert {"binary_tensor_data", "schedule_policy", "system_shared_memory"} <= set(server["extensions"])
    model = call("get_model_metadata", "simple")
    assert (model["name"], model["platform"], model["versions"]) == ("simple", "python", [])
    assert model["inputs"] == [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [-1, 16]} for i in (0, 1)]
    assert call("get_model_config", "simple")["max_batch_size"] == 64


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_infer(call: Both, binary_in: bool, binary_out: bool | None) -> None:
    wanted = None if binary_out is None else requested("OUTPUT0", "OUTPUT1", binary=binary_out)
    result = call("infer", "simple", inputs(FIRST, SECOND, binary=binary_in), outputs=wanted, request_id="r1")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), FIRST + SECOND)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), FIRST - SECOND)
    response = result.get_response()
    assert (response["model_name"], response["id"]) == ("simple", "r1") and "model_version" not in response


def test_only_the_requested_outputs_come_back(call: Both) -> None:
    result = call("infer", "simple", inputs(FIRST, SECOND), outputs=requested("OUTPUT1"))
    assert [output["name"] for output in result.get_response()["outputs"]] == ["OUTPUT1"]
    assert result.as_numpy("OUTPUT0") is None


def test_mixed_binary_and_json(call: Both) -> None:
    mixed = [inputs(FIRST, SECOND)[0], inputs(FIRST, SECOND, binary=False)[1]]
    result = call("infer", "simple", mixed, outputs=[*requested("OUTPUT0"), *requested("OUTPUT1", binary=False)])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), FIRST + SECOND)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), FIRST - SECOND)


@pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
@pytest.mark.parametrize("received", [None, "gzip", "deflate"])
def test_compression(call: Both, sent: str | None, received: str | None) -> None:
    words = np.array([[b"word" * 100] * 50], object)
    result = call(
        "infer", "simple_identity", inputs(words, kind="BYTES"), request_compression_algorithm=sent,
        response_compression_algorithm=received,
    )  # fmt: skip
    assert result.as_numpy("OUTPUT0").tolist() == words.tolist()


def test_strings(call: Both) -> None:
    first, second = (np.array([[str(x).encode() for x in array[0]]], object) for array in (FIRST, SECOND))
    result = call("infer", "simple_string", inputs(first, second, kind="BYTES"))
    assert [int(text) for text in result.as_numpy("OUTPUT0")[0]] == (FIRST + SECOND)[0].tolist()
    result = call(
        "infer", "simple_string", inputs(first, second, kind="BYTES", binary=False), outputs=requested("OUTPUT1")
    )
    assert [int(text) for text in result.as_numpy("OUTPUT1")[0]] == (FIRST - SECOND)[0].tolist()


def every_type(binary: bool) -> list[Any]:
    """Return two rows of two elements of every datatype."""
    made = []
    for kind in TYPES:
        tensor = triton.InferInput(kind.lower(), [2, 2], kind)
        if kind == "BYTES":
            tensor.set_data_from_numpy(np.array([[b"a", b"b"], [b"", "ü".encode()]], object), binary_data=binary)
        elif kind == "BF16":
            tensor.set_data_from_numpy(np.array([[1.5, -2.0], [0.0, 3.0]]).astype(triton_dtype(kind)))
        else:
            array = np.array([[1, 0], [1, 1]]).astype(triton_dtype(kind))
            tensor.set_data_from_numpy(array, binary_data=binary or kind == "FP16")
        made.append(tensor)
    return made


def triton_dtype(kind: str) -> Any:
    """Return numpy's type for a datatype."""
    return triton_to_np_dtype(kind)


@pytest.mark.parametrize("binary", [True, False])
def test_every_datatype(call: Both, binary: bool) -> None:
    wanted = [triton.InferRequestedOutput(kind, binary_data=binary or kind in ("FP16", "BF16")) for kind in TYPES]
    result = call("infer", "types", every_type(binary), outputs=wanted)
    for kind in TYPES:
        got = result.as_numpy(kind)
        if kind == "BYTES":
            texts = [each if isinstance(each, str) else each.decode() for each in got.ravel()]
            assert texts == ["a", "b", "", "ü"]
        elif kind == "BF16":
            assert got.tolist() == [[1.5, -2.0], [0.0, 3.0]]
        else:
            assert (
                got.dtype == triton_dtype(kind)
                and got.tolist() == np.array([[1, 0], [1, 1]]).astype(got.dtype).tolist()
            )


def test_large_tensors(call: Both) -> None:
    x = np.random.default_rng(0).standard_normal((3, 50_000), np.float32)
    tensor = triton.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    result = call("infer", "vector", [tensor])
    np.testing.assert_array_equal(result.as_numpy("twice"), x * 2)


def test_items_are_documents(call: Both) -> None:
    tensor = triton.InferInput("input", [3], "BYTES")
    tensor.set_data_from_numpy(np.array([b"1", b"2", b"3"], object))
    assert call("infer", "square", [tensor]).as_numpy("output").tolist() == [b"1", b"4", b"9"]


def test_priority_timeout_and_parameters(call: Both) -> None:
    options = {"priority": 1, "timeout": 60_000_000, "parameters": {"colour": "blue", "depth": 3, "on": True}}
    call("infer", "simple", inputs(FIRST, SECOND), **options)
    with pytest.raises(InferenceServerException, match="timeout"):
        call("infer", "simple", inputs(FIRST, SECOND), timeout=1)


@pytest.mark.parametrize(
    ("model", "version", "message", "status"),
    [
        ("nobody", "", "Request for unknown model: 'nobody' is not found", "404"),
        ("simple", "9", "Request for unknown model: 'simple' version '9' is not found", "404"),
    ],
)
def test_unknown_models(call: Both, model: str, version: str, message: str, status: str) -> None:
    for method in ("get_model_metadata", "get_model_config", "infer"):
        more = [inputs(FIRST, SECOND)] if method == "infer" else []
        with pytest.raises(InferenceServerException) as caught:
            call(method, model, *more, model_version=version)
        assert caught.value.message().startswith(message) and caught.value.status() == status


def test_what_is_wrong_comes_back_as_text(call: Both) -> None:
    with pytest.raises(InferenceServerException, match=r"'INPUT1': is missing"):
        call("infer", "simple", inputs(FIRST))
    with pytest.raises(InferenceServerException, match=r"'INPUT0'.*\[1, 8\].*\[-1, 16\]"):
        call("infer", "simple", inputs(FIRST[:, :8], SECOND))
    with pytest.raises(InferenceServerException, match=r"'INPUT0'.*'FP32', must be INT32"):
        call("infer", "simple", inputs(FIRST.astype(np.float32), SECOND.astype(np.float32), kind="FP32"))
    with pytest.raises(InferenceServerException, match="'OUTPUT7'"):
        call("infer", "simple", inputs(FIRST, SECOND), outputs=requested("OUTPUT7"))


@pytest.mark.parametrize("method", ["get_log_settings", "get_trace_settings"])
def test_what_is_not_offered_is_refused_by_name(call: Both, method: str) -> None:
    with pytest.raises(InferenceServerException, match="does not have this extension") as caught:
        call(method)
    assert caught.value.status() == "501"


def test_there_is_no_memory_of_devices(call: Both) -> None:
    assert call("get_cuda_shared_memory_status") == []
    call("unregister_cuda_shared_memory")  # as all examples do before they begin
    with pytest.raises(InferenceServerException, match="does not have this extension"):
        call("register_cuda_shared_memory", "r", b"handle", 0, 64)


def test_many_greenlets_share_batches(address: str) -> None:
    with triton.InferenceServerClient(address, concurrency=8) as client:
        under_way = [client.async_infer("simple", inputs(FIRST + i, SECOND), request_id=str(i)) for i in range(40)]
        for i, each in enumerate(under_way):
            result = each.get_result()
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), FIRST + i + SECOND)
            assert result.get_response()["id"] == str(i)


# KServe's own client.


def with_kserve(test: Callable[[Any], Awaitable[None]]) -> None:
    """Run `test` with KServe's REST client."""

    async def main() -> None:
        async with kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2", retries=1)) as client:
            await test(client)

    asyncio.run(main())


def test_kserve_health(address: str) -> None:
    async def test(client: Any) -> None:
        url = f"http://{address}"
        assert await client.is_server_live(url) is True
        assert await client.is_server_ready(url) is True
        assert await client.is_model_ready(url, "simple") is True
        assert await client.is_model_ready(url, "nobody") is False

    with_kserve(test)


@pytest.mark.parametrize("binary", [True, False])
def test_kserve_infer(address: str, binary: bool) -> None:
    tensors = []
    for name, array in (("INPUT0", FIRST), ("INPUT1", SECOND)):
        tensor = kserve.InferInput(name, [1, 16], "INT32")
        tensor.set_data_from_numpy(array, binary_data=binary)
        tensors.append(tensor)

    async def test(client: Any) -> None:
        outputs = [kserve.protocol.infer_type.RequestedOutput("OUTPUT0", {"binary_data": binary})]
        request = kserve.InferRequest("simple", tensors, request_id="k1", request_outputs=outputs)
        response = await client.infer(f"http://{address}", request, model_name="simple")
        assert response.id == "k1" and response.model_name == "simple"
        [output] = response.outputs
        np.testing.assert_array_equal(output.as_numpy(), FIRST + SECOND)

    with_kserve(test)


def test_kserve_first_version(address: str) -> None:
    url = f"http://{address}"

    async def main() -> None:
        async with kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v1")) as client:
            assert await client.is_server_live(url) and await client.is_model_ready(url, "square")
            for field in ("instances", "inputs"):
                assert await client.infer(url, {field: [2, 3]}, model_name="square") == {"predictions": [4, 9]}
            tensors = {"INPUT0": FIRST.tolist(), "INPUT1": SECOND.tolist()}
            found = await client.infer(url, {"instances": [tensors]}, model_name="simple")
            assert found["predictions"][0]["OUTPUT0"] == (FIRST + SECOND).tolist()
            for body, rule in (({"instances": 3}, "must be a list"), ({"instances": [2, "a"]}, r"instances\[1\]: ")):
                with pytest.raises(httpx.HTTPStatusError, match=rule):
                    await client.infer(url, body, model_name="square")

    asyncio.run(main())
    assert httpx.get(f"{url}/v1/models").json()["models"]


def test_kserve_errors(address: str) -> None:
    async def test(client: Any) -> None:
        with pytest.raises(Exception, match="Request for unknown model: 'nobody'"):
            await client.infer(f"http://{address}", {"inputs": []}, model_name="nobody")

    with_kserve(test)
