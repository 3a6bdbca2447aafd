"""What answers each call of gRPC, by its path: inference, what shows and what changes the server, health, reflection, and calls that are not offered."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pb2
from google.protobuf.json_format import ParseDict

from weir.errors import InvalidRequest, ModelNotFound, Overloaded, Unauthorized, Unsupported, WeirError, brief
from weir.frontends.grpc.call import Answer, Handler, IncomingCall, headers_of, in_task, parse, refuse, unary
from weir.frontends.grpc.inference import StreamInference, UnaryInference
from weir.profiling.machine import find_hardware
from weir.protocols.kserve import metadata as kserve
from weir.protocols.kserve.context import KserveContext
from weir.protocols.offloading import off_loop
from weir.wire.inference import Parameter
from weir.wire.kserve_grpc import POOL, Method, message, methods, read_parameters

if TYPE_CHECKING:
    from weir.catalog.registry import Registry


_PREFIX = "inference."


def filled(name: str, values: Mapping[str, Any]) -> Any:
    """Return the message of that name with the values of its fields."""
    return ParseDict(dict(values), message(_PREFIX + name)(), descriptor_pool=POOL)


class Showing:
    """The answers, one to each call of the same name."""

    def __init__(self, context: KserveContext) -> None:
        self._context = context
        self._registry = context.registry

    async def ServerLive(self, asked: Any, call: IncomingCall) -> Any:
        """Say that this process answers, and that its models can start workers, where liveness counts them."""
        return filled("ServerLiveResponse", {"live": not self._context.failed})

    async def ServerReady(self, asked: Any, call: IncomingCall) -> Any:
        """Say whether every model takes requests."""
        return filled("ServerReadyResponse", {"ready": self._registry.ready})

    async def ModelReady(self, asked: Any, call: IncomingCall) -> Any:
        """Say whether one model takes requests; one that there is not does not."""
        try:
            ready = self._registry.get(asked.name, asked.version).ready
        except ModelNotFound:
            ready = False
        return filled("ModelReadyResponse", {"ready": ready})

    async def ServerMetadata(self, asked: Any, call: IncomingCall) -> Any:
        """Say what this server is and what it offers."""
        return filled(
            "ServerMetadataResponse",
            kserve.server_metadata(self._context.settings.server_name, self._context.extensions),
        )

    async def ModelMetadata(self, asked: Any, call: IncomingCall) -> Any:
        """Describe one model."""
        found = kserve.model_metadata(self._registry, asked.name, asked.version)
        return filled("ModelMetadataResponse", found)

    async def ModelConfig(self, asked: Any, call: IncomingCall) -> Any:
        """Show the configuration of one model."""
        found = kserve.find(self._registry, asked.name, asked.version)
        return filled("ModelConfigResponse", {"config": kserve.config(found)})

    async def ModelStatistics(self, asked: Any, call: IncomingCall) -> Any:
        """Count what one model, in one version or all, or every model, has done."""
        found = kserve.all_statistics(self._registry, asked.name, asked.version)
        return filled("ModelStatisticsResponse", found)

    async def ModelList(self, asked: Any, call: IncomingCall) -> Any:
        """Name the models."""
        return filled("ModelListResponse", {"models": list(self._registry.services)})

    async def HasHardware(self, asked: Any, call: IncomingCall) -> Any:
        """Say whether there are as many devices of a kind as asked for, or one."""
        found = kserve.device_count(find_hardware(), asked.name)
        return filled("HasHardwareResponse", {"found": found >= max(1, asked.num)})


class Controlling:
    """The answers, one to each call of the same name."""

    def __init__(self, context: KserveContext) -> None:
        self._context = context

    # Models, as Triton has them.

    async def RepositoryIndex(self, asked: Any, call: IncomingCall) -> Any:
        """List the models that there are to be loaded, with their states. Anybody may ask."""
        states = self._context.manager.index(ready_only=asked.ready)
        return filled("RepositoryIndexResponse", {"models": [state._asdict() for state in states]})

    async def RepositoryModelLoad(self, asked: Any, call: IncomingCall) -> Any:
        """Load a model of the repository, or load it again."""
        self._check(call)
        name = named(asked)
        arguments = await self._load_arguments(asked, repository_parameters(asked), {})
        await self._context.manager.load_model(name, **arguments._asdict())
        return filled("RepositoryModelLoadResponse", {"model_name": name, "isLoaded": True})

    async def RepositoryModelUnload(self, asked: Any, call: IncomingCall) -> Any:
        """Serve a model no longer."""
        self._check(call)
        name = named(asked)
        dependents = repository_parameters(asked).get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidRequest(f"parameter 'unload_dependents'={brief(dependents, 40)}: must be true or false")
        await self._context.manager.unload_model(name, unload_dependents=dependents)
        return filled("RepositoryModelUnloadResponse", {"model_name": name, "isUnloaded": True})

    # Models and workers, as the AMD Inference Server has them.

    async def ModelLoad(self, asked: Any, call: IncomingCall) -> Any:
        """Load a model of the repository, or load it again."""
        self._check(call)
        parameters = read_parameters(asked.parameters)
        own = {name: value for name, value in parameters.items() if not kserve.is_of_repository(name)}
        repository = {name: value for name, value in parameters.items() if kserve.is_of_repository(name)}
        arguments = await self._load_arguments(asked, repository, own)
        await self._context.manager.load_model(asked.name, **arguments._asdict())
        return filled("ModelLoadResponse", {})

    async def ModelUnload(self, asked: Any, call: IncomingCall) -> Any:
        """Serve a model no longer."""
        self._check(call)
        await self._context.manager.unload_model(asked.name)
        return filled("ModelUnloadResponse", {})

    async def WorkerLoad(self, asked: Any, call: IncomingCall) -> Any:
        """Start a worker, or join one that runs with the same parameters; the answer is its endpoint."""
        self._check(call)
        endpoint = await self._context.manager.load_worker(asked.name, read_parameters(asked.parameters))
        return filled("WorkerLoadResponse", {"endpoint": endpoint})

    async def WorkerUnload(self, asked: Any, call: IncomingCall) -> Any:
        """Drain and end a worker of an endpoint; the last one takes the endpoint with it."""
        self._check(call)
        await self._context.manager.unload_worker(asked.name)
        return filled("WorkerUnloadResponse", {})

    # Shared memory.

    async def SystemSharedMemoryStatus(self, asked: Any, call: IncomingCall) -> Any:
        """List the regions, or show one."""
        self._check(call)
        regions = {each["name"]: each for each in self._context.regions.status(asked.name)}
        return filled("SystemSharedMemoryStatusResponse", {"regions": regions})

    async def SystemSharedMemoryRegister(self, asked: Any, call: IncomingCall) -> Any:
        """Open a region."""
        self._check(call)
        self._context.regions.register(asked.name, asked.key, asked.offset, asked.byte_size)
        return filled("SystemSharedMemoryRegisterResponse", {})

    async def SystemSharedMemoryUnregister(self, asked: Any, call: IncomingCall) -> Any:
        """Close a region, or all."""
        self._check(call)
        self._context.regions.unregister(asked.name)
        return filled("SystemSharedMemoryUnregisterResponse", {})

    async def _load_arguments(
        self, asked: Any, parameters: Mapping[str, Any], own: Mapping[str, Any]
    ) -> kserve.LoadArguments:
        """Read them in a thread if the message is long: a configuration is a JSON document."""
        return await off_loop(asked.ByteSize(), partial(kserve.load_arguments, parameters, self._context.control, own))

    def _check(self, call: IncomingCall) -> None:
        self._context.control.require_http(call.peer, headers_of(call))


def named(asked: Any) -> str:
    """Return the name of the model to load or unload: KServe's clients write it where Triton's have the repository."""
    name: str = asked.model_name or asked.repository_name
    return name


def repository_parameters(asked: Any) -> dict[str, Parameter | bytes]:
    """Return the parameters of a call as a dict: files are bytes. MLServer's messages have none."""
    read: dict[str, Parameter | bytes] = {}
    for name, parameter in getattr(asked, "parameters", {}).items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(f"parameter {name!r}: has no value")
        read[name] = getattr(parameter, choice)
    return read


