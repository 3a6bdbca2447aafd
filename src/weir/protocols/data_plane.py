"""The calls of the Open Inference Protocol that are not inference: health, metadata, configuration, statistics, hardware, and those that change a server.

`DataPlane` has a method for each call. The table DATA_PLANE (wire/inference.py) has its HTTP route and its gRPC message. Each document is declared once: HTTP
reads and writes it as JSON, gRPC copies it into its messages, and OpenAPI's schemas are made of it. Sources: the protocol's REST specification, and Triton's
extensions model_configuration, model_repository, statistics and shared_memory (see the package).
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, NotRequired, TypedDict, cast, get_type_hints

from msgspec import Meta, Struct

from weir._version import __version__
from weir.errors import Forbidden, InvalidRequest, ModelNotFound, ModelNotReady, NotFound, Unsupported, brief
from weir.model import NONE, RAGGED, Tensor, is_batched
from weir.policy.decision import SizeOrDelay
from weir.profiling.machine import Hardware, find_hardware
from weir.protocols.access import Control
from weir.protocols.account import charge_values
from weir.protocols.exchange import inference_of, once_read
from weir.protocols.offloading import off_loop
from weir.wire.data_plane import DATA_PLANE, DataPlaneCall
from weir.wire.inference import Parameter
from weir.wire.kserve_json import parse
from weir.wire.schema import read_document
from weir.wire.values import decode_json, json_bytes

if TYPE_CHECKING:
    from weir.protocols.kserve import KserveContext
    from weir.serving.handle import ModelHandle, Models


# The extensions of the protocol that a server's metadata lists. Shared memory is listed only where it is allowed.
EXTENSIONS = (
    "binary_tensor_data",
    "compression",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "statistics",
)
SHARED_MEMORY = "system_shared_memory"

_BACKENDS = {"onnx": "onnxruntime", "ensemble": ""}  # the others have the name of the platform
_MICROSECONDS = 1e6
_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}  # the others have the protocol's name behind TYPE_


def find(registry: "Models", name: str, version: str = "") -> "ModelHandle":
    """Return the service of the model `name`; `version` "" is the default version.

    Raises ModelNotFound with Triton's text, which clients of the protocol search for.
    """
    try:
        return registry.get(name, version)
    except ModelNotFound:
        there_are = ", ".join(dict.fromkeys((*registry.services, *registry.on_demand))) or "no models"
        which = f" version {version!r}" if version else ""
        raise ModelNotFound(f"Request for unknown model: {name!r}{which} is not found; there are {there_are}") from None


def check_ready(registry: "Models", name: str, version: str = "") -> None:
    """Raise ModelNotReady unless the model takes requests, or its first request has it read; and what `find` raises."""
    try:
        service = find(registry, name, version)
        label, reason = service.facts.label, service.not_ready_reason
    except ModelNotReady as error:
        if error.read is None:
            raise
        label, reason = name, registry.on_demand[name]
    if reason:
        raise ModelNotReady(f"model {label!r} is not ready: {reason}")


# Documents that the server sends.


class LiveState(TypedDict):
    """Whether this process responds."""

    live: bool


class ReadyState(TypedDict):
    """Whether the server, or the model `name`, takes requests."""

    ready: bool
    name: NotRequired[str]


class ServerMetadata(TypedDict):
    """The name of this server, its version, and the extensions that it offers."""

    name: str
    version: str
    extensions: list[str]


class ModelNames(TypedDict):
    """The models that are served."""

    models: list[str]


class TensorMetadata(TypedDict):
    """A tensor; -1 is a dimension of any length."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(TypedDict):
    """The name of a model, its platform, and the tensors that it takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class TensorConfig(TypedDict):
    """A tensor without its batch dimension."""

    name: str
    data_type: str
    dims: list[int]
    format: NotRequired[str]
    reshape: NotRequired[dict[str, list[int]]]
    optional: NotRequired[bool]
    allow_ragged_batch: NotRequired[bool]


class InstanceGroup(TypedDict):
    """The number of workers that run a model, and their devices."""

    name: str
    kind: str
    count: int


class ConfigDelay(TypedDict, total=False):
    """The time that a batch waits, and the rows that it waits for."""

    max_queue_delay_microseconds: int
    preferred_batch_size: list[int]


class ModelConfig(TypedDict):
    """Triton's ModelConfig, as far as it applies here. `max_batch_size` 0: the model is not batched."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[TensorConfig]
    output: list[TensorConfig]
    instance_group: list[InstanceGroup]
    model_transaction_policy: dict[str, bool]
    dynamic_batching: ConfigDelay
    parameters: dict[str, dict[str, str]]


