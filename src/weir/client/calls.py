"""The parts that all clients share, whatever protocol they speak: requests and results with arrays, calls as programs, retries, timeouts and
errors.

A program is a generator. It yields what is to be sent, or a Sleep, and receives the response. Blocking and asynchronous clients
run the same programs.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real
from threading import TIMEOUT_MAX
from typing import Any, NamedTuple, TypedDict, TypeVar

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
    reason_of,
)
from weir.wire.data_plane import DATA_PLANE
from weir.wire.inference import (
    InferenceRequest,
    InferenceResponse,
    Parameter,
    Parameters,
    RequestedOutput,
    TensorValue,
)
from weir.wire.status import error_of_grpc, error_of_http
from weir.wire.tensors import DTYPES

Array = NDArray[Any]
# Arrays by the names of the tensors. BF16 needs a TensorValue, as no dtype of numpy stands for it.
Inputs = Mapping[str, Array | TensorValue]

# A model of items has one input and one output tensor, both BYTES of JSON documents. Its metadata gives them these names.
ITEM_INPUT, ITEM_OUTPUT = "input", "output"

# A parameter of each part of a stream, which tells whether the part is the last.
FINAL = "triton_final_response"

# The protocol's datatypes by numpy's dtypes.
_DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items() if datatype not in ("BYTES", "BF16")}


class RequestExtras(TypedDict, total=False):
    """The options of a request, besides its inputs.

    version: the version of the model; without it, the default version.
    outputs: the names of the outputs to return; without it, all.
    id: an identifier, which the response repeats.
    parameters: parameters for the server.
    priority: 1 is the highest; 0 is the default, which leaves it to the server.
    timeout: seconds for the call. It is sent to the server too.
    bulk: whether this is bulk work, which gets the time that other requests leave.
    """

    version: str
    outputs: Sequence[str]
    id: str
    parameters: Mapping[str, Parameter]
    priority: int
    timeout: float
    bulk: bool


class Result(Mapping[str, Array]):
    """A response: its arrays by the names of the outputs.

    BYTES are an object array of bytes; BF16 are the bits as uint16. Arrays that came over a connection are read-only views of
    the received bytes.
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


def request_of(model: str, inputs: Inputs, extras: RequestExtras) -> InferenceRequest:
    """Return the request for `inputs`. Raises InvalidRequest unless they are arrays by name, in datatypes of the protocol."""
    if not isinstance(inputs, Mapping):
        raise InvalidRequest(f"inputs {inputs!r:.80}: model {model!r} takes tensors, must be arrays by name")
    parameters: Parameters = dict(extras.get("parameters") or {})
    if extras.get("priority"):
        parameters["priority"] = extras["priority"]
    if extras.get("bulk"):
        parameters["class"] = "bulk"
    if extras.get("timeout"):
        parameters["timeout"] = max(1, round(extras["timeout"] * 1e6))
    outputs = extras.get("outputs")
    return InferenceRequest(
        model,
        [tensor_of(name, value) for name, value in inputs.items()],
        version=extras.get("version", ""),
        id=extras.get("id", ""),
        outputs=None if outputs is None else [RequestedOutput(name, {}) for name in outputs],
        parameters=parameters,
    )


def is_tensors(value: Any) -> bool:
    """Return whether `value` must be arrays by name, and cannot be an item of a model of items."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(each, (TensorValue, numpy.ndarray)) for each in value.values())
    )


def takes_items(metadata: Mapping[str, Any]) -> bool:
    """Tell from a model's metadata whether it is a model of items."""
    with reading("metadata of a model"):
        inputs, outputs = metadata.get("inputs") or [], metadata.get("outputs") or []
        named = [(tensor["name"], tensor["datatype"]) for tensor in (*inputs, *outputs)]
    return named == [(ITEM_INPUT, "BYTES"), (ITEM_OUTPUT, "BYTES")]


def item_request(model: str, item: Any, extras: RequestExtras) -> InferenceRequest:
    """Return the request for one `item`. Raises InvalidRequest if JSON cannot represent the item."""
    try:
        document = msgspec.json.encode(item)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"item {item!r:.80}: cannot be written as JSON ({error})") from error
    element = numpy.empty(1, object)
    element[0] = document
    return request_of(model, {ITEM_INPUT: TensorValue(ITEM_INPUT, "BYTES", element)}, extras)


def item_result(response: InferenceResponse) -> Any:
    """Return the response to one item: the decoded JSON document, or the bytes themselves if they are not JSON."""
    with reading(f"item of model {response.model!r}"):
        document = bytes(response.outputs[0].array[0])
        try:
            return msgspec.json.decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return document


