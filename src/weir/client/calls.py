"""What every client can ask, whatever protocol it speaks: arrays in and out, calls as programs, and which of them are sent again.

A program is a generator: it yields what is to be sent, or a Sleep, and receives the answer. Blocking and asynchronous clients run the same programs.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from threading import TIMEOUT_MAX
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

import msgspec
import numpy
from numpy.typing import NDArray

from weir import errors
from weir.errors import (
    CapacityError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    SettingsError,
    WeirError,
    WorkerLost,
)
from weir.wire.inference import AskedOutput, InferenceRequest, InferenceResponse, Parameter, Parameters, TensorValue
from weir.wire.tensors import DTYPES

# What callers give and get: arrays by name.


Array = NDArray[Any]
# Arrays by the names of the tensors; a TensorValue where the datatype cannot be told from the array (BF16).
Inputs = Mapping[str, Array | TensorValue]

# A model of items has one tensor each way, BYTES of JSON documents; these are what its metadata calls them.
ITEM_INPUT, ITEM_OUTPUT = "input", "output"

# In the parameters of each part of a stream: whether it is the last.
FINAL = "triton_final_response"

_DATATYPES = {
    dtype: datatype for datatype, dtype in DTYPES.items() if datatype not in ("BYTES", "BF16")
}  # what numpy calls them, to what the protocol does


class RequestExtras(TypedDict, total=False):
    """What a request may have beside its inputs.

    `version` of the model; names of the `outputs` wanted (all of them otherwise); `id`; `parameters` for the server;
    `priority` (1 is the highest, 0 the default); `timeout` in seconds, which the server gets too.
    """

    version: str
    outputs: Sequence[str]
    id: str
    parameters: Mapping[str, Parameter]
    priority: int
    timeout: float


class Result(Mapping[str, Array]):
    """An answer: its arrays by the names of the outputs. BYTES are an object array of bytes, BF16 bits as uint16.

    Arrays that came over a connection are read-only views of what was received.
    """

    def __init__(self, response: InferenceResponse) -> None:
        self.model = response.model
        self.version = response.version
        self.id = response.id
        self.parameters: Parameters = {name: value for name, value in response.parameters.items() if name != FINAL}
        self.outputs = {output.name: output for output in response.outputs}

    def __getitem__(self, name: str) -> Array:
        return self.outputs[name].array

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def __repr__(self) -> str:
        return f"Result({self.model!r}, {list(self.outputs.values())})"


def request_of(model: str, inputs: Inputs, asking: RequestExtras) -> InferenceRequest:
    """Return the request for `inputs`. Raises InvalidRequest for an array of no datatype of the protocol."""
    if not isinstance(inputs, Mapping):
        raise InvalidRequest(f"inputs {inputs!r:.80}: model {model!r} takes tensors, must be arrays by name")
    parameters: Parameters = dict(asking.get("parameters") or {})
    if asking.get("priority"):
        parameters["priority"] = asking["priority"]
    if asking.get("timeout"):
        parameters["timeout"] = max(1, round(asking["timeout"] * 1e6))
    outputs = asking.get("outputs")
    return InferenceRequest(
        model,
        [tensor_of(name, value) for name, value in inputs.items()],
        version=asking.get("version", ""),
        id=asking.get("id", ""),
        outputs=None if outputs is None else [AskedOutput(name, {}) for name in outputs],
        parameters=parameters,
    )


def is_tensors(value: Any) -> bool:
    """Tell whether `value` can only be arrays by name, and no item of a model of items."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(each, (TensorValue, numpy.ndarray)) for each in value.values())
    )


def takes_items(metadata: Mapping[str, Any]) -> bool:
    """Tell from a model's metadata whether it takes items, each a JSON document."""
    inputs, outputs = metadata.get("inputs") or [], metadata.get("outputs") or []
    named = [(tensor["name"], tensor["datatype"]) for tensor in (*inputs, *outputs)]
    return named == [(ITEM_INPUT, "BYTES"), (ITEM_OUTPUT, "BYTES")]


def item_request(model: str, item: Any, asking: RequestExtras) -> InferenceRequest:
    """Return the request for one plain `item`. Raises InvalidRequest for what JSON cannot write."""
    try:
        document = msgspec.json.encode(item)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"item {item!r:.80}: cannot be written as JSON ({error})") from error
    element = numpy.empty(1, object)
    element[0] = document
    return request_of(model, {ITEM_INPUT: TensorValue(ITEM_INPUT, "BYTES", element)}, asking)


