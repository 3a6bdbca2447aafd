"""BlockingService, which is Service for programs without an event loop and for notebooks, and the thread that runs its loop."""

import asyncio
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from inspect import CORO_CREATED, getcoroutinestate
from types import NoneType, TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar, Unpack

from weir.batching.request_state import settle
from weir.errors import Conflict, ModelError, ModelNotReady, for_caller
from weir.messages import Form
from weir.model import Model
from weir.serving.calls import StreamedCall, StreamWindow, ThreadCall, fail_all, preprocessing, stream_blocking
from weir.serving.driver import NOT_STARTED
from weir.serving.handle import ModelHealth
from weir.serving.service import CallKeywords, Service, StreamKeywords
from weir.workers.settings import Ray
from weir.workers.timer import new_loop

T = TypeVar("T")
Step = Callable[[], Coroutine[Any, Any, Any]]

# Seconds. An event loop that has not ended by then is left running: its thread is a daemon, and ends with the process.
CLOSE_TIMEOUT = 10.0

# Values taken in one turn of the event loop. A limit is needed, as threads that post without pause would block everything else.
MAX_PER_TURN = 1000


class Background:
    """Runs an event loop in a daemon thread, called `name`, from `start` to `close`.

    Any thread may post values. They are given to `take` on the event loop; all values that came since its last turn cause one
    wake-up. Values posted after `close` are given to `refuse`, in the thread that posts them.
    """

    def __init__(self, name: str, take: Callable[[Any], None], refuse: Callable[[Any], None]) -> None:
        self._take = take
        self._refuse = refuse
        self._posted: deque[Any] = deque()
        self._waking = False
        self._closed = False
        self._awaited: set[Future[Any]] = set()  # the futures that `run` waits for
        self._over = False  # whether the event loop has ended
        self._running: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; return when its event loop runs."""
        self._thread.start()
        self._running.result()

    @property
    def started(self) -> bool:
        """Whether the event loop runs, or has run."""
        return self._running.done()

    def post(self, value: Any) -> None:
        """Give `value` to `take` on the event loop soon, or to `refuse` now if it is closed."""
        self._posted.append(value)
        if self._closed:
            self._empty(self._refuse)
        elif not self._waking:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._take_posted)
            except RuntimeError:  # the loop was closed in between
                self._empty(self._refuse)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the event loop and return its result. Interrupting the wait (Ctrl-C) cancels it.

        Raises what the coroutine raises, and ModelNotReady if the event loop ends first.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise _stopped() from None
        self._awaited.add(future)
        try:
            if self._over:  # the event loop runs nothing any more
                future.cancel()
            return future.result()
        except BaseException as error:
            future.cancel()
            if self._over and isinstance(error, CancelledError):
                if getcoroutinestate(coroutine) == CORO_CREATED:  # the event loop never began it
                    coroutine.close()
                raise _stopped() from None
            raise
        finally:
            self._awaited.discard(future)

    def close(self, last: Step | None = None) -> None:
        """Run `last` on the event loop, then end the event loop and the thread. Idempotent.

        This waits until they have ended, but at most CLOSE_TIMEOUT seconds, and not at all when called in the loop's own thread
        (by the garbage collector).
        """
        if self._closed:
            return
        self._closed = True
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._end.set_result, last)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT)
        self._empty(self._refuse)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(self._live())
        finally:
            self._over = True
            for future in list(self._awaited):
                future.cancel()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.create_future()
        self._running.set_result(None)
        last = await self._end
        if last is not None:
            await last()

    def _take_posted(self) -> None:
        self._waking = False  # must come first: a thread that posts after this wakes the loop again
        self._empty(self._take, MAX_PER_TURN)
        if self._posted and not self._waking:
            self._waking = True
            self._loop.call_soon(self._take_posted)

    def _empty(self, use: Callable[[Any], None], most: int = sys.maxsize) -> None:
        for _ in range(most):
            try:
                value = self._posted.popleft()
            except IndexError:
                return
            use(value)


class Startable(Protocol):
    """Anything that a Lifecycle can start and stop, such as a Service or a Manager."""

    async def start(self) -> None:
        """Return when it runs; after an exception nothing is left running."""

    async def stop(self, drain_timeout: float | None = None) -> None:
        """Drain for up to `drain_timeout` seconds (None: the setting); return when nothing of it runs any more."""


class Lifecycle:
    """Starts and stops a Startable on the event loop of a Background. Any number of threads may call its methods.

    One start or stop is under way at a time. In a forked process nothing runs: the thread of the event loop is not there.

    Attributes:
        running: the Background while the Startable runs, else None.
        forked_from: the id of the process that started it, if this process was forked from that one; else None.
    """

    def __init__(self, name: str, take: Callable[[Any], None], refuse: Callable[[Any], None]) -> None:
        self.running: Background | None = None
        self.forked_from: int | None = None
        self._make = partial(Background, name, take, refuse)
        self._lock = threading.Lock()
        self._last: _LifecycleChange | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        _LIFECYCLES.add(self)

    def start(self, find: Callable[[], Startable]) -> bool:
        """Start what `find` returns, on an event loop in a new thread; return True when it runs. It is stopped at the latest when
        this object is garbage-collected or the interpreter exits.

        Of several threads, the first one starts it. The others wait for that start, and return False or raise what it raised.
        Calls while it runs return False at once. After an exception nothing is left running.
        """
        while True:
            with self._lock:
                if self.running is not None:
                    return False
                last = self._last
                if last is None or last.done.done():
                    self._last = mine = _LifecycleChange(self._make(), find(), Future(), starts=True)
                    self.forked_from = None
                    break
            if last.starts:
                last.done.result()
                return False
            last.done.exception()
        try:
            mine.background.start()
            try:
                mine.background.run(mine.what.start())
            except BaseException:
                mine.background.close(partial(mine.what.stop, 0.0))
                raise
        except BaseException as error:
            mine.done.set_exception(error)
            raise
        self._finalizer = weakref.finalize(self, mine.background.close, partial(mine.what.stop, 0.0))
        self.running = mine.background
        mine.done.set_result(None)
        return True

    def stop(self, drain_timeout: float | None = None) -> None:
        """Stop what was started, then end the event loop and its thread. A start that is under way in another thread is
        ended. Of several threads, the first one stops it, and the others wait for that. `drain_timeout` is in seconds."""
        while True:
            with self._lock:
                last = self._last
                if last is None:
                    return
                if last.done.done():
                    if self.running is None:
                        return
                    self._last = mine = _LifecycleChange(self.running, last.what, Future(), starts=False)
                    self.running = None
                    break
            if last.starts and last.background.started:
                with suppress(Exception):
                    last.background.run(last.what.stop(drain_timeout))
            last.done.exception()
        try:
            mine.background.run(mine.what.stop(drain_timeout))
        finally:
            mine.background.close()
            mine.done.set_result(None)

    def forget(self) -> None:
        """Reset this object in a process that was forked while the Startable ran, was being started or was being stopped."""
        self._lock = threading.Lock()
        last, self._last = self._last, None
        if last is None or (last.done.done() and self.running is None):
            return
        self.running = None
        self.forked_from = os.getppid()
        # Kept for ever: freeing the event loop, or what it watches, would affect the process to which they belong.
        _INHERITED.append(last)
        if self._finalizer is not None:
            self._finalizer.detach()


class _LifecycleChange(NamedTuple):
    """A start or a stop. It is over when `done` has a result."""

    background: Background
    what: Startable
    done: Future[None]
    starts: bool


_LIFECYCLES: weakref.WeakSet[Lifecycle] = weakref.WeakSet()
_INHERITED: list[_LifecycleChange] = []


def _forget_all() -> None:
    for lifecycle in list(_LIFECYCLES):
        lifecycle.forget()
    if any(lifecycle.forked_from == os.getppid() for lifecycle in list(_LIFECYCLES)):
        fail_all(ModelNotReady(f"the call is running in process {os.getppid()}, from which this one was forked"))


os.register_at_fork(after_in_child=_forget_all)


def _stopped() -> ModelNotReady:
    return ModelNotReady("the service was stopped")


class BlockingService:
    """Serves one model to any number of threads, which share batches. Its event loop runs in its own thread.

        with weir.BlockingService(Square, max_batch_size=64) as service:
            assert service.infer(3) == 9

    `model` and the other arguments are those of Service; or `model` is a Service that has not been started. All methods may
    be called from any thread, even from one that runs another event loop. A service that is never stopped ends with the program,
    or when it is garbage-collected. A process that was forked while the service ran has no workers: there the service is not
    ready until it is started in that process too.
    """

    def __init__(self, model: type[Model] | Service | None = None, **options: Any) -> None:
        # Makes another Service in a forked process, if that is possible.
        self._again: Callable[[], Service] | None = None
        if isinstance(model, Service):
            self.service = model
        else:
            self.service = Service(model, **options)
            if isinstance(options.get("executor"), (str, Ray, NoneType)):
                self._again = partial(Service, model, **options)
        self._lifecycle = Lifecycle(f"weir-{self.service.name}", _take, _refuse)

    def start(self) -> None:
        """Start the workers; return when all are ready. If the service already runs, nothing happens. Threads that call this at
        the same time wait for one start. Raises what Service.start raises.

        Raises Conflict in a process that was forked while the service ran, if the Service or its executor was passed as an
        object.
        """
        self._start()

    def stop(self, drain_timeout: float | None = None) -> None:
        """Accept no more calls, finish the accepted ones, and stop the workers. A start that is under way in another thread is
        ended. Idempotent. See Service.stop."""
        self._lifecycle.stop(drain_timeout)

    def _start(self) -> bool:
        parent = self._lifecycle.forked_from
        if parent is not None and self._again is None:
            raise Conflict(
                f"service {self.service.name!r} was started in process {parent}, from which this one was forked; make a "
                "Service of its own in this process"
            )
        return self._lifecycle.start(self._service_to_start)

    def _service_to_start(self) -> Service:
        if self._lifecycle.forked_from is not None and self._again is not None:
            self.service = self._again()
        return self.service

    def __enter__(self) -> Self:
        # Several `with` blocks cannot share it: the first one to end would stop it for the others.
        if not self._start():
            raise Conflict(f"service {self.service.name!r} is already running")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception nobody waits for responses any more, so there is nothing to drain.
        self.stop(None if error is None else 0.0)

    def submit(self, item: Any, **options: Unpack[CallKeywords]) -> "Future[Any]":
        """Return a concurrent.futures.Future of the response to `item`; cancelling it cancels the request. See Service.infer."""
        return self._submit(item, options)

    def infer(self, item: Any, **options: Unpack[CallKeywords]) -> Any:
        """Return the response to `item`, or raise its error. Interrupting the wait (Ctrl-C) cancels the request. See
        Service.infer."""
        call = self._submit(item, options)
        try:
            return call.result()
        except BaseException:
            call.cancel()
            raise

    def infer_many(
        self,
        items: Iterable[Any],
        *,
        return_errors: bool = False,
        express: bool = False,
        **options: Unpack[CallKeywords],
    ) -> list[Any]:
        """Return the list of responses, in order. See Service.infer_many."""

        async def infer_many() -> list[Any]:
            return await self.service.infer_many(items, return_errors=return_errors, express=express, **options)

        items = list(items)
        return self._running().run(infer_many())

    def stream(
        self, items: Iterable[Any], *, return_inputs: bool = False, return_errors: bool = False,
        preprocessor: Callable[[Any], Any] | None = None, **options: Unpack[StreamKeywords],
    ) -> Generator[Any, None, None]:  # fmt: skip
        """Yield the responses to `items` in their order, with bounded memory. `items` is read, and `preprocessor` is called, in the
        calling thread; both may block. See Service.stream."""

        def infer(item: Any) -> ThreadCall:
            return self._submit(item, {**options, "backpressure": True})

        def refused(item: Any) -> ThreadCall:
            return ThreadCall(Form(0.0), item, 0.0, self.service.cancel)

        prepared = preprocessing(preprocessor, infer, refused)
        return stream_blocking(items, StreamWindow(prepared, self.service.stream_size, return_inputs, return_errors))

    def infer_stream(self, item: Any, **options: Unpack[CallKeywords]) -> Generator[Any, None, None]:
        """Yield the responses of a streaming model to one `item`. See Service.infer_stream."""
        background = self._running()
        request = self.service.new_stream(item, **options)
        background.post(PostedCall(request, partial(self.service.enter, backpressure=options.get("backpressure"))))
        try:
            while True:
                try:
                    response, _ = background.run(request.read())
                except StopAsyncIteration:
                    return
                except ModelError as error:
                    raise for_caller(error) from error.__cause__
                yield response
        finally:
            background.post(PostedCall(request, StreamedCall.close))

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        """The reason why requests are not accepted; "" if they are."""
        parent = self._lifecycle.forked_from
        if parent is not None:
            return f"it was started in process {parent}, from which this one was forked; start it in this process too"
        if self._lifecycle.running is not None:
            return self.service.not_ready_reason
        # When the workers are ready, the start is still "loading" until the thread that called it returns.
        return self.service.not_ready_reason or "loading"

    def state(self) -> dict[str, Any]:
        """Return the state of the service as a JSON-able dict. See Service.state."""

        return self._running().run(self._called(self.service.state))

    def explain_policy(self) -> dict[str, Any]:
        """Return what the policy decides and what was measured under it, as a JSON-able dict. See Service.explain_policy."""

        return self._running().run(self._called(self.service.explain_policy))

    def set_prices(self, /, **changes: Any) -> dict[str, Any]:
        """Solve the policy for other weights; return its explanation once it is in use. See Service.set_prices."""
        return self._running().run(self.service.set_prices(**changes))

    def deep_health(self) -> ModelHealth:
        """Run the model's examples and return their results. See Service.deep_health."""
        return self._running().run(self.service.deep_health())

    async def _called(self, read: Callable[[], T]) -> T:
        return read()

    def _submit(self, item: Any, options: CallKeywords) -> ThreadCall:
        background, service = self._running(), self.service

        def withdraw(call: ThreadCall) -> None:
            background.post(PostedCall(call, service.cancel))

        call = ThreadCall(service.form_of(**options), item, service.now(), withdraw)
        background.post(PostedCall(call, partial(service.enter, backpressure=options.get("backpressure"))))
        return call

    def _running(self) -> Background:
        background = self._lifecycle.running
        if background is None:
            reason = self.not_ready_reason
            hint = "; start it with `with service`, or call start()" if reason == NOT_STARTED else ""
            raise ModelNotReady(f"model {self.service.name!r} is not ready: {reason}{hint}")
        return background


class PostedCall(NamedTuple):
    """A call, and what the event loop is to do with it."""

    call: Any  # a ThreadCall or a StreamedCall
    action: Callable[[Any], None]


def _take(posted: PostedCall) -> None:
    try:
        posted.action(posted.call)
    except Exception as error:  # such as a timeout that cannot be compared; the caller waits in another thread
        settle(posted.call)
        posted.call.fail(error)


def _refuse(posted: PostedCall) -> None:
    posted.call.fail(ModelNotReady("the service was stopped"))