def tensor_of(name: str, value: Array | TensorValue) -> TensorValue:
    """Return an array as a tensor; strings and bytes become BYTES. Raises InvalidRequest for another dtype that the protocol
    does not have."""
    if isinstance(value, TensorValue):
        return value
    array = numpy.asarray(value)
    if array.dtype.kind in "OSU":
        return TensorValue(name, "BYTES", _bytes_of(name, array))
    native = array.dtype.newbyteorder("=")
    if native not in _DATATYPES:
        raise InvalidRequest(f"tensor {name!r}: the protocol has no datatype for an array of {array.dtype}")
    return TensorValue(name, _DATATYPES[native], array.astype(native, copy=False))


def _bytes_of(name: str, array: Array) -> Array:
    found = numpy.empty(array.shape, object)
    for index, element in numpy.ndenumerate(array):
        if isinstance(element, str):
            element = element.encode()
        if not isinstance(element, bytes):
            raise InvalidRequest(f"tensor {name!r}: {element!r:.80} is neither bytes nor a text")
        found[index] = element
    return found


# Calls as programs: generators without sockets and clocks, which blocking and asynchronous clients can run alike.


T = TypeVar("T")
# Yields steps (a Sleep, or a step of the transport), receives their responses, and returns the result of the call.
Program = Generator[Any, Any, T]


class Sleep(NamedTuple):
    """The step that waits. If the deadline comes first, DeadlineExceeded is thrown into the program at once."""

    seconds: float


