"""The service of one model: the entry for all its requests, from start to stop and across reloads."""

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Hashable, Iterable, Sequence
from numbers import Integral
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypedDict, TypeVar, Unpack

import msgspec

from weir.batching.request_state import NEW, refuse
from weir.errors import Conflict, InvalidRequest, ModelError, SettingsError, WeirError, for_caller
from weir.messages import LONGEST_TIMEOUT, Block, Express, Form, Kind, Observer, Request, label_of
from weir.model import Example, Model, check_model
from weir.policy.decision import Policy
from weir.serving import check_name, check_version, compose
from weir.serving.calls import (
    Call,
    ListCall,
    StreamedCall,
    StreamWindow,
    ThreadCall,
    describe,
    is_hashable,
    preprocessing,
    several,
    stream_async,
    stream_sync,
    takes_one,
)
from weir.serving.delivery import submit_traced
from weir.serving.generation import Generation, LoadedModel, OnDemand, summary
from weir.serving.handle import ExampleHealth, ModelFacts, ModelHealth, ResidencyView
from weir.serving.hooks import ServiceHooks
from weir.telemetry.recorder import Recorder
from weir.workers.executor import Executor, MakeExecutor
from weir.workers.settings import Ray, WorkerSettings
from weir.workers.turns import DeviceGroup

if TYPE_CHECKING:
    from weir.keywords import ServiceKeywords

C = TypeVar("C", bound=Call)


class StreamKeywords(TypedDict, total=False):
    """The options of each item of a stream."""

    timeout: float | None
    """Seconds from now for waiting and computing together; None takes the setting."""
    priority: int
    """Requests of a higher priority go first. One below 0 (weir.BULK) is bulk work, which gets the time that others leave."""
    key: Hashable
    """Only items of equal keys share a batch."""


class CallKeywords(StreamKeywords, total=False):
    """The options of a call in this process."""

    backpressure: bool | None
    """Whether the call waits while the queue is full. Otherwise it fails with Overloaded then. None takes the setting."""


