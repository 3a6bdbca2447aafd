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

from weir.errors import (
    Draining,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    Unauthorized,
    Unsupported,
    WeirError,
    brief,
)
from weir.frontends.grpc.call import Answer, Handler, IncomingCall, headers_of, in_task, parse, refuse, unary
from weir.frontends.grpc.inference import StreamInference, UnaryInference
from weir.profiling.machine import find_hardware
from weir.protocols import kserve_metadata as kserve
from weir.protocols.access import CLASS_HEADER, caller_in
from weir.protocols.exchange import once_read
from weir.protocols.kserve import KserveContext
from weir.protocols.offloading import off_loop
from weir.wire.inference import Parameter
from weir.wire.kserve_grpc import POOL, Method, message, methods, read_parameters

if TYPE_CHECKING:
    from weir.serving.handle import Models


_PREFIX = "inference."


def filled(name: str, values: Mapping[str, Any]) -> Any:
    """Return the message `name` of the inference protocol with these values of its fields."""
    return ParseDict(dict(values), message(_PREFIX + name)(), descriptor_pool=POOL)


class MetadataCalls:
    """Answers calls that show the server and its models. Each method answers the call of its name."""

    def __init__(self, context: KserveContext) -> None:
        self._context = context
        self._registry = context.registry

    async def ServerLive(self, request: Any, call: IncomingCall) -> Any:
        """Return whether the server is live (`liveness`)."""
        return filled("ServerLiveResponse", {"live": not self._context.failed})

    async def ServerReady(self, request: Any, call: IncomingCall) -> Any:
        """Return whether every model accepts requests."""
        return filled("ServerReadyResponse", {"ready": self._registry.ready})

    async def ModelReady(self, request: Any, call: IncomingCall) -> Any:
        """Return whether one model accepts requests; False for an unknown model."""
        return filled("ModelReadyResponse", {"ready": kserve.is_ready(self._registry, request.name, request.version)})

    async def ServerMetadata(self, request: Any, call: IncomingCall) -> Any:
        """Return the server's name, version and extensions."""
        return filled(
            "ServerMetadataResponse",
            kserve.server_metadata(self._context.settings.server_name, self._context.extensions),
        )

    async def ModelMetadata(self, request: Any, call: IncomingCall) -> Any:
        """Return the metadata of one model."""
        found = await once_read(partial(kserve.model_metadata, self._registry, request.name, request.version))
        return filled("ModelMetadataResponse", found)

    async def ModelConfig(self, request: Any, call: IncomingCall) -> Any:
        """Return the configuration of one model."""
        found = await once_read(partial(kserve.find, self._registry, request.name, request.version))
        return filled("ModelConfigResponse", {"config": kserve.config(found)})

    async def ModelStatistics(self, request: Any, call: IncomingCall) -> Any:
        """Return the statistics of one model, in one version or in all, or of every model."""
        found = await once_read(partial(kserve.all_statistics, self._registry, request.name, request.version))
        return filled("ModelStatisticsResponse", found)

    async def ModelList(self, request: Any, call: IncomingCall) -> Any:
        """Return the names of the models."""
        return filled("ModelListResponse", {"models": list(self._registry.services)})

    async def HasHardware(self, request: Any, call: IncomingCall) -> Any:
        """Return whether this machine has `num` devices (by default one) of a kind or name."""
        found = kserve.device_count(find_hardware(), request.name)
        return filled("HasHardwareResponse", {"found": found >= max(1, request.num)})