def item_answer(response: InferenceResponse) -> Any:
    """Return the plain answer to one item: what its JSON document says, or the bytes of a model that answers in another form."""
    document = bytes(response.outputs[0].array[0])
    try:
        return msgspec.json.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return document


def tensor_of(name: str, value: Array | TensorValue) -> TensorValue:
    """Return an array as a tensor. Texts and bytes are BYTES."""
    if isinstance(value, TensorValue):
        return value
    array = numpy.asarray(value)
    if array.dtype.kind in "OSU":
        return TensorValue(name, "BYTES", _bytes_of(name, array))
    native = array.dtype.newbyteorder("=")
    if native not in _DATATYPES:
        raise InvalidRequest(f"tensor {name!r}: an array of {array.dtype} is of no datatype of the protocol")
    return TensorValue(name, _DATATYPES[native], array.astype(native, copy=False))


def _bytes_of(name: str, array: Array) -> Array:
    found = numpy.empty(array.shape, object)
    for place, element in numpy.ndenumerate(array):
        if isinstance(element, str):
            element = element.encode()
        if not isinstance(element, bytes):
            raise InvalidRequest(f"tensor {name!r}: {element!r:.80} is neither bytes nor a text")
        found[place] = element
    return found


# Calls as programs: generators that yield what is to be done, one step after the other, and receive its result.
#
# A program knows no socket and no clock, so that the same one is run by a client that blocks and by one that awaits.


T = TypeVar("T")
# Yields steps (Sleep, or what the transport understands), is sent their answers, returns the value of the call.
Program = Generator[Any, Any, T]


class Sleep(NamedTuple):
    """Wait. DeadlineExceeded comes at once if that would take longer than there is time."""

    seconds: float


def run(program: Program[T], send: Callable[[Any, float], Any], timeout: float) -> T:
    """Run `program` to its end and return its value; `send` does a step within the seconds it is given."""
    deadline = time.monotonic() + timeout
    resume: Callable[[], Any] = partial(next, program)
    while True:
        try:
            step = resume()
        except StopIteration as end:
            value: T = end.value
            return value
        try:
            left = _left(step, deadline, timeout)
            answer: Any = None
            if isinstance(step, Sleep):
                time.sleep(step.seconds)
            else:
                answer = send(step, left)
        except WeirError as error:
            resume = partial(program.throw, error)
        else:
            resume = partial(program.send, answer)


async def run_async(
    program: Program[T], send: Callable[[Any, float], Awaitable[Any]], timeout: float
) -> T:  # fmt: skip
    """Do the same without blocking the event loop."""
    deadline = time.monotonic() + timeout
    resume: Callable[[], Any] = partial(next, program)
    while True:
        try:
            step = resume()
        except StopIteration as end:
            value: T = end.value
            return value
        try:
            left = _left(step, deadline, timeout)
            answer = await (asyncio.sleep(step.seconds) if isinstance(step, Sleep) else send(step, left))
        except WeirError as error:
            resume = partial(program.throw, error)
        else:
            resume = partial(program.send, answer)


def _left(step: Any, deadline: float, timeout: float) -> float:
    """Return the seconds that are left for `step`. Raises DeadlineExceeded if it cannot be done in time."""
    left = deadline - time.monotonic()
    if left <= (step.seconds if isinstance(step, Sleep) else 0.0):
        raise DeadlineExceeded(f"no answer within {timeout:g} s")
    return left


Metadata = dict[str, Any]

# Inputs or outputs as metadata have them: tables of name, datatype and shape.
Tensors = Sequence[Mapping[str, Any]]

# Makes of what the transport hands on, piece by piece, the answers that it completes.
Decoder = Callable[[Any], Iterable[InferenceResponse]]


class Streaming(NamedTuple):
    """A call with several answers: the step that begins it, and what makes a decoder for one attempt."""

    step: Any
    decoder: Callable[[], Decoder]


