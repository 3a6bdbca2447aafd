"""The requests of callers in this process: futures that are their own requests, streams of one item's responses, and streams of
items. Also how a call gets its kind, rows, cost and batch key before it enters the queue.
"""

import asyncio
import concurrent.futures
import gc
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

from weir.batching.request_state import NEW, RequestBase, refuse
from weir.errors import InvalidRequest, ModelError, Overloaded, RequestError, Unsupported, WeirError, for_caller
from weir.messages import NO_RESPONSE, Dispatch, Form, Kind, Request, with_key
from weir.model import Measure, Model, is_batched, is_tensor_model, overrides
from weir.workers.executor import discard, is_block
from weir.workers.timer import end_tasks


class InProcessRequest:
    """The attributes of messages.Request that rarely differ from call to call.

    They are attributes of the class: setting them on each call would cost more than all the rest of making a call. This is no RequestBase, because a future
    cannot have a second base class with slots.
    """

    __slots__ = ()

    form: Form
    payload: Any
    arrival: float
    deadline: float

    large: bool = False
    tag: float = 0.0
    brief: bool = False
    settled: bool = False
    taken: int = 0
    overtaken: int = 0
    partial: Any = None
    trace: Any = None
    outside: bool = False  # waits for room in the queue

    def part(self, output: Any, dispatch: Dispatch) -> None:
        """Raise Unsupported: a call has one response."""
        raise Unsupported("a call returns one response, but a streaming model returns several: use stream")


class Call(InProcessRequest, asyncio.Future[Any]):
    """The result of `Service.infer`: awaiting it returns the response or raises the error.

    It works with await, gather, wait_for, as_completed, asyncio.timeout, create_task and TaskGroup. Only asyncio.wait, which
    refuses everything that create_task accepts, needs a task: `asyncio.wait([asyncio.create_task(call)])`. Cancelling the call
    (or a task that awaits it) takes the request out of the queue, or drops its response if it is running; no other request is
    affected.
    """

    # What every call sets has a slot, so an ordinary call needs no dictionary. A call that waits for room has one.
    __slots__ = ("_withdraw", "arrival", "deadline", "form", "overtaken", "partial", "payload", "settled", "taken")

    _generator: Generator[Any, None, Any] | None = None

    _withdraw: Callable[["Call"], None]

    def prepare(self, form: Form, payload: Any, arrival: float, withdraw: Callable[["Call"], None]) -> Self:
        """Set what each call has, and return this call. A constructor with these arguments would take twice the time of both."""
        self.form = form
        self.payload = payload
        self.arrival = arrival
        self.deadline = arrival + form.timeout
        self.settled, self.taken, self.overtaken, self.partial = NEW
        self._withdraw = withdraw
        return self

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Resolve the future with the response."""
        self.set_result(output)

    def fail(self, error: WeirError) -> None:
        """Raise `error` from every `await` of this call."""
        if self.done():
            return
        self.set_exception(for_caller(error))
        if not isinstance(error, ModelError):
            # asyncio logs errors that nobody awaited. That helps with a bug of the model, but not with refused or late calls.
            self._log_traceback = False

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the request, whether it waits or runs; return False if it has already ended."""
        if not super().cancel(msg):
            return False
        self._withdraw(self)
        return True

    # The coroutine protocol: with these three methods, create_task and TaskGroup accept a call as a coroutine.

    def send(self, value: Any) -> Any:
        """Run until the response is ready."""
        return self._steps().send(value)

    def throw(self, *error: Any) -> Any:
        """Raise `error` where this call is awaited."""
        return self._steps().throw(*error)

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        self.cancel()

    def _steps(self) -> Generator[Any, None, Any]:
        if self._generator is None:
            self._generator = self.__await__()
        return self._generator


class ListCall(Call):
    """The result of `Service.infer_many`: awaiting it returns the list of responses, or raises the first error in it unless
    `return_errors` is set."""

    return_errors: bool = False

    def finish(self, output: list[Any], dispatch: Dispatch) -> None:
        """Resolve the future with the responses, or with the first error among them."""
        error = next((entry for entry in output if isinstance(entry, WeirError)), None)
        if error is not None and not self.return_errors:
            self.fail(error)
        else:
            super().finish(for_callers(output) if error is not None else output, dispatch)


