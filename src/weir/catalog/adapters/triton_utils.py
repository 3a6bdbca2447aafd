"""Replaces `triton_python_backend_utils`, which models of Triton's Python backend import: tensors, requests and responses, the model's
configuration, errors, logging, metrics, and calls of other models of this server.

A name that Weir does not have is refused when it is used, with the reason.
"""

import json
import logging
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

import numpy

from weir.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    ModelNotReady,
    RequestError,
    Unsupported,
    WeirError,
)
from weir.metrics import ModelMetrics
from weir.workers.settings import SERVER_ADDRESS
from weir.workers.source import folder_of

NAME = "triton_python_backend_utils"
FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL
SEQUENCE_START, SEQUENCE_END = 1, 2  # TRITONSERVER_REQUEST_FLAG_SEQUENCE_...
_SEQUENCE = ((SEQUENCE_START, "sequence_start"), (SEQUENCE_END, "sequence_end"))
# Parameters of the protocol that are not parameters of the model.
_OF_PROTOCOL = ("binary_data_output", "class", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout")

Array = numpy.ndarray[Any, Any]

# Triton's names of datatypes in configurations, and their numbers.
_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "TYPE_BOOL": numpy.bool_, "TYPE_UINT8": numpy.uint8, "TYPE_UINT16": numpy.uint16, "TYPE_UINT32": numpy.uint32,
        "TYPE_UINT64": numpy.uint64, "TYPE_INT8": numpy.int8, "TYPE_INT16": numpy.int16, "TYPE_INT32": numpy.int32,
        "TYPE_INT64": numpy.int64, "TYPE_FP16": numpy.float16, "TYPE_FP32": numpy.float32, "TYPE_FP64": numpy.float64,
        "TYPE_STRING": numpy.object_,
    }
)  # fmt: skip
_NUMBERS = tuple(_TYPES.values())  # the first has the number 1


class TritonModelException(Exception):
    """Fails the requests of a call of `execute` if the model raises it."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self._message = message

    def message(self) -> str:
        """Return the text."""
        return self._message


class TritonError:
    """The error of one response: a text, and one of the codes."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = 1) -> None:
        self._message = str(message)
        self._code = code

    def __str__(self) -> str:
        return self._message

    def message(self) -> str:
        """Return the text."""
        return self._message

    def code(self) -> int:
        """Return the code."""
        return self._code

    def as_weir(self) -> WeirError:
        """Return the error that the caller gets."""
        return _OF_CODES.get(self._code, ModelError)(self._message)

    @classmethod
    def of(cls, error: WeirError) -> "TritonError":
        """Return an error of a call of another model."""
        for code, kind in _OF_CODES.items():
            if isinstance(error, kind):
                return cls(error.message, code)
        if isinstance(error, DeadlineExceeded):
            return cls(error.message, cls.UNAVAILABLE)
        return cls(error.message, cls.INVALID_ARG if isinstance(error, RequestError) else cls.INTERNAL)


_OF_CODES: Mapping[int, type[WeirError]] = MappingProxyType(
    {
        TritonError.NOT_FOUND: ModelNotFound,
        TritonError.INVALID_ARG: InvalidRequest,
        TritonError.UNAVAILABLE: ModelNotReady,
        TritonError.UNSUPPORTED: Unsupported,
        TritonError.ALREADY_EXISTS: Conflict,
        TritonError.CANCELLED: Cancelled,
    }
)


class PbTensor:
    """A tensor of a request or a response; its array is in the memory of the CPU."""

    def __init__(self, name: str, array: Any) -> None:
        self._name = name
        self._array = numpy.asarray(array)
        if self._array.dtype.kind in "SU":
            self._array = self._array.astype(object)

    def name(self) -> str:
        """Return the name."""
        return self._name

    def as_numpy(self) -> Array:
        """Return the array."""
        return self._array

    def triton_dtype(self) -> int | None:
        """Return Triton's number of the datatype."""
        return numpy_to_triton_type(self._array.dtype.type)

    def shape(self) -> list[int]:
        """Return the lengths."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Return true."""
        return True

    def to_dlpack(self) -> Any:
        """Return a capsule with the array, for frameworks."""
        return self._array.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> "PbTensor":
        """Return the tensor with the array of a framework, or in a capsule, which must be in the memory of the CPU."""
        return cls(name, numpy.from_dlpack(tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)))