class Service:
    """Serves one model in this process's event loop, and batches the requests of its callers.

        async with weir.Service(Square, max_batch_size=64) as service:
            assert await service.infer(3) == 9

    Arguments:
        model: a subclass of Model. A subclass of Service may have it as a class attribute instead.
        name: the model's name; by default the class name in lower case.
        version: the version of the model, if several of one name are served; "" if it has none. Observers and logs know the
            service by its `label`: the name, followed by a slash and the version if there is one.
        params: keyword arguments for the model's constructor.
        executor: the name of a kind of executor; a weir.Ray; or an Executor, or what makes it, which replaces the workers that the settings describe.
        observers: are notified of what happens.
        clock: returns the time in seconds. A clock with a method `call_at` also keeps the timers (testing.FakeClock).
        platform: the kind of model, for the metadata.
        device: the models with which this one takes turns on a device.
        on_demand: starts the workers when a request comes.
        settings: those of BatchingSettings, WorkerSettings and ServiceSettings. The model's class attributes override
            Weir's defaults; these arguments override both.

    A service serves with one `generation` (model, settings, policy, executor, driver) at a time; `replace_with` gives it another
    one. A request ends in the generation that accepted it; later requests go to the new one. When a subclass is reloaded, it keeps
    its own methods, except the hooks, which are those of the new generation.

    Raises SettingsError for an unusable model or setting.
    """

    model: type[Model] = Model

    def __init__(
        self, model: type[Model] | None = None, *, name: str | None = None, version: str = "",
        params: dict[str, Any] | None = None, executor: Executor | MakeExecutor | Ray | str | None = None, observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic, platform: str = "python", device: DeviceGroup | None = None,
        on_demand: OnDemand | None = None, **settings: "Unpack[ServiceKeywords]",
    ) -> None:  # fmt: skip
        self.model = check_model(model or type(self).model)
        given: dict[str, Any] = dict(settings)
        self.name = check_name(name or self.model.__name__.lower())
        self.version = check_version(version)
        self.label = label_of(self.name, version)
        if isinstance(executor, str):
            given["executor"], executor = executor, None
        elif isinstance(executor, Ray):
            given, executor = {**executor.settings(), **given}, None
        if device is not None:
            given = {**device.settings(), **given}
        composed = compose(self.model, given)
        _check_group(composed.workers.device_group, device)
        kind = type(self)
        hooks = ServiceHooks(
            self.before_batch if kind.before_batch is not Service.before_batch else None,
            self.after_batch if kind.after_batch is not Service.after_batch else None,
        )
        facts = ModelFacts(
            self.name, version, self.model, platform, composed.batching, composed.service, hooked=any(hooks)
        )
        self.now = clock  # returns the present time in seconds, as in the `arrival` of a request
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # the thread that runs the loop
        self._resizing = asyncio.Lock()
        self._former: list[Generation] = []  # replaced ones that have not been stopped
        self.generation = Generation(
            LoadedModel(facts, params or {}, composed.workers), executor=executor, device=device, hooks=hooks, observers=observers,
            clock=clock, on_demand=on_demand,
        )  # fmt: skip
        # Those of the generation, see ModelHandle. They are attributes because the edge reads them many times for a request.
        self.facts, self.tracing = facts, self.generation.tracing

    @property
    def control(self) -> Self:
        """The part of the model that operators see and may change: see ModelControl."""
        return self

    @property
    def params(self) -> dict[str, Any]:
        """The keyword arguments of the model's constructor."""
        return self.generation.params

    @property
    def policy(self) -> Policy:
        """The policy that decides when a batch is dispatched."""
        return self.generation.policy

    @property
    def workers(self) -> WorkerSettings:
        """The settings of the workers; their field `workers` is the present number of workers, or its range as a text."""
        return self.generation.workers

    @property
    def worker_count(self) -> int:
        """The present number of workers, whatever their state."""
        return self.generation.worker_count

    @property
    def statistics(self) -> Recorder:
        """Counts of requests and batches since this model was loaded."""
        return self.generation.recorder

    async def start(self) -> None:
        """Start the workers; return when all have loaded and warmed up.

        Raises ModelError with the worker's traceback when a worker cannot load; nothing is left running then. A stopped
        service can be started again.
        """
        self.generation.renew()
        self.open()
        await self.generation.start()

    def open(self) -> None:
        """Take the running event loop for that of its callers, before the start."""
        self._loop = self._here()
        self._thread = get_ident()

    async def stop(self, drain_timeout: float | None = None) -> None:
        """Accept no more requests, finish the accepted ones, and stop the workers, including those of replaced generations.

        Requests that are unfinished after `drain_timeout` seconds (None: the setting) fail with Draining. Idempotent.
        """
        formers = asyncio.gather(*[each.stop(drain_timeout) for each in self._former])
        await self.generation.stop(drain_timeout)  # accepts no more from now on, not from the next turn of the loop on
        await formers

    async def drain(self, drain_timeout: float | None = None) -> None:
        """Accept no more requests; return when all accepted ones have ended, those of replaced generations too, or after
        `drain_timeout` seconds (None: the setting). The workers keep running."""
        seconds = self.facts.settings.drain_timeout if drain_timeout is None else drain_timeout
        drivers = [driver for each in (*self._former, self.generation) for driver in each.drivers]
        await asyncio.gather(*[driver.drain(seconds) for driver in drivers])

    async def add_worker(self) -> None:
        """Start one more worker; return when it is ready. The policy and the metrics count it from then on.

        Raises what `start` raises, Conflict if the executor can have no more workers, and ModelNotReady unless the service
        runs. The other workers go on as before then.
        """
        async with self._resizing:
            await self.generation.add_worker()

    async def remove_worker(self) -> None:
        """Give the last worker no more batches, let it finish those that it has, and stop it. Batches that it has not finished
        after the `drain_timeout` run again on another worker. Raises Conflict for the only worker, and ModelNotReady unless the
        service runs."""
        async with self._resizing:
            await self.generation.remove_worker()

    def replace_with(self, other: "Service") -> "Replaced":
        """Serve with the generation of `other` from now on, and return the former one, which the caller must stop.

        `other` must run in the same event loop. Callers of this service reach the new generation, with its model, settings and
        hooks. The former generation gets no more requests, and its `stop` waits for those that it had accepted.
        """
        former = self.generation
        former.driver.note_accepted()
        self._former.append(former)
        # A channel may just be receiving a payload into a Block of the former generation, and will submit it here.
        other.generation.driver.may_have_blocks(former.driver)
        self._loop, self._thread = other._loop, other._thread
        self.generation, self.model = other.generation, other.model
        self.facts, self.tracing = other.facts, other.tracing
        return Replaced(former, self._former)

    def __enter__(self) -> NoReturn:
        raise TypeError("a Service needs an event loop: use `async with`, or `with weir.BlockingService(...)`")

    __exit__ = __enter__

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception nobody waits for responses any more, so there is nothing to drain.
        await self.stop(None if error is None else 0.0)

    # Calls in this process.

    def infer(self, item: Any, **options: Unpack[CallKeywords]) -> Call:
        """Return a future of the response to `item`. All errors are raised by awaiting it; cancelling it cancels the request.

        Arguments:
            item: the item.
            timeout: seconds from now for waiting and computing together; None takes the setting.
            priority: requests of a higher priority go first. One below 0 (weir.BULK) is bulk work, which gets the time that others leave.
            key: only items of equal keys share a batch.
            backpressure: whether the call waits while the queue is full. Otherwise it fails with Overloaded then. None takes
                the setting.
        """
        generation = self.generation
        if options or not generation.simple:
            call = self._new_call(Call, item, **options)
            self.enter(call, options.get("backpressure"))
            return call
        loop = self._loop  # from here on, this is _new_call, prepare and enter inlined for the most common case
        if loop is None or get_ident() != self._thread:
            loop = self._running_loop()
        call = Call(loop=loop)
        call.settled, call.taken, call.overtaken, call.partial = NEW
        call.form = form = generation.form
        call.payload = item
        call.arrival = now = self.now()
        call.deadline = now + form.timeout
        call._withdraw = generation.withdraw
        try:
            generation.driver.submit(call, now, generation.settings.backpressure)
        except WeirError as error:
            refuse(call, error)
        return call

    def infer_many(
        self,
        items: Iterable[Any],
        *,
        return_errors: bool = False,
        express: bool = False,
        **options: Unpack[CallKeywords],
    ) -> asyncio.Future[list[Any]]:
        """Return a future of the list of responses to `items`, in order. The list is divided into batches as needed.

        The first item that fails fails the call with its error; with `return_errors`, the list has the errors in the places of
        their items. With `express`, the call gets batches of its own, for which no policy waits; while other requests wait too,
        every second batch is one of express calls. For the other arguments, see `infer`.
        """
        items = list(items)
        if express:
            options["key"] = Express(object(), options.get("key"))
        batching = self.facts.batching
        largest = min(batching.max_queue_size, batching.capacity or batching.max_queue_size)
        if self.generation.takes_as_is and 0 < len(items) <= largest:
            call = self._new_call(ListCall, items, **options)
            call.form = call.form.replaced(kind=Kind.ITEMS, rows=len(items), cost=float(len(items)))
            call.return_errors = return_errors
            self.enter(call, options.get("backpressure"))
            return call
        return asyncio.ensure_future(self._infer_each(items, return_errors, options))

    async def _infer_each(self, items: list[Any], return_errors: bool, options: CallKeywords) -> list[Any]:
        """Do `infer_many` with one request per item: for measured items, tensors, and lists longer than the queue."""
        if not items:
            return []
        calls = [self.infer(item, **options) for item in items]
        try:
            responses = await asyncio.gather(*calls, return_exceptions=return_errors)
        except BaseException:
            for call in calls:
                call.cancel()
            raise
        for response in responses:
            if isinstance(response, BaseException) and not isinstance(response, WeirError):
                raise response
        return responses

    def stream(
        self, items: Iterable[Any] | AsyncIterable[Any], *, return_inputs: bool = False, return_errors: bool = False,
        preprocessor: Callable[[Any], Any] | None = None, **options: Unpack[StreamKeywords],
    ) -> AsyncGenerator[Any, None]:  # fmt: skip
        """Yield the responses to `items` in their order, with bounded memory, and keep every worker busy.

        Arguments:
            items: is read on the event loop; a sync iterable must not block.
            timeout: seconds per item, from the moment when it is read from `items`.
            return_inputs: whether to yield pairs of item and response.
            return_errors: whether to yield the WeirError of a failed item in its place. Otherwise the error is raised, which
                ends the stream.
            preprocessor: is called in this process with each item, and must not block; its result goes to the model. If it
                raises, the item fails with InvalidRequest.

        An exception of `items` itself is raised after the responses to the items before it. Closing the generator early cancels
        the requests that are under way. For the other arguments, see `infer`.
        """

        def infer(item: Any) -> Call:
            return self.infer(item, **options, backpressure=True)

        def refused(item: Any) -> Call:
            return self._new_call(Call, item, **options)

        prepared = preprocessing(preprocessor, infer, refused)
        window = StreamWindow(prepared, self.stream_size, return_inputs, return_errors)
        return stream_async(items, window) if isinstance(items, AsyncIterable) else stream_sync(items, window)

    def infer_stream(self, item: Any, **options: Unpack[CallKeywords]) -> AsyncGenerator[Any, None]:
        """Yield the responses of a streaming model to one `item`; of any other model, its one response.

        The request begins with the first `anext`. `timeout` is for all responses together. A reader that is more than
        `stream_buffer` responses behind gets those, and then Overloaded. Closing the generator early ends the item at the model too.
        For the other arguments, see `infer`.
        """
        return self._read(self.new_stream(item, **options), options.get("backpressure"))

    async def _read(self, request: StreamedCall, backpressure: bool | None) -> AsyncGenerator[Any, None]:
        """Enter `request` and yield its responses; closing the generator cancels the request."""
        try:
            self.enter(request, backpressure)
            async for response in request:
                yield response
        except ModelError as error:
            raise for_caller(error) from error.__cause__
        finally:
            request.close()

    def new_stream(self, item: Any, **options: Unpack[CallKeywords]) -> StreamedCall:
        """Return a request for `item` that is not in the queue yet. May be called from any thread."""
        return StreamedCall(self.form_of(**options), item, self.facts.settings.stream_buffer, self.cancel, self.now)

    def form_of(
        self, *, timeout: float | None = None, priority: int = 0, key: Hashable = None, backpressure: bool | None = None
    ) -> Form:
        """Return the form of a call in this process that states this; `backpressure` is not part of it."""
        usual = self.generation.form
        if timeout is None and not priority and key is None:
            return usual
        return Form(usual.timeout if timeout is None else timeout, key=key, priority=priority)

    @property
    def stream_size(self) -> int:
        """The number of items that a stream keeps under way: as many as all workers hold in full batches, and the same number waiting."""
        return 2 * self.facts.batching.max_batch_size * self.workers.most_workers * self.workers.places

    # Hooks, for subclasses.

    async def before_batch(self, batch: list[Any]) -> list[Any]:
        """Override this to change a batch of decoded items in this process, before a worker gets it; see hooks.py."""
        return batch

    async def after_batch(self, results: list[Any]) -> list[Any]:
        """Override this to change the responses in this process, after the worker has been freed; see hooks.py."""
        return results

    # Protocols and channels.

    inference: Any = None  # see ModelHandle

    def notify(self, frontend: str, error: WeirError) -> None:
        """Notify the observers of an error that ends a request of the frontend `frontend`, unless they know it: the request was refused, or its response
        cannot be written. Only exchanges call this, for each error that they send; of the errors of accepted requests, the delivery notifies."""
        self.generation.driver.ended_outside(frontend, error)

    def transferred(self, frontend: str, received_bytes: int, sent_bytes: int) -> None:
        """Notify the observers of the sizes of requests of the frontend `frontend` and of their responses."""
        for meter in self.generation.byte_meters:
            meter(self.label, frontend, received_bytes, sent_bytes)

    def submit(self, request: Request, now: float | None = None) -> None:
        """Put `request` into the queue. `now` is the present time of the service's clock, if the caller has just read it.

        Raises ModelNotReady, Draining, Overloaded, or DeadlineExceeded when the deadline could not be met. The request was not
        accepted then, and a Block that is its payload still belongs to the caller. An accepted request releases its Block when
        it has ended.
        """
        generation = self.generation
        if generation.streaming and takes_one(request):
            raise several(self.name)
        now = self.now() if now is None else now
        if generation.tracing is None:
            generation.driver.submit(request, now)
        else:
            submit_traced(generation.tracing, self.label, generation.driver.submit, request, now)

    def submit_all(self, requests: Sequence[Request], now: float) -> list[tuple[Request, WeirError]]:
        """Put `requests` into the queue, which are single items, differ in payload and arrival only and are in order of arrival. Return those that were not
        accepted, each with what `submit` raises. They are not traced."""
        return self.generation.driver.submit_all(requests, now)

    def has_room(self, rows: int, *, bulk: bool = False) -> bool:
        """Return whether the queue, or that of `bulk` work, has room for a request of `rows` rows now."""
        return self.generation.driver.batcher.room(rows, bulk=bulk)

    def best_rate(self, now: float) -> float:
        """Return how many rows per second all workers together can serve, for rows like the recent ones; infinity while too
        little is known."""
        return self.generation.driver.batcher.best_rate(now)

    @property
    def residency(self) -> ResidencyView | None:
        """The state of a model on demand, the reason, and what it takes; None for any other."""
        return self.generation.residency

    @property
    def ready_workers(self) -> int:
        """The number of workers that take batches now."""
        return self.generation.driver.batcher.workers

    def cancel(self, request: Request) -> None:
        """Cancel a request whose caller has left; nothing happens if it has already ended."""
        generation = self.generation
        for former in self._former:
            if former.driver.accepted(request):
                generation = former
        generation.cancel(request)

    def reserve(self, size_bytes: int) -> Block | None:
        """Return a place of `size_bytes` bytes in shared memory, to receive a payload into; None if none is free."""
        return self.generation.driver.reserve(size_bytes)

    @property
    def executor(self) -> Executor:
        """The executor that runs its batches."""
        return self.generation.driver.executor

    @property
    def arena_bytes(self) -> int:
        """Bytes of shared memory for payloads. If it is 0, `reserve` always returns None."""
        return int(self.generation.driver.executor.gauges()["arena_bytes"])

    @property
    def ready(self) -> bool:
        """Whether requests are accepted and a worker can run them."""
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        """The reason why requests are not accepted or not run; "" if they are."""
        return self.generation.not_ready_reason

    @property
    def failed(self) -> str:
        """The reason why no worker can be started, although that is tried again and again; "" if one can."""
        return self.generation.driver.failed

    @property
    def draining(self) -> bool:
        """Whether the service is finishing what it accepted, before it stops."""
        return self.generation.driver.draining

    def state(self, *, brief: bool = False) -> dict[str, Any]:
        """Return the state of the service as a JSON-able dict; with `brief`, only what changes from moment to moment, which is
        cheap to collect."""
        own = {"model": self.name, "ready": self.ready, "reason": self.not_ready_reason} | self.generation.present()
        return own if brief else own | self.generation.history() | {"policy": summary(self.explain_policy())}

    def explain_policy(self) -> dict[str, Any]:
        """Return what the policy decides and what was measured under it, as a JSON-able dict. `GET /models/{model}/policy` shows
        this."""
        return self.generation.explain_policy(self.name)

    async def set_prices(self, /, **changes: Any) -> dict[str, Any]:
        """Solve the policy for other weights, and return its explanation once it is in use. `PUT /models/{model}/policy` does
        this. Concurrent calls are served one after the other.

        `changes` are some of `latency_weight`, `energy_weight`, `reference_rate` and `latency_objective` ("p99=20ms"). None for
        one of the last two removes it; prices that are not named stay.

        Raises Conflict for a policy that is not solved, InvalidRequest for another name, SettingsError with the reason when no
        policy satisfies the prices, DeadlineExceeded, and ModelNotReady or Draining unless the service runs. The policy stays
        as it was then.
        """
        tuner = self.generation.tuner
        if tuner is None:
            raise Conflict(
                f"the policy of model {self.name!r} is {self.facts.batching.policy!r}: only a solved policy has weights"
            )
        await tuner.change(changes)
        return self.explain_policy()

    async def deep_health(self) -> ModelHealth:
        """Run the model's examples through the same queue and workers as all requests, and compare the responses with the expected
        ones where these are known.

        A model without examples is healthy if it is ready. A model that is not ready is not healthy, and `reason` says why.
        """
        examples = [each if isinstance(each, Example) else Example(each) for each in self.facts.model.examples]
        results = await asyncio.gather(*[self._run_example(example) for example in examples])
        healthy = self.ready and all(result["ok"] for result in results)
        return {"healthy": healthy, "model": self.label, "reason": self.not_ready_reason, "examples": results}

    async def _run_example(self, example: Example) -> ExampleHealth:
        started = self.now()
        error = ""
        try:
            response: Any = (
                [part async for part in self.infer_stream(example.item)]
                if self.facts.streaming
                else await self.infer(example.item)
            )
        except WeirError as failure:
            error = f"{type(failure).__name__}: {failure.message}"
        else:
            if example.expected is not ... and not same(response, example.expected):
                error = f"expected {example.expected!r:.200}, got {response!r:.200}"
        return {"ok": not error, "seconds": self.now() - started, "error": error}

    def _new_call(self, kind: type[C], payload: Any, **options: Unpack[CallKeywords]) -> C:
        loop = self._loop
        if loop is None or get_ident() != self._thread:  # get_running_loop makes a system call each time
            loop = self._running_loop()
        return kind(loop=loop).prepare(self.form_of(**options), payload, self.now(), self.generation.withdraw)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._here()
        if loop is not self._loop and self._loop is not None:
            raise RuntimeError(f"service {self.name!r} runs in another event loop; threads share a BlockingService")
        return loop

    def _here(self) -> asyncio.AbstractEventLoop:
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                f"service {self.name!r}: no event loop of asyncio runs here; without one, use a BlockingService"
            ) from None

    def enter(self, call: Call | ThreadCall | StreamedCall, backpressure: bool | None) -> None:
        """Put a call into the queue, or let it wait for room. A refused call fails with the reason; nothing is raised."""
        if (tracing := self.generation.tracing) is not None:
            tracing.begin(call)
        try:
            self._check(call)
        except WeirError as error:
            self.notify(call.form.frontend, error)
            refuse(call, error)
            return
        try:
            patient = self.facts.settings.backpressure if backpressure is None else backpressure
            self.generation.driver.submit(call, call.arrival, patient)
        except WeirError as error:
            refuse(call, error)

    def _check(self, call: Call | ThreadCall | StreamedCall) -> None:
        generation = self.generation
        if generation.streaming and not isinstance(call, StreamedCall):
            raise several(self.name)
        form = call.form
        if not form.timeout <= LONGEST_TIMEOUT:
            raise InvalidRequest(f"timeout={form.timeout!r}: must be a number of at most {LONGEST_TIMEOUT:g} seconds")
        # The queue sorts by priority and looks up the key: a value that cannot be sorted or hashed must not get there.
        priority: Any = form.priority
        if not isinstance(priority, Integral):
            raise InvalidRequest(f"priority={priority!r:.100}: must be an integer")
        if not is_hashable(form.key):
            raise InvalidRequest(f"key={form.key!r:.100}: must be hashable")
        if not generation.takes_as_is and form.kind is Kind.ITEM:
            describe(generation.model, call)