def run(program: Program[T], send: Callable[[Any, float], Any], timeout: float) -> T:
    """Run `program` to its end and return its result.

    `send(step, seconds)` does a step within `seconds` and returns its response. A WeirError of a step is thrown into the
    program. Raises what the program raises, and DeadlineExceeded after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    resume: Callable[[], Any] = partial(next, program)
    while True:
        try:
            step = resume()
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            del resume  # which an error that it raises would hold, and be held by
        try:
            left = _left(step, deadline, timeout)
            response: Any = None
            if isinstance(step, Sleep):
                time.sleep(step.seconds)
            else:
                response = send(step, left)
        except WeirError as error:
            resume = partial(program.throw, error)
        else:
            resume = partial(program.send, response)


async def run_async(program: Program[T], send: Callable[[Any, float], Awaitable[Any]], timeout: float) -> T:
    """Run `program` like `run`, on the running event loop."""
    deadline = time.monotonic() + timeout
    resume: Callable[[], Any] = partial(next, program)
    while True:
        try:
            step = resume()
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            del resume  # which an error that it raises would hold, and be held by
        try:
            left = _left(step, deadline, timeout)
            response = await (asyncio.sleep(step.seconds) if isinstance(step, Sleep) else send(step, left))
        except WeirError as error:
            resume = partial(program.throw, error)
        else:
            resume = partial(program.send, response)


def _left(step: Any, deadline: float, timeout: float) -> float:
    """Return the seconds that are left for `step`. Raises DeadlineExceeded if none are, or too few for a Sleep."""
    left = deadline - time.monotonic()
    if left <= (step.seconds if isinstance(step, Sleep) else 0.0):
        raise DeadlineExceeded(f"no response within {timeout:g} s")
    return left


class Silence:
    """The time, at most `seconds`, in which the next response of a stream must come. It begins when this is made, and again at `begin`;
    between `pause` and `begin`, no time passes, as the caller works."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begin()

    def begin(self) -> None:
        """Wait for the next response."""
        self._until = time.monotonic() + self.seconds

    def pause(self) -> None:
        """Stop the clock: a response has come."""
        self._until = math.inf

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return max(0.0, self._until - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the time is over for an event loop, whose timers may be a millisecond early."""
        return self.left < 2e-3

    def error(self) -> DeadlineExceeded:
        """Return the error for a silence that is too long."""
        return DeadlineExceeded(f"no response within {self.seconds:g} s")

    async def next_of(self, chunks: AsyncIterator[T]) -> T:
        """Return the next of `chunks`. Raises StopAsyncIteration after the last, and DeadlineExceeded when the time is over."""
        limit = asyncio.timeout(self.left)
        try:
            async with limit:
                return await anext(chunks)
        except TimeoutError:
            if limit.expired():
                raise self.error() from None
            raise


Metadata = dict[str, Any]

# Inputs or outputs as in metadata: tables of name, datatype and shape.
Tensors = Sequence[Mapping[str, Any]]

# Takes one piece from the transport; yields the responses that it completes.
Decoder = Callable[[Any], Iterable[InferenceResponse]]


class Streaming(NamedTuple):
    """A call with several responses: the step that begins it, and a function that makes a decoder for each attempt."""

    step: Any
    decoder: Callable[[], Decoder]


class Calls(ABC):
    """The calls of a server, as programs; each protocol has a class that sends them. Each raises the WeirError that the server's response stands for."""

    @abstractmethod
    def call(self, name: str, body: Mapping[str, Any] | None = None, /, **path: str) -> Program[Any]:
        """Make the call `name` of DATA_PLANE with what its path names and with its body, and return the document of the response. That of a question has
        the field that DATA_PLANE names, whatever the protocol."""

    @abstractmethod
    def infer(self, request: InferenceRequest) -> Program[InferenceResponse]:
        """Return a model's response."""

    @abstractmethod
    def stream(self, request: InferenceRequest) -> Streaming:
        """Return the call that gets several responses of a model."""

    def server_metadata(self) -> Program[Metadata]:
        """Return name, version and extensions of the server."""
        return dict((yield from self.call("server_metadata")))

    def model_metadata(self, name: str, version: str) -> Program[Metadata]:
        """Return name, versions, platform, inputs and outputs of a model."""
        return dict((yield from self.call("model_metadata", model=name, version=version)))

    def models(self) -> Program[list[str]]:
        """Return the names of the models that run."""
        document = yield from self.call("models")
        with reading("list of models"):
            return list(document["models"])

    def load_worker(self, name: str, parameters: Mapping[str, Parameter]) -> Program[str]:
        """Run a model with parameters; return the name of the endpoint."""
        return str((yield from self.call("load_worker", dict(parameters), worker=name)))

    def do(self, name: str, body: Mapping[str, Any] | None = None, /, **path: str) -> Program[None]:
        """Make a call like `call`, and ignore the document of its response."""
        yield from self.call(name, body, **path)

    def ask(self, name: str, body: Mapping[str, Any] | None = None, /, **path: str) -> Program[bool]:
        """Make a call like `call` that is a question, and return whether the response is yes."""
        return bool((yield from self.call(name, body, **path))[DATA_PLANE[name].asks])


class Prepared(NamedTuple):
    """A request, and a function that turns its response into the result for the caller."""

    request: InferenceRequest
    result: Callable[[InferenceResponse], Any]


class ModelCall:
    """Makes inference requests through `calls`. The result of arrays by name is a Result; that of an item is the model's response.

    If a value could be either, the model's metadata decide; they are requested once per model.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._takes_items: dict[tuple[str, str], bool] = {}

    def prepare(self, model: str, value: Any, extras: RequestExtras) -> Program[Prepared]:
        """Return the request for `value`. Raises InvalidRequest for a value that cannot be sent, and TypeError for an unknown option."""
        if unknown := extras.keys() - RequestExtras.__annotations__:
            known = ", ".join(RequestExtras.__annotations__)
            raise TypeError(f"{min(unknown)}: unknown option of a request; the options are {known}")
        if not is_tensors(value) and (yield from self._is_of_items(model, extras.get("version", ""))):
            return Prepared(item_request(model, value, extras), item_result)
        return Prepared(request_of(model, value, extras), Result)

    def infer(self, model: str, value: Any, extras: RequestExtras) -> Program[Any]:
        """Return the result for `value`: a Result, or the response to an item."""
        prepared = yield from self.prepare(model, value, extras)
        try:
            return prepared.result((yield from self._calls.infer(prepared.request)))
        except (InvalidRequest, ModelNotFound):
            self._takes_items.pop((model, extras.get("version", "")), None)  # another model may have replaced it
            raise

    def _is_of_items(self, model: str, version: str) -> Program[bool]:
        known = self._takes_items.get((model, version))
        if known is None:
            known = takes_items((yield from self._calls.model_metadata(model, version)))
            self._takes_items[model, version] = known
        return known


def ensemble(models: Sequence[str | Mapping[str, Any]], inputs: Tensors, outputs: Tensors) -> Metadata:
    """Return the configuration of a chain; see Client.load_ensemble for the arguments."""
    tensors = {"inputs": list(map(dict, inputs)), "outputs": list(map(dict, outputs))}
    return {"platform": "ensemble", "steps": list(models)} | {key: value for key, value in tensors.items() if value}


def has_extension(calls: Calls, name: str) -> Program[bool]:
    """Return whether the server lists the extension `name`."""
    metadata = yield from calls.server_metadata()
    with reading("metadata of the server"):
        return name in metadata["extensions"]


def until_server_ready(calls: Calls, interval: float) -> Program[None]:
    """Return when every model accepts requests; check every `interval` seconds. Raises DeadlineExceeded."""
    return _until(lambda: calls.ask("server_ready"), True, "server ready", interval)


def until_model(calls: Calls, name: str, version: str, ready: bool, interval: float) -> Program[None]:
    """Return when a model accepts requests, or with `ready` False when it does not; check every `interval` seconds. Raises
    DeadlineExceeded."""
    what = f"model {name!r} {'ready' if ready else 'not ready'}"
    return _until(lambda: calls.ask("model_ready", model=name, version=version), ready, what, interval)


def _until(check: Callable[[], Program[bool]], wanted: bool, what: str, interval: float) -> Program[None]:
    try:
        while (yield from or_false(check())) is not wanted:
            yield Sleep(interval)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{what}: {error.message}") from None


def or_false(check: Program[bool]) -> Program[bool]:
    """Return the result of `check`, and False if it raises CapacityError: the server is not reachable or not ready."""
    try:
        return (yield from check)
    except CapacityError:
        return False


@dataclass(frozen=True)
class Retry:
    """Tells how often, and after which waits, a call is sent again if the server refuses it for now.

    Only calls that were refused before they began are sent again: the queue was full, the model or the server was not ready, or no
    connection could be made. A request that a model has received is never sent again, so neither is a stream that has begun, nor a
    request that ended with ModelCrashed.

    Attributes:
        times: the largest number of repetitions.
        first_wait: seconds before the first repetition; each further wait is twice as long. A longer Retry-After of the
            server overrides this.
        longest_wait: seconds that a wait lasts at most, unless Retry-After is longer.
    """

    times: int = 2
    first_wait: float = 0.1
    longest_wait: float = 10.0

    def wait(self, error: BaseException, tried: int, left: float) -> float | None:
        """Return the seconds to wait after `error` ended attempt number `tried` (from 0); None if the call must not be sent
        again, or cannot within the `left` seconds that it has."""
        if not isinstance(error, CapacityError) or isinstance(error, WorkerLost) or tried >= self.times:
            return None
        wait = max(error.retry_after or 0.0, min(self.longest_wait, self.first_wait * 2.0**tried))
        return wait if wait < left else None


NEVER = Retry(times=0)


def retried(retry: Retry, attempt: Callable[[], Program[T]]) -> Program[T]:
    """Run `attempt` until it succeeds, fails with an error that `retry` does not repeat, or the deadline passes. Raises the
    error of the last attempt."""
    tried = 0
    while True:
        try:
            return (yield from attempt())
        except CapacityError as error:
            wait = retry.wait(error, tried, math.inf)
            if wait is None:
                raise
            try:
                yield Sleep(wait)
            except DeadlineExceeded:
                raise error from None
        tried += 1


_RULE = "must be a finite number of seconds greater than 0"


def of_client(timeout: Any) -> float:
    """Return the `timeout` of a client, in seconds. Raises SettingsError unless it is a number greater than 0."""
    if not _is_timeout(timeout):
        raise SettingsError(f"timeout={timeout!r}: {_RULE}")
    return float(timeout)


def of_call(timeout: Any, otherwise: float) -> float:
    """Return the `timeout` of a call, in seconds, or `otherwise` if it is None. Raises InvalidRequest unless it is a number
    greater than 0."""
    if timeout is None:
        return otherwise
    if not _is_timeout(timeout):
        raise InvalidRequest(f"timeout={timeout!r}: {_RULE}")
    return float(timeout)


def _is_timeout(seconds: Any) -> bool:
    is_number = isinstance(seconds, Real)
    return is_number and bool(0 < seconds <= TIMEOUT_MAX)


class Unreachable(CapacityError):
    """No connection could be made: nothing was sent."""


class ConnectionLost(WeirError):
    """The connection ended before the response: whether the request was served is not known."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise WeirError where the block reads a response, `what`, that does not have the form of the protocol."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, msgspec.DecodeError) as error:
        raise WeirError(f"{what}: the response has another form ({reason_of(error)})") from error