class CountedTime(TypedDict):
    """The number of times that something happened, and the nanoseconds that it took together."""

    count: int
    ns: int


class ComputeStatistics(TypedDict):
    """The steps of a batch in a worker."""

    compute_input: CountedTime
    compute_infer: CountedTime
    compute_output: CountedTime


class InferStatistics(ComputeStatistics):
    """The durations of requests, by the steps and ends that they had."""

    success: CountedTime
    fail: CountedTime
    queue: CountedTime
    cache_hit: CountedTime
    cache_miss: CountedTime


class BatchStatistics(ComputeStatistics):
    """The durations of batches of one size, in rows."""

    batch_size: int


class ModelStatistics(TypedDict):
    """The work of a model since it was loaded. `last_inference` is in milliseconds since 1970."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics
    batch_stats: list[BatchStatistics]


class AllStatistics(TypedDict):
    """The work of models since they were loaded."""

    model_stats: list[ModelStatistics]


class ModelIndexEntry(TypedDict):
    """A model that can be loaded. `state` is READY, UNAVAILABLE, LOADING or UNLOADING."""

    name: str
    version: str
    state: str
    reason: str


class RegionStatus(TypedDict):
    """A region of shared memory, in bytes."""

    name: str
    key: str
    offset: int
    byte_size: int


class AllHardware(TypedDict):
    """The processors of this machine."""

    hardware: list[Hardware]


class Nothing(TypedDict):
    """An empty object."""


class KserveError(TypedDict):
    """The text of an error."""

    error: str


# Documents that callers send.


class IndexRequest(Struct):
    """Chooses the models to list: with `ready`, those that take requests."""

    ready: bool | None = None


class LoadRequest(Struct):
    """Tells how to load a model. Other fields than `parameters` are parameters of the model itself."""

    parameters: (
        Annotated[
            dict[str, Any],
            Meta(
                description="config: a configuration in place of the repository's, as a JSON text; file:<version>/<name>: a file, in base64",
                extra_json_schema={"properties": {"config": {"type": "string"}}},
            ),
        ]
        | None
    ) = None


class UnloadParameters(Struct):
    """With `unload_dependents`, the chains that use this model are unloaded too."""

    unload_dependents: bool | None = None


class UnloadRequest(Struct):
    """Tells how to unload a model."""

    parameters: UnloadParameters | None = None


class HardwareRequest(Struct):
    """Devices of the kind `name` (CPU, GPU), or with `name` as a part of their name. `num`: at least this many, 1 by default."""

    name: str
    num: int | None = None


class RegionRequest(Struct):
    """A region of the shared memory object `key`, in bytes."""

    key: str
    # Regions.register checks both numbers, for gRPC too, and its error names the region.
    byte_size: Annotated[int, Meta(extra_json_schema={"minimum": 1})]
    offset: Annotated[int, Meta(extra_json_schema={"minimum": 0})] | None = None


# Documents about a server and its models.


def metadata(service: "ModelHandle", versions: Sequence[str] = ()) -> ModelMetadata:
    """Return the metadata of a model; `versions` are those that are served."""
    return {
        "name": service.facts.name,
        "versions": list(versions),
        "platform": service.facts.platform,
        "inputs": [_tensor(tensor) for tensor in inference_of(service).inputs(service)],
        "outputs": [_tensor(tensor) for tensor in inference_of(service).outputs(service)],
    }


def _tensor(tensor: Tensor) -> TensorMetadata:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def config(service: "ModelHandle") -> ModelConfig:
    """Return the configuration of a model."""
    batching = service.facts.batching
    parameters = {
        "policy": str(batching.policy),
        "max_queue_size": str(batching.max_queue_size),
        "max_queue_delay": str(batching.max_queue_delay),
    }
    if sizes := service.facts.model.allowed_batch_sizes:
        parameters["allowed_batch_sizes"] = ", ".join(map(str, sorted(sizes)))
    parameters |= {"unbatched": reason} if (reason := service.facts.model.unbatched) else {}
    return {
        "name": service.facts.name,
        "platform": service.facts.platform,
        "backend": _BACKENDS.get(service.facts.platform, service.facts.platform),
        "max_batch_size": batching.max_batch_size if is_batched(service.facts.model) else 0,
        "input": [_declared(tensor) for tensor in inference_of(service).inputs(service)],
        "output": [_declared(tensor) for tensor in inference_of(service).outputs(service)],
        "instance_group": [{"name": service.facts.name, "kind": "KIND_CPU", "count": service.control.worker_count}],
        "model_transaction_policy": {"decoupled": service.facts.streaming},
        "dynamic_batching": _waits(service.control.policy),
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }


def _waits(policy: Any) -> ConfigDelay:
    """Return the delay and the batch size of `policy`, if it has them: Triton's configuration has no fields for other policies."""
    waits: ConfigDelay = {}
    if isinstance(policy, SizeOrDelay):
        waits["max_queue_delay_microseconds"] = round(policy.delay * _MICROSECONDS)
        if policy.size is not None:
            waits["preferred_batch_size"] = [policy.size]
    return waits


