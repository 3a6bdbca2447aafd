"""The blocking twin of Service, for programs without an event loop, and for notebooks."""

import weakref
from collections.abc import Callable, Generator, Hashable, Iterable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

from weir.errors import Conflict, ModelNotReady
from weir.manager.background import Background
from weir.manager.call import ThreadCall
from weir.manager.service import Service
from weir.manager.stream import Window, stream_blocking
from weir.manager.streamed import Streamed, new_stream
from weir.model import Model


class BlockingService:
    """Serves one model from any number of threads, which share batches; its event loop runs in a thread of its own.

        with weir.BlockingService(Square, max_batch_size=64) as service:
            assert service.infer(3) == 9

    `model` and the other arguments are those of Service; or `model` is a Service that has not been started. All methods may
    be called from any thread, also while another event loop runs in it. A service that is never stopped ends with the
    program, or when nothing refers to it any more.
    """

    def __init__(self, model: type[Model] | Service | None = None, **options: Any) -> None:
        self.service = model if isinstance(model, Service) else Service(model, **options)
        self._background: Background | None = None
        self._finalizer: Callable[[], Any] | None = None

    def start(self) -> None:
        """Start the workers; return when all are ready. See Service.start."""
        if self._background is not None:
            raise Conflict(f"service {self.service.name!r} is already running")
        background = Background(f"weir-{self.service.name}", _take, _refuse)
        background.start()
        try:
            background.run(self.service.start())
        except BaseException:
            background.close(partial(self.service.stop, 0.0))
            raise
        self._background = background
        # Runs when nothing refers to this object any more, and at the latest when the interpreter exits.
        self._finalizer = weakref.finalize(self, background.close, partial(self.service.stop, 0.0))

    def stop(self, drain_timeout: float | None = None) -> None:
        """Take no more, finish what was accepted, end the workers. Idempotent. See Service.stop."""
        background, self._background = self._background, None
        if background is not None:
            background.run(self.service.stop(drain_timeout))
            background.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Whoever leaves by an exception awaits no more answers.
        self.stop(None if error is None else 0.0)

    def submit(
        self, item: Any, *, timeout: float | None = None, priority: int = 0, key: Hashable = None,
        backpressure: bool | None = None,
    ) -> "Future[Any]":  # fmt: skip
        """Return a concurrent.futures.Future of the answer to `item`; cancel it to withdraw. See Service.infer."""
        return self._submit(item, timeout, priority, key, backpressure)

    def infer(
        self, item: Any, *, timeout: float | None = None, priority: int = 0, key: Hashable = None,
        backpressure: bool | None = None,
    ) -> Any:  # fmt: skip
        """Return the answer to `item`, or raise its error. An interrupted wait (Ctrl-C) withdraws it. See Service.infer."""
        call = self._submit(item, timeout, priority, key, backpressure)
        try:
            return call.result()
        except BaseException:
            call.cancel()
            raise

    def infer_many(
        self, items: Iterable[Any], *, timeout: float | None = None, priority: int = 0, key: Hashable = None,
        return_errors: bool = False, backpressure: bool | None = None,
    ) -> list[Any]:  # fmt: skip
        """Return the list of answers, in order. See Service.infer_many."""

        async def infer_many() -> list[Any]:
            return await self.service.infer_many(
                items, timeout=timeout, priority=priority, key=key, return_errors=return_errors,
                backpressure=backpressure,
            )  # fmt: skip

        items = list(items)
        return self._running().run(infer_many())

    def stream(
        self, items: Iterable[Any], *, timeout: float | None = None, priority: int = 0, key: Hashable = None,
        return_inputs: bool = False, return_errors: bool = False,
    ) -> Generator[Any, None, None]:  # fmt: skip
        """Yield the answers to `items` in their order, in bounded memory. `items` is pulled in the calling thread and may
        block. See Service.stream."""

        def infer(item: Any) -> ThreadCall:
            return self._submit(item, timeout, priority, key, True)

        return stream_blocking(items, Window(infer, self.service.stream_size, return_inputs, return_errors))

    def infer_stream(
        self, item: Any, *, timeout: float | None = None, priority: int = 0, key: Hashable = None,
        backpressure: bool | None = None,
    ) -> Generator[Any, None, None]:  # fmt: skip
        """Yield the answers to one `item` as a streaming model gives them. See Service.infer_stream."""
        background = self._running()
        request = new_stream(self.service, item, timeout, priority, key)
        background.post(Posted(request, partial(self.service.enter, backpressure=backpressure)))
        try:
            while True:
                try:
                    answer, _ = background.run(request.read())
                except StopAsyncIteration:
                    return
                yield answer
        finally:
            background.post(Posted(request, Streamed.close))

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.service.ready

    @property
    def not_ready_reason(self) -> str:
        """Why no requests are taken; "" if they are."""
        return self.service.not_ready_reason

    def state(self) -> dict[str, Any]:
        """Return what there is to see, as a JSON-able dict. See Service.state."""

        async def state() -> dict[str, Any]:
            return self.service.state()

        return self._running().run(state())

    def explain_policy(self) -> dict[str, Any]:
        """Return what the policy does and what came of it. See Service.explain_policy."""

        async def explain_policy() -> dict[str, Any]:
            return self.service.explain_policy()

        return self._running().run(explain_policy())

    def set_prices(self, /, **said: Any) -> dict[str, Any]:
        """Solve the policy for other prices; return its explanation once it goes by them. See Service.set_prices."""
        return self._running().run(self.service.set_prices(**said))

    def deep_health(self) -> dict[str, Any]:
        """Run the model's examples and return what came of them. See Service.deep_health."""
        return self._running().run(self.service.deep_health())

    def _submit(
        self, item: Any, timeout: float | None, priority: int, key: Hashable, backpressure: bool | None
    ) -> ThreadCall:
        background, service = self._running(), self.service
        if timeout is None:
            timeout = service.settings.timeout

        def withdraw(call: ThreadCall) -> None:
            background.post(Posted(call, service.cancel))

        call = ThreadCall(item, service.now(), timeout, withdraw)
        call.priority = priority
        call.key = key
        background.post(Posted(call, partial(service.enter, backpressure=backpressure)))
        return call

    def _running(self) -> Background:
        if self._background is None:
            raise ModelNotReady(f"model {self.service.name!r} is not ready: {self.service.not_ready_reason}")
        return self._background


class Posted(NamedTuple):
    """What is to be done with a call on the loop."""

    call: Any  # a ThreadCall or a Streamed
    action: Callable[[Any], None]


def _take(posted: Posted) -> None:
    try:
        posted.action(posted.call)
    except Exception as error:  # a timeout or a key that cannot be compared: whoever waits is in another thread
        posted.call.settled = True
        posted.call.fail(error)


def _refuse(posted: Posted) -> None:
    posted.call.fail(ModelNotReady("the service was stopped"))
