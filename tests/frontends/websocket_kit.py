"""A server with WebSockets, in the loop of the test, and what is said on them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy
from tests.fakes import RecordingObserver
from tests.frontends.http.servers import fronts_know
from tests.served import TEST_FRONTS
from websockets.asyncio.client import ClientConnection, connect

from weir import InvalidRequest, Model, Service, Tensor
from weir.catalog.registry import Registry
from weir.frontends.http.application import make_app
from weir.frontends.http.server import HttpServer
from weir.frontends.websocket import WebSockets
from weir.fronts.server import FrontFigures, FrontsPlan, FrontsServer
from weir.protocols import HttpSettings
from weir.protocols.kserve import KserveContext
from weir.wire.inference import InferenceRequest, InferenceResponse, TensorValue
from weir.wire.websocket import ErrorMessage, read_response, write_request


class Sum(Model):
    """Adds up rows; refuses negative numbers."""

    inputs = (Tensor("x", "FP32", [-1, -1]),)
    outputs = (Tensor("sum", "FP32", [-1]),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        if (batch["x"] < 0).any():
            raise InvalidRequest("numbers must not be negative")
        return {"sum": batch["x"].sum(axis=1)}


@dataclass
class Server:
    """A running server with its WebSockets, and what was heard of models that were given as classes."""

    server: HttpServer
    websockets: WebSockets
    registry: Registry
    observer: RecordingObserver

    def connect(self, path: str = "/v2/ws", **options: Any) -> connect:
        options = {"open_timeout": 60, "ping_timeout": 60, "close_timeout": 0.1, **options}
        return connect(f"ws://127.0.0.1:{self.server.port}{path}", **options)


@asynccontextmanager
async def serving(*models: type[Model] | Service, **options: Any) -> AsyncIterator[Server]:
    observer, settings = RecordingObserver(), HttpSettings(port=0, **options)
    registry = Registry(
        [
            each if isinstance(each, Service) else Service(each, executor="thread", observers=[observer])
            for each in models
        ]
    )
    figures = FrontFigures(settings, 2) if TEST_FRONTS else None
    context = KserveContext(registry, settings, account=None if figures is None else figures.account)
    websockets = WebSockets(registry, settings, context.account)
    app = make_app(context, websockets=websockets)
    server = (
        HttpServer(context, app, websockets=websockets)
        if figures is None
        else FrontsServer(context, app, FrontsPlan(fronts_know(settings), figures), websockets=websockets)
    )
    try:
        await registry.start()
        await server.start()
        yield Server(server, websockets, registry, observer)
    finally:
        await registry.stop(0.0)
        await server.stop()


def rows(values: Any, model: str = "sum", id: str = "", *, binary: bool = False, **more: Any) -> str | bytes:
    """A request with rows of numbers."""
    tensor = TensorValue("x", "FP32", numpy.array(values, "float32"))
    return write_request(InferenceRequest(model, [tensor], **more), binary=binary).message(id)


def item(model: str, value: Any, id: str = "", **fields: Any) -> str:
    """A request with one item, as JSON."""
    tensor = {"name": "input", "datatype": "BYTES", "shape": [1], "data": [json.dumps(value)]}
    return json.dumps({"model_name": model, "id": id, "inputs": [tensor], **fields})


async def next_answer(client: ClientConnection) -> InferenceResponse | ErrorMessage:
    return read_response(await client.recv())


async def answer(client: ClientConnection) -> tuple[str, Any, bool]:
    """The next answer: its id, the first output decoded, and whether it is the last."""
    got = await next_answer(client)
    assert isinstance(got, InferenceResponse), got
    values = [json.loads(value) for output in got.outputs for value in output.array]
    return got.id, values[0] if values else None, got.parameters["triton_final_response"] is True


async def answers(client: ClientConnection) -> list[Any]:
    """The answers up to the last."""
    got: list[Any] = []
    while True:
        _, value, last = await answer(client)
        if value is not None:
            got.append(value)
        if last:
            return got


async def failure(client: ClientConnection) -> ErrorMessage:
    got = await next_answer(client)
    assert isinstance(got, ErrorMessage), got
    return got
