"""Batching inside Ray Serve: `@weir.ray.batch` in place of `@serve.batch`, and `weir.ray.deployment(Model)`.

Both batch late inside each replica. `@serve.batch` closes a batch when its timer ends, although all that could run it is busy, and queues the closed
batches; here nothing is cut before it can run, and a policy decides when. Ray Serve itself is imported only by `deployment`. `weir.Ray` is another
thing: workers of one service on the nodes of a cluster.
"""

import asyncio
import contextvars
import inspect
import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, Protocol, overload

from weir.errors import ModelError, ModelNotReady, SettingsError, WeirError
from weir.messages import JSON, LONGEST_TIMEOUT, Batch, EventKind, Events, Timing
from weir.model import Measure, Model, check_model
from weir.serving import known_settings
from weir.serving.service import Service
from weir.wire.status import http_code
from weir.wire.values import decode, encode
from weir.workers.executor import ExecutorBase, Listener
from weir.workers.local import LocalState
from weir.workers.run.steps import copies, model_error, responses_of
from weir.workers.timer import in_background, outcome_of

WAIT = 0.01  # seconds; the default of @serve.batch
BATCHED = "the batched function"  # as messages call it
ENDED = (StopIteration, StopAsyncIteration)  # what a generator yields for a caller who gets no more


def end_detached(name: str, address: str = "auto") -> list[str]:
    """End the workers that servers with `ray_detached=name` have left on the Ray at `address`; return their names. Those that a server uses now stay.
    A program that is connected to a Ray already asks that one."""
    import ray

    from weir.workers.ray.driver import end_detached as end

    if ray.is_initialized():
        return end(name)
    with ray.init(address=address, logging_level="WARNING"):
        return end(name)


class BatchedArguments(NamedTuple):
    """The arguments of one call, by name, and the context of its caller."""

    values: dict[str, Any]
    rows: int
    context: contextvars.Context