class ControlCalls:
    """Answers calls that control the server. Each method answers the call of its name."""

    def __init__(self, context: KserveContext) -> None:
        self._context = context

    # Models: Triton's calls.

    async def RepositoryIndex(self, request: Any, call: IncomingCall) -> Any:
        """List the models that can be loaded, with their states. Every caller may do this."""
        states = await self._context.manager.index(ready_only=request.ready)
        return filled("RepositoryIndexResponse", {"models": [state._asdict() for state in states]})

    async def RepositoryModelLoad(self, request: Any, call: IncomingCall) -> Any:
        """Load a model of the repository, or load it again."""
        self._check(call)
        name = named(request)
        arguments = await self._load_arguments(request, repository_parameters(request), {})
        await self._context.manager.load_model(name, **arguments._asdict())
        return filled("RepositoryModelLoadResponse", {"model_name": name, "isLoaded": True})

    async def RepositoryModelUnload(self, request: Any, call: IncomingCall) -> Any:
        """Serve a model no longer."""
        self._check(call)
        name = named(request)
        dependents = repository_parameters(request).get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidRequest(f"parameter 'unload_dependents'={brief(dependents, 40)}: must be true or false")
        await self._context.manager.unload_model(name, unload_dependents=dependents)
        return filled("RepositoryModelUnloadResponse", {"model_name": name, "isUnloaded": True})

    # Models and workers: calls of the AMD Inference Server.

    async def ModelLoad(self, request: Any, call: IncomingCall) -> Any:
        """Load a model of the repository, or load it again."""
        self._check(call)
        parameters = read_parameters(request.parameters)
        own = {name: value for name, value in parameters.items() if not kserve.is_of_repository(name)}
        repository = {name: value for name, value in parameters.items() if kserve.is_of_repository(name)}
        arguments = await self._load_arguments(request, repository, own)
        await self._context.manager.load_model(request.name, **arguments._asdict())
        return filled("ModelLoadResponse", {})

    async def ModelUnload(self, request: Any, call: IncomingCall) -> Any:
        """Serve a model no longer."""
        self._check(call)
        await self._context.manager.unload_model(request.name)
        return filled("ModelUnloadResponse", {})

    async def WorkerLoad(self, request: Any, call: IncomingCall) -> Any:
        """Start a worker, or use one that runs with the same parameters. Return the name of its endpoint."""
        self._check(call)
        endpoint = await self._context.manager.load_worker(request.name, read_parameters(request.parameters))
        return filled("WorkerLoadResponse", {"endpoint": endpoint})

    async def WorkerUnload(self, request: Any, call: IncomingCall) -> Any:
        """Drain and end a worker of an endpoint. The endpoint ends with its last worker."""
        self._check(call)
        await self._context.manager.unload_worker(request.name)
        return filled("WorkerUnloadResponse", {})

    # Shared memory.

    async def SystemSharedMemoryStatus(self, request: Any, call: IncomingCall) -> Any:
        """List the regions, or show one."""
        self._check(call)
        regions = {each["name"]: each for each in self._context.regions.status(request.name)}
        return filled("SystemSharedMemoryStatusResponse", {"regions": regions})

    async def SystemSharedMemoryRegister(self, request: Any, call: IncomingCall) -> Any:
        """Open a region."""
        self._check(call)
        self._context.regions.register(request.name, request.key, request.offset, request.byte_size)
        return filled("SystemSharedMemoryRegisterResponse", {})

    async def SystemSharedMemoryUnregister(self, request: Any, call: IncomingCall) -> Any:
        """Close a region, or all."""
        self._check(call)
        self._context.regions.unregister(request.name)
        return filled("SystemSharedMemoryUnregisterResponse", {})

    async def _load_arguments(
        self, request: Any, parameters: Mapping[str, Any], own: Mapping[str, Any]
    ) -> kserve.LoadArguments:
        """Return the arguments for loading a model. They are read in a thread if the message is long, because a configuration is a JSON document."""
        read = partial(kserve.load_arguments, parameters, self._context.control, own)
        return await off_loop(request.ByteSize(), read)

    def _check(self, call: IncomingCall) -> None:
        self._context.control.require_http(call.peer, headers_of(call))


def named(request: Any) -> str:
    """Return the name of the model to load or unload. KServe's messages have it in the field in which Triton's have the name of the repository."""
    name: str = request.model_name or request.repository_name
    return name


def repository_parameters(request: Any) -> dict[str, Parameter | bytes]:
    """Return the parameters of a call; files are bytes. MLServer's messages have no parameters."""
    read: dict[str, Parameter | bytes] = {}
    for name, parameter in getattr(request, "parameters", {}).items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(f"parameter {name!r}: has no value")
        read[name] = getattr(parameter, choice)
    return read


SERVICE = "grpc.health.v1.Health"

_UNKNOWN, _SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = range(4)

_Response = message("grpc.health.v1.HealthCheckResponse")