class Calls(Protocol):
    """The calls in one protocol. Programs raise the WeirError that the answer stands for."""

    def server_metadata(self) -> Program[Metadata]:
        """Ask for name, version and extensions."""

    def server_live(self) -> Program[bool]:
        """Ask whether the process answers."""

    def server_ready(self) -> Program[bool]:
        """Ask whether every model takes requests."""

    def model_ready(self, name: str, version: str) -> Program[bool]:
        """Ask whether a model takes requests."""

    def model_metadata(self, name: str, version: str) -> Program[Metadata]:
        """Ask for versions, platform, inputs and outputs."""

    def models(self) -> Program[list[str]]:
        """Ask for the names of the models that run."""

    def has_hardware(self, name: str, count: int) -> Program[bool]:
        """Ask whether there are so many devices of a kind or name."""

    def load_model(self, name: str, config: Mapping[str, Any] | None) -> Program[None]:
        """Have a model read anew and run."""

    def unload_model(self, name: str) -> Program[None]:
        """Have a model end."""

    def load_worker(self, name: str, parameters: Mapping[str, Parameter]) -> Program[str]:
        """Have a model run with parameters; the answer is the endpoint."""

    def unload_worker(self, endpoint: str) -> Program[None]:
        """Have a worker of an endpoint end."""

    def infer(self, request: InferenceRequest) -> Program[InferenceResponse]:
        """Ask a model."""

    def stream(self, request: InferenceRequest) -> Streaming:
        """Ask a model for several answers."""


class Prepared(NamedTuple):
    """A request, and what makes of an answer to it what the caller gets."""

    request: InferenceRequest
    answer: Callable[[InferenceResponse], Any]