class CoroutineExecutor(ExecutorBase):
    """Runs batches by calling an async function, or an async generator function, on the event loop; up to `places.maxsize` at once.

    `call` gets the list of calls of a batch. What it raises is the error of all of them.
    """

    def __init__(
        self, call: Callable[[list[BatchedArguments]], Any], count: int, running: asyncio.Semaphore, *, streaming: bool
    ) -> None:
        self._call = call
        self._count = count
        self._running = running
        self._streaming = streaming
        self._cancelled: dict[int, set[int]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._states = [LocalState(index) for index in range(count)]
        self._listener: Listener

    async def start(self, listener: Listener) -> None:
        """Take batches from now on."""
        self._listener = listener
        for state in self._states:
            state.state = "ready"
            listener.worker_ready(state.index, 1)

    def run(self, worker: int, batch: Batch) -> None:
        """Call the function with `batch`, in the context of its first caller."""
        self._states[worker].in_flight += 1
        self._cancelled[batch.batch_id] = set()
        context = batch.payloads[0].context.copy()
        work = self._run(worker, batch)
        self._tasks[batch.batch_id] = asyncio.get_running_loop().create_task(work, context=context)

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Give a generator up when no caller of its batch is left."""
        gone = self._cancelled.get(batch_id)
        if gone is not None:
            gone.update(indices)

    async def stop(self) -> None:
        """Cancel what runs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for state in self._states:
            state.state = "stopped"

    def states(self) -> Sequence[LocalState]:
        """Return the state of each place for a batch."""
        return self._states

    async def _run(self, worker: int, batch: Batch) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with self._running:  # also shared with the batches of an executor before this one
                began = loop.time()
                ends = await (self._stream(worker, batch) if self._streaming else self._compute(batch))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            began, ends = loop.time(), self._failed(batch, error)
        ends.timing = Timing(0.0, loop.time() - began, 0.0)
        del self._tasks[batch.batch_id], self._cancelled[batch.batch_id]
        self._states[worker].in_flight -= 1
        self._listener.received(worker, ends)

    async def _compute(self, batch: Batch) -> Events:
        gone = self._cancelled[batch.batch_id]
        if len(gone) == len(batch.payloads):
            return Events(batch.batch_id, [None] * len(batch.payloads))
        results = await self._call(batch.payloads)
        return Events(batch.batch_id, responses_of(results, len(batch.payloads), BATCHED))

    async def _stream(self, worker: int, batch: Batch) -> Events:
        gone, open_ = self._cancelled[batch.batch_id], set(range(len(batch.payloads)))
        if gone == open_:
            return _ended(batch, open_)
        steps = self._call(batch.payloads)
        try:
            async for results in steps:
                results = responses_of(results, len(batch.payloads), BATCHED)
                ended = [index for index in sorted(open_) if any(results[index] is end for end in ENDED)]
                open_ -= {*ended}
                given = sorted(open_ - gone)
                if given:
                    self._report(worker, batch, given, [results[index] for index in given], EventKind.PART)
                if ended:
                    self._report(worker, batch, ended, [None] * len(ended), EventKind.END)
                if not open_ - gone:
                    break
        except Exception as error:
            if not open_:
                return _ended(batch, open_)
            errors: list[Any] = [*copies(_as_model_error(error), len(open_))]
            return Events(batch.batch_id, errors, indices=sorted(open_))
        finally:
            await steps.aclose()
        return _ended(batch, open_)

    def _report(self, worker: int, batch: Batch, indices: list[int], outputs: list[Any], kind: EventKind) -> None:
        self._listener.received(
            worker, Events(batch.batch_id, outputs, indices=indices, kinds=[kind] * len(indices), final=False)
        )

    def _failed(self, batch: Batch, error: Exception) -> Events:
        errors: list[Any] = [*copies(_as_model_error(error), len(batch.payloads))]
        return Events(batch.batch_id, errors)


def _ended(batch: Batch, open_: set[int]) -> Events:
    entries = sorted(open_)
    return Events(batch.batch_id, [None] * len(entries), indices=entries, kinds=[EventKind.END] * len(entries))


def _as_model_error(error: Exception) -> WeirError:
    return error if isinstance(error, WeirError) else model_error(BATCHED, error)


class BatchQueue:
    """The service of one batched function, or of one instance of a batched method, on one event loop; and how it is changed."""

    def __init__(self, owner: "BatchedFunction", instance: Any) -> None:
        self._owner = owner
        self._instance = None if instance is None else weakref.ref(instance)
        self._running = asyncio.Semaphore(owner.max_concurrent_batches)
        self._version = -1
        self._starting: asyncio.Future[Service]
        self._draining: set[asyncio.Task[None]] = set()

    def service(self) -> "asyncio.Future[Service]":
        """Return the service for calls from now on, once it has started. After a setter it is a new one; the one before finishes what it has, at
        once."""
        if self._version != self._owner.version:
            former = None if self._version < 0 else self._starting
            self._version = self._owner.version
            self._starting = asyncio.ensure_future(self._started())
            if former is not None:
                in_background(_drain(former), "the drain of a replaced model", self._draining)
        return self._starting

    async def _started(self) -> Service:
        owner = self._owner
        executor = CoroutineExecutor(self._call, owner.max_concurrent_batches, self._running, streaming=owner.streaming)
        wait = owner.batch_wait_timeout_s
        service = Service(
            _model_of(owner), name=owner.name, executor=executor, policy=owner.policy, max_batch_size=owner.max_batch_size,
            max_queue_delay=max(wait, WAIT), max_queue_size=1 << 20, timeout=LONGEST_TIMEOUT, stream_buffer=1 << 30,
            small_request_size=0, retry_in_halves=False,
        )  # fmt: skip
        await service.start()
        return service

    def _call(self, calls: list[BatchedArguments]) -> Any:
        lists = {name: [call.values[name] for call in calls] for name in calls[0].values}
        before = () if self._instance is None else (self._instance(),)
        arguments = self._owner.signature.bind_partial(*before)
        arguments.arguments.update(lists)
        return self._owner.function(*arguments.args, **arguments.kwargs)


async def _drain(former: "asyncio.Future[Service]") -> None:
    await (await former).stop(LONGEST_TIMEOUT)


def _model_of(owner: "BatchedFunction") -> type[Model]:
    """Return a class that tells a service what it must know of the function; its instances are never made."""

    def measure(item: BatchedArguments) -> Measure:
        return Measure(rows=item.rows)

    attributes: dict[str, Any] = {"predict": lambda self, batch: batch, "streaming": owner.streaming}
    if owner.batch_size_fn is not None:
        attributes["measure"] = staticmethod(measure)
    return type("Batched", (Model,), attributes)


class BatchedFunction:
    """The settings of the function that `@batch` decorates, and its queues by instance and event loop."""

    def __init__(
        self,
        function: Callable[..., Any],
        max_batch_size: int,
        wait: float,
        concurrent: int,
        size: Callable[[list[Any]], int] | None,
        policy: Any,
    ) -> None:
        self.function = function
        self.name = function.__name__.strip("_") or "batched"
        self.signature = inspect.signature(function)
        self.streaming = inspect.isasyncgenfunction(function)
        self.max_batch_size = max_batch_size
        self.batch_wait_timeout_s = wait
        self.max_concurrent_batches = concurrent
        self.batch_size_fn = size
        self._policy = policy
        self.version = 0  # goes up when a setting changes
        self._queues: dict[tuple[Any, int], BatchQueue] = {}

    @property
    def policy(self) -> Any:
        """The policy for a service."""
        if self._policy is not None:
            return self._policy
        return f"size-or-delay:size={self.max_batch_size},delay={self.batch_wait_timeout_s}s"

    def change(self, **settings: Any) -> None:
        """Change settings for the calls from now on."""
        for name, value in settings.items():
            setattr(self, name, value)
        self.version += 1

    def item(self, arguments: tuple[Any, ...], keywords: dict[str, Any], instance: Any) -> BatchedArguments:
        """Return the arguments of a call as an item. Raises TypeError if they are not those of the function, and RuntimeError if the call alone is
        larger than a batch may be."""
        bound = self.signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        values = dict(bound.arguments)
        if instance is not None:
            values.pop(next(iter(values)))
        rows = 1
        if self.batch_size_fn is not None:
            rows = self.batch_size_fn([next(iter(values.values()))])
            if rows > self.max_batch_size:
                raise RuntimeError(
                    f"{self.name}: batch_size_fn says {rows} for one item, more than max_batch_size={self.max_batch_size}"
                )
        return BatchedArguments(values, max(rows, 1), contextvars.copy_context())

    def queue(self, instance: Any) -> BatchQueue:
        """Return the queue for calls on `instance` (None: of a function) on this event loop."""
        key = asyncio.get_running_loop(), id(instance)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = BatchQueue(self, instance)
            if instance is not None:
                weakref.finalize(instance, self._queues.pop, key, None)
        return queue

    def __reduce__(self) -> Any:
        """Travel to a replica without queues, which belong to this process."""
        return type(self), (
            self.function,
            self.max_batch_size,
            self.batch_wait_timeout_s,
            self.max_concurrent_batches,
            self.batch_size_fn,
            self._policy,
        )


class BatchedCallable(Protocol):
    """A function that `@batch` decorates. A method is bound as any function is."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call it for single values: the result is awaited, or iterated over by `async for`."""

    def set_max_batch_size(self, new_max_batch_size: int, /) -> None:
        """Change the largest batch, for later calls."""

    def set_batch_wait_timeout_s(self, new_batch_wait_timeout_s: float, /) -> None:
        """Change the longest wait, for later calls."""

    def _get_max_batch_size(self) -> int: ...

    def _get_batch_wait_timeout_s(self) -> float: ...


@overload
def batch(function: Callable[..., Any], /) -> BatchedCallable: ...


@overload
def batch(
    function: None = None,
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float | None = None,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], int] | None = None,
    *,
    policy: Any = None,
) -> Callable[[Callable[..., Any]], BatchedCallable]: ...