class _Capsule:
    """A capsule of DLPack as numpy takes it."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class PbResponse:
    """A response: tensors, or an error."""

    def __init__(self, output_tensors: Sequence[PbTensor] = (), error: TritonError | None = None, **more: Any) -> None:
        _refuse_arguments("InferenceResponse", more)
        self._tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[PbTensor]:
        """Return the tensors."""
        return self._tensors

    def has_error(self) -> bool:
        """Return whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def output(self, wanted: Sequence[str]) -> Any:
        """Return what the caller gets: the arrays by name, or an error."""
        if self._error is not None:
            return self._error.as_weir()
        arrays = {tensor.name(): tensor.as_numpy() for tensor in self._tensors}
        return {name: array for name, array in arrays.items() if name in wanted or not wanted}


class PbSender:
    """Sends the responses to one request of a decoupled model. `send` passes (index, response, final) on."""

    def __init__(
        self, index: int, give: Callable[[int, PbResponse | None, bool], None], left: Callable[[int], bool]
    ) -> None:
        self._index = index
        self._give = give
        self._left = left
        self._closed = False

    def send(self, response: PbResponse | None = None, flags: int = 0) -> None:
        """Send a response, or (with the flag FINAL) end the request, or both. Raises TritonModelException after the end."""
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is None and not flags & FINAL:
            raise TritonModelException("Inference Response object must be provided, or the flag for the final response")
        self._closed = bool(flags & FINAL)
        self._give(self._index, response, self._closed)

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for more."""
        return self._left(self._index)


class PbRequest:
    """A request: one that the model gets, or one that it makes of another model of this server."""

    def __init__(
        self, inputs: Sequence[PbTensor] = (), requested_output_names: Sequence[str] = (), model_name: str | bytes = "", *,
        request_id: str = "", correlation_id: int | str = 0, model_version: int = -1, flags: int = 0,
        timeout: int = 0, parameters: Mapping[str, Any] | None = None, preferred_memory: Any = None, trace: Any = None,
    ) -> None:  # fmt: skip
        if flags & ~(SEQUENCE_START | SEQUENCE_END):
            raise TritonModelException(f"flags={flags}: must be of a start and an end of a sequence")
        self._correlation_id, self._flags = correlation_id, flags
        self._inputs = list(inputs)
        self._outputs = list(requested_output_names)
        # A name that came in a tensor is bytes.
        self._model = model_name.decode() if isinstance(model_name, bytes) else str(model_name)
        self._version = int(model_version)
        self._id, self._timeout = str(request_id), timeout
        self._parameters = dict(parameters or {})
        self.sender: PbSender | None = None

    @classmethod
    def received(cls, arrays: Mapping[str, Any], head: Any, outputs: Sequence[str]) -> "PbRequest":
        """Return the request of a caller. `head` is a ResponseHead or None; `outputs` are those that the model has."""
        tensors = [PbTensor(name, array) for name, array in arrays.items()]
        if head is None:
            return cls(tensors, outputs)
        given = head.parameters or {}
        return cls(
            tensors,
            head.outputs or outputs,
            request_id=head.id,
            correlation_id=given.get("sequence_id", 0),
            flags=sum(flag for flag, name in _SEQUENCE if given.get(name)),
            timeout=int(given.get("timeout", 0)),
            parameters={name: value for name, value in given.items() if name not in _OF_PROTOCOL},
        )

    def inputs(self) -> list[PbTensor]:
        """Return the tensors."""
        return self._inputs

    def requested_output_names(self) -> list[str]:
        """Return the names of the outputs that the caller wants."""
        return self._outputs

    def request_id(self) -> str:
        """Return the caller's id."""
        return self._id

    def correlation_id(self) -> int | str:
        """Return the caller's id of a sequence; 0 stands for none. The requests of a sequence may come to different workers."""
        return self._correlation_id

    def flags(self) -> int:
        """Return whether the caller marked it as the start (1) or the end (2) of a sequence."""
        return self._flags

    def trace(self) -> None:
        """Return None: calls of other models are not parts of the caller's trace."""

    def timeout(self) -> int:
        """Return the time for the request in microseconds; 0 stands for none."""
        return self._timeout

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self._parameters)

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for the response."""
        return self.sender is not None and self.sender.is_cancelled()

    def get_response_sender(self) -> PbSender:
        """Return what sends the responses. Raises TritonModelException if the model is not decoupled."""
        if self.sender is None:
            rule = "get_response_sender: the model's configuration has no decoupled transaction policy"
            raise TritonModelException(rule)
        return self.sender

    def set_release_flags(self, flags: int) -> None:
        """Do nothing: a request is released when it has its response. Raises TritonModelException for another flag."""
        if flags != 1:
            raise TritonModelException("set_release_flags: requests are not rescheduled")

    def exec(self, decoupled: bool = False) -> Any:
        """Have the model compute, and return the response; with `decoupled`, an iterator of responses."""
        call = self._calls()
        if decoupled:
            return self._responses(call)
        try:
            return _response(_client().infer(self._model, self._arrays(), **call))
        except WeirError as error:
            return PbResponse(error=TritonError.of(error))

    async def async_exec(self, decoupled: bool = False) -> Any:
        """Do what `exec` does, while the event loop goes on."""
        import asyncio  # only models that use it load it

        return await asyncio.to_thread(self.exec, decoupled)

    def _responses(self, call: dict[str, Any]) -> Iterator[PbResponse]:
        try:
            for result in _client().stream(self._model, self._arrays(), **call):
                yield _response(result)
        except WeirError as error:
            yield PbResponse(error=TritonError.of(error))

    def _arrays(self) -> dict[str, Array]:
        return {tensor.name(): tensor.as_numpy() for tensor in self._inputs}

    def _calls(self) -> dict[str, Any]:
        if not self._model:
            raise TritonModelException("exec: model_name must be given")
        sequence = {"sequence_id": self._correlation_id} if self._correlation_id else {}
        flags = {name: True for flag, name in _SEQUENCE if self._flags & flag}
        call: dict[str, Any] = {"outputs": self._outputs} if self._outputs else {}
        if parameters := {**self._parameters, **sequence, **flags}:
            call["parameters"] = parameters
        if self._version > 0:
            call["version"] = str(self._version)
        if self._timeout:
            call["timeout"] = self._timeout / 1e6
        return {**call, **({"id": self._id} if self._id else {})}


def _response(result: Mapping[str, Array]) -> PbResponse:
    return PbResponse([PbTensor(name, array) for name, array in result.items()])


_clients: dict[str, Any] = {}


def _client() -> Any:
    """Return the client of this server. Raises TritonModelException if the model runs without a server."""
    address = os.environ.get(SERVER_ADDRESS, "")
    if not address:
        raise TritonModelException("other models can be called only under `weir serve`, weir.serve and weir.running")
    if address not in _clients:
        from weir.client import HttpClient

        _clients[address] = HttpClient(address)
    return _clients[address]


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether a model of this server is ready."""
    return bool(_client().model_ready(model_name, model_version))


