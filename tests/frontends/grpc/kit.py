"""The gRPC frontend in the test's own event loop, and a client of it that knows no more than paths and messages."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest
from tests.fakes import RecordingObserver
from tests.frontends.http.servers import fronts_know

from weir.catalog.manager import Manager
from weir.catalog.registry import Registry
from weir.frontends.grpc import GrpcSettings
from weir.frontends.grpc.core import Core
from weir.frontends.grpc.server import GrpcServer
from weir.fronts.calls import DispatcherGrpc
from weir.fronts.server import FrontFigures, FrontsPlan, FrontsServer
from weir.model import Model, Tensor
from weir.protocols import HttpSettings, KserveSettings
from weir.protocols.access import Control, ControlSettings
from weir.protocols.kserve import KserveContext
from weir.serving.service import Service
from weir.wire.inference import InferenceRequest, InferenceResponse, TensorValue
from weir.wire.kserve_grpc import methods, read_response, write_request

INFERENCE = "inference.GRPCInferenceService"
INFER = f"/{INFERENCE}/ModelInfer"
STREAM = f"/{INFERENCE}/ModelStreamInfer"
FRONTS = "fronts"  # calls come through fronts
CORE: Any = Core  # what servers take their calls from; conftest.py has it be both


class Double(Model):
    """A tensor model: y = 2 x."""

    inputs = (Tensor("x", "INT32", (-1, 2)),)
    outputs = (Tensor("y", "INT32", (-1, 2)),)
    max_batch_size = 2

    def predict(self, batch: Any) -> Any:
        return {"y": 2 * batch["x"]}


def make_request(*values: int, model: str = "double", id: str = "", **parameters: Any) -> InferenceRequest:
    """Return a request for Double: one row."""
    tensor = TensorValue("x", "INT32", np.array([values or (1, 2)], np.int32))
    return InferenceRequest(model, [tensor], id=id, parameters=parameters)


def item(document: bytes, model: str, id: str = "", **parameters: Any) -> InferenceRequest:
    """Return a request for a model of items: one item."""
    tensor = TensorValue("input", "BYTES", np.array([document], object))
    return InferenceRequest(model, [tensor], id=id, parameters=parameters)


@dataclass
class Rig:
    """A running server of `service` and perhaps other models, and a channel to it. `observer` hears of models that were given as classes."""

    registry: Registry
    service: Service
    observer: RecordingObserver
    context: KserveContext
    server: GrpcServer
    channel: Any
    fronts: FrontsServer | None

    @property
    def under_way(self) -> int:
        """How many requests the first model has."""
        state = self.service.state()
        return int(state["waiting"]) + int(state["in_flight"])

    async def drain(self, seconds: float | None = None) -> bool:
        """Drain the server, and its fronts if it has some, as App does."""
        frontends: list[Any] = [self.server] if self.fronts is None else [self.fronts, self.server]
        return all(await asyncio.gather(*[frontend.drain(seconds) for frontend in frontends]))

    async def call(self, call: str, /, *, service: str = INFERENCE, metadata: Any = None, **fields: Any) -> Any:
        """Call a unary method with what its message says."""
        method = next(method for method in methods(service) if method.name == call)
        body = await self.raw(method.path, method.request(**fields).SerializeToString(), metadata=metadata)
        return method.response.FromString(body)

    def raw(self, path: str, body: bytes, **options: Any) -> Any:
        """Begin a unary call with the bytes of a message."""
        return self.channel.unary_unary(path)(body, **options)

    async def infer(self, request: InferenceRequest, **options: Any) -> InferenceResponse:
        """Call ModelInfer."""
        return read_response(await self.raw(INFER, write_request(request), **options))

    def stream(self) -> Any:
        """Begin a stream."""
        return self.channel.stream_stream(STREAM)()


@asynccontextmanager
async def serving(
    *models: type[Model] | Service, executor: Any = "inline", control: dict[str, Any] | None = None, http: dict[str, Any] | None = None,
    credentials: Any = None, manager: Callable[[Registry], Manager] | None = None, allow_shared_memory: bool = False, **settings: Any,
) -> AsyncIterator[Rig]:  # fmt: skip
    """Start these models, or Double, and a server of them on a free port; end them, whatever happens."""
    http_settings, observer = HttpSettings(**(http or {})), RecordingObserver()
    services = [
        each if isinstance(each, Service) else Service(each, executor=executor, observers=[observer])
        for each in models or (Double,)
    ]
    registry = Registry(services)
    kserve = KserveSettings(allow_shared_memory=allow_shared_memory)
    allowed = Control(ControlSettings(**(control or {})))
    context = KserveContext(registry, http_settings, allowed, settings=kserve, manager=manager and manager(registry))
    kind: Any = DispatcherGrpc if CORE is FRONTS else GrpcServer
    server = kind(context, GrpcSettings(grpc_port=0, **settings), http_settings, Core if CORE is FRONTS else CORE)
    async with AsyncExitStack() as stack:
        await registry.start()
        stack.push_async_callback(registry.stop, 0.0)
        fronts = await stack.enter_async_context(fronts_of(server, context)) if CORE is FRONTS else None
        await server.start()
        stack.push_async_callback(server.stop)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        if credentials:
            made = grpc.aio.secure_channel(f"localhost:{server.port}", credentials, options)
        else:
            made = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options)
        yield Rig(registry, services[0], observer, context, server, await stack.enter_async_context(made), fronts)


@asynccontextmanager
async def fronts_of(server: DispatcherGrpc, context: KserveContext) -> AsyncIterator[FrontsServer]:
    """Run two fronts before `server`."""
    figures = FrontFigures(context.http, 2)
    context.account = figures.account
    context.http = replace(context.http, port=0)
    http = FrontsServer(context, None, FrontsPlan(fronts_know(context.http), figures, server))
    try:
        await http.start()
        yield http
    finally:
        await http.stop()


async def refuses(call: Any, code: grpc.StatusCode, text: str = "") -> None:
    """Check that a call ends with `code`, and with a text in which the pattern `text` is found."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    details = refused.value.details() or ""
    assert (refused.value.code(), bool(re.search(text, details, re.DOTALL))) == (code, True), details


# HTTP/2, RFC 9113: how a connection begins, with settings that are all as they are by default.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