def batch(
    function: Callable[..., Any] | None = None,
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float | None = None,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], int] | None = None,
    *,
    policy: Any = None,
) -> Any:
    """Have an async function or method that takes lists handle calls that pass single values, as `serve.batch` does.

        class Embedder:
            @weir.ray.batch(max_batch_size=32, policy="auto")
            async def embed(self, texts):
                return await self.model.encode(texts)

    An async generator yields lists; `StopIteration` in the place of a result ends it for that caller. The decorated function has the setters and
    getters of `serve.batch`. A setter holds for the calls after it; what waits is run at once. Calls on different instances are never batched together.

    Arguments:
        max_batch_size: the most calls in a batch; with `batch_size_fn`, the largest sum of what that returns for each call.
        batch_wait_timeout_s: the longest wait, in seconds, while nothing runs. By default it is up to the policy.
        max_concurrent_batches: how many batches run at once. No batch is cut while that many run.
        batch_size_fn: returns the size of a list of first arguments. It is called with one at a time, and sizes add up.
        policy: when a batch is cut. By default "auto", which learns how long batches take; with a `batch_wait_timeout_s` it is a full batch or that wait,
            as with `serve.batch`.

    Raises TypeError and ValueError where `serve.batch` does.
    """
    if function is not None and not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
        raise TypeError("functions decorated with @weir.ray.batch must be 'async def'")
    size = _whole("max_batch_size", max_batch_size)
    concurrent = _whole("max_concurrent_batches", max_concurrent_batches)
    if batch_wait_timeout_s is not None:
        _check_wait(batch_wait_timeout_s)
    if batch_size_fn is not None and not callable(batch_size_fn):
        raise TypeError(f"batch_size_fn={batch_size_fn!r}: must be a function")
    if policy is None and batch_wait_timeout_s is None:
        policy = "auto"
    wait = WAIT if batch_wait_timeout_s is None else float(batch_wait_timeout_s)

    def decorate(function: Callable[..., Any]) -> BatchedCallable:
        if not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
            raise TypeError("functions decorated with @weir.ray.batch must be 'async def'")
        return _decorated(BatchedFunction(function, size, wait, concurrent, batch_size_fn, policy))

    return decorate if function is None else decorate(function)


