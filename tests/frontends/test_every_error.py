"""Every class of error, through every protocol and every channel, is answered with its codes: there is one table (wire/status.py)."""

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import httpx
import numpy
import pytest
from tests.fakes import RecordingObserver
from tests.frontends.grpc.kit import INFER
from tests.frontends.grpc.kit import item as grpc_item
from tests.frontends.http.servers import running
from tests.rings import subcases
from websockets.sync.client import connect

import weir
from weir import Measure, Model, Tensor, errors
from weir.catalog.registry import Registry
from weir.client import NEVER, GrpcClient, HttpClient, WebSocketClient
from weir.errors import WeirError
from weir.frontends.http.fast.shared import Heads
from weir.protocols import HttpSettings
from weir.serving.service import Service
from weir.wire.kserve_grpc import write_request
from weir.wire.sse import EventParser
from weir.wire.status import grpc_code, http_code, kserve_code

KINDS = [
    kind
    for name, kind in sorted(vars(errors).items())
    if isinstance(kind, type) and issubclass(kind, WeirError) and not name.startswith("_")
]
NAMES = [kind.__name__ for kind in KINDS]


def error_of(name: str) -> WeirError:
    """Return an error of the class `name`."""
    error: WeirError = getattr(errors, name)(f"it is {name}")
    return error