# Error responses become the errors that a caller in the server's process would get.


def error_of_status(status: int, text: str, *, name: str = "", retry_after: float | None = None) -> WeirError:
    """Return the error for a response with that HTTP status, text, class name and Retry-After in seconds."""
    return _made(_named(name) or error_of_http(status), text or f"HTTP status {status}", retry_after)


def error_of_code(code: str, text: str, *, name: str = "", retry_after: float | None = None) -> WeirError:
    """Return the error for a gRPC call that ended with the status of the name `code`, that text, class name and wait in seconds.

    Without a wait, RESOURCE_EXHAUSTED means that a message was too large, and UNAVAILABLE that the connection broke.
    """
    kind = _named(name) or error_of_grpc(code, for_now=retry_after is not None)
    if not name and retry_after is None and code == "UNAVAILABLE":
        kind = Unreachable if text.startswith("failed to connect") else ConnectionLost
    return _made(kind, text or code, retry_after)


def _named(name: str) -> type[WeirError] | None:
    kind = getattr(errors, name, None) if name else None
    return kind if isinstance(kind, type) and issubclass(kind, WeirError) else None


def _made(kind: type[WeirError], text: str, retry_after: float | None) -> WeirError:
    return kind(text, retry_after=retry_after) if issubclass(kind, CapacityError) else kind(text)