def _decorated(batched: BatchedFunction) -> BatchedCallable:
    function = batched.function

    def instance_of(arguments: tuple[Any, ...]) -> Any:
        """Return the first argument if this is a method of it."""
        kinds = type(arguments[0]).__mro__ if arguments else ()
        return arguments[0] if any(vars(kind).get(function.__name__) is decorated for kind in kinds) else None

    async def call(*arguments: Any, **keywords: Any) -> Any:
        instance = instance_of(arguments)
        item = batched.item(arguments, keywords, instance)
        service = await batched.queue(instance).service()
        try:
            return await service.infer(item, key=_multiplexed())
        except ModelError as error:
            raise (error.__cause__ or error) from None

    def stream(*arguments: Any, **keywords: Any) -> AsyncGenerator[Any, None]:
        instance = instance_of(arguments)
        item = batched.item(arguments, keywords, instance)
        starting = batched.queue(instance).service()
        # The call is in the queue from now on, whenever its generator is read.
        entered = asyncio.ensure_future(_entered(starting, item, _multiplexed()))
        return _read(entered)

    decorated: Any = wraps(function)(stream if batched.streaming else call)

    def set_max_batch_size(new_max_batch_size: int) -> None:
        batched.change(max_batch_size=_whole("max_batch_size", new_max_batch_size))

    def set_batch_wait_timeout_s(new_batch_wait_timeout_s: float) -> None:
        _check_wait(new_batch_wait_timeout_s)
        batched.change(batch_wait_timeout_s=float(new_batch_wait_timeout_s))

    decorated.set_max_batch_size = set_max_batch_size
    decorated.set_batch_wait_timeout_s = set_batch_wait_timeout_s
    decorated._get_max_batch_size = lambda: batched.max_batch_size
    decorated._get_batch_wait_timeout_s = lambda: batched.batch_wait_timeout_s
    return decorated  # type: ignore[no-any-return]  # `wraps` does not know the attributes


async def _entered(starting: "asyncio.Future[Service]", item: BatchedArguments, key: Any) -> Any:
    service = await starting
    request = service.new_stream(item, key=key)
    service.enter(request, None)
    return request


async def _read(entered: "asyncio.Future[Any]") -> AsyncGenerator[Any, None]:
    request = await entered
    try:
        async for response in request:
            yield response
    except ModelError as error:
        raise (error.__cause__ or error) from None
    finally:
        request.close()


