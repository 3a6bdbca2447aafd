"""The blocking twin of Service, for programs without an event loop, and for notebooks."""

from collections.abc import Callable, Generator, Hashable, Iterable
from concurrent.futures import Future
from functools import partial
from types import NoneType, TracebackType
from typing import Any, NamedTuple, Self

from weir.batching.request_state import settle
from weir.errors import Conflict, ModelError, ModelNotReady, for_caller
from weir.manager.background import Background, Lifecycle
from weir.manager.call import ThreadCall
from weir.manager.service import Service
from weir.manager.stream import Window, preprocessing, stream_blocking
from weir.manager.streamed import Streamed, new_stream
from weir.model import Model


class BlockingService:
    """Serves one model from any number of threads, which share batches; its event loop runs in a thread of its own.

        with weir.BlockingService(Square, max_batch_size=64) as service:
            assert service.infer(3) == 9

    `model` and the other arguments are those of Service; or `model` is a Service that has not been started. All methods may
    be called from any thread, also while another event loop runs in it. A service that is never stopped ends with the
    program, or when nothing refers to it any more. A process that was forked while it ran has none of its workers: it is not
    ready there, and says so, until it is started there too.
    """

    def __init__(self, model: type[Model] | Service | None = None, **options: Any) -> None:
        self._again: Callable[[], Service] | None = None  # makes another one, where it can, for a forked process
        if isinstance(model, Service):
            self.service = model
        else:
            self.service = Service(model, **options)
            if isinstance(options.get("executor"), (str, NoneType)):
                self._again = partial(Service, model, **options)
        self._lifecycle = Lifecycle(f"weir-{self.service.name}", _take, _refuse)

    def start(self) -> None:
        """Start the workers; return when all are ready. Nothing happens if they are, and threads that call it at the same
        time wait for one start. See Service.start.

        Raises Conflict in a process that was forked while it ran, if the Service, or its executor, was made before.
        """
        self._start()

    def stop(self, drain_timeout: float | None = None) -> None:
        """Take no more, finish what was accepted, end the workers. Idempotent. Ends a start that is under way in another
        thread. See Service.stop."""
        self._lifecycle.stop(drain_timeout)

    def _start(self) -> bool:
        parent = self._lifecycle.forked_from
        if parent is not None and self._again is None:
            raise Conflict(
                f"service {self.service.name!r} was started in process {parent}, from which this one was forked; make a "
                "Service of its own in this process"
            )
        return self._lifecycle.start(self._found)

    def _found(self) -> Service:
        if self._lifecycle.forked_from is not None and self._again is not None:
            self.service = self._again()
        return self.service

    def __enter__(self) -> Self:
        if not self._start():  # whoever leaves first would stop it for the others
            raise Conflict(f"service {self.service.name!r} is already running")
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
        return_errors: bool = False, backpressure: bool | None = None, express: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Return the list of answers, in order. See Service.infer_many."""

        async def infer_many() -> list[Any]:
            return await self.service.infer_many(
                items, timeout=timeout, priority=priority, key=key, return_errors=return_errors,
                backpressure=backpressure, express=express,
            )  # fmt: skip

        items = list(items)
        return self._running().run(infer_many())

    def stream(
        self, items: Iterable[Any], *, timeout: float | None = None, priority: int = 0, key: Hashable = None,
        return_inputs: bool = False, return_errors: bool = False, preprocessor: Callable[[Any], Any] | None = None,
    ) -> Generator[Any, None, None]:  # fmt: skip
        """Yield the answers to `items` in their order, in bounded memory. `items` is pulled, and `preprocessor` called, in the
        calling thread; both may block. See Service.stream."""

        def infer(item: Any) -> ThreadCall:
            return self._submit(item, timeout, priority, key, True)

        def refused(item: Any) -> ThreadCall:
            return ThreadCall(item, 0.0, 0.0, self.service.cancel)

        prepared = preprocessing(preprocessor, infer, refused)
        return stream_blocking(items, Window(prepared, self.service.stream_size, return_inputs, return_errors))

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
                except ModelError as error:
                    raise for_caller(error) from error.__cause__
                yield answer
        finally:
            background.post(Posted(request, Streamed.close))

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        """Why no requests are taken; "" if they are."""
        parent = self._lifecycle.forked_from
        if parent is not None:
            return f"it was started in process {parent}, from which this one was forked; start it in this process too"
        if self._lifecycle.running is not None:
            return self.service.not_ready_reason
        return (
            self.service.not_ready_reason or "loading"
        )  # the workers are ready, and whoever starts it is about to hear of it

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
        background = self._lifecycle.running
        if background is None:
            raise ModelNotReady(f"model {self.service.name!r} is not ready: {self.not_ready_reason}")
        return background


class Posted(NamedTuple):
    """What is to be done with a call on the loop."""

    call: Any  # a ThreadCall or a Streamed
    action: Callable[[Any], None]


def _take(posted: Posted) -> None:
    try:
        posted.action(posted.call)
    except Exception as error:  # a timeout or a key that cannot be compared: whoever waits is in another thread
        settle(posted.call)
        posted.call.fail(error)


def _refuse(posted: Posted) -> None:
    posted.call.fail(ModelNotReady("the service was stopped"))