class Items(Model):
    """Answers with the error whose class it gets, and with anything else as it is."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return [error_of(item) if item in NAMES else item for item in batch]


class Raises(Model):
    """Raises the error whose class it gets."""

    max_batch_size = 1

    def predict(self, batch: list[Any]) -> list[Any]:
        raise error_of(batch[0])


class Rows(Model):
    """Raises the error whose number it gets."""

    inputs = (Tensor("x", "INT32", (-1,)),)
    outputs = (Tensor("y", "INT32", (-1,)),)
    max_batch_size = 1

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        raise error_of(NAMES[int(batch["x"][0])])


class Stream(Model):
    """Gives the parts before the last item, and ends with the error whose class that is."""

    streaming = True

    def predict(self, batch: list[Any]) -> Generator[dict[int, Any], Any, None]:
        for place, item in enumerate(batch):
            for part in item[:-1]:
                yield {place: part}
            yield {place: error_of(item[-1])}


SERVED = (Items, Raises, Rows, Stream)


class Server:
    """A running server with every channel."""

    def __init__(self, http: str, grpc_address: str, asgi: str) -> None:
        self.http = http
        self.channels = {
            "fast": httpx.Client(base_url=http, timeout=60),
            "asgi": httpx.Client(base_url=asgi, timeout=60),
        }
        self.grpc = grpc_address


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with ExitStack() as stack:
        hosted = stack.enter_context(weir.running(*SERVED, executor="inline", grpc_port=0, log_level="error"))
        registry = Registry([Service(model, executor="inline") for model in SERVED])
        asgi = stack.enter_context(running("asgi", registry, HttpSettings(port=0)))
        _, rpc = hosted.addresses
        server = Server(hosted.address, rpc.partition("://")[2] or rpc, asgi.url)
        yield server
        for client in server.channels.values():
            client.close()


every_error = subcases("kind", KINDS)
every_channel = pytest.mark.parametrize("channel", ["fast", "asgi"])


def kserve_item(item: Any) -> dict[str, Any]:
    """Return a request of the Open Inference Protocol for one item."""
    return {"inputs": [{"name": "input", "datatype": "BYTES", "shape": [1], "data": [json.dumps(item)]}]}


def kserve_row(number: int) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [number]}]}


FORMS: dict[str, Callable[[str], Any]] = {
    "/infer/items": lambda name: name,
    "/infer/raises": lambda name: name,
    "/infer/rows": lambda name: {"x": [NAMES.index(name)]},
    "/infer/stream": lambda name: [name],
    "/v2/models/items/infer": kserve_item,
    "/v2/models/raises/infer": kserve_item,
    "/v2/models/rows/infer": lambda name: kserve_row(NAMES.index(name)),
    "/v2/models/stream/infer_stream": lambda name: kserve_item([name]),
}


@every_channel
@every_error
def test_over_http(server: Server, kind: type[WeirError], channel: str) -> None:
    for path, body in FORMS.items():
        answer = server.channels[channel].post(path, json=body(kind.__name__))
        error = answer.json()["error"]
        if path.startswith("/v2"):
            assert answer.status_code == kserve_code(kind()), path
            assert f"it is {kind.__name__}" in error
        else:
            assert (answer.status_code, error["type"]) == (http_code(kind()), kind.__name__), path


@every_channel
@every_error
def test_in_a_list_and_in_the_midst_of_a_stream(server: Server, kind: type[WeirError], channel: str) -> None:
    item, client = ["good", kind.__name__], server.channels[channel]
    answer = client.post("/infer/items/batch", json=item)
    good, bad = answer.json()
    assert answer.status_code == 200 and good == {"output": "good"}
    assert (bad["code"], bad["error"]["type"]) == (http_code(kind()), kind.__name__)
    for path, body in (("/infer/stream", item), ("/v2/models/stream/infer_stream", kserve_item(item))):
        answer = client.post(path, json=body)
        part, end = EventParser().feed(answer.content)
        assert (answer.status_code, part.name, end.name) == (200, "message", "error")
        error = json.loads(end.data)
        assert kind.__name__ == (error["type"] if path.startswith("/v2") else error["error"]["type"])


def test_over_websocket(server: Server) -> None:
    with connect(f"ws{server.http[4:]}/v2/ws", close_timeout=1) as client:
        for kind in KINDS:
            for model, item in (("items", kind.__name__), ("stream", [kind.__name__])):
                client.send(json.dumps({"model_name": model, "id": "1", **kserve_item(item)}))
                error = json.loads(client.recv(20))
                assert (error["status"], error["type"]) == (kserve_code(kind()), kind.__name__)


CLIENTS: dict[str, Callable[[Server], Any]] = {
    "http": lambda server: HttpClient(server.http, retry=NEVER),
    "grpc": lambda server: GrpcClient(server.grpc, retry=NEVER),
    "websocket": lambda server: WebSocketClient(server.http, retry=NEVER),
}


@pytest.mark.parametrize("name", CLIENTS)
@every_error
def test_each_client_raises_the_same_class(server: Server, kind: type[WeirError], name: str) -> None:
    with CLIENTS[name](server) as client:
        extras = {} if name == "websocket" else {"timeout": 20.0}
        for model, item in (("items", kind.__name__), ("rows", {"x": numpy.array([KINDS.index(kind)], "int32")})):
            with pytest.raises(WeirError, match=f"it is {kind.__name__}") as caught:
                client.infer(model, item, **extras)
            assert type(caught.value) is kind
        with pytest.raises(WeirError) as caught:
            list(client.stream("stream", ["good", kind.__name__]))
        assert type(caught.value) is kind


def test_the_code_of_grpc(server: Server) -> None:
    channel: Any
    with grpc.insecure_channel(server.grpc) as channel:
        for kind in KINDS:
            with pytest.raises(grpc.RpcError) as caught:
                body = write_request(grpc_item(json.dumps(kind.__name__).encode(), "items"))
                channel.unary_unary(INFER)(body, timeout=60)
            assert caught.value.code().name == grpc_code(kind())


@every_error
async def test_in_the_program_itself(kind: type[WeirError]) -> None:
    async with Service(Items, executor="inline") as service:
        with pytest.raises(WeirError) as caught:
            await service.infer(kind.__name__)
        assert type(caught.value) is kind
        _, error = await service.infer_many([1, kind.__name__], return_errors=True)
        assert type(error) is kind


def test_a_response_that_cannot_be_written_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> bytes:
        raise LookupError("a bug in the writing of heads")

    with running("fastlane", Registry([Service(Items, executor="inline")]), HttpSettings(port=0)) as server:
        with monkeypatch.context() as patched:
            patched.setattr(Heads, "head", fails)
            patched.setattr(Heads, "plain_head", fails)
            for path in ("/infer/items", "/v2/models/items/infer"):
                for name in ("ModelError", "good"):
                    with pytest.raises(httpx.RemoteProtocolError):
                        server.client.post(path, json=FORMS[path](name), timeout=60)
        assert server.client.post("/infer/items", json="good").json() == "good"


class Measured(Model):
    """Refuses the item "bad" when the server measures it, and fails for "broken"; its answer to "odd" cannot be written as JSON."""

    @classmethod
    def measure(cls, item: Any) -> Measure:
        if item == "bad":
            raise errors.InvalidRequest("must be good")
        return Measure(rows=1)

    def predict(self, batch: list[Any]) -> list[Any]:
        return [errors.ModelError("it is broken") if item == "broken" else item for item in batch]


# What is sent, and how often the observers hear of a refusal, of a failure, and of an end with an error.
HEARD: list[tuple[str, Any, tuple[int, int, int]]] = [
    ("/infer/measured", "bad", (1, 0, 0)),
    ("/infer/measured/batch", ["good", "bad", "bad"], (2, 0, 0)),
    ("/v1/models/measured:predict", {"instances": ["good", "bad"]}, (1, 0, 0)),
    ("/infer/measured", "broken", (0, 1, 1)),
    ("/infer/measured/batch", ["good", "broken"], (0, 1, 1)),
    ("/v2/models/measured/infer", kserve_item("bad"), (1, 0, 0)),
    ("/v2/models/measured/infer", kserve_item("broken"), (0, 1, 1)),
    ("/v2/models/measured/infer", 7, (1, 0, 0)),
    ("/v2/models/measured/infer", {**kserve_item("good"), "parameters": {"timeout": -1}}, (1, 0, 0)),
]


@pytest.mark.parametrize("channel", ["fastlane", "asgi"])
def test_the_observers_hear_of_each_error_once(channel: str) -> None:
    observer = RecordingObserver()
    registry = Registry([Service(Measured, executor="inline", observers=[observer])])
    with running(channel, registry, HttpSettings(port=0)) as server:
        for path, body, heard in HEARD:
            for notes in (observer.refusals, observer.failures, observer.responses):
                notes.clear()
            server.client.post(path, json=body, timeout=60)
            failures = [error for _, failed in observer.failures for error in failed]
            ends = [error for _, error, _ in observer.responses if error is not None]
            assert (len(observer.refusals), len(failures), len(ends)) == heard, (path, body)
