"""Models of mosec and LitServe run as they are: written here in the forms of these projects' examples. `make test-adapters`."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.served import serving, weir_here

import weir
from weir.client import HttpClient
from weir.model import adapted, check_model

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore")]  # the other servers' own

MODELS = '''
import asyncio

import litserve as ls
import msgspec
import numpy as np
from fastapi import HTTPException
from mosec import SSEWorker, Worker
from mosec.errors import ClientError, ValidationError
from mosec.mixin import TypedMsgPackMixin
from pydantic import BaseModel


class Exp(Worker):
    """One request at a time, and JSON."""

    example = {"x": 0}

    def forward(self, data):
        if "x" not in data:
            raise ValidationError("cannot find key 'x'")
        return {"y": float(np.exp(float(data["x"]))), "worker": self.worker_id, "size": self.max_batch_size}


class Lengths(Worker):
    """Batches, and bodies of its own."""

    resp_mime_type = "text/plain"

    def __init__(self):
        super().__init__()
        self.offset = 100

    def deserialize(self, data):
        return data.decode()

    def serialize(self, data):
        return str(data).encode()

    def forward(self, data):
        assert isinstance(data, list)
        if "bad" in data:
            raise ClientError("bad text")
        return [self.offset + len(text) for text in data]


class Request(msgspec.Struct):
    numbers: list[int]


class Typed(TypedMsgPackMixin, Worker):
    def forward(self, data: list[Request]) -> list[int]:
        return [sum(each.numbers) for each in data]


class Letters(SSEWorker):
    def forward(self, data):
        for place, text in enumerate(data if isinstance(data, list) else [data]):
            if text == "wrong":
                raise ClientError("wrong text")
            for letter in text:
                self.send_stream_event(letter, index=place)
        return data


class Square(ls.LitAPI):
    """The first example: single items."""

    def setup(self, device):
        self.exponent, self.device_name = 2, device

    def decode_request(self, request):
        return request["input"]

    def predict(self, x):
        if x == 13:
            raise HTTPException(status_code=400, detail="an unlucky number")
        return x ** self.exponent

    def encode_response(self, output):
        return {"output": output, "device": self.device_name}


class Batched(ls.LitAPI):
    """Batches are stacked, and the methods share a context."""

    def decode_request(self, request, context):
        context["scale"] = request.get("scale", 1)
        return np.asarray(request["input"])

    def predict(self, x, context):
        assert len(x) == len(context)
        return x.sum(axis=1) * np.array([each["scale"] for each in context])

    def encode_response(self, output, context):
        return {"output": float(output), "scale": context["scale"]}


class Order(BaseModel):
    text: str
    times: int = 2


class Repeat(ls.LitAPI):
    """A typed request, answered by an asynchronous predict with a model of pydantic."""

    def decode_request(self, request: Order):
        return request

    async def predict(self, order):
        await asyncio.sleep(0)
        return Order(text=order.text * order.times, times=0)


class Counting(ls.LitAPI):
    """A generator streams."""

    def decode_request(self, request):
        return request["n"]

    def predict(self, n):
        for place in range(n):
            yield place

    def encode_response(self, output):
        for each in output:
            yield {"n": each}


class CountingTogether(ls.LitAPI):
    """A generator of lists streams to a batch."""

    def predict(self, x):
        for place in range(2):
            yield [each + place for each in x]

    def encode_response(self, output):
        for each in output:
            yield [{"n": value} for value in each]


class Spoken(ls.LitAPI):
    def __init__(self):
        super().__init__(spec=ls.OpenAISpec())

    def predict(self, x):
        yield "never"


class Sized(ls.LitAPI):
    def __init__(self, factor=3):
        super().__init__()
        self.factor = factor

    def predict(self, x):
        return x * self.factor
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("adapted")
    (at / "adapted_models.py").write_text(MODELS)
    (at / "weir.toml").write_text(
        "[models.together]\ntarget = 'adapted_models.py:CountingTogether'\nmax_batch_size = 4\n"
        "[models.lengths]\ntarget = 'adapted_models.py:Lengths'\nmax_batch_size = 8\n"
        "[models.typed]\ntarget = 'adapted_models.py:Typed'\nmax_batch_size = 8\n"
        "[models.batched]\ntarget = 'adapted_models.py:Batched'\nmax_batch_size = 8\n"
        "[models.sized]\ntarget = 'adapted_models.py:Sized'\nparams = { factor = 5 }\n"
        "[models.slow]\ntarget = 'adapted_models.py:Letters'\nmax_batch_size = 4\n"
    )
    return at


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    targets = [f"{folder}/adapted_models.py:{name}" for name in ("Exp", "Letters", "Square", "Repeat", "Counting")]
    text = (folder / "weir.toml").read_text().replace("'adapted_models.py", f"'{folder}/adapted_models.py")
    (folder / "weir.toml").write_text(text)
    with weir.running(*targets, config=str(folder / "weir.toml"), executor="thread") as server:
        yield server.address


@pytest.fixture
def client(address: str) -> Iterator[HttpClient]:
    with HttpClient(address) as client:
        yield client


def post(address: str, path: str, body: bytes, **headers: str) -> Any:
    import httpx

    return httpx.post(
        address + path, content=body, headers={name.replace("_", "-"): text for name, text in headers.items()}
    )


def test_a_worker_of_mosec(address: str, client: HttpClient) -> None:
    assert client.infer("exp", {"x": 0}) == {"y": 1.0, "worker": 1, "size": 1}
    with pytest.raises(weir.ValidationFailed, match="cannot find key 'x'"):
        client.infer("exp", {})


def test_a_worker_of_mosec_that_reads_its_bodies_and_gets_batches(address: str) -> None:
    answers: dict[str, Any] = {}

    def ask(text: str) -> None:
        answers[text] = post(address, "/infer/lengths", text.encode(), content_type="text/plain")

    threads = [threading.Thread(target=ask, args=(text,)) for text in ("a", "bad", "abc")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (answers["a"].text, answers["abc"].text) == ("101", "103")
    assert answers["bad"].status_code == 400 and "bad text" in answers["bad"].text
    assert post(address, "/infer/lengths", b"four", content_type="application/json").text == "104"


def test_a_mixin_of_mosec(address: str) -> None:
    import msgspec

    head = {"content_type": "application/msgpack", "accept": "application/msgpack"}
    answer = post(address, "/infer/typed", msgspec.msgpack.encode({"numbers": [1, 2]}), **head)
    assert msgspec.msgpack.decode(answer.content) == 3
    wrong = post(address, "/infer/typed", msgspec.msgpack.encode({"numbers": ["x"]}), **head)
    assert wrong.status_code == 422, wrong.text


def test_an_sse_worker_of_mosec_streams(client: HttpClient) -> None:
    for name in ("letters", "slow"):
        assert list(client.stream(name, "abc")) == ["a", "b", "c"]
        with pytest.raises(weir.InvalidRequest, match="wrong text"):
            list(client.stream(name, "wrong"))
    for part in client.stream("letters", "x" * 5000):
        assert part == "x"
        break  # what the worker still sends is dropped
    assert list(client.stream("letters", "z")) == ["z"]


def test_an_api_of_litserve(client: HttpClient) -> None:
    assert client.infer("square", {"input": 4}) == {"output": 16, "device": "cpu"}
    with pytest.raises(weir.InvalidRequest, match="an unlucky number"):
        client.infer("square", {"input": 13})
    with pytest.raises(weir.ModelError, match="KeyError"):
        client.infer("square", {})
    assert client.infer("sized", 2) == 10


def test_an_api_of_litserve_with_batches_and_a_context(client: HttpClient) -> None:
    found = client.infer_ordered("batched", [{"input": [1, place], "scale": place} for place in range(6)])
    assert list(found) == [{"output": (1.0 + place) * place, "scale": place} for place in range(6)]


def test_an_api_of_litserve_with_types_and_an_asynchronous_predict(client: HttpClient) -> None:
    assert client.infer("repeat", {"text": "ab"}) == {"text": "abab", "times": 0}
    with pytest.raises(weir.ValidationFailed):
        client.infer("repeat", {"times": 1})


def test_an_api_of_litserve_streams(client: HttpClient) -> None:
    assert list(client.stream("counting", {"n": 3})) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert list(client.stream("together", 5)) == [{"n": 5}, {"n": 6}]


def test_the_command_line_and_worker_processes(folder: Path) -> None:
    done = weir_here("check", "adapted_models:Exp", cwd=folder)
    assert done.returncode == 0 and "exp: loaded and warmed up" in done.stdout, done
    with serving(f"{folder}/adapted_models.py:Square", "--route", "/predict") as (_, client):
        assert client.post("/predict", json={"input": 3}).json() == {"output": 9, "device": "cpu"}


def test_what_is_not_adapted_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import litserve
    import mosec

    class Uploads(litserve.LitAPI):  # type: ignore[misc]  # mypy does not see litserve
        def decode_request(self, request: "UploadFile") -> Any:  # type: ignore[name-defined]  # noqa: F821  # not imported
            return request

        def predict(self, x: Any) -> Any:
            return x

    class Endless(litserve.LitAPI):  # type: ignore[misc]  # as above
        async def predict(self, x: Any) -> Any:
            yield x

    for wrong, why in (
        (mosec.Worker, "must implement forward"), (litserve.LitAPI, "must implement predict"),
        (Endless, "an async generator is not supported"),
    ):  # fmt: skip
        with pytest.raises(weir.SettingsError, match=why):
            check_model(wrong)
    assert adapted(dict) is None
    monkeypatch.syspath_prepend(str(folder))
    import adapted_models  # type: ignore[import-not-found]  # the test has written it

    async def main() -> None:
        async with weir.Service(adapted_models.Spoken, executor="thread"):
            pass

    with pytest.raises(weir.SettingsError, match="spec=OpenAISpec: is not adapted"):
        asyncio.run(main())