SERVICE = "grpc.health.v1.Health"

_UNKNOWN, _SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = range(4)

_Response = message("grpc.health.v1.HealthCheckResponse")


class Health:
    """Tells whether the models of `registry` take requests; `own` are the names that stand for the whole server.

    Calls of Watch are told of a change within `look_every` seconds.
    """

    def __init__(self, registry: "Registry", own: Iterable[str], *, look_every: float = 0.5) -> None:
        self._registry = registry
        self._own = {"", SERVICE, *own}
        self._refusing = asyncio.Event()
        self._look_every = look_every

    def refuse(self) -> None:
        """Report from now on that nothing is served; calls of Watch are told, and end."""
        self._refusing.set()

    async def Check(self, asked: Any, call: IncomingCall) -> Any:
        """Say whether the server, or one model, takes requests. Raises ModelNotFound for a name that is neither."""
        status = self._status(asked.service)
        if status == _SERVICE_UNKNOWN:
            raise ModelNotFound(f"service {asked.service!r}: there is none of this name, nor a model")
        return _Response(status=status)

    async def watch(self, asked: Any) -> AsyncGenerator[Any, None]:
        """Yield how it is, and how it is whenever that changes."""
        sent = _UNKNOWN
        while True:
            is_last, status = self._refusing.is_set(), self._status(asked.service)
            if status != sent:
                sent = status
                yield _Response(status=status)
            if is_last:  # not what may have happened while the answer was on its way
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
            return _SERVING if self._registry.get(name).ready else _NOT_SERVING
        except ModelNotFound:
            return _SERVICE_UNKNOWN


def service_of(version: str) -> str:
    """Return the full name of the service of a version."""
    return f"grpc.reflection.{version}.ServerReflection"


VERSIONS = ("v1", "v1alpha")


