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

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from math import isfinite
from typing import Any, Protocol

from weir.batching.batcher import Batcher
from weir.batching.workers import SOLVED, ComparedTurns, Reservation, SharedWorkers, WorkerUser
from weir.errors import SettingsError
from weir.workers.executor import Executor, SharesWorkers, capabilities_of, reserved


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
        self._owners: set[Any] = set()  # the pool of the models; None if each has workers of its own

    def settings(self) -> dict[str, str]:
        """Return the settings of a model of this group."""
        return {"device_group": self.name, "device_order": self.order}

    def admit(self, sharing: SharesWorkers | None) -> None:
        """Admit a model with this part in shared workers, or with workers of its own. Raises SettingsError unless it is like the models before."""
        owner = None if sharing is None else sharing.pool
        if self._owners - {owner}:
            raise SettingsError(
                f"device_group={self.name!r}: some of its models share workers, and others do not share these; give all "
                "the same pool, or none"
            )
        self._owners.add(owner)

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


class DeviceTurns:
    """The turns of one model of a DeviceGroup, whose batches `user` gives to the workers of `executor`. `clock` is that of all its models.

    Workers that the models of the group share take the turns by themselves; `user` reports what becomes of its own workers.
    """

    def __init__(self, group: DeviceGroup, user: Member, executor: Executor, clock: Callable[[], float]) -> None:
        """Raises SettingsError if the model cannot be in the group."""
        self._group = group
        self._user = user
        self._clock = clock
        self._running = False
        self._workers: set[int] = set()  # the model's own that are ready, without those for bulk work
        capabilities = capabilities_of(executor)
        group.admit(capabilities.sharing)
        self._has_own = capabilities.sharing is None
        if self._has_own and capabilities.warm_up_in is not None:
            capabilities.warm_up_in(self._take_turn)
        if group.follower is not None:
            group.follower.joined(user)

    def explain(self) -> dict[str, Any]:
        """See DeviceGroup.explain."""
        return self._group.explain(self._user, self._clock())

    def brief(self) -> dict[str, Any]:
        """See DeviceGroup.brief."""
        return self._group.brief(self._user, self._clock())

    def open(self) -> None:
        """Take turns from now on. The workers are about to start."""
        self._running = True
        if self._has_own:
            self._group.workers.add(self._user)

    def started(self) -> None:
        """Note that the workers have started."""
        if self._group.follower is not None and self._running:
            self._group.follower.started(self._user)

    async def close(self) -> None:
        """Take no more turns: the workers are about to end. Idempotent."""
        if self._running:
            self._running = False
            if self._has_own:
                self._group.workers.remove(self._user, self._clock())
            if self._group.follower is not None:
                await self._group.follower.left(self._user)

    def reserved(self, worker: int) -> AbstractAsyncContextManager[None]:
        """Return what waits until no other model computes where this worker does, and keeps it so until its end."""
        return reserved(self._group.workers, self._user, worker, self._clock)

    def _take_turn(self, worker: int, granted: Callable[[], None]) -> Callable[[], None]:
        """See Turns. A model that stops waits for nothing."""
        reservation = Reservation(self._user, worker, granted)
        if self._running:
            self._group.workers.reserve(reservation, self._clock())
        else:
            granted()
        return lambda: self._group.workers.release(reservation, self._clock())

    def worker_ready(self, worker: int, *, bulk: bool) -> None:
        """Note that `worker` takes batches. It is away while another model uses its place."""
        if self._has_own and not bulk:
            self._workers.add(worker)
            if self._group.workers.is_others(self._user, worker):
                self._user.worker_away(worker)

    def worker_lost(self, worker: int) -> None:
        """Note that `worker` has ended. Its place is free for the other models."""
        if worker in self._workers:
            self._workers.discard(worker)
            if self._running:
                self._group.workers.gave_up(self._user, worker, self._clock())

    def began(self, worker: int) -> None:
        """Note that `worker` has got a batch. No other model uses its place until it is back."""
        if worker in self._workers:
            self._group.workers.began(self._user, worker, self._clock())

    def ends(self, worker: int) -> bool:
        """Note that a batch is about to come back. Return whether `ended` is to be called then."""
        takes_turns = self._running and worker in self._workers
        if takes_turns:
            self._group.workers.ends(self._user, worker, self._clock())
        return takes_turns

    def ended(self, worker: int) -> None:
        """Note that the batch has come back. The place is offered to all models."""
        self._group.workers.ended(worker, self._clock())