class PbMemory:
    """The memory in which a request wants its outputs: the CPU's. Raises TritonModelException for that of a GPU."""

    def __init__(self, preferred_memory_type: int = 0, preferred_device_id: int = 0) -> None:
        if preferred_memory_type != 0:
            raise TritonModelException("PreferredMemory: tensors are in the memory of the CPU")


class PbModelConfig:
    """The configuration of a model, which its `auto_complete_config` completes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = json.loads(json.dumps(config))

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration."""
        return self._config  # type: ignore[no-any-return]  # from JSON

    def set_max_batch_size(self, size: int) -> None:
        """Set max_batch_size. Raises ValueError for less than the configuration says."""
        if self._config["max_batch_size"] > size:
            raise ValueError(f"max_batch_size={size}: the configuration says {self._config['max_batch_size']}")
        self._config["max_batch_size"] = size

    def set_dynamic_batching(self) -> None:
        """Have requests batched, as the configuration says or else as the server does."""
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: Mapping[str, bool]) -> None:
        """Set whether the model is decoupled. Raises ValueError if the configuration says something else."""
        given = self._config.get("model_transaction_policy")
        if set(policy) != {"decoupled"} or (given and dict(given) != dict(policy)):
            raise ValueError(f"model_transaction_policy={dict(policy)}: must be decoupled, as in the configuration")
        self._config["model_transaction_policy"] = dict(policy)

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        """Add an input with name, data_type, dims and optional. Raises ValueError if the configuration has another one of its
        name."""
        self._add("input", tensor, ("name", "data_type", "dims", "optional"))

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        """Add an output with name, data_type and dims. Raises ValueError as `add_input` does."""
        self._add("output", tensor, ("name", "data_type", "dims"))

    def _add(self, kind: str, tensor: Mapping[str, Any], keys: tuple[str, ...]) -> None:
        if set(tensor) - set(keys) or not set(keys[:3]) <= set(tensor):
            rule = f"{kind} {dict(tensor)}: must have {', '.join(keys[:3])}, and nothing other than {', '.join(keys)}"
            raise ValueError(rule)
        table = {**tensor, "dims": [int(length) for length in tensor["dims"]]}
        for known in self._config[kind]:
            if known["name"] == table["name"]:
                if [known.get(key) for key in keys[1:3]] != [table[key] for key in keys[1:3]]:
                    raise ValueError(f"{kind} {table['name']!r}: the configuration has another one: {known}")
                return
        self._config[kind].append(table)