class Health:
    """Answers health checks: whether the models of `registry` accept requests. The names in `own` stand for the whole server.

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
            kserve.check_ready(self._registry, name)
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
    """Answers requests about the services with these names, with the messages of one `version` of the protocol."""

    def __init__(self, version: str, services: Iterable[str]) -> None:
        package = f"grpc.reflection.{version}"
        self._response = message(f"{package}.ServerReflectionResponse")
        self._services = sorted(services)
        self._answers: dict[str, Callable[[Any], dict[str, Any]]] = {
            "file_by_filename": lambda name: _files(POOL.FindFileByName(name)),
            "file_containing_symbol": lambda name: _files(POOL.FindFileContainingSymbol(name)),
            "list_services": self._list,
        }

    def answer(self, request: Any) -> Any:
        """Return the response to one request of a stream."""
        question = request.WhichOneof("message_request")
        answered = self._response(valid_host=request.host, original_request=request)
        if question not in self._answers:  # requests about extensions: the server's messages have none
            return self._failed(answered, grpc.StatusCode.NOT_FOUND, f"{question}: is not supported")
        try:
            found = self._answers[question](getattr(request, question))
        except KeyError as error:
            return self._failed(answered, grpc.StatusCode.NOT_FOUND, str(error.args[0]))
        answered.MergeFrom(self._response(**found))
        return answered

    def _list(self, _: str) -> dict[str, Any]:
        return {"list_services_response": {"service": [{"name": name} for name in self._services]}}

    def _failed(self, answered: Any, code: grpc.StatusCode, text: str) -> Any:
        number: Any = code.value[0]
        answered.error_response.error_code, answered.error_response.error_message = number, text
        return answered


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


class UnsupportedCalls:
    """Answers calls of Triton's extensions that the server does not have."""

    async def CudaSharedMemoryStatus(self, request: Any, call: IncomingCall) -> Any:
        """Return no regions: there are none."""
        return filled("CudaSharedMemoryStatusResponse", {})

    async def CudaSharedMemoryRegister(self, request: Any, call: IncomingCall) -> Any:
        """Refuse: inputs and outputs are in main memory."""
        raise Unsupported("CUDA shared memory is not offered; system shared memory is")

    async def CudaSharedMemoryUnregister(self, request: Any, call: IncomingCall) -> Any:
        """Do nothing: there are no regions."""
        return filled("CudaSharedMemoryUnregisterResponse", {})

    async def TraceSetting(self, request: Any, call: IncomingCall) -> Any:
        """Refuse: tracing is set when the server starts."""
        raise Unsupported("trace settings cannot be read or changed by a call: they are set when the server starts")

    async def LogSettings(self, request: Any, call: IncomingCall) -> Any:
        """Refuse: logging is set when the server starts."""
        raise Unsupported("log settings cannot be read or changed by a call: they are set when the server starts")


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
        self._inference = inference or UnaryInference(context, development=development)
        self._streaming = StreamInference(context, most, development=development)
        self._health = Health(context.registry, OWN)
        self._development = development
        self._access = context.access
        answering = (MetadataCalls(context), ControlCalls(context), UnsupportedCalls())
        self.handlers: dict[str, Handler] = {
            method.path: unary(method, _answer(answering, method), development=development)
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
                return refuse(Draining("the server is shutting down"), call, development=self._development)
            handler.begin(call, body)

        return Handler(begin, handler.takes_stream)

    def _add_health(self) -> None:
        check, watch = methods(SERVICE)
        self.handlers[check.path] = unary(check, self._health.Check, development=self._development)

        async def watching(call: IncomingCall, body: bytes) -> None:
            with self._watchers(self._knows_key(call)):
                async for answer in self._health.watch(parse(watch, body)):
                    await call.write(answer.SerializeToString())

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
                await call.write(reflection.answer(parse(method, body)).SerializeToString())
                call.release(len(body))

        self.handlers[method.path] = Handler(in_task(reflecting, development=self._development), takes_stream=True)


def _answer(answering: tuple[Any, ...], method: Method) -> Answer:
    answer: Answer = next(getattr(each, method.name) for each in answering if hasattr(each, method.name))
    return answer