def same(given: Any, expected: Any) -> bool:
    """Return whether a response equals the expected one: floats within rounding, arrays and lists element by element, values of a
    declared type field by field."""
    given, expected = _comparable(given), _comparable(expected)
    if isinstance(expected, dict):
        return (
            isinstance(given, dict)
            and given.keys() == expected.keys()
            and all(same(given[key], expected[key]) for key in expected)
        )
    if isinstance(expected, (str, bytes)) or expected is None:
        return bool(given == expected)
    if isinstance(expected, (list, tuple)):
        return isinstance(given, (list, tuple)) and len(given) == len(expected) and all(map(same, given, expected))
    if isinstance(expected, float) and isinstance(given, (int, float)):
        return math.isclose(given, expected, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(expected) and math.isnan(given))
    return bool(given == expected)


def _check_group(name: str | None, device: DeviceGroup | None) -> None:
    """Raise SettingsError if the setting `device_group` names a group that the service would not be in."""
    if name is not None and (device is None or device.name != name):
        raise SettingsError(
            f"device_group={name!r}: only a server finds a group by its name; in a program, give all models of the group "
            f"device=weir.device_group({name!r})"
        )


def _comparable(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


class Replaced:
    """A generation that another one has replaced in its service. `all` are those of the service, of which it is one until it is stopped."""

    def __init__(self, generation: Generation, all: list[Generation]) -> None:
        self.generation = generation
        self._all = all

    async def stop(self, drain_timeout: float | None = None) -> None:
        """Finish what it had accepted, and stop its workers; see Generation.stop. Idempotent."""
        await self.generation.stop(drain_timeout)
        if self.generation in self._all:
            self._all.remove(self.generation)
