"""What every client can ask, as programs, whatever it speaks."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from weir.client.values import RequestExtras, Result, is_tensors, item_answer, item_request, request_of, takes_items
from weir.errors import CapacityError, DeadlineExceeded, InvalidRequest, ModelNotFound, WeirError
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameter

# Calls as programs: generators that yield what is to be done, one step after the other, and are given what came of it.
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

    Which of the two a model takes is asked once, and only where the value could be either.
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
    return {"platform": "ensemble", "steps": list(models)} | {key: said for key, said in tensors.items() if said}


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