def _log(message: str, level: str = "INFO") -> None:
    levels = {"VERBOSE": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
    logging.getLogger("triton").log(levels[level], "%s", message)


class PbLogger:
    """Writes to the server's log: `log` a line of a level, the others one of theirs. VERBOSE is shown with --log-level debug."""

    VERBOSE, INFO, WARNING, ERROR = "VERBOSE", "INFO", "WARNING", "ERROR"
    log = staticmethod(_log)
    log_info, log_verbose, log_warn, log_error = (
        staticmethod(partial(_log, level=level)) for level in ("INFO", "VERBOSE", "WARNING", "ERROR")
    )


class PbMetricFamily:
    """A metric of the model's own, whose `Metric(labels=...)` is one series of it."""

    COUNTER, GAUGE, HISTOGRAM = range(3)
    owner: ModelMetrics | None = None  # of the model of this process

    def __init__(self, name: str, description: str = "", kind: int = 0) -> None:
        self._name, self._description, self._kind = name, description, kind

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> "PbMetric":
        """Return the series of these labels."""
        metrics, names = self.owner or ModelMetrics(), list(labels or {})
        if self._kind == self.COUNTER:
            counter = metrics.counter(self._name, self._description, labels=names)
            return PbMetric(lambda value, _: counter.inc(value, **dict(labels or {})), False)
        if self._kind == self.GAUGE:
            gauge = metrics.gauge(self._name, self._description, labels=names)
            return PbMetric(lambda _, total: gauge.set(total, **dict(labels or {})), True)
        histogram = metrics.histogram(self._name, self._description, labels=names, buckets=buckets or ())
        return PbMetric(lambda value, _: histogram.observe(value, **dict(labels or {})), False)


class PbMetric:
    """One series of a metric. `tell` gets what was added, and the value in this worker since its start."""

    def __init__(self, tell: Callable[[float, float], None], settable: bool) -> None:
        self._tell = tell
        self._settable = settable
        self._value = 0.0

    def increment(self, amount: float) -> None:
        """Add `amount`."""
        self._value += amount
        self._tell(amount, self._value)

    def set(self, value: float) -> None:
        """Set a gauge. Raises TritonModelException for another metric."""
        if not self._settable:
            raise TritonModelException("set: only a gauge can be set")
        self._value = value
        self._tell(0.0, value)

    def observe(self, value: float) -> None:
        """Count a value of a histogram."""
        self._tell(value, value)

    def value(self) -> float:
        """Return the value in this worker since its start."""
        return self._value


def get_input_tensor_by_name(request: PbRequest, name: str) -> PbTensor | None:
    """Return an input of a request; None if it has none of this name."""
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(response: PbResponse, name: str) -> PbTensor | None:
    """Return an output of a response; None if it has none of this name. Raises TritonModelException if it is an error."""
    if response.has_error():
        raise TritonModelException(str(response.error()))
    return next((tensor for tensor in response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(config: Mapping[str, Any], name: str) -> Any:
    """Return the configuration of an input, or None."""
    return next((each for each in config.get("input", ()) if each["name"] == name), None)


def get_output_config_by_name(config: Mapping[str, Any], name: str) -> Any:
    """Return the configuration of an output, or None."""
    return next((each for each in config.get("output", ()) if each["name"] == name), None)


def using_decoupled_model_transaction_policy(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is that of a decoupled model."""
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(name: str) -> type:
    """Return numpy's type for a datatype such as TYPE_FP32."""
    return _TYPES[name]


def triton_to_numpy_type(number: int) -> type:
    """Return numpy's type for Triton's number of a datatype."""
    return _NUMBERS[number - 1]


def numpy_to_triton_type(kind: Any) -> int | None:
    """Return Triton's number of a type of numpy, or None."""
    scalar = numpy.dtype(kind).type
    scalar = numpy.object_ if issubclass(scalar, (numpy.bytes_, numpy.str_)) else scalar
    return _NUMBERS.index(scalar) + 1 if scalar in _NUMBERS else None


def serialize_byte_tensor(array: Array) -> bytes | None:
    """Return the elements one after the other, each after its length in 4 bytes; None for no elements."""
    if array.size == 0:
        return None
    texts = [each if isinstance(each, bytes) else str(each).encode() for each in array.ravel().tolist()]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def deserialize_bytes_tensor(data: bytes) -> Array:
    """Return the elements that `serialize_byte_tensor` has written, as an array of one dimension. Raises ValueError."""
    texts: list[bytes] = []
    at = 0
    while at < len(data):
        if len(data) - at < 4 or len(data) - at - 4 < (length := struct.unpack_from("<I", data, at)[0]):
            raise ValueError(f"an element at byte {at} of {len(data)} is cut off")
        texts.append(bytes(data[at + 4 : at + 4 + length]))
        at += 4 + length
    array = numpy.empty(len(texts), object)
    array[:] = texts
    return array


def _refuse_arguments(what: str, more: Mapping[str, Any]) -> None:
    if more:
        raise TritonModelException(f"{what}: {', '.join(more)}: is not supported")


_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE": "requests are not rescheduled",
        "TRITONSERVER_MEMORY_GPU": "tensors are in the memory of the CPU",
        "load_model": "a model does not load others; list them in the repository",
        "unload_model": "a model does not unload others",
    }
)


def make_module(folder: str) -> ModuleType:
    """Return the module that models import; `folder` is that of the model's version."""
    module = ModuleType(NAME, "What a model of Triton's Python backend imports, as far as Weir has it.")
    own = (
        get_input_tensor_by_name, get_output_tensor_by_name, get_input_config_by_name, get_output_config_by_name,
        using_decoupled_model_transaction_policy, triton_string_to_numpy, triton_to_numpy_type, numpy_to_triton_type,
        serialize_byte_tensor, deserialize_bytes_tensor, is_model_ready, TritonModelException, TritonError,
    )  # fmt: skip
    vars(module).update({each.__name__: each for each in own})

    def refuse(name: str) -> Any:
        raise AttributeError(f"{NAME}.{name}: {_REFUSED.get(name, 'is not supported by Weir')}")

    vars(module).update(
        Tensor=PbTensor, InferenceRequest=PbRequest, InferenceResponse=PbResponse, ModelConfig=PbModelConfig,
        PreferredMemory=PbMemory, Logger=PbLogger, MetricFamily=PbMetricFamily, InferenceResponseSender=PbSender,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL, TRITONSERVER_REQUEST_RELEASE_ALL=1, TRITONSERVER_MEMORY_CPU=0,
        TRITONSERVER_REQUEST_FLAG_SEQUENCE_START=SEQUENCE_START, TRITONSERVER_REQUEST_FLAG_SEQUENCE_END=SEQUENCE_END,
        TRITON_STRING_TO_NUMPY=dict(_TYPES), get_model_dir=lambda: folder, __getattr__=refuse,
    )  # fmt: skip
    return module


def load_class(code: bytes, path: str, metrics: ModelMetrics | None = None) -> Any:
    """Run the code of a model's file and return its class TritonPythonModel. Raises what the code raises."""
    folder = os.path.dirname(path)
    models = folder_of(folder)  # for the modules next to it
    sys.modules[NAME] = models.given[NAME] = make_module(folder)
    PbMetricFamily.owner = metrics
    if folder not in sys.path:
        sys.path.insert(0, folder)  # for what loads modules by name, such as pickles
    module = sys.modules["triton_model"] = ModuleType("triton_model")
    module.__file__ = path
    models.adopt(module)
    exec(compile(code, path, "exec", dont_inherit=True), vars(module))  # noqa: S102 - the user's model
    return module.TritonPythonModel


if __name__ == "__main__":
    try:
        with open(sys.argv[1], "rb") as file:
            _found = load_class(file.read(), os.path.abspath(sys.argv[1]))
        _config = PbModelConfig(json.loads(sys.argv[2]))
        _completed = _found.auto_complete_config(_config) or _config
        sys.stdout.write("\n" + json.dumps(_completed.as_dict()) + "\n")
    except BaseException as error:
        sys.exit(f"auto_complete_config: {type(error).__name__}: {' '.join(str(error).split())}"[:500])