def _declared(tensor: Tensor) -> TensorConfig:
    """Return a tensor for a configuration, without its batch dimension."""
    declared: TensorConfig = {
        "name": tensor.name,
        "data_type": _CONFIG_TYPES.get(tensor.datatype, f"TYPE_{tensor.datatype}"),
        "dims": list(tensor.shape if tensor.batch == NONE else tensor.shape[1:]),
    }
    if tensor.varying == RAGGED:
        declared["allow_ragged_batch"] = True
    if tensor.optional:
        declared["optional"] = True
    if tensor.format:
        declared["format"] = tensor.format
    if tensor.reshape is not None:
        declared["reshape"] = {"shape": list(tensor.reshape)}
    return declared


def statistics(service: "ModelHandle") -> ModelStatistics:
    """Return the statistics of a model since it was loaded."""
    return cast(
        ModelStatistics,
        {"name": service.facts.name, "version": service.facts.version, **service.control.statistics.to_dict()},
    )


# The arguments of a call to load a model.


_FILE = "file:"


class LoadArguments(NamedTuple):
    """The arguments of Manager.load_model besides the name: a configuration that replaces the repository's, files by path, and the model's parameters."""

    config: dict[str, Any] | None
    files: dict[str, bytes] | None
    parameters: dict[str, Any]


