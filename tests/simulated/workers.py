"""Workers without processes: what happens to a batch is the real code of workers, how long it takes and what fails is simulated."""

import asyncio
import math
import random
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulated.arenas import Arenas, WorkerMemory
from tests.simulated.models import Crash, Hang

from weir.errors import ModelError, ModelNotReady
from weir.messages import Batch, EventKind, Events, Kind, Request
from weir.model import Model
from weir.workers.arena import SharedBlock
from weir.workers.executor import Capabilities, ExecutorBase, HeldTurn, Listener, Turns, free_index
from weir.workers.local import LocalState
from weir.workers.run.runner import RunnableModel, Runner
from weir.workers.timer import resolve

if TYPE_CHECKING:
    from tests.simulated.devices import Device
    from tests.simulated.scaling import Scaling
    from tests.simulated.world import World


@dataclass(frozen=True)
class WorkerPlan:
    """How the workers of one model are. Durations are in seconds."""

    workers: int = 1
    places: int = 2
    base: float = 0.005  # of every batch
    per_row: float = 0.0005
    spread: float = 0.2  # the relative deviation of a batch
    start: float = 0.5  # until a worker is ready
    hang_limit: float = 5.0  # after which a worker that hangs is killed
    failing_starts: float = 0.0  # the share of replacements that do not load
    latency: float = 0.0  # until the server has what a worker has sent
    aimed: float = 0.0  # the share of batches that end when a request is due, if they can; starts do so twice as often

    @property
    def longest(self) -> float:
        """How long any batch takes at most that is neither a stream nor hangs, twice."""
        return 4.0 * (self.base + 64 * self.per_row)


LINGERS = (0.0, 0.001, 0.05, 1.0)  # seconds for which a worker of a device that is stopped finishes its batches
NEAR = (-0.0002, 0.0, 0.0001, 0.0001)  # seconds from when a request is due; timers may be half a millisecond away
LATEST_START = 3.0  # seconds after which a start that is aimed ends
PATIENCE = 5  # failures to load in a row after which no request should wait
MOST_DEATHS = 9  # by one item: one of its batch of at most 64, one of each half, and one more of the item alone


class _Worker:
    def __init__(self, index: int) -> None:
        self.state = LocalState(index)
        self.runner: Runner | None = None
        self.memory: WorkerMemory | None = None  # which it shares with the server, if there are arenas
        self.life = 0  # how often it has been started
        self.queue: deque[Batch] = deque()
        self.failures = 0
        self.idle_since = math.inf
        self.cancelled: dict[int, set[int]] = {}
        self.sent: set[int] = set()  # the batches whose last events are on their way to the server
        self.orphans: list[int] = []  # the entries of the batch that runs whose requests had ended when it began
        self.turn = HeldTurn(None, index)  # in which it warms up
        self.granted: asyncio.Future[None] | None = None
        self.warms = False

    def end(self) -> None:
        """Nothing more comes from it in this life."""
        self.life += 1
        self.warms = False
        self.turn.end()
        if self.granted is not None:
            resolve(self.granted, None)
        self.queue.clear()
        self.state.in_flight = 0
        if self.memory is not None:
            self.memory.close()


