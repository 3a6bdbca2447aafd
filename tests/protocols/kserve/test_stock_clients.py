"""Clients that nobody here wrote, against a real server process: Triton's (sync, gevent, asyncio) and KServe's."""

import asyncio
from itertools import product
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from numpy.typing import NDArray
from tests.late import kserve, needs_kserve, triton_aio
from tests.protocols.kserve.models import TYPES
from tests.rings import subcases
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


def test_health_and_metadata(call: Both) -> None:
    assert call("is_server_live") is call("is_server_ready") is call("is_model_ready", "simple") is True
    assert call("is_model_ready", "nobody") is call("is_model_ready", "simple", "7") is False
    server = call("get_server_metadata")
    assert (server["name"], server["version"]) == ("stock", __version__)
    assert {"binary_tensor_data", "schedule_policy", "system_shared_memory"} <= set(server["extensions"])
    model = call("get_model_metadata", "simple")
    assert (model["name"], model["platform"], model["versions"]) == ("simple", "python", [])
    assert model["inputs"] == [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [-1, 16]} for i in (0, 1)]
    assert call("get_model_config", "simple")["max_batch_size"] == 64
    [statistics] = call("get_inference_statistics", "vector")["model_stats"]
    assert (statistics["name"], statistics["inference_stats"].keys() >= {"success", "fail"}) == ("vector", True)


BINARY, JSON = inputs(FIRST, SECOND), inputs(FIRST, SECOND, binary=False)


@subcases("given", [BINARY, JSON, [BINARY[0], JSON[1]]])
def test_infer(call: Both, given: list[Any]) -> None:
    for wanted in (
        None,
        requested("OUTPUT0", "OUTPUT1"),
        requested("OUTPUT0", "OUTPUT1", binary=False),
        [*requested("OUTPUT0"), *requested("OUTPUT1", binary=False)],
        requested("OUTPUT1"),
    ):
        result = call("infer", "simple", given, outputs=wanted, request_id="r1")
        if wanted is None or len(wanted) == 2:
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), FIRST + SECOND)
        else:
            assert result.as_numpy("OUTPUT0") is None
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), FIRST - SECOND)
        response = result.get_response()
        assert (response["model_name"], response["id"]) == ("simple", "r1") and "model_version" not in response


def test_compression(call: Both) -> None:
    words = np.array([[b"word" * 100] * 50], object)
    for sent, received in product((None, "gzip", "deflate"), repeat=2):
        result = call(
            "infer", "simple_identity", inputs(words, kind="BYTES"), request_compression_algorithm=sent,
            response_compression_algorithm=received,
        )  # fmt: skip
        assert result.as_numpy("OUTPUT0").tolist() == words.tolist()


@pytest.mark.parametrize("binary", [True, False])
def test_every_datatype(call: Both, binary: bool) -> None:
    given, expected = [], {}
    for kind in TYPES:
        dtype: Any = triton_to_np_dtype(kind)
        texts = np.array([[b"a", b"b"], [b"", "ü".encode()]], object)
        expected[kind] = texts if kind == "BYTES" else np.array([[1, 0], [1, 1]]).astype(dtype)
        given.append(triton.InferInput(kind.lower(), [2, 2], kind))
        given[-1].set_data_from_numpy(expected[kind], binary_data=binary or kind in ("FP16", "BF16"))
    wanted = [triton.InferRequestedOutput(kind, binary_data=binary or kind in ("FP16", "BF16")) for kind in TYPES]
    result = call("infer", "types", given, outputs=wanted)
    for kind, array in expected.items():
        got = result.as_numpy(kind)
        if kind == "BYTES":
            assert [each if isinstance(each, str) else each.decode() for each in got.ravel()] == ["a", "b", "", "ü"]
        else:
            assert (got.dtype == array.dtype or kind == "BF16") and got.tolist() == array.tolist()


def test_priority_timeout_and_parameters(call: Both) -> None:
    options = {"priority": 1, "timeout": 60_000_000, "parameters": {"colour": "blue", "depth": 3, "on": True}}
    call("infer", "simple", BINARY, **options)
    with pytest.raises(InferenceServerException, match="timeout"):
        call("infer", "simple", BINARY, timeout=1)


def test_many_greenlets_share_batches(address: str) -> None:
    with triton.InferenceServerClient(address, concurrency=8) as client:
        under_way = [client.async_infer("simple", inputs(FIRST + i, SECOND), request_id=str(i)) for i in range(40)]
        for i, each in enumerate(under_way):
            result = each.get_result()
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), FIRST + i + SECOND)
            assert result.get_response()["id"] == str(i)


@needs_kserve
async def test_kserves_client(address: str) -> None:
    url = f"http://{address}"
    async with kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2", retries=1)) as client:
        assert await client.is_server_live(url) is await client.is_server_ready(url) is True
        assert await client.is_model_ready(url, "simple") is True
        assert await client.is_model_ready(url, "nobody") is False
        for binary in (True, False):
            tensors = [kserve.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
            for tensor, array in zip(tensors, (FIRST, SECOND), strict=True):
                tensor.set_data_from_numpy(array, binary_data=binary)
            outputs = [kserve.protocol.infer_type.RequestedOutput("OUTPUT0", {"binary_data": binary})]
            request = kserve.InferRequest("simple", tensors, request_id="k1", request_outputs=outputs)
            response = await client.infer(url, request, model_name="simple")
            assert response.id == "k1" and response.model_name == "simple"
            [output] = response.outputs
            np.testing.assert_array_equal(output.as_numpy(), FIRST + SECOND)
        with pytest.raises(Exception, match="Request for unknown model: 'nobody'"):
            await client.infer(url, {"inputs": []}, model_name="nobody")


@needs_kserve
async def test_kserves_client_of_the_first_version(address: str) -> None:
    url = f"http://{address}"
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


def test_the_list_of_the_first_version(client: httpx.Client) -> None:
    assert client.get("/v1/models").json()["models"]