def load_document(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `parameters` of an AMD client's call as a LoadRequest: those of the model itself become fields of their own."""
    repository = {name: value for name, value in parameters.items() if name == "config" or name.startswith(_FILE)}
    own = {name: value for name, value in parameters.items() if name not in repository}
    return {**own, "parameters": repository}


def load_arguments(request: dict[str, Any], control: Control) -> LoadArguments:
    """Return the arguments for loading a model, from a LoadRequest: `config` is a JSON text, and `file:<version>/<name>` is bytes or base64.

    Other fields than `parameters` are parameters of the model itself, as clients of the AMD Inference Server send them: texts, numbers, true and false.

    Raises InvalidRequest naming parameter, value and rule, and Forbidden for files unless the server allows them.
    """
    parameters = read_document(request, LoadRequest).parameters or {}
    own = {name: value for name, value in request.items() if name != "parameters"}
    config, files = None, {}
    for name, value in own.items():
        if not isinstance(value, (str, int, float)):
            raise InvalidRequest(f"parameter {brief(name)}={brief(value)}: must be a text, a number, true or false")
    for name, value in parameters.items():
        if name == "config":
            config = _config(value)
        elif name.startswith(_FILE):
            files[name.removeprefix(_FILE)] = _content(name, value)
        else:
            raise InvalidRequest(f"parameter {brief(name)}: must be config or file:<version>/<name>")
    if files and not control.settings.allow_model_files:
        raise Forbidden("files in a call that loads a model: not allowed on this server (allow_model_files)")
    if files and config is None:
        raise InvalidRequest(f"parameter {brief(_FILE + next(iter(files)))}: needs the parameter config too")
    return LoadArguments(config, files or None, own)


def _config(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise InvalidRequest(f"parameter 'config'={brief(value)}: must be a JSON object as text")
    text = value.encode()
    charge_values(len(text), partial(json_bytes, text))
    config = parse(decode_json, text, "a configuration")
    if not isinstance(config, dict):
        raise InvalidRequest(f"parameter 'config'={brief(value)}: must be a JSON object as text")
    return config


def _content(name: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise InvalidRequest(f"parameter {brief(name)}: must be base64 ({error})") from None


class DataPlane:
    """All that a server does besides inference, whatever channel a call comes by. Each call of DATA_PLANE has a method of its name.

    What the path of a call names is an argument, and its body is `request`, whose type says how it is read. A method returns the document of the
    response. For a question whose response is no it raises ModelNotReady or NotFound. Only calls that return what a model on demand declares have it read.
    """

    def __init__(self, context: "KserveContext") -> None:
        self._context = context
        self._registry = context.registry
        self._bodies = {
            name: get_type_hints(getattr(self, name), include_extras=True).get("request") for name in DATA_PLANE
        }

    def body_of(self, call: DataPlaneCall) -> Any:
        """Return the type that the body of a call is read as; None if the call has no body."""
        return self._bodies[call.name]

    async def respond(self, call: DataPlaneCall, path: Mapping[str, str], body: Any) -> Any:
        """Return the document of the response to a call without HTTP's status codes: a question whose response is no has a document, too.

        `path` has what the path of the call would name, and `body` is a document. Raises what the method raises otherwise.
        """
        declared = self.body_of(call)
        given = {} if declared is None else {"request": read_document(body, declared)}
        try:
            document = await getattr(self, call.name)(**path, **given)
        except (ModelNotReady, NotFound):
            if not call.asks:
                raise
            return {call.asks: False}
        return {call.asks: True} if call.asks else document

    # The server.

    async def server_metadata(self) -> ServerMetadata:
        """Show the server's name, version and extensions."""
        extensions = list(self._context.extensions)
        return {"name": self._context.settings.server_name, "version": __version__, "extensions": extensions}

    async def server_live(self) -> LiveState:
        """Return whether the server is live, as its setting `liveness` defines it."""
        if failed := self._context.failed:
            raise _not("live", failed)
        return {"live": True}

    async def server_ready(self) -> ReadyState:
        """Return whether every model accepts requests."""
        if not self._registry.ready:
            raise _not("ready", self._registry.not_ready_reasons)
        return {"ready": True}

    async def hardware(self) -> AllHardware:
        """List the CPUs and GPUs of this machine."""
        return {"hardware": find_hardware()}

    async def has_hardware(self, request: HardwareRequest) -> HardwareRequest:
        """Return whether this machine has `num` devices of a kind or name."""
        wanted, least = request.name.lower(), max(1, request.num or 1)
        hardware = find_hardware()
        found = sum(each.count for each in hardware if wanted == each.kind.lower() or wanted in each.name.lower())
        if found < least:
            raise NotFound(f"hardware {request.name!r:.80}: there are {found}, not {least}")
        return HardwareRequest(request.name, found)

    async def trace_settings(self, model: str = "", version: str = "") -> NoReturn:
        """Refuse: tracing is set when the server starts."""
        raise Unsupported("trace settings cannot be read or changed by a call: they are set when the server starts")

    async def log_settings(self) -> NoReturn:
        """Refuse: logging is set when the server starts."""
        raise Unsupported("log settings cannot be read or changed by a call: they are set when the server starts")

    # Models.

    async def models(self) -> ModelNames:
        """Name the models."""
        return {"models": list(self._registry.services)}

    async def index(self, request: IndexRequest) -> list[ModelIndexEntry]:
        """List the models that can be loaded, with their states."""
        states = await self._context.manager.index(ready_only=bool(request.ready))
        return [cast(ModelIndexEntry, state._asdict()) for state in states]

    async def model_metadata(self, model: str, version: str = "") -> ModelMetadata:
        """Describe one model."""
        handle = await self._find(model, version)
        return metadata(handle, [each for each in self._registry.versions(handle.facts.name) if each])

    async def model_ready(self, model: str, version: str = "") -> ReadyState:
        """Return whether one model accepts requests, without reading it."""
        check_ready(self._registry, model, version)
        return {"name": model, "ready": True}

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        """Show the configuration of one model."""
        return config(await self._find(model, version))

    async def statistics(self, model: str = "", version: str = "") -> AllStatistics:
        """Show the statistics of one model, in one version or in all, or of every model."""
        if not model:
            handles: Sequence[ModelHandle] = self._registry.all
        elif version:
            handles = [await self._find(model, version)]
        else:
            handles = [*self._registry.versions((await self._find(model)).facts.name).values()]
        return {"model_stats": [statistics(handle) for handle in handles]}

    async def load_model(
        self, model: str, request: Annotated[dict[str, Any], LoadRequest], version: str = ""
    ) -> Nothing:
        """Load a model of the repository, or load it again."""
        given = request.get("parameters")
        texts = given.values() if isinstance(given, dict) else ()
        size = sum(len(each) for each in texts if isinstance(each, (str, bytes)))
        arguments = await off_loop(size, partial(load_arguments, request, self._context.control))
        await self._context.manager.load_model(model, version=version, **arguments._asdict())
        return {}

    async def unload_model(self, model: str, request: UnloadRequest, version: str = "") -> Nothing:
        """Stop serving a model."""
        dependents = request.parameters is not None and bool(request.parameters.unload_dependents)
        await self._context.manager.unload_model(model, version=version, unload_dependents=dependents)
        return {}

    async def load_worker(self, worker: str, request: dict[str, Parameter]) -> str:
        """Start a worker, or use one that runs with the same parameters; the response is the name of its endpoint."""
        return await self._context.manager.load_worker(worker, request)

    async def unload_worker(self, worker: str) -> Nothing:
        """Drain and end a worker of an endpoint; the endpoint ends with its last worker."""
        await self._context.manager.unload_worker(worker)
        return {}

    async def _find(self, name: str, version: str = "") -> "ModelHandle":
        return await once_read(partial(find, self._registry, name, version))

    # Shared memory.

    async def memory_status(self, region: str = "") -> list[RegionStatus]:
        """List the regions, or show one."""
        return self._context.regions.status(region)

    async def register_memory(self, region: str, request: RegionRequest) -> Nothing:
        """Open a region."""
        self._context.regions.register(region, request.key, request.offset or 0, request.byte_size)
        return {}

    async def unregister_memory(self, region: str = "") -> Nothing:
        """Close a region, or all."""
        self._context.regions.unregister(region)
        return {}

    async def cuda_memory_status(self) -> list[RegionStatus]:
        """List the regions of GPU memory: there are never any."""
        return []

    async def unregister_cuda_memory(self, region: str = "") -> Nothing:
        """Close regions of GPU memory: there are never any."""
        return {}

    async def share_cuda_memory(self, region: str = "") -> NoReturn:
        """Refuse: inputs and outputs are in main memory."""
        raise Unsupported("CUDA shared memory is not offered; system shared memory is")


def _not(what: str, reasons: Mapping[str, str]) -> ModelNotReady:
    """Return the error that says why the server is not `what`."""
    return ModelNotReady(f"not {what}: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
