"""The asyncio driver of one model's Batcher.

The batcher decides, the executor runs batches, and requests deliver their own responses; the driver connects these. Only `submit`
is called once per request. All else happens once per turn of the event loop or once per batch: one poll, scheduled with
`call_soon` however many requests arrive in a turn; one timer; one frame per batch; one call of each observer per batch.

Calls in this process wait in a BackpressureQueue while the batcher's queue is full. A Timer wakes the driver on the service's clock.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from weir.batching.batcher import Batcher, BatcherUser
from weir.batching.bulk import is_bulk
from weir.batching.collate import entries_of, fail_entries, to_batch
from weir.batching.queue import IndexedHeap
from weir.batching.request_state import settle
from weir.errors import Cancelled, DeadlineExceeded, ModelError, ModelNotReady, Overloaded, WeirError, draining, stopped
from weir.messages import Batch, Block, Dispatch, Events, Request, Wakeup
from weir.metrics import MetricReport
from weir.serving.delivery import Delivery, logger
from weir.serving.hooks import HookedBatches, HookUser
from weir.workers.executor import Executor, Reserve, capabilities_of, discard, for_all_work
from weir.workers.run.steps import copies
from weir.workers.timer import TimeLimit, Timer
from weir.workers.turns import DeviceGroup, DeviceTurns

if TYPE_CHECKING:
    from weir.tuning.learning import StartMeasurement

# Reading this many rows takes a turn of the loop so long that others have probably come meanwhile.
MANY = 16

NOT_STARTED = "not started"  # why a service is not ready before its start and after its end
LOADING = "loading"
STOPPED = "stopped"
_START = "; start it with `async with service`, or in a web application with lifespan=weir.lifespan(...)"


# Calls in this process that wait for room in the batcher's queue. Requests of other processes are refused instead.


class WaitingCall(Request, Protocol):
    """A request that can wait for room in the queue, as calls in this process do. Requests of other processes are refused."""

    outside: bool  # whether it waits for room now


class BackpressureQueue:
    """The requests of one class that wait for room in the batcher's queue, in order of arrival."""

    def __init__(self, *, bulk: bool = False) -> None:
        self._bulk = bulk
        # Public, because each call in this process tests it: the truth of a dict is faster than a method.
        self.waiting: OrderedDict[int, WaitingCall] = OrderedDict()  # by id()
        self._deadlines: IndexedHeap[int] = IndexedHeap()

    def __len__(self) -> int:
        return len(self.waiting)

    def append(self, request: WaitingCall) -> None:
        """Add `request` at the end."""
        request.outside = True
        self.waiting[id(request)] = request
        self._deadlines.put(id(request), (request.deadline, 0.0))

    def pop(self, room: Callable[[int, float, bool], bool]) -> WaitingCall | None:
        """Remove and return the first request if `room` says that the batcher's queue has room for its rows and its cost; else None."""
        first = next(iter(self.waiting.values()), None)
        if first is None or not room(first.form.rows, first.form.cost, self._bulk):
            return None
        self._remove(first)
        return first

    def drop(self, request: WaitingCall) -> None:
        """Settle and remove a waiting request whose caller left."""
        settle(request)
        self._remove(request)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, or None if no request waits."""
        first = self._deadlines.first()
        return None if first is None else first[0][0]

    def expire(self, now: float) -> list[WaitingCall]:
        """Settle, remove and return the requests whose deadline has passed."""
        late = []
        while (first := self._deadlines.first()) is not None and first[0][0] <= now:
            late.append(self.waiting[first[1]])
            self.drop(late[-1])
        return late

    def clear(self) -> list[WaitingCall]:
        """Settle, remove and return all waiting requests."""
        left = list(self.waiting.values())
        for request in left:
            self.drop(request)
        return left

    def _remove(self, request: WaitingCall) -> None:
        request.outside = False
        del self.waiting[id(request)]
        self._deadlines.discard(id(request))


# Is called with each request that comes before the workers have started, and the time. It has them started, and returns the error that
# refuses the request, or None if the request may wait for the start.
Demand = Callable[[Request, float], WeirError | None]


class WorkerStarts(NamedTuple):
    """The functions that a driver calls to have workers started when work comes that none can take; None where nothing starts them.

    `no_worker` is called when requests arrive and no worker is ready, and `start_bulk` once, when bulk work has come for the first time. With `demand`,
    requests wait for the start; `forsaken` is called when none does any more. `measurement` makes what measures the workers when they have started.
    """

    no_worker: Callable[[], None] | None = None
    start_bulk: Callable[[], None] | None = None
    measurement: "Callable[[Executor, Reserve | None], StartMeasurement] | None" = None
    demand: Demand | None = None
    forsaken: Callable[[], None] | None = None


class DriverPhase(Enum):
    """A driver is started once and stopped once."""

    NEW = "new"
    WAITING = "waiting"  # requests wait for the start
    RUNNING = "running"
    STOPPED = "stopped"


class Driver(BatcherUser):
    """Drives one batcher with one executor, whose Listener it is, from one start to one stop.

    Attributes:
        outside: requests that wait for room in the batcher's queue.
        outside_bulk: bulk requests that do; they have a queue of their own there too.
        streaming: whether requests have several responses.
        draining: whether no more requests are accepted.
        not_ready_reason: why requests are not accepted; "" if they are.
        failed: why no worker can be started any more; "" if one can.
    """

    def __init__(
        self, batcher: Batcher, executor: Executor, delivery: Delivery, clock: Callable[[], float], *, streaming: bool = False,
        starts: WorkerStarts, hooks: Callable[[HookUser], HookedBatches] | None = None, device: DeviceGroup | None = None,
    ) -> None:  # fmt: skip
        """`hooks` makes what runs the hooks of the service, for this driver. Raises SettingsError if the model cannot take turns with those of `device`."""
        self.batcher = batcher
        self._running = batcher.running
        self.outside = BackpressureQueue()
        self.outside_bulk = BackpressureQueue(bulk=True)
        self.streaming = streaming
        self.executor = executor
        self._hooks = None if hooks is None else hooks(self)
        self.phase = DriverPhase.NEW
        self.draining = False
        self._drains: list[asyncio.Event] = []
        self._ending = asyncio.Lock()  # held while `stop` ends the workers
        self.not_ready_reason = NOT_STARTED
        self.failed = ""
        # Workers that get no more batches. The event is set when the worker has no batch left.
        self._leaving: dict[int, asyncio.Event] = {}
        self._accepted: dict[int, Request] = {}  # by id(), see note_accepted
        # `_start_bulk` is None also once it has been called.
        self._no_worker, self._start_bulk, measurement, self._demand, self._forsaken = starts
        self._woken_at: float | None = None  # when there was a worker again after there had been none
        self._delivery = delivery
        self._clock = clock
        self._polling = False
        self._turn_began = 0.0  # when the first request of this turn of the event loop came
        self._looked_again = False
        self._batcher_draining = False
        self._logged: set[str] = set()
        self._measuring = measurement is not None  # until then, no worker gets a batch of requests
        sharing = capabilities_of(executor).sharing
        self.turns = None if device is None else DeviceTurns(device, self, executor, clock)
        if sharing is not None:
            sharing.join(self, None if device is None else device.workers)
        reserve = sharing.reserved if sharing is not None else None if self.turns is None else self.turns.reserved
        self._measurement = None if measurement is None else measurement(executor, reserve)

    async def start(self) -> None:
        """Start the workers; return when all are ready. Raises what the executor raises; the driver is stopped then."""
        if self.phase is DriverPhase.NEW:
            self._open()
        self.phase = DriverPhase.RUNNING
        try:
            await self._start_workers()
        except BaseException as error:
            self.phase = DriverPhase.STOPPED
            stopped = isinstance(error, asyncio.CancelledError)
            reason = self.not_ready_reason = STOPPED if stopped else str(error) or type(error).__name__
            self._fail_all(lambda request: self._not_ready(reason))
            self._timer.cancel()
            self._end_drains()
            await self._end_workers()  # a cancelled start may leave workers that are still loading
            raise
        # Meanwhile the driver may have been stopped, or all workers lost.
        if self.phase is DriverPhase.RUNNING and self.not_ready_reason == LOADING:
            self.not_ready_reason = ""
            self._call_bulk_workers()

    async def _start_workers(self) -> None:
        turns = self.turns
        if turns is not None:
            turns.open()
        await self.executor.start(self)
        if turns is not None:
            turns.started()
        if self._measurement is not None:
            await self._measurement.measure_all()
            self._measuring = False
            now = self._clock()
            if self._woken_at is not None:
                self._woken_at = now
            self._poll(Wakeup.WORKER, now)

    def _open(self) -> None:
        """Let requests wait for the start."""
        self._loop = asyncio.get_running_loop()
        self._timer = Timer(self._clock, self._loop, self._timer_due)
        self.not_ready_reason = LOADING
        self.phase = DriverPhase.WAITING

    async def stop(self, drain_timeout: float) -> None:
        """Accept no more requests, give the accepted ones `drain_timeout` seconds to finish, fail the rest with Draining, and
        stop the workers. A second stop waits for the end of the workers, too."""
        if not self._is_open:
            if self.phase is DriverPhase.NEW and self._demand is not None:  # else a request could still have it started
                self.phase, self.not_ready_reason = DriverPhase.STOPPED, STOPPED
            async with self._ending:
                return
        try:
            await self.drain(drain_timeout)
        finally:
            was_started = self.phase is not DriverPhase.WAITING
            self.phase = DriverPhase.STOPPED
            self.not_ready_reason, self.failed = STOPPED, ""
            self._fail_all(lambda request: stopped(f"model {self._delivery.model!r}", "the response was ready"))
            self._end_drains()
            if self.streaming:
                for each in self.batcher.running.values():
                    self._cancel(each.worker, each.batch_id, range(len(entries_of(each))))
            self._timer.cancel()
            if was_started:
                async with self._ending:
                    await self._end_workers()

    async def _end_workers(self) -> None:
        if self._measurement is not None:
            self._measurement.cancel()
        if self._hooks is not None:
            await self._hooks.stop()
        try:
            await self.executor.stop()
        finally:
            if self.turns is not None:  # only now: a worker may finish a batch before it ends
                await self.turns.close()

    async def drain(self, seconds: float) -> None:
        """Accept no more requests; return when all accepted ones have ended, or after `seconds` seconds."""
        self.draining = True
        if not self._is_open:
            return
        ended = asyncio.Event()  # of its own: another drain may be given less time
        self._drains.append(ended)
        limit = TimeLimit(self._loop, seconds, ended.set, self._clock)
        limit.begin()
        try:
            self._poll(Wakeup.ARRIVAL, self._clock())
            await ended.wait()
        finally:
            limit.close()
            self._drains.remove(ended)

    def workers(self) -> list[int]:
        """Return the indices of the workers, whatever their state, without those for bulk work only."""
        return [state.index for state in for_all_work(self.executor.states())]

    async def add_worker(self) -> None:
        """Start one more worker; return when it is ready. Raises what the executor raises."""
        await self.executor.add_worker()

    async def remove_worker(self, worker: int, seconds: float) -> None:
        """Give `worker` no more batches, let it finish those that it has, and stop it. Batches that
        are unfinished after `seconds` seconds run again on another worker."""
        empty = self._leaving[worker] = asyncio.Event()
        limit = TimeLimit(self._loop, seconds, empty.set, self._clock)
        try:
            if not self.batcher.worker_leaves(worker):
                limit.begin()
                await empty.wait()
        finally:
            limit.close()
            self.worker_lost(worker, "")
            try:
                await self.executor.remove_worker(worker)
            finally:
                del self._leaving[worker]
                if self.turns is not None:  # only now: it may finish a batch before it ends
                    self.turns.worker_lost(worker)

    # Requests.

    @property
    def _is_open(self) -> bool:
        return self.phase in (DriverPhase.WAITING, DriverPhase.RUNNING)

    @property
    def refusing(self) -> str:
        """The reason why requests are not accepted; "" if they are, also where they wait for the start."""
        return "" if self._waits_for_start else self.not_ready_reason

    @property
    def is_idle(self) -> bool:
        """Whether no request is here, not even one whose payload is just being received."""
        gauges = self.executor.gauges()
        return self.batcher.is_empty and not self._has_outside and gauges["arena_free_bytes"] == gauges["arena_bytes"]

    @property
    def _waits_for_start(self) -> bool:
        return self._demand is not None and self.not_ready_reason in (NOT_STARTED, LOADING)

    def submit(self, request: Request, now: float, waits: bool = False) -> None:
        """Put `request` into the queue. With `waits`, the request must be a WaitingCall, and waits while the queue is full.

        Raises ModelNotReady, Draining, Overloaded or DeadlineExceeded. The request was not accepted then, the observers have
        been notified, and the payload still belongs to the caller.
        """
        some_wait = self.outside.waiting or self.outside_bulk.waiting
        if (
            self.not_ready_reason or self.draining or (some_wait and self._outside(request).waiting)
        ) and not self._begins_wait_for_start(request, now):
            if self._waits_outside(request, waits):
                return
            raise self._refused(request, self._refusal())
        try:
            self.batcher.submit(request, now)
        except Exception as error:
            if isinstance(error, Overloaded) and self._waits_outside(request, waits):
                return
            settle(request)
            if isinstance(error, WeirError):
                self._delivery.refused(request, error)
            raise
        else:
            if not self._polling:  # as _schedule_poll does, which would be one more call for each lone request
                self._polling, self._turn_began = True, now
                self._loop.call_soon(self._poll_arrivals)

    def submit_all(self, requests: Sequence[Request], now: float) -> list[tuple[Request, WeirError]]:
        """Put `requests` in the queue, which differ in payload and arrival only and are in order of arrival. Return those that were not accepted, each
        with what `submit` raises."""
        refused: list[tuple[Request, WeirError]] = []
        if not (self.not_ready_reason or self.draining or self.outside.waiting or self.outside_bulk.waiting):
            requests = self.batcher.submit_alike(requests, now)
            if not self._polling:
                self._schedule_poll(now)
        for request in requests:
            try:
                self.submit(request, now)
            except WeirError as error:
                refused.append((request, error))
        return refused

    def _schedule_poll(self, now: float) -> None:
        self._polling, self._turn_began = True, now
        self._loop.call_soon(self._poll_arrivals)

    def _begins_wait_for_start(self, request: Request, now: float) -> bool:
        """Have the workers started for `request`, and return whether it may wait for that in the queue. Raises the error that
        refuses it."""
        if self._demand is None or self.refusing or not self.not_ready_reason or self.draining:
            return False
        if (refusal := self._demand(request, now)) is not None:
            try:
                raise self._refused(request, refusal)
            finally:
                del refusal  # a local of its own traceback would keep the request until the garbage is collected
        if self.phase is DriverPhase.NEW:
            self._open()
        return not self._outside(request).waiting

    def _waits_outside(self, request: Request, waits: bool) -> bool:
        if not waits or self.refusing or self.draining:
            return False
        self._outside(request).append(cast(WaitingCall, request))
        self._timer.arm(request.deadline)
        return True

    def _refused(self, request: Request, error: WeirError) -> WeirError:
        """Settle `request`, and return the error that refuses it."""
        settle(request)
        self._delivery.refused(request, error)
        return error

    def _outside(self, request: Request) -> BackpressureQueue:
        return self.outside_bulk if is_bulk(request) else self.outside

    @property
    def waiting_outside(self) -> int:
        """The number of requests that wait for room in the batcher's queue."""
        return len(self.outside) + len(self.outside_bulk)

    def _refusal(self) -> WeirError:
        name = self._delivery.model
        if self.refusing:
            hint = _START if self.not_ready_reason == NOT_STARTED else ""
            return self._not_ready(f"{self.not_ready_reason}{hint}")
        if self.draining:
            return draining(f"model {name!r}")
        # First come, first served: calls that wait for room come before this request.
        return Overloaded(f"the queue of model {name!r} is full", retry_after=self.batcher.drain_time())

    def _not_ready(self, reason: str) -> WeirError:
        return ModelNotReady(f"model {self._delivery.model!r} is not ready: {reason}")

    def note_accepted(self) -> None:
        """Record the requests that are here now, for `accepted`. No more may be submitted after this."""
        self._accepted = {id(request): request for request in self._all()}

    def _all(self) -> list[Request]:
        """Return the requests that are here."""
        return [*self.batcher.unsettled(), *self.outside.waiting.values(), *self.outside_bulk.waiting.values()]

    def waiters(self) -> dict[str, float]:
        """Return the earliest deadline of the requests that are here, by caller."""
        found: dict[str, float] = {}
        for request in self._all():
            found[request.form.caller] = min(request.deadline, found.get(request.form.caller, request.deadline))
        return found

    def accepted(self, request: Request) -> bool:
        """Return whether `request` was here when `note_accepted` was called."""
        return id(request) in self._accepted

    def cancel(self, request: Request) -> None:
        """Cancel `request`, whether it waits or runs; nothing happens if it has already ended."""
        if request.settled:
            return
        now = self._clock()
        if getattr(request, "outside", False):
            self._outside(request).drop(cast(WaitingCall, request))
        else:
            for worker, batch_id, indices in self.batcher.cancel(request, now):
                self._cancel(worker, batch_id, indices)
        self._delivery.cancelled(request, Cancelled("the caller disconnected"), now)
        self._note_if_emptied()
        self._note_if_forsaken()

    def _end(self, request: Request, error: WeirError, now: float) -> None:
        """Fail a running request, and cancel it at its worker."""
        if not request.settled:
            for each in self.batcher.cancel(request, now):
                self._cancel(*each)
            self._delivery.give_error(request, error, now)

    def _cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Note that no caller waits for these entries of a batch: the worker may leave them out."""
        if self._hooks is not None:
            indices = self._hooks.cancel(batch_id, indices)
            if not indices:
                return
        self.executor.cancel(worker, batch_id, indices)

    def policy_changed(self) -> None:
        """Let the policy, which has changed, decide again about all waiting requests."""
        self.batcher.reconsider()
        self._poll(Wakeup.TIMER, self._clock())

    def reserve(self, size_bytes: int) -> Block | None:
        """Return a place of `size_bytes` bytes in shared memory, or None if there is none."""
        if self.phase is not DriverPhase.RUNNING:
            return None
        block = self.executor.reserve(size_bytes)
        if block is not None:
            self._delivery.blocks_in_use = True
        return block

    def ended_outside(self, frontend: str, error: WeirError) -> None:
        """Notify the observers of an error of a request that is not in the queue; see Delivery."""
        self._delivery.ended_outside(frontend, error, self._clock())

    def may_have_blocks(self, other: "Driver") -> None:
        """Expect requests whose payloads are in shared memory of `other`."""
        self._delivery.blocks_in_use |= other._delivery.blocks_in_use

    # What the executor reports (Listener).

    def worker_ready(self, worker: int, places: int, *, bulk: bool = False) -> None:
        if worker in self._leaving:
            return
        self._worker_changed(worker, "ready", "")
        now = self._clock()
        if self._measurement is not None:
            self._measurement.worker_ready(worker, places)
        if self.turns is not None:
            self.turns.worker_ready(worker, bulk=bulk)
        if not bulk:
            if self.failed:
                self.failed = self.not_ready_reason = ""
            if not self.batcher.workers:
                self._woken_at = now
        if self._hooks is not None:
            places = self._hooks.worker_ready(worker, places)
        self.batcher.worker_ready(worker, places, now, bulk=bulk)
        self._poll(Wakeup.WORKER, now)

    def worker_lost(self, worker: int, reason: str) -> None:
        leaving = self._leaving.get(worker)
        if leaving is not None:
            leaving.set()
        if self._measurement is not None:
            self._measurement.worker_lost(worker, reason)
        if self._hooks is not None:
            self._hooks.worker_lost(worker)
        self._worker_changed(worker, "lost" if leaving is None else "stopped", reason)
        now = self._clock()
        for lost in self.batcher.worker_lost(worker, now):
            self._delivery.give_each(fail_entries(lost, reason), lost.dispatch, now)
            self._leave_out_rest(lost.dispatch)
        self._poll(Wakeup.WORKER, now)
        if self.turns is not None and leaving is None:
            self.turns.worker_lost(worker)

    def worker_leaves(self, worker: int) -> None:
        self.batcher.worker_leaves(worker)

    def received(self, worker: int, events: Events) -> None:
        if self._measurement is not None and self._measurement.has(events.batch_id):
            self._measurement.received(worker, events)
            return
        takes_turns = self.turns is not None and events.final and self.turns.ends(worker)
        left = events if self._hooks is None else self._hooks.received(worker, events)
        if left is not None:
            self.deliver(worker, left)
        if self.turns is not None and takes_turns:
            self.turns.ended(worker)

    def deliver(self, worker: int, events: Events) -> None:
        """Give the callers what has come of a batch; with its end, the worker gets its next one."""
        now = self._clock()
        dispatch = self._running.get(events.batch_id)
        if dispatch is None:
            for output in events.outputs:
                discard(output)
            return
        if dispatch.due <= now:
            self._expire(now)  # a response after the deadline does not count
        if events.final:
            # The freed worker gets its next batch before the responses of this one are delivered.
            self.batcher.finished(events.batch_id, now)
            if worker in self._leaving and self.batcher.worker_leaves(worker):
                self._leaving[worker].set()
            self._poll(Wakeup.WORKER, now)
        refused = self._delivery.give_parts(dispatch, events, now) if self.streaming else ()
        self._delivery.give(dispatch, events, now)
        if dispatch.slices is not None and events.kinds is not None:
            self._leave_out_rest(dispatch)
        if not events.final and (failed := events.failed()):
            # The worker may not know: a part of a stream may have been lost on its way here.
            self._cancel(worker, events.batch_id, failed)
        for request, error in refused:
            self._end(request, error, now)
        if self.draining:
            self._note_if_emptied()

    def _leave_out_rest(self, dispatch: Dispatch) -> None:
        """Have workers leave out the other pieces of divided requests that have ended with a piece in this batch."""
        for each in self.batcher.where(request for request in dispatch.requests if request.settled):
            self._cancel(*each)

    def measured(self, worker: int, reports: Sequence[MetricReport]) -> None:
        if self._measurement is not None:
            reports = self._measurement.counted(worker, reports)
        self._delivery.tell("metrics_reported", worker, reports)

    def unavailable(self, reason: str) -> None:
        self.failed = self.not_ready_reason = reason
        for worker in self.executor.states():
            if worker.state == "failed":
                self._worker_changed(worker.index, "failed", worker.reason)
        self._fail_all(lambda request: self._not_ready(reason))
        self._note_if_emptied()

    @property
    def label(self) -> str:
        """The label of the model."""
        return self._delivery.model

    def poll_worker(self) -> None:
        """See BatcherUser."""
        self._poll(Wakeup.WORKER, self._clock())

    # One turn: decide, dispatch, arm the timer.

    def _poll_arrivals(self) -> None:
        now = self._clock()
        self.batcher.took_turn(now - self._turn_began)
        if not self._looked_again and self.batcher.could_grow(MANY):
            # Without this, callers part into groups that take turns, with a small batch for every large one.
            self._looked_again = True
            self._schedule_poll(now)
            return
        self._polling = self._looked_again = False
        if self._start_bulk is not None:
            self._call_bulk_workers()
        self._poll(Wakeup.ARRIVAL, now)
        if self._no_worker is not None and not self.batcher.workers and not self.not_ready_reason:
            self._no_worker()

    def _call_bulk_workers(self) -> None:
        if self._start_bulk is not None and self.batcher.waiting_bulk and not self.not_ready_reason:
            self._start_bulk()
            self._start_bulk = None

    def _timer_due(self) -> None:
        now = self._clock()
        self._expire(now)
        self._poll(Wakeup.TIMER, now)
        self._arm()

    def _arm(self) -> None:
        self._timer.arm(self.batcher.next_wakeup)
        for outside in (self.outside, self.outside_bulk):
            if outside.waiting:
                self._timer.arm(outside.next_deadline())

    def _poll(self, wakeup: Wakeup, now: float) -> None:
        batcher, outside = self.batcher, self.outside.waiting or self.outside_bulk.waiting
        if not (batcher.has_waiting or outside or self.draining):
            return  # there is nothing to decide, and the timer is armed for what runs
        if not self._measuring:
            self._run_all(batcher.poll(now, wakeup))
            while outside and self._has_outside and self._admit(now):
                self._run_all(batcher.poll(now, Wakeup.ARRIVAL))
            if self.draining and not self._has_outside and not self._batcher_draining:
                self._batcher_draining = True
                batcher.drain()
                self._run_all(batcher.poll(now, wakeup))
            if batcher.has_left_out:
                self._expire(now)  # at once: whoever is called before would take them for ended
            if batcher.policy_error is not None:
                self._policy_raised(batcher.policy_error)
        if outside or batcher.has_waiting:
            self._arm()
        if self.draining:
            self._note_if_emptied()

    @property
    def _has_outside(self) -> bool:
        return bool(self.outside.waiting or self.outside_bulk.waiting)

    def _policy_raised(self, error: Exception) -> None:
        self.batcher.policy_error = None
        if repr(error) not in self._logged:  # log it once, not at every decision
            self._logged.add(repr(error))
            logger.error(
                "the policy of model %r failed; its batches did not wait", self._delivery.model, exc_info=error
            )

    def _run_all(self, dispatches: list[Dispatch]) -> None:
        others = len(dispatches) + self.batcher.waiting_interactive
        for dispatch in dispatches:
            if self._woken_at is not None:
                self._note_woken(dispatch, self._woken_at)
            batch = to_batch(dispatch)
            others -= 1
            batch.others = others
            try:
                if self._hooks is None:
                    self.hand(dispatch.worker, batch)
                else:
                    self._hooks.run(dispatch.worker, batch)
            except Exception as error:
                self._could_not_run(dispatch, batch, error)
            if self._hooks is None:
                self._delivery.tell("dispatched", dispatch)
            if dispatch.due < self._timer.armed:
                self._timer.arm(dispatch.due)

    def _note_woken(self, dispatch: Dispatch, woken_at: float) -> None:
        """Tell a batch that its requests have waited for a worker to start; the first one that has not is the last to be asked."""
        if dispatch.at - dispatch.oldest_age < woken_at:
            dispatch.woken_at = woken_at
        else:
            self._woken_at = None

    def hand(self, worker: int, batch: Batch) -> None:
        """Give `worker` a batch."""
        self.executor.run(worker, batch)
        if self.turns is not None:
            self.turns.began(worker)

    def handed(self, batch_id: int) -> None:
        """Record that a batch with hooks has only now gone to its worker: the time before counts as waiting."""
        dispatch = self._running.get(batch_id)
        if dispatch is not None:
            dispatch.at = self._clock()
            self._delivery.tell("dispatched", dispatch)

    def _could_not_run(self, dispatch: Dispatch, batch: Batch, error: Exception) -> None:
        logger.exception("batch %d could not be handed to worker %d", dispatch.batch_id, dispatch.worker)
        failure = error if isinstance(error, WeirError) else ModelError(f"the batch could not be run: {error!r}")
        events = Events(batch.batch_id, [*copies(failure, len(batch.payloads))])
        # Not at once: the batcher is still returning dispatches.
        self._loop.call_soon(self.deliver, dispatch.worker, events)

    def _admit(self, now: float) -> bool:
        """Submit the waiting calls for which the queue has room; return whether there was one."""
        batcher, admitted = self.batcher, False
        for outside in (self.outside, self.outside_bulk):
            while (request := outside.pop(batcher.room)) is not None:
                try:
                    batcher.submit(request, now)
                    admitted = True
                except WeirError as error:
                    settle(request)
                    self._delivery.give_error(request, error, now)
        return admitted

    def _expire(self, now: float) -> None:
        late = self.batcher.expire(now)
        for each in self.batcher.where(late):  # a worker that has not begun them need not; a stream need not go on
            self._cancel(*each)
        for outside in (self.outside, self.outside_bulk):
            if outside.waiting:
                late += outside.expire(now)
        if late:
            self._delivery.fail(late, self._too_late, now)
            self._note_if_forsaken()

    def _too_late(self, request: Request) -> WeirError:
        """Return the error of a request whose deadline has passed. One that has waited for the start may come again once that is done."""
        refusal = self._demand(request, self._clock()) if self._waits_for_start and self._demand else None
        return refusal or too_late(request)

    def _fail_all(self, error: Callable[[Request], WeirError]) -> None:
        left = self.outside.clear() + self.outside_bulk.clear() + self.batcher.abandon()
        self._delivery.fail(left, error, self._clock())

    def _worker_changed(self, worker: int, state: str, reason: str) -> None:
        self._delivery.tell("worker_changed", worker, state, reason)

    def _note_if_emptied(self) -> None:
        if self.draining and not self._has_outside and self.batcher.is_empty:
            self._end_drains()

    def _note_if_forsaken(self) -> None:
        if self._forsaken is not None and self._waits_for_start and self.batcher.is_empty and not self._has_outside:
            self._forsaken()

    def _end_drains(self) -> None:
        for each in self._drains:
            each.set()


def too_late(request: Request) -> WeirError:
    """Return the error of a request whose deadline has passed."""
    return DeadlineExceeded(f"no response within the timeout of {request.form.timeout:g} s")
