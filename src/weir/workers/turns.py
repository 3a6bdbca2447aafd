"""Models that take turns on a device: each has workers of its own, and one of them computes at a time.

    group = DeviceGroup("gpu0")
    first = Service(First, device=group)
    second = Service(Second, device=group)

Worker 0 of every model has the same *place* on the device, and so have all workers 1, and so on. At one time a place is
used by one model; to the others their workers there are away. `workers` of the models therefore says how many batches
the device runs at once. Whose turn it is, SharedWorkers says (batching/workers.py), in the order of the group.

Workers of any kind can take turns: nothing is shared but time. Models that fit one environment can share processes
too (process/shared.py), which takes less memory; their group says in which order. Workers for bulk work alone take no turns: the system gives them
what is left.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from math import isfinite
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from weir.batching.batcher import Batcher
from weir.batching.workers import SOLVED, ComparedTurns, Reservation, SharedWorkers, WorkerUser
from weir.errors import SettingsError
from weir.messages import Batch, Events
from weir.metrics import MetricReport
from weir.workers.executor import Executor, Listener, SharesWorkers, StartsBulkWorkers, WarmsUpInTurns, reserved


class Member(WorkerUser, Protocol):
    """One of the models of a group: what drives its batcher."""

    @property
    def label(self) -> str:
        """The label of the model."""

    @property
    def batcher(self) -> Batcher:
        """Its batcher."""

    def policy_changed(self) -> None:
        """Let the policy decide again about all that waits."""


class Follower(Protocol):
    """Keeps what the order of a group depends on up to date while models of the group run."""

    def joined(self, user: Member) -> None:
        """A model is going to start. Raises SettingsError if it cannot be in the group."""

    def started(self, user: Member) -> None:
        """A model runs."""

    async def left(self, user: Member) -> None:
        """A model has ended."""


@runtime_checkable
class SharesInOrder(SharesWorkers, Protocol):
    """An Executor that shares its workers in an order which it may be given."""

    @property
    def pool(self) -> object:
        """What has the workers."""

    def order_by(self, workers: SharedWorkers[Any]) -> None:
        """Give the workers away by `workers`, to which nothing else belongs. Called before `join`."""


class DeviceGroup:
    """The models that take turns on one device.

    Arguments:
        name: for log lines and errors.
        order: one of batching/workers.py's ORDERS.
        follower: is notified of the models.
    """

    def __init__(self, name: str, *, order: str = SOLVED, follower: Follower | None = None) -> None:
        self.name = name
        self.order = order
        self.follower = follower
        self.workers: SharedWorkers[Member] = SharedWorkers(order)
        self.resizing = asyncio.Lock()
        self._owners: set[Any] = set()  # the pool of the models; None if each has workers of its own

    def settings(self) -> dict[str, str]:
        """Return the settings of a model of this group."""
        return {"device_group": self.name, "device_order": self.order}

    def member(self, own: Executor) -> "GroupMember":
        """Return the executor of a model of the group, around its own. Raises SettingsError if the workers cannot take turns."""
        shares = own if isinstance(own, SharesInOrder) else None
        if shares is None and isinstance(own, SharesWorkers):
            raise SettingsError(
                f"device_group={self.name!r}: the executor shares its workers, whose models take turns already; leave out "
                "the group, or the executor"
            )
        if self._owners - {owner := None if shares is None else shares.pool}:
            raise SettingsError(
                f"device_group={self.name!r}: some of its models share workers, and others do not share these; give all "
                "the same pool, or none"
            )
        self._owners.add(owner)
        if shares is not None:
            shares.order_by(self.workers)
            return GroupMember(self, own)
        return TurnsWithBulk(self, own) if isinstance(own, StartsBulkWorkers) else TakesTurns(self, own)

    def explain(self, user: Member, now: float) -> dict[str, Any]:
        """Return what time of the device `user` has had, why it was next, and how the models compare at present, as a JSON-able dict.

        Instants are told as seconds from `now` on.
        """
        brief, (_, compared) = self.brief(user, now), self.workers.last(user)
        reason = brief.pop("because")
        models = [] if compared is None else _shown(compared, now)
        return {**brief, "last": {"reason": reason, "models": models}, "models": _shown(self.workers.present(now), now)}

    def brief(self, user: Member, now: float) -> dict[str, Any]:
        """Return what time of the device `user` has had, and why it was next, as a JSON-able dict."""
        busy = {each: self.workers.busy(each, now) for each in self.workers.users}
        own, (reason, _) = busy.get(user, 0.0), self.workers.last(user)
        return {
            "group": self.name,
            "order": self.order,
            "busy_seconds": own,
            "share": own / (sum(busy.values()) or 1.0),
            "turns": self.workers.taken(user),
            "because": reason or None,
        }


def _shown(compared: ComparedTurns[Member], now: float) -> list[dict[str, Any]]:
    """Return the models in their order, as a JSON-able list. An urgency that is not finite means that the policy waits."""
    shown = []
    for user in compared.order:
        turn = compared.turns.get(user)
        urgency = None if turn is None or turn.urgency is None or not isfinite(turn.urgency) else turn.urgency
        shown.append(
            {
                "model": user.label,
                "waiting": 0 if turn is None else turn.waiting,
                "urgency": urgency,
                "due_in": None if turn is None else turn.due - now,
                "must_begin": user in compared.due,
            }
        )
    return shown


class GroupMember:
    """The Executor of one model of a DeviceGroup, around one of its own, whose workers it shares with all models of the group."""

    own: Any

    def __init__(self, group: DeviceGroup, own: Executor) -> None:
        self.own = own
        self._group = group
        self._user: Member
        self._running = False
        # These go to the own executor directly, without a further call.
        self.cancel = own.cancel
        self.reserve = own.reserve
        self.states = own.states
        self.gauges = own.gauges

    @property
    def added(self) -> int:
        """See SharesWorkers."""
        added: int = self.own.added
        return added

    @property
    def resizing(self) -> asyncio.Lock:
        """See SharesWorkers."""
        return self._group.resizing

    def join(self, user: Member) -> None:
        """See SharesWorkers."""
        self._user = user
        self.own.join(user)
        self._joined()

    def _joined(self) -> None:
        if self._group.follower is not None:
            self._group.follower.joined(self._user)

    def explain(self) -> dict[str, Any]:
        """See DeviceGroup.explain."""
        return self._group.explain(self._user, monotonic())

    def brief(self) -> dict[str, Any]:
        """See DeviceGroup.brief."""
        return self._group.brief(self._user, monotonic())

    async def start(self, listener: Listener) -> None:
        """Start the workers; from then on the model takes turns with the others of the group."""
        self._running = True
        await self.own.start(listener)
        if self._group.follower is not None and self._running:
            self._group.follower.started(self._user)

    def run(self, worker: int, batch: Batch) -> None:
        """See Executor."""
        self.own.run(worker, batch)

    def reserved(self, worker: int) -> AbstractAsyncContextManager[None]:
        """See ReservesWorkers."""
        made: AbstractAsyncContextManager[None] = self.own.reserved(worker)
        return made

    async def stop(self) -> None:
        """Take no more turns, and end the workers."""
        if self._running:
            self._running = False
            self._leave()
            if self._group.follower is not None:
                await self._group.follower.left(self._user)
        await self.own.stop()

    def _leave(self) -> None:
        """Do nothing: the own executor takes no more turns once it has stopped."""

    async def add_worker(self) -> None:
        """Start one more worker of all models."""
        await self.own.add_worker()

    async def remove_worker(self, worker: int | None = None) -> None:
        """End a worker of all models."""
        await self.own.remove_worker(worker)


class TakesTurns(GroupMember):
    """One whose own executor has workers for this model alone."""

    def __init__(self, group: DeviceGroup, own: Executor) -> None:
        super().__init__(group, own)
        self._added = 0
        self._workers = group.workers
        self._listener: Listener
        self._bulk: set[int] = set()

    @property
    def added(self) -> int:
        """See SharesWorkers."""
        return self._added

    def join(self, user: Member) -> None:
        """See SharesWorkers."""
        self._user = user
        self._joined()

    # The Executor.

    async def start(self, listener: Listener) -> None:
        """Start the model's own workers; from then on it takes turns with the others of the group."""
        self._listener = listener
        self._workers.add(self._user)
        if isinstance(self.own, WarmsUpInTurns):
            self.own.warm_up_in(self._take_turn)
        await super().start(self)

    def run(self, worker: int, batch: Batch) -> None:
        """Send `batch` to `worker`, whose place no other model uses until it is back."""
        if worker not in self._bulk:
            self._workers.began(self._user, worker, monotonic())
        self.own.run(worker, batch)

    def reserved(self, worker: int) -> AbstractAsyncContextManager[None]:
        """See ReservesWorkers."""
        return reserved(self._workers, self._user, worker)

    def _take_turn(self, worker: int, granted: Callable[[], None]) -> Callable[[], None]:
        """See Turns. A model that stops waits for nothing."""
        reservation = Reservation(self._user, worker, granted)
        if self._running:
            self._workers.reserve(reservation, monotonic())
        else:
            granted()
        return lambda: self._workers.release(reservation, monotonic())

    def _leave(self) -> None:
        self._workers.remove(self._user, monotonic())

    async def add_worker(self) -> None:
        """Start one more worker of this model. It computes beside the others, unless other models have as many."""
        await super().add_worker()
        self._added += 1

    async def remove_worker(self, worker: int | None = None) -> None:
        """End a worker of this model; the others keep theirs."""
        await super().remove_worker(worker)
        self._added -= 1

    # The Listener of the own executor.

    def worker_ready(self, worker: int, places: int, *, bulk: bool = False) -> None:
        """Pass it on. The worker is away while another model uses its place."""
        if bulk:
            self._bulk.add(worker)
        elif self._workers.is_others(self._user, worker):
            self._user.worker_away(worker)
        self._listener.worker_ready(worker, places, bulk=bulk)

    def worker_lost(self, worker: int, reason: str) -> None:
        """Pass it on. Its place is free for the other models."""
        self._listener.worker_lost(worker, reason)
        if self._running:
            self._workers.gave_up(self._user, worker, monotonic())

    def worker_leaves(self, worker: int) -> None:
        """Pass it on."""
        self._listener.worker_leaves(worker)

    def received(self, worker: int, events: Events) -> None:
        """Pass it on. With the end of a batch its place is offered to all models."""
        takes_turns = events.final and worker not in self._bulk and self._running
        if takes_turns:
            self._workers.ends(self._user, worker, monotonic())
        self._listener.received(worker, events)
        if takes_turns:
            self._workers.ended(worker, monotonic())

    def measured(self, worker: int, reports: Sequence[MetricReport]) -> None:
        """Pass it on."""
        self._listener.measured(worker, reports)

    def unavailable(self, reason: str) -> None:
        """Pass it on."""
        self._listener.unavailable(reason)


class TurnsWithBulk(TakesTurns):
    """One whose own executor can have workers for bulk work only."""

    def start_bulk_workers(self) -> None:
        """See StartsBulkWorkers."""
        self.own.start_bulk_workers()