class Reflection:
    """Answers what is asked of the services named, in the messages of one `version`."""

    def __init__(self, version: str, services: Iterable[str]) -> None:
        package = f"grpc.reflection.{version}"
        self._response = message(f"{package}.ServerReflectionResponse")
        self._services = sorted(services)
        self._answers: dict[str, Callable[[Any], dict[str, Any]]] = {
            "file_by_filename": lambda name: _files(POOL.FindFileByName(name)),
            "file_containing_symbol": lambda name: _files(POOL.FindFileContainingSymbol(name)),
            "list_services": self._list,
        }

    def answer(self, asked: Any) -> Any:
        """Return the answer to one request of a stream."""
        question = asked.WhichOneof("message_request")
        answered = self._response(valid_host=asked.host, original_request=asked)
        if question not in self._answers:  # our messages have no extensions, and never will
            return self._failed(answered, grpc.StatusCode.NOT_FOUND, f"there is nothing for {question}")
        try:
            found = self._answers[question](getattr(asked, question))
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
    """Return a file and all that it imports."""
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
    *[method.path for method in methods(SERVICE)], *[f"/{INFERENCE}/{name}" for name in ("ServerLive", "ServerReady")]
)  # fmt: skip
# Calls of Watch at a time: of all who may call, and of those without the key of a server that asks for one, for load balancers have none.
_MOST_WATCHERS = 1000
_MOST_STRANGERS = 100
ALL = (*OWN, SERVICE, *map(service_of, VERSIONS))


class UnsupportedCalls:
    """The calls that are known and not offered, and why."""

    async def CudaSharedMemoryStatus(self, asked: Any, call: IncomingCall) -> Any:
        """List no regions: there can be none."""
        return filled("CudaSharedMemoryStatusResponse", {})

    async def CudaSharedMemoryRegister(self, asked: Any, call: IncomingCall) -> Any:
        """Refuse: inputs and outputs go through the arena, in the memory of the machine."""
        raise Unsupported("CUDA shared memory is not offered; system shared memory is")

    async def CudaSharedMemoryUnregister(self, asked: Any, call: IncomingCall) -> Any:
        """Close all of no regions."""
        return filled("CudaSharedMemoryUnregisterResponse", {})

    async def TraceSetting(self, asked: Any, call: IncomingCall) -> Any:
        """Refuse: what is traced is set when the server starts."""
        raise Unsupported("trace settings cannot be read or changed by a call: they are set when the server starts")

    async def LogSettings(self, asked: Any, call: IncomingCall) -> Any:
        """Refuse: what is logged is set when the server starts."""
        raise Unsupported("log settings cannot be read or changed by a call: they are set when the server starts")


class Services:
    """What answers each call: `handlers` are by its path. `most` requests of one stream may be under way."""

    def __init__(self, context: KserveContext, most: int, *, development: bool) -> None:
        self._inference = UnaryInference(context, development=development)
        self._streaming = StreamInference(context, most, development=development)
        self._health = Health(context.registry, OWN)
        self._development = development
        self._access = context.access
        answering = (Showing(context), Controlling(context), UnsupportedCalls())
        self.handlers: dict[str, Handler] = {
            method.path: unary(method, _answer(answering, method), development=development)
            for service in OWN
            for method in methods(service)
            if method.name not in ("ModelInfer", "ModelStreamInfer")
        }
        self.handlers[f"/{INFERENCE}/ModelInfer"] = self._inference.handler()
        self.handlers[f"/{INFERENCE}/ModelStreamInfer"] = self._streaming.handler()
        self._watching = {True: 0, False: 0}  # by whether they know the key
        self._add_health()
        for version in VERSIONS:
            self._add_reflection(version)

    def admit(self, path: str, call: IncomingCall) -> bool:
        """Tell whether a call may go on: health checks may, and calls with the server's key; else end it."""
        try:
            if self._access.required and path not in OPEN:
                self._access.require_http(headers_of(call))
        except Unauthorized as error:
            refuse(error, call, development=self._development)
            return False
        return True

    def refuse_with(self, error: WeirError, call: IncomingCall) -> None:
        """End a call with `error`."""
        refuse(error, call, development=self._development)

    def refuse(self) -> None:
        """Take no more requests; those under way go on."""
        self._inference.refusing = True
        self._streaming.refuse()
        self._health.refuse()

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
        """Count one more who watches. Raises Overloaded for one too many."""
        most = _MOST_WATCHERS if knows_key else _MOST_STRANGERS
        if self._watching[knows_key] >= most:
            raise Overloaded(f"{most} calls of Watch are under way; that is the limit", retry_after=1.0)
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
        reflection = Reflection(version, ALL)

        async def reflecting(call: IncomingCall, _: bytes) -> None:
            while (body := await call.read()) is not None:
                await call.write(reflection.answer(parse(method, body)).SerializeToString())

        self.handlers[method.path] = Handler(in_task(reflecting, development=self._development), takes_stream=True)


def _answer(answering: tuple[Any, ...], method: Method) -> Answer:
    answer: Answer = next(getattr(each, method.name) for each in answering if hasattr(each, method.name))
    return answer