def _multiplexed() -> str | None:
    """Return the id of the model for which a replica of Ray Serve runs this call, if several share it: they share no batch."""
    serve = sys.modules.get("ray.serve")
    return (serve.get_multiplexed_model_id() or None) if serve is not None else None


def _whole(name: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: must be a whole number")
    if value < 1:
        raise ValueError(f"{name}={value!r}: must be 1 or more")
    return value


def _check_wait(value: Any) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"batch_wait_timeout_s={value!r}: must be a number of seconds")
    if value < 0:
        raise ValueError(f"batch_wait_timeout_s={value!r}: must be 0 or more")


def deployment(
    model: type[Model] | Callable[..., Any],
    *,
    policy: Any = "auto",
    params: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return `model` as a deployment of Ray Serve, for `serve.run(weir.ray.deployment(Model).bind())`, `serve deploy` and RayService.

    Each replica is a Service in a thread of its own process: hooks, batches cut late, deadlines, bad items that fail alone. Over HTTP it takes an
    item as JSON and answers as JSON, with the codes of `weir serve`; a streaming model answers with a JSON value a line. A handle takes the item itself:
    `await handle.remote(item)`; of a streaming model `handle.options(stream=True).stream.remote(item)`.

    Arguments:
        policy, params: as for Service.
        options: settings of a service (max_batch_size=32); all others go to `serve.deployment` (num_replicas=2). `max_ongoing_requests` is four full
            batches unless said: Serve's own default is smaller than a batch.

    Raises SettingsError for a model or setting that cannot be used, and if Ray Serve is not installed.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise SettingsError(
            f"weir.ray.deployment: Ray Serve is not installed ({error}); install it with: pip install 'ray[serve]'"
        ) from None
    kind = check_model(model)
    settings = {name: options.pop(name) for name in known_settings() if name in options}
    settings = {"executor": "thread", **settings, "policy": policy}
    tried = Service(kind, params=params, **settings)
    options.setdefault("name", kind.__name__)
    options.setdefault("max_ongoing_requests", 4 * tried.facts.batching.max_batch_size)

    class WeirReplica(ServeReplica):
        def __init__(self) -> None:
            super().__init__(kind, params, settings)

    return serve.deployment(**options)(WeirReplica)


class ServeReplica:
    """A replica of Ray Serve that runs one model with a Service of Weir."""

    def __init__(self, model: type[Model], params: dict[str, Any] | None, settings: dict[str, Any]) -> None:
        self._service = Service(model, params=params, **settings)
        self._starting: asyncio.Task[None] | None = None

    async def _started(self) -> Service:
        """Return the service, which starts with the first call on this event loop: the check that Serve makes before it sends any."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._service.start())
        await outcome_of(self._starting)
        return self._service

    async def check_health(self) -> None:
        """Raise ModelNotReady with the reason if the model is not ready, which has Serve replace the replica."""
        service = await self._started()
        if not service.ready:
            raise ModelNotReady(f"model {service.name!r} is not ready: {service.not_ready_reason}")

    async def __call__(self, item: Any) -> Any:
        """Answer an HTTP request, or a call through a handle."""
        from starlette.requests import Request

        if isinstance(item, Request):
            return await self._respond(await item.body())
        return await (await self._started()).infer(item)

    async def stream(self, item: Any) -> AsyncGenerator[Any, None]:
        """Yield the responses of a streaming model."""
        async for response in (await self._started()).infer_stream(item):
            yield response

    async def state(self) -> dict[str, Any]:
        """Return the state of the service, as `GET /models/{model}` of `weir serve` shows it."""
        return (await self._started()).state()

    async def _respond(self, body: bytes) -> Any:
        from starlette.responses import Response, StreamingResponse

        service = await self._started()
        try:
            item = decode(body, JSON)
            if service.facts.streaming:
                lines = (encode(response, JSON) + b"\n" async for response in self.stream(item))
                return StreamingResponse(lines, media_type="application/x-ndjson")
            return Response(encode(await service.infer(item), JSON), media_type=JSON)
        except WeirError as error:
            document = {"error": {"type": type(error).__name__, "message": error.message}}
            return Response(encode(document, JSON), http_code(error), media_type=JSON)
