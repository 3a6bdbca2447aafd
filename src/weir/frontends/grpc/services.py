"""The handlers of all gRPC calls, by path: inference, metadata, control, health, reflection, and calls that are refused.

Health is gRPC's health checking protocol (https://github.com/grpc/grpc/blob/master/doc/health-checking.md), and reflection its server reflection protocol
(https://github.com/grpc/grpc/blob/master/doc/server-reflection.md).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from google.protobuf import descriptor_pb2
from google.protobuf.json_format import ParseDict

from weir.errors import ModelNotFound, ModelNotReady, Overloaded, Unauthorized, WeirError, draining
from weir.frontends.grpc.call import Handler, IncomingCall, Respond, headers_of, in_task, parse, refuse, unary
from weir.frontends.grpc.inference import StreamInference, UnaryCall, UnaryInference
from weir.protocols.access import CLASS_HEADER, Control, caller_in
from weir.protocols.data_plane import DataPlane, check_ready, load_document
from weir.protocols.kserve import KserveContext
from weir.wire.data_plane import DATA_PLANE, DataPlaneCall
from weir.wire.kserve_grpc import POOL, Method, message, methods, read_parameters

if TYPE_CHECKING:
    from weir.serving.handle import Models


def data_plane_call(method: Method, plane: DataPlane, control: Control) -> Respond:
    """Return what responds to a method of DATA_PLANE: it reads the message, makes the call, and writes the message of the response."""
    call = next(each for each in DATA_PLANE.values() if method.name in each.grpc)
    loaded = _LOADED.get(method.name)

    async def respond(request: Any, incoming: IncomingCall) -> Any:
        if call.controls:
            control.require_http(incoming.peer, headers_of(incoming))
        path, body = _arguments(call, method, request)
        document = await plane.respond(call, path, body)
        if loaded is not None:
            document = {"model_name": path["model"], loaded: True}
        elif call.wrapped == "regions":
            document = {"regions": {each["name"]: each for each in document}}
        elif call.wrapped:
            document = {call.wrapped: document}
        return ParseDict(document, method.response(), ignore_unknown_fields=True, descriptor_pool=POOL)

    return respond


# KServe's clients read these fields of the response. MLServer's messages do not have them.
_LOADED = {"RepositoryModelLoad": "isLoaded", "RepositoryModelUnload": "isUnloaded"}
# KServe's messages have the model's name in the field in which Triton's have the name of the repository.
_NAMES = ("model_name", "repository_name", "name")


def _arguments(call: DataPlaneCall, method: Method, request: Any) -> tuple[dict[str, str], Any]:
    """Return what the path of a call would name, and its body, from a message. Raises InvalidRequest for a parameter without a value."""
    fields = {field.name: getattr(request, field.name) for field in request.DESCRIPTOR.fields}
    path = {"version": fields.pop("version")} if "version" in fields else {}
    if call.subject:
        path[call.subject] = next(filter(None, [fields.pop(name) for name in _NAMES if name in fields]), "")
    if "parameters" not in fields:
        return path, fields
    parameters = read_parameters(request.parameters)
    if method.name == "ModelLoad":
        return path, load_document(parameters)
    return path, parameters if method.name == "WorkerLoad" else {"parameters": parameters}


SERVICE = "grpc.health.v1.Health"

_UNKNOWN, _SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = range(4)

_Response = message("grpc.health.v1.HealthCheckResponse")


class Health:
    """Responds to health checks: whether the models of `registry` accept requests. The names in `own` stand for the whole server.

    A call of Watch gets a change within `look_every` seconds.
    """

    def __init__(self, registry: "Models", own: Iterable[str], *, look_every: float = 0.5) -> None:
        self._registry = registry
        self._own = {"", SERVICE, *own}
        self._refusing = asyncio.Event()
        self._look_every = look_every

    def refuse(self) -> None:
        """Report NOT_SERVING from now on. Calls of Watch get it and end."""
        self._refusing.set()

    async def Check(self, request: Any, call: IncomingCall) -> Any:
        """Return whether the server or one model accepts requests. Raises ModelNotFound for a name that is neither."""
        status = self._status(request.service)
        if status == _SERVICE_UNKNOWN:
            raise ModelNotFound(f"service {request.service!r}: no service and no model has this name")
        return _Response(status=status)

    async def watch(self, request: Any) -> AsyncGenerator[Any, None]:
        """Yield the status now, and again whenever it changes."""
        sent = _UNKNOWN
        while True:
            is_last, status = self._refusing.is_set(), self._status(request.service)
            if status != sent:
                sent = status
                yield _Response(status=status)
            if is_last:  # if `refuse` was called since, its status must still be sent
                return
            try:
                async with asyncio.timeout(self._look_every):
                    await self._refusing.wait()
            except TimeoutError:
                continue

    def _status(self, name: str) -> int:
        if self._refusing.is_set():
            return _NOT_SERVING
        if name in self._own:
            return _SERVING if self._registry.ready else _NOT_SERVING
        try:
            check_ready(self._registry, name)
        except ModelNotReady:
            return _NOT_SERVING
        except ModelNotFound:
            return _SERVICE_UNKNOWN
        return _SERVING


def service_of(version: str) -> str:
    """Return the full name of the reflection service of a version."""
    return f"grpc.reflection.{version}.ServerReflection"


VERSIONS = ("v1", "v1alpha")


class Reflection:
    """Responds to requests about the services with these names, with the messages of one `version` of the protocol."""

    def __init__(self, version: str, services: Iterable[str]) -> None:
        package = f"grpc.reflection.{version}"
        self._response = message(f"{package}.ServerReflectionResponse")
        self._services = sorted(services)
        self._responses: dict[str, Callable[[Any], dict[str, Any]]] = {
            "file_by_filename": lambda name: _files(POOL.FindFileByName(name)),
            "file_containing_symbol": lambda name: _files(POOL.FindFileContainingSymbol(name)),
            "list_services": self._list,
        }

    def respond(self, request: Any) -> Any:
        """Return the response to one request of a stream."""
        question = request.WhichOneof("message_request")
        made = self._response(valid_host=request.host, original_request=request)
        if question not in self._responses:  # requests about extensions: the server's messages have none
            return self._failed(made, grpc.StatusCode.NOT_FOUND, f"{question}: is not supported")
        try:
            found = self._responses[question](getattr(request, question))
        except KeyError as error:
            return self._failed(made, grpc.StatusCode.NOT_FOUND, str(error.args[0]))
        made.MergeFrom(self._response(**found))
        return made

    def _list(self, _: str) -> dict[str, Any]:
        return {"list_services_response": {"service": [{"name": name} for name in self._services]}}

    def _failed(self, made: Any, code: grpc.StatusCode, text: str) -> Any:
        number: Any = code.value[0]
        made.error_response.error_code, made.error_response.error_message = number, text
        return made


def _files(file: Any) -> dict[str, Any]:
    """Return a file descriptor and those of all files that it imports."""
    found: dict[str, bytes] = {}
    waiting = [file]
    while waiting:
        each = waiting.pop()
        if each.name not in found:
            found[each.name] = _serialized(each)
            waiting.extend(each.dependencies)
    return {"file_descriptor_response": {"file_descriptor_proto": list(found.values())}}


def _serialized(file: Any) -> bytes:
    described = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(described)
    return described.SerializeToString()


INFERENCE = "inference.GRPCInferenceService"
REPOSITORY = "inference.model_repository.ModelRepositoryService"
OWN = (INFERENCE, REPOSITORY)
OPEN = (
    *[method.path for method in methods(SERVICE)],
    *[f"/{INFERENCE}/{name}" for name in ("ServerLive", "ServerReady")],
)
# How many calls of Watch may be in flight: of callers with the server's API key, and of callers without it (load balancers have no key).
_MOST_WATCHERS = 1000
_MOST_STRANGERS = 100
ALL = (*OWN, SERVICE, *map(service_of, VERSIONS))


class AddedCalls(NamedTuple):
    """Calls that a product adds: the full names of its services, and the handlers of their methods by path."""

    services: Sequence[str]
    handlers: Mapping[str, Handler]


NO_CALLS = AddedCalls((), {})


class Services:
    """The handlers of all calls: `handlers` maps paths to them. A stream may have `most` requests in flight. `added` are calls of a product."""

    def __init__(
        self,
        context: KserveContext,
        most: int,
        *,
        development: bool,
        added: AddedCalls = NO_CALLS,
        inference: UnaryInference | None = None,
    ) -> None:
        self._names = (*ALL, *added.services)
        self._inference = inference or UnaryInference(context, partial(UnaryCall, development=development))
        self._streaming = StreamInference(context, most, development=development)
        self._health = Health(context.registry, OWN)
        self._development = development
        self._access = context.access
        plane = DataPlane(context)
        self.handlers: dict[str, Handler] = {
            method.path: unary(method, data_plane_call(method, plane, context.control), development=development)
            for service in OWN
            for method in methods(service)
            if method.name not in ("ModelInfer", "ModelStreamInfer")
        }
        self.handlers[f"/{INFERENCE}/ModelInfer"] = self._inference.handler()
        self.handlers[f"/{INFERENCE}/ModelStreamInfer"] = self._streaming.handler()
        self._watching = {True: 0, False: 0}  # calls of Watch, by whether the caller has the key
        self.handlers |= {path: self._while_open(handler) for path, handler in added.handlers.items()}
        self._add_health()
        for version in VERSIONS:
            self._add_reflection(version)

    def admit(self, path: str, call: IncomingCall) -> bool:
        """Return whether a call may go on: a health check, or one with the server's key. End the call otherwise."""
        try:
            if self._access.required and path not in OPEN:
                headers = self._access.require_http(headers_of(call))
                call.caller = caller_in(headers)
                if headers[-1:] == [(CLASS_HEADER, b"bulk")]:  # the key's class goes before one that the caller stated
                    stated = CLASS_HEADER.decode()
                    call.metadata = (*(pair for pair in call.metadata if pair[0] != stated), (stated, "bulk"))
        except Unauthorized as error:
            refuse(error, call, development=self._development)
            return False
        return True

    def refuse_with(self, error: WeirError, call: IncomingCall) -> None:
        """End a call with `error`."""
        refuse(error, call, development=self._development)

    def refuse(self) -> None:
        """Refuse new requests. Those in flight continue."""
        self._inference.refusing = True
        self._streaming.refuse()
        self._health.refuse()

    def _while_open(self, handler: Handler) -> Handler:
        """Return `handler`, which refuses calls once `refuse` was called."""

        def begin(call: IncomingCall, body: bytes) -> None:
            if self._inference.refusing:
                return refuse(draining(), call, development=self._development)
            handler.begin(call, body)

        return Handler(begin, handler.takes_stream)

    def _add_health(self) -> None:
        check, watch = methods(SERVICE)
        self.handlers[check.path] = unary(check, self._health.Check, development=self._development)

        async def watching(call: IncomingCall, body: bytes) -> None:
            with self._watchers(self._knows_key(call)):
                async for response in self._health.watch(parse(watch, body)):
                    await call.write(response.SerializeToString())

        self.handlers[watch.path] = Handler(in_task(watching, development=self._development))

    @contextmanager
    def _watchers(self, knows_key: bool) -> Iterator[None]:
        """Count one more call of Watch. Raises Overloaded if there are too many."""
        most = _MOST_WATCHERS if knows_key else _MOST_STRANGERS
        if self._watching[knows_key] >= most:
            raise Overloaded(f"{most} Watch calls are in flight, which is the limit", retry_after=1.0)
        self._watching[knows_key] += 1
        try:
            yield
        finally:
            self._watching[knows_key] -= 1

    def _knows_key(self, call: IncomingCall) -> bool:
        try:
            self._access.require_http(headers_of(call))
        except Unauthorized:
            return False
        return True

    def _add_reflection(self, version: str) -> None:
        (method,) = methods(service_of(version))
        reflection = Reflection(version, self._names)

        async def reflecting(call: IncomingCall, _: bytes) -> None:
            while (body := await call.read()) is not None:
                await call.write(reflection.respond(parse(method, body)).SerializeToString())
                call.release(len(body))

        self.handlers[method.path] = Handler(in_task(reflecting, development=self._development), takes_stream=True)