class ThreadCall(InProcessRequest, concurrent.futures.Future[Any]):
    """The result of `BlockingService.submit`: a concurrent.futures.Future that can be cancelled until it is done."""

    def __init__(self, form: Form, payload: Any, arrival: float, withdraw: Callable[["ThreadCall"], None]) -> None:
        super().__init__()
        self.form = form
        self.payload = payload
        self.arrival = arrival
        self.deadline = arrival + form.timeout
        self._withdraw = withdraw

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Resolve the future with the response."""
        with suppress(concurrent.futures.InvalidStateError):  # the caller has cancelled meanwhile
            self.set_result(output)

    def fail(self, error: WeirError) -> None:
        """Raise `error` in the threads that wait for this call."""
        with suppress(concurrent.futures.InvalidStateError):  # the caller has cancelled meanwhile
            self.set_exception(for_caller(error))

    def cancel(self) -> bool:
        """Cancel the request, whether it waits or runs; return False if it has already ended."""
        before = self.cancelled()
        if not super().cancel():
            return False
        if not before:
            self.set_running_or_notify_cancel()  # without this, concurrent.futures.wait would not notice
            self._withdraw(self)
        return True


def fail_all(error: WeirError) -> None:
    """Fail every unfinished ThreadCall with `error`. This is for a forked process: the calls are under way in its parent.

    The calls are found among all objects of the garbage collector: keeping a list would cost every call, and forks are rare.
    Programs often call gc.freeze before they fork, which hides their objects from the collector, so this unfreezes them first.
    """
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    found = gc.get_objects()
    if frozen:
        gc.freeze()
    for each in found:
        if isinstance(each, ThreadCall) and not each.done():
            each._condition = threading.Condition()  # a thread of the parent may have held the old one
            refuse(each, error)


def for_callers(responses: list[Any]) -> list[Any]:
    """Return `responses` with their errors in the form for code in this process."""
    return [for_caller(response) if isinstance(response, WeirError) else response for response in responses]


BURST = 16
BURST_BYTES = 4 << 20
PATIENCE = 0.25  # seconds


class StreamedCall(RequestBase):
    """A request whose responses one reader takes with `read`, or as an async iterator. A model that is not streaming gives one
    response.

    `limit` responses are kept for a slow reader. As a model may give responses faster than the event loop turns, BURST times as many
    are kept for up to PATIENCE seconds, if they have at most BURST_BYTES together. A reader that falls behind further gets the
    kept responses and then Overloaded. No other request waits for the reader.

    `withdraw` cancels the request in the queue or at its worker. Only the constructor may be called outside of the service's
    event loop.
    """

    __slots__ = (
        "_behind_since",
        "_burst_bytes",
        "_clock",
        "_error",
        "_kept",
        "_last",
        "_limit",
        "_over",
        "_waiter",
        "_withdraw",
        "dispatch",
        "outside",
    )

    def __init__(
        self,
        form: Form,
        payload: Any,
        limit: int,
        withdraw: Callable[["StreamedCall"], None],
        clock: Callable[[], float],
        trace: Any = None,
    ) -> None:
        super().__init__(form, payload, clock(), trace)
        self.outside = False  # waits for room in the queue
        self.dispatch: Dispatch | None = None  # the batch that it is in, once there is a response
        self._limit = limit
        self._withdraw = withdraw
        self._clock = clock
        self._kept: deque[Any] = deque()
        self._over = False
        self._last = False  # whether the newest kept response is the model's last one
        self._error: WeirError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._behind_since: float | None = None
        self._burst_bytes = 0

    # Called by the service.

    def part(self, output: Any, dispatch: Dispatch) -> None:
        """Keep a response for the reader. Raises Overloaded when the reader is too far behind."""
        if len(self._kept) >= self._limit and self._too_far_behind(output):
            raise Overloaded(
                f"the reader of this stream is {len(self._kept)} results behind; {self._limit} are kept (stream_buffer)",
                retry_after=0.0,
            )
        self._kept.append(output)
        self.dispatch = dispatch
        self._wake()

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Keep the last response, unless it is NO_RESPONSE, and end the stream."""
        self.dispatch = dispatch
        if output is not NO_RESPONSE:
            self._kept.append(output)
            self._last = True
        self._over = True
        self._wake()

    def fail(self, error: WeirError) -> None:
        """Keep the error; the reader gets it after the responses before it."""
        self._error = error
        self._over = True
        self._wake()

    # Called by the reader.

    async def read(self) -> tuple[Any, bool]:
        """Return the next response, and whether it is known to be the last. Raises the error that ended the request, or
        StopAsyncIteration after the last response."""
        while not self._kept:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        response = self._kept.popleft()
        if len(self._kept) < self._limit:
            self._behind_since = None
        return response, self._last and not self._kept

    def __aiter__(self) -> "StreamedCall":
        return self

    async def __anext__(self) -> Any:
        return (await self.read())[0]

    def close(self) -> None:
        """Cancel the request and release the kept responses. Idempotent."""
        if not self.settled:
            self._withdraw(self)
        self._over = True
        self.dispatch = None  # which refers to this request
        while self._kept:
            discard(self._kept.popleft())
        self._wake()

    def _too_far_behind(self, output: Any) -> bool:
        now = self._clock()
        if self._behind_since is None:
            self._behind_since, self._burst_bytes = now, 0
        self._burst_bytes += _size_of(output)
        return (
            now - self._behind_since > PATIENCE
            or len(self._kept) >= BURST * self._limit
            or self._burst_bytes > BURST_BYTES
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size_of(output: Any) -> int:
    if isinstance(output, (bytes, str)):
        return len(output)
    if is_block(output):
        return len(output.view)
    return sum(map(_size_of, output.values())) if isinstance(output, dict) else int(getattr(output, "nbytes", 0))


def takes_one(request: Request) -> bool:
    """Return whether `request` can take one response only."""
    return getattr(type(request), "part", None) in (None, RequestBase.part)


def several(name: str) -> Unsupported:
    """Return the error for a request to a streaming model that can take one response only."""
    return Unsupported(f"model {name!r} is streaming, it returns several responses: request a stream")


def measure(model: type[Model], item: Any) -> Measure:
    """Return the rows, cost and key that `model.measure` gives for `item`.

    Raises the RequestError that it raises, InvalidRequest for any other exception and for an impossible size, and ModelError
    for a result of a wrong type.
    """
    try:
        returned = model.measure(item)
    except RequestError:
        raise
    except Exception as error:
        raise InvalidRequest(f"{model.__name__}.measure cannot measure this item: {error!r}") from error
    if returned is None:
        return Measure()
    measured = Measure(returned) if isinstance(returned, int) else returned
    if not _is_measure(measured):
        raise ModelError(
            f"{model.__name__}.measure returned {returned!r:.200}: must be rows, None, or a Measure whose key is hashable"
        )
    if measured.rows < 1 or not measured.cost >= 0:
        raise InvalidRequest(
            f"{model.__name__}.measure returned {returned!r}: rows must be 1 or more and cost 0 or more"
        )
    return measured


def _is_measure(returned: Any) -> bool:
    if not (
        isinstance(returned, Measure) and isinstance(returned.rows, int) and isinstance(returned.cost, (int, float))
    ):
        return False
    return is_hashable(returned.key)


def is_hashable(key: Any) -> bool:
    """Return whether `key` can be a batch key: it and everything inside it are hashable."""
    try:
        hash(key)
    except Exception:  # a class of the caller may raise anything in __hash__
        return False
    return True


def describe(model: type[Model], call: Call | ThreadCall | StreamedCall) -> None:
    """Set kind, rows, cost and key of `call` from its item. Raises what `measure` raises, and InvalidRequest for tensors that
    do not fit the model."""
    if is_tensor_model(model):
        _describe_tensors(model, call)
        if not overrides(model, "measure"):
            return
    measured = measure(model, call.payload)
    rows = call.form.rows if is_tensor_model(model) else measured.rows
    call.form = call.form.replaced(rows=rows, cost=measured.cost, key=with_key(call.form.key, measured.key))


def _describe_tensors(model: type[Model], call: Call | ThreadCall | StreamedCall) -> None:
    from weir.wire.tensors import rows_of, shape_key, to_arrays  # only tensor models need numpy

    call.payload = to_arrays(call.payload, model.inputs)
    alone = not is_batched(model)
    kind = Kind.ITEM if model.streaming or alone else Kind.TENSORS  # requests of streams are not divided
    rows = 1 if alone else rows_of(call.payload)
    shapes = None if model.streaming else shape_key(call.payload, model.inputs)  # nor are they joined
    call.form = call.form.replaced(kind=kind, rows=rows, cost=float(rows), key=with_key(call.form.key, shapes))


C = TypeVar("C", Call, ThreadCall)


class StreamWindow(Generic[C]):
    """The items of a stream that are under way, in order. `infer` begins a call; `size` is the number of items at a time; for
    the rest see Service.stream."""

    def __init__(self, infer: Callable[[Any], C], size: int, return_inputs: bool, return_errors: bool) -> None:
        self._infer: Callable[[Any], C] = infer
        self._size = size
        self._return_inputs = return_inputs
        self._return_errors = return_errors
        self._under_way: deque[tuple[Any, C]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def full(self) -> bool:
        """Whether no more items may be added."""
        return len(self._under_way) >= self._size

    @property
    def head(self) -> C:
        """The call whose response is next."""
        return self._under_way[0][1]

    def put(self, item: Any) -> None:
        """Begin the call of one more item."""
        self._under_way.append((item, self._infer(item)))

    def take(self, response: Any) -> Any:
        """Remove the head, whose response or error is `response`, and return what the caller of the stream gets for it. Raises the
        error unless errors are to be returned."""
        if isinstance(response, WeirError) and not self._return_errors:
            raise response
        item, _ = self._under_way.popleft()
        return (item, response) if self._return_inputs else response

    def withdraw(self) -> None:
        """Cancel all calls that are under way."""
        for _, call in self._under_way:
            if not call.cancel() and not call.cancelled():
                call.exception()  # marks the error as seen, or asyncio would log that nobody awaited it


def preprocessing(
    preprocessor: Callable[[Any], Any] | None, infer: Callable[[Any], C], refused: Callable[[Any], C]
) -> Callable[[Any], C]:
    """Return a function that calls `infer` with the result of `preprocessor` for an item. If the preprocessor raises, the call
    that `refused` makes for the item fails with that RequestError, or else with InvalidRequest."""
    if preprocessor is None:
        return infer

    def infer_preprocessed(item: Any) -> C:
        try:
            prepared = preprocessor(item)
        except Exception as error:
            call = refused(item)
            refuse(call, error if isinstance(error, RequestError) else _unprepared(error))
            return call
        return infer(prepared)

    return infer_preprocessed


def _unprepared(error: Exception) -> InvalidRequest:
    wrong = InvalidRequest(f"the preprocessor of the stream raised {error!r:.200}")
    wrong.__cause__ = error
    return wrong


class ItemSource:
    """Reads a sync iterable as far as a window allows."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        self._end: Exception | None = None

    def fill(self, window: StreamWindow[C]) -> bool:
        """Read items into the window; return whether any call is under way.

        This reads at least one item, so that the window stays full, and more only while the next response is not ready: a slow
        iterable does not hold up responses. An error of the iterable is raised once all items before it have theirs.
        """
        while self._end is None and not window.full:
            try:
                item = next(self._items)
            except Exception as end:
                self._end = end
            else:
                window.put(item)
                if window.head.done():
                    break
        if not window and self._end is not None and not isinstance(self._end, StopIteration):
            raise self._end
        return bool(window)


async def stream_sync(items: Iterable[Any], window: StreamWindow[Call]) -> AsyncGenerator[Any, None]:
    """Yield the responses to `items`, in order."""
    source = ItemSource(items)
    try:
        while source.fill(window):
            yield window.take(await _response(window.head))
    finally:
        window.withdraw()


async def stream_async(items: AsyncIterable[Any], window: StreamWindow[Call]) -> AsyncGenerator[Any, None]:
    """Yield the responses to `items`, in order."""
    feed = _Feed(items, window)
    try:
        while await feed.has_more():
            response = window.take(await _response(window.head))
            feed.room.set()
            yield response
        if feed.error is not None:
            raise feed.error
    finally:
        await feed.stop()


def stream_blocking(items: Iterable[Any], window: StreamWindow[ThreadCall]) -> Generator[Any, None, None]:
    """Yield the responses to `items`, in order, in a program without an event loop."""
    source = ItemSource(items)
    try:
        while source.fill(window):
            try:
                response = window.head.result()
            except WeirError as error:
                response = error
            yield window.take(response)
    finally:
        window.withdraw()


async def _response(call: Call) -> Any:
    try:
        return await call
    except WeirError as error:
        return error


class _Feed:
    """Reads an async iterable in a task of its own, as far as the window allows."""

    def __init__(self, items: AsyncIterable[Any], window: StreamWindow[Call]) -> None:
        self.room = asyncio.Event()
        self.error: Exception | None = None
        self._window = window
        self._arrived = asyncio.Event()
        self._ended = False
        self._task = asyncio.ensure_future(self._pull(items))

    async def has_more(self) -> bool:
        """Return True when a call is under way, and False when all items have their responses and no more will come."""
        while not self._window and not self._ended:
            self._arrived.clear()
            await self._arrived.wait()
        return bool(self._window)

    async def stop(self) -> None:
        """Read no more, and cancel what is under way."""
        try:
            await end_tasks(self._task)  # the iterable may take long to end, and the caller may be cancelled here
        finally:
            self._window.withdraw()

    async def _pull(self, items: AsyncIterable[Any]) -> None:
        try:
            async for item in items:
                self._window.put(item)
                self._arrived.set()
                while self._window.full:
                    self.room.clear()
                    await self.room.wait()
        except Exception as error:  # the caller gets it after the responses to the items before it
            self.error = error
        finally:
            self._ended = True
            self._arrived.set()