class SimulatedExecutor(ExecutorBase):
    """An executor whose workers live in virtual time. `idle_since` is the instant since which one worker has nothing to do; infinity if none has."""

    def __init__(
        self, world: "World", model: type[Model], plan: WorkerPlan, draw: random.Random, *, largest: int,
        params: dict[str, Any] | None = None, arenas: Arenas | None = None, device: "Device | None" = None,
        scaling: "Scaling | None" = None,
    ) -> None:  # fmt: skip
        self._world, self._loop, self._broken = world, world.loop, world.broken
        self.model, self._plan, self._draw, self._largest = model, plan, draw, largest
        self._workers = {index: _Worker(index) for index in range(plan.workers)}
        self._listener: Listener
        self._device, self.scaling = device, scaling
        self._turns: Turns | None = None
        self.lingering: set[int] = set()  # what computes after it was stopped
        self._ended = asyncio.Event()  # nothing does
        self._ended.set()
        self._params = params or {}
        self.arenas = arenas
        self.unavailable = True
        self.stopped = False
        self.deaths = 0
        self._deaths_of: dict[int, tuple[Request, int]] = {}  # of items, by id()
        self.idle_since = math.inf

    async def start(self, listener: Listener) -> None:
        self._listener, self.stopped = listener, False
        await asyncio.sleep(self._plan.start)
        if self.stopped or not all(await asyncio.gather(*map(self._warm_up, self._workers.values()))):
            raise ModelNotReady("stopped before it was ready")
        for worker in self._workers.values():
            self._ready(worker)

    @property
    def capabilities(self) -> Capabilities:
        """See Capabilities."""
        return Capabilities(warm_up_in=None if self._device is None else self._warm_up_in)

    def _warm_up_in(self, turns: Turns) -> None:
        self._turns = turns

    async def _warm_up(self, worker: _Worker) -> bool:
        """Have a worker that starts compute the batches of its warm-up when it has its turn. Return whether it still starts then."""
        life, device = worker.life, self._device
        if device is not None:
            worker.turn, worker.granted = HeldTurn(self._turns, worker.state.index), self._loop.create_future()
            worker.turn.ask(partial(resolve, worker.granted, None))
            await worker.granted
            if worker.life == life:
                device.begins(self, worker.state.index)
                worker.warms = True
                device.look()
                await asyncio.sleep(self._plan.base)
            if worker.life == life:
                worker.warms = False
                worker.turn.end()
        return worker.life == life and not self.stopped

    def run(self, worker: int, batch: Batch) -> None:
        each = self._workers[worker]
        if each.state.state != "ready" or len(each.queue) >= self._plan.places:
            raise AssertionError(f"worker {worker} ({each.state.state}) got a batch beside {len(each.queue)}")
        if self._device is not None:
            self._device.begins(self, worker)
        if each.memory is not None:
            each.memory.send(batch)
        each.queue.append(batch)
        each.state.in_flight += 1
        self._look_for_idle()
        if len(each.queue) == 1:
            self._begin(each)

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        self._workers[worker].cancelled.setdefault(batch_id, set()).update(indices)

    async def stop(self) -> None:
        self.stopped = True
        computing = {index for index, worker in self._workers.items() if worker.queue}
        for worker in self._workers.values():
            worker.end()
            worker.state.state = "stopped"
        await self._linger(computing)
        await self._ended.wait()  # one that is being removed computes, too

    async def _linger(self, computing: set[int]) -> None:
        """Return when the workers at these places of the device, which were stopped, have ended."""
        self.lingering |= computing
        self._look_for_idle()
        if self._device is not None and computing:
            self._ended.clear()
            try:
                await asyncio.sleep(self._draw.choice(LINGERS))
            finally:
                self.lingering -= computing
                if not self.lingering:
                    self._ended.set()
                self._look_for_idle()

    async def add_worker(self) -> None:
        index = free_index(self._workers)
        worker = self._workers[index] = _Worker(index)
        if self.scaling is not None:
            self.scaling.begins(self)
        try:
            await asyncio.sleep(self._plan.start)
            if self.scaling is not None:
                self.scaling.check_start(self)
        except BaseException as error:
            del self._workers[index]
            if self.scaling is not None:
                self.scaling.changed(self)
            if isinstance(error, ModelError) and not any(
                each.state.state == "ready" for each in self._workers.values()
            ):
                self._become(unavailable=True)
            raise
        if not self.stopped and self._workers.get(index) is worker and await self._warm_up(worker):
            self._ready(worker)

    async def remove_worker(self, worker: int | None = None) -> None:
        index = max(self._workers) if worker is None else worker
        removed, computing = self._workers.pop(index, None), set[int]()
        if removed is not None:
            computing = {index} if removed.queue else computing
            self.deaths += bool(removed.queue)
            removed.end()
        if self.scaling is not None:
            self.scaling.changed(self)
        await self._linger(computing)

    def reserve(self, size_bytes: int) -> SharedBlock | None:
        return None if self.arenas is None or self.stopped else self.arenas.requests.reserve(size_bytes)

    def gauges(self) -> dict[str, Any]:
        return super().gauges() | ({} if self.arenas is None else self.arenas.gauges())

    def states(self) -> Sequence[LocalState]:
        return [self._workers[index].state for index in sorted(self._workers)]

    def has(self, worker: int, batch_id: int) -> bool:
        """Return whether a worker computes this batch, or has done so and the server does not know it yet."""
        each = self._workers.get(worker)
        return each is not None and (batch_id in each.sent or any(batch.batch_id == batch_id for batch in each.queue))

    # What happens in time.

    def kill(self, index: int) -> None:
        """End a worker, if it is ready, or is warming up again."""
        worker = self._workers.get(index)
        if worker is not None and (worker.state.state == "ready" or (worker.warms and worker.state.restarts)):
            self._die(worker, "killed by the simulation")

    def _ready(self, worker: _Worker) -> None:
        worker.life += 1
        worker.failures = 0
        model = RunnableModel(self.model, self._params, self._largest)
        worker.runner = Runner(model, worker.state.index, fatal=(Crash, Hang))
        worker.runner.start()
        if self.arenas is not None:
            worker.memory = self.arenas.of_worker(self.model, worker.runner)
        worker.state.state, worker.state.reason = "ready", ""
        self._look_for_idle()
        self._become(unavailable=False)
        self._listener.worker_ready(worker.state.index, self._plan.places)

    def _begin(self, worker: _Worker) -> None:
        batch = worker.queue[0]
        plan = self._plan
        worker.orphans = [index for index, request in enumerate(batch.requests) if request.settled]
        mean, now = plan.base + plan.per_row * len(batch.payloads), self._loop.now
        seconds = mean * (1.0 + plan.spread * self._draw.uniform(-1.0, 1.0))
        at = self._aimed(now + seconds, batch.requests, now + 2.0 * mean, plan.aimed)
        self._loop.happen_at(at, self._finish, worker, worker.life, batch)

    def _aimed(self, at: float, requests: Iterable[Request], longest: float, share: float) -> float:
        """Return when something ends that ends `at`, or else, now and then, about when one of `requests` is due, if that is not after `longest`."""
        if share and self._draw.random() < share:
            due = min((each.deadline for each in requests if each.deadline > self._loop.now), default=math.inf)
            due += self._draw.choice(NEAR)
            if self._loop.now < due <= longest:
                return due
        return at

    def _finish(self, worker: _Worker, life: int, batch: Batch) -> None:
        if worker.life != life:
            return
        assert worker.runner is not None
        if worker.memory is None:
            payloads = [getattr(payload, "view", payload) for payload in batch.payloads]
            sent = replace(batch, payloads=payloads)
        else:
            sent = worker.memory.read(batch)
        cancelled = worker.cancelled.setdefault(batch.batch_id, set())  # grows while a stream runs
        prepared = worker.runner.prepare(sent)
        self._step(worker, life, batch, worker.runner.run(prepared, cancelled), set())

    def _step(
        self, worker: _Worker, life: int, batch: Batch, run: Generator[Events, None, None], ended: set[int]
    ) -> None:
        """Deliver the next events of a batch: the only ones, but for a streaming model. `ended`: the entries that have had their end."""
        if worker.life != life:
            return
        cancelled = worker.cancelled[batch.batch_id]
        if left := set(worker.orphans) - cancelled - ended:  # what ended just before that may have been withdrawn since
            self._broken(f"a worker computes entries {left} of batch {batch.batch_id}, whose requests had ended before")
        try:
            events = next(run)
        except Crash:
            self._die(worker, "the item ended it")
            return
        except Hang:
            self._loop.call_later(self._plan.hang_limit, self._hung, worker, life)
            return
        if not events.final:
            kinds = events.kinds or [EventKind.ERROR] * len(events.outputs)
            those = zip(events.indices or (), kinds, strict=True)
            ended.update(index for index, kind in those if kind is not EventKind.PART)
            self._send(worker, batch, events)
            worker.orphans = [index for index, request in enumerate(batch.requests) if request.settled]
            self._loop.call_later(self._plan.base * self._draw.random(), self._step, worker, life, batch, run, ended)
            return
        del worker.cancelled[batch.batch_id]
        worker.queue.popleft()
        worker.state.in_flight -= 1
        self._look_for_idle()
        if worker.queue:
            self._begin(worker)
        self._send(worker, batch, events)

    def _send(self, worker: _Worker, batch: Batch, events: Events) -> None:
        """Have the server receive `events` of `batch`, unless the worker is lost before."""
        sent = events if worker.memory is None else worker.memory.write(events)
        if not self._plan.latency:
            self._arrive(worker, worker.life, batch, sent)
        else:
            if events.final:
                worker.sent.add(events.batch_id)
            self._loop.happen_at(self._loop.now + self._plan.latency, self._arrive, worker, worker.life, batch, sent)

    def _arrive(self, worker: _Worker, life: int, batch: Batch, sent: Events | bytearray) -> None:
        if worker.life == life:
            if isinstance(sent, bytearray):
                assert worker.memory is not None
                sent = worker.memory.receive(sent, batch)
            if sent.final:
                worker.sent.discard(batch.batch_id)
            self._listener.received(worker.state.index, sent)

    def _hung(self, worker: _Worker, life: int) -> None:
        if worker.life == life:
            self._die(worker, "it hung, and was killed")

    def _die(self, worker: _Worker, reason: str) -> None:
        self.deaths += 1
        if self.scaling is not None:
            self.scaling.excuse()
        lost = [request for batch in worker.queue for request in batch.requests]
        for batch in worker.queue:
            self._count_deaths(batch)
        worker.end()
        worker.sent.clear()
        worker.cancelled.clear()
        worker.state.state, worker.state.reason = "lost", reason
        worker.state.restarts += 1
        self._look_for_idle()
        now = self._loop.now
        latest = now + max(self._plan.start, LATEST_START)
        ready = self._aimed(now + self._plan.start, lost, latest, 2.0 * self._plan.aimed)
        self._loop.happen_at(ready, self._restart, worker, worker.life)
        self._listener.worker_lost(worker.state.index, reason)

    def _restart(self, worker: _Worker, life: int) -> None:
        if self.stopped or worker.life != life or self._workers.get(worker.state.index) is not worker:
            return
        if self._draw.random() >= self._plan.failing_starts:
            if self._device is None:
                self._ready(worker)
            else:
                asyncio.ensure_future(self._warm_up_again(worker))  # noqa: RUF006  # the loop has it until it ends
            return
        worker.life += 1
        worker.failures += 1
        worker.state.state = "failed" if worker.failures >= PATIENCE else "lost"
        worker.state.reason = "it does not load"
        self._loop.call_later(min(0.1 * 2.0**worker.failures, 30.0), self._restart, worker, worker.life)
        if all(each.failures >= PATIENCE for each in self._workers.values()):
            self._become(unavailable=True)
            self._listener.unavailable("no worker is left")

    async def _warm_up_again(self, worker: _Worker) -> None:
        if await self._warm_up(worker):
            self._ready(worker)

    def _count_deaths(self, batch: Batch) -> None:
        """An item may end so many workers, and no more."""
        for request in batch.requests:
            if request.form.kind is Kind.ITEM:
                _, before = self._deaths_of.get(id(request), (request, 0))
                self._deaths_of[id(request)] = request, before + 1
                if before >= MOST_DEATHS:
                    self._broken(f"an item was with {before + 1} workers when they died")

    @property
    def driver(self) -> Any:
        """The driver whose batches these are."""
        return self._listener

    def computes(self, index: int) -> bool:
        """Return whether a worker computes."""
        worker = self._workers.get(index)
        return index in self.lingering or (worker is not None and bool(worker.queue or worker.warms))

    def is_idle(self, index: int) -> bool:
        """Return whether a worker is ready and has nothing to do."""
        worker = self._workers.get(index)
        return worker is not None and worker.state.state == "ready" and not worker.queue

    def _look_for_idle(self) -> None:
        """Note since when each worker has nothing to do: also those of other models, at whose places this one computes."""
        if self._device is None:
            self.look_for_idle()
        else:
            self._device.look()

    def look_for_idle(self) -> None:
        """Note since when each worker has nothing to do, and its place on the device is free."""
        for index, each in self._workers.items():
            idle = self.is_idle(index) and not (self._device is not None and self._device.used(index))
            each.idle_since = min(each.idle_since, self._loop.now) if idle else math.inf
        self.idle_since = min((each.idle_since for each in self._workers.values()), default=math.inf)

    def _become(self, *, unavailable: bool) -> None:
        if self.unavailable != unavailable:
            self.unavailable = unavailable
            self._world.readiness_changed()