class ModelCall:
    """Asks models for answers through `calls`: to arrays by name a Result, to a plain item of a model of items the plain answer.

    The server is asked once which of the two a model takes, and only where the value could be either.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._takes_items: dict[tuple[str, str], bool] = {}

    def prepare(self, model: str, value: Any, asking: RequestExtras) -> Program[Prepared]:
        """Return the request for `value`. Raises InvalidRequest for what can be no request."""
        if not is_tensors(value) and (yield from self._is_of_items(model, asking.get("version", ""))):
            return Prepared(item_request(model, value, asking), item_answer)
        return Prepared(request_of(model, value, asking), Result)

    def infer(self, model: str, value: Any, asking: RequestExtras) -> Program[Any]:
        """Ask for the answer to `value`."""
        prepared = yield from self.prepare(model, value, asking)
        try:
            return prepared.answer((yield from self._calls.infer(prepared.request)))
        except (InvalidRequest, ModelNotFound):
            self._takes_items.pop((model, asking.get("version", "")), None)  # it may have been replaced by another
            raise

    def _is_of_items(self, model: str, version: str) -> Program[bool]:
        known = self._takes_items.get((model, version))
        if known is None:
            known = takes_items((yield from self._calls.model_metadata(model, version)))
            self._takes_items[model, version] = known
        return known


def ensemble(models: Sequence[str | Mapping[str, Any]], inputs: Tensors, outputs: Tensors) -> Metadata:
    """Return the configuration of a chain of `models`."""
    tensors = {"inputs": list(map(dict, inputs)), "outputs": list(map(dict, outputs))}
    return {"platform": "ensemble", "steps": list(models)} | {key: value for key, value in tensors.items() if value}


def has_extension(calls: Calls, name: str) -> Program[bool]:
    """Ask whether the server lists an extension."""
    metadata = yield from calls.server_metadata()
    return name in metadata["extensions"]


def until_server_ready(calls: Calls, interval: float) -> Program[None]:
    """Ask every `interval` seconds until every model takes requests. Raises DeadlineExceeded when that is not in time."""
    return _until(calls.server_ready, True, "server ready", interval)


def until_model(calls: Calls, name: str, version: str, ready: bool, interval: float) -> Program[None]:
    """Ask every `interval` seconds until a model takes requests, or none. Raises DeadlineExceeded when that is not in time."""
    what = f"model {name!r} {'ready' if ready else 'not ready'}"
    return _until(lambda: calls.model_ready(name, version), ready, what, interval)


def _until(ask: Callable[[], Program[bool]], wanted: bool, what: str, interval: float) -> Program[None]:
    try:
        while (yield from or_false(ask())) is not wanted:
            yield Sleep(interval)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{what}: {error.message}") from None


def or_false(ask: Program[bool]) -> Program[bool]:
    """Ask; where nobody answers, or only that it is not ready, that is a no."""
    try:
        return (yield from ask)
    except CapacityError:
        return False


# Which calls are repeated, and when.


@dataclass(frozen=True)
class Retry:
    """How often, and after which waits, a call is sent again that the server refused for now.

    Only a call that was refused before it began is repeated: the queue was full, the model or the server not ready, no
    connection could be made. Never what a model was given, so no ModelCrashed and no stream that has begun. The server's Retry-After
    is the shortest wait; without one it is `first_wait` seconds, and twice as much each time, `longest_wait` at most.
    """

    times: int = 2
    first_wait: float = 0.1
    longest_wait: float = 10.0

    def wait(self, error: BaseException, tried: int) -> float | None:
        """Return the seconds to wait after `error` ended attempt number `tried` (from 0); None: it is not sent again."""
        if not isinstance(error, CapacityError) or isinstance(error, WorkerLost) or tried >= self.times:
            return None
        return max(error.retry_after or 0.0, min(self.longest_wait, self.first_wait * 2.0**tried))


NEVER = Retry(times=0)


def retried(retry: Retry, attempt: Callable[[], Program[T]]) -> Program[T]:
    """Run `attempt` until it succeeds, or fails with what is not to be tried again, or there is no time left."""
    tried = 0
    while True:
        try:
            return (yield from attempt())
        except CapacityError as error:
            wait = retry.wait(error, tried)
            if wait is None:
                raise
            refused = error
        try:
            yield Sleep(wait)
        except DeadlineExceeded:
            raise refused from None
        tried += 1


# How long a call may take: the call's own timeout, or else the client's.


_RULE = "must be a finite number of seconds greater than 0"


def of_client(timeout: Any) -> float:
    """Return `timeout`, which a client is made with, in seconds. Raises SettingsError."""
    if not _is_timeout(timeout):
        raise SettingsError(f"timeout={timeout!r}: {_RULE}")
    return float(timeout)


def of_call(timeout: Any, otherwise: float) -> float:
    """Return `timeout` in seconds; `otherwise` if it is None. Raises InvalidRequest."""
    if timeout is None:
        return otherwise
    if not _is_timeout(timeout):
        raise InvalidRequest(f"timeout={timeout!r}: {_RULE}")
    return float(timeout)


def _is_timeout(seconds: Any) -> bool:
    is_number = isinstance(seconds, Real)
    return is_number and bool(0 < seconds <= TIMEOUT_MAX)


# What an answer that is an error becomes here: the error that a caller in process would have had.


class Unreachable(CapacityError):
    """No connection could be made: nothing was sent."""


class ConnectionLost(WeirError):
    """The connection ended before the answer: whether the request was served is not known."""


# Where an answer does not name its error: the class that its code stands for.
_BY_STATUS: dict[int, type[WeirError]] = {
    400: errors.InvalidRequest, 401: errors.Unauthorized, 403: errors.Forbidden, 404: errors.ModelNotFound,
    405: errors.MethodNotAllowed, 408: errors.DeadlineExceeded, 409: errors.Conflict, 413: errors.TooLarge,
    415: errors.UnsupportedMediaType, 422: errors.ValidationFailed, 429: errors.Overloaded, 499: errors.Cancelled,
    500: errors.ModelError, 501: errors.Unsupported, 503: errors.CapacityError,
}  # fmt: skip
_BY_CODE: dict[str, type[WeirError]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest, "NOT_FOUND": errors.ModelNotFound, "ALREADY_EXISTS": errors.Conflict,
    "UNIMPLEMENTED": errors.Unsupported, "UNAUTHENTICATED": errors.Unauthorized, "PERMISSION_DENIED": errors.Forbidden,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded, "CANCELLED": errors.Cancelled, "INTERNAL": errors.ModelError,
    "RESOURCE_EXHAUSTED": errors.Overloaded, "UNAVAILABLE": errors.CapacityError,
}  # fmt: skip


def error_of_status(status: int, text: str, *, name: str = "", retry_after: float | None = None) -> WeirError:
    """Return the error of an answer with that HTTP status and text, which calls itself `name`."""
    return _made(_named(name) or _BY_STATUS.get(status, WeirError), text or f"HTTP status {status}", retry_after)


def error_of_code(code: str, text: str, *, name: str = "", retry_after: float | None = None) -> WeirError:
    """Return the error of a gRPC call that ended with the status code of that name.

    Without a wait to be kept, RESOURCE_EXHAUSTED is a message over a limit and UNAVAILABLE a connection that broke.
    """
    kind = _named(name) or _BY_CODE.get(code, WeirError)
    if not name and retry_after is None and code == "RESOURCE_EXHAUSTED":
        kind = errors.TooLarge
    elif not name and retry_after is None and code == "UNAVAILABLE":
        kind = Unreachable if text.startswith("failed to connect") else ConnectionLost
    return _made(kind, text or code, retry_after)


def _named(name: str) -> type[WeirError] | None:
    kind = getattr(errors, name, None) if name else None
    return kind if isinstance(kind, type) and issubclass(kind, WeirError) else None


def _made(kind: type[WeirError], text: str, retry_after: float | None) -> WeirError:
    return kind(text, retry_after=retry_after) if issubclass(kind, CapacityError) else kind(text)
