"""The workers as the batcher sees them: their places for batches, the batches that they run, and the deadlines in those batches.

Several models may share workers: each has a batcher of its own, to which a worker is away while it runs batches of another model.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

from weir.batching.collate import indices_of
from weir.batching.service_time import ENOUGH, KindTimes, ServiceTime
from weir.messages import Dispatch, Request
from weir.policy.decision import KindState, Observation


class Worker:
    """A worker that is ready. It holds up to `places` batches at once, or one that must be alone on it. If it leaves, it gets no more, and none while
    it is away: it works for another model then."""

    __slots__ = ("alone", "away", "batches", "finished", "free", "idle_since", "index", "kind", "leaves", "places")

    def __init__(self, index: int, places: int, now: float, kind: int = 0) -> None:
        self.index = index
        self.kind = kind
        self.places = places
        self.free = places  # how many further batches it takes
        self.idle_since = now  # the instant at which it last returned a batch, or was ready
        self.finished = -inf  # the instant at which it last returned a batch
        # By id, in the order in which they were given: whether the batch is bulk work only.
        self.batches: dict[int, bool] = {}
        self.alone = False
        self.away = False
        self.leaves = False

    def rank(self) -> tuple[int, bool, float]:
        """Return by what the worker for the next batch is chosen: the lowest is."""
        batches = self.batches
        return len(batches), not all(batches.values()), self.idle_since if batches else -self.finished

    def count(self) -> int:
        """Compute `free` again, and return by how much it has grown."""
        before = self.free
        self.free = 0 if self.alone or self.leaves or self.away else self.places - len(self.batches)
        return self.free - before


class Places:
    """The workers by index. `free` is how many free places they have together, `staying` how many workers do not leave."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._away: set[int] = set()
        self.free = 0
        self.staying = 0

    def __len__(self) -> int:
        return self.staying

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __contains__(self, index: int) -> bool:
        return index in self._workers

    def add(self, index: int, places: int, now: float, kind: int = 0) -> None:
        """Add a worker that is ready, of the kind with this number. An earlier one of this index must have been removed."""
        worker = self._workers[index] = Worker(index, places, now, kind)
        worker.away = index in self._away
        worker.count()
        self.free += worker.free
        self.staying += 1

    def remove(self, index: int) -> list[int]:
        """Remove a worker, and return the ids of the batches that it had."""
        worker = self._workers.pop(index, None)
        if worker is None:
            return []
        self.free -= worker.free
        self.staying -= not worker.leaves
        return list(worker.batches)

    def leave(self, index: int) -> bool:
        """Give a worker no more batches. Return whether it has none left."""
        worker = self._workers.get(index)
        if worker is None:
            return True
        if not worker.leaves:
            worker.leaves = True
            self.free += worker.count()
            self.staying -= 1
        return not worker.batches

    def set_away(self, index: int, away: bool) -> None:
        """Note whether a worker, which need not be ready, works for another model."""
        (self._away.add if away else self._away.discard)(index)
        worker = self._workers.get(index)
        if worker is not None:
            worker.away = away
            self.free += worker.count()

    @property
    def idle(self) -> int:
        """The number of workers that have no batch and take one."""
        return sum(worker.free > 0 and not worker.batches for worker in self._workers.values())

    def pick(self, *, empty: bool = False) -> Worker | None:
        """Return the worker for the next batch: the one with the fewest batches, then one with bulk work only, which is done soon, then of busy ones
        the one that returned a batch longest ago, and of idle ones the last to do so, whose caches are warm; at the start, the first that
        was ready. None if no worker has a free place. With `empty` only workers without a batch count."""
        best = None
        for worker in self._workers.values():
            if worker.free <= 0 or (empty and worker.batches):
                continue
            if best is None or worker.rank() < best.rank():
                best = worker
        return best

    def give(self, worker: Worker, batch_id: int, *, alone: bool = False, bulk: bool = False) -> None:
        """Give `worker` a batch, of `bulk` work only or not. With `alone` it gets no other until this one is back."""
        worker.batches[batch_id] = bulk
        worker.alone = alone
        self.free += worker.count()

    def take_back(self, index: int, batch_id: int, now: float) -> float:
        """Note that a batch is back. Return the instant since which its worker had no other batch to finish."""
        worker = self._workers[index]
        since = worker.idle_since
        del worker.batches[batch_id]
        worker.alone = False
        worker.idle_since = worker.finished = now
        self.free += worker.count()
        return since


class Running:
    """The running `batches` by id: whoever cuts or ends one adds or removes it. Its `due` is its earliest deadline, or an earlier instant, which is
    corrected when it has come."""

    def __init__(self) -> None:
        self.batches: dict[int, Dispatch] = {}

    def earliest_deadline(self) -> float:
        """Return an instant before which no deadline passes; infinity if nothing runs."""
        earliest = inf
        for each in self.batches.values():
            if each.due < earliest:
                earliest = each.due
        return earliest

    def passed(self, now: float) -> list[Request]:
        """Return the unsettled requests whose deadline is not after `now`."""
        late = []
        for each in self.batches.values():
            if each.due > now:
                continue
            alive = [request for request in each.requests if not request.settled]
            late += [request for request in alive if request.deadline <= now]
            each.due = min((request.deadline for request in alive if request.deadline > now), default=inf)
        return late

    def find(self, request: Request) -> list[Dispatch]:
        """Return the batches that `request` is in."""
        return [each for each in self.batches.values() if any(member is request for member in each.requests)]

    def leave_out(self, ended: Collection[int]) -> list[tuple[int, int, list[int]]]:
        """Return where the requests with these ids are, as (worker, batch id, entry indices). Their batches may become shorter than they are."""
        found = []
        for each in self.batches.values() if ended else ():
            if indices := indices_of(each, ended):
                each.shorter = True
                found.append((each.worker, each.batch_id, indices))
        return found


class WorkerKinds:
    """The workers of a model that are of several kinds, such as a large and a small GPU. `numbers` has the number of each worker's kind, from 0 on,
    going round.

    Attributes:
        times: what is known of the service times, of each kind by itself.
        batches, rows: how many have come back from each kind, without those that gave way to others.
    """

    def __init__(self, numbers: Sequence[int], places: Places, *, padded: bool, max_cost: float | None) -> None:
        self._numbers = numbers
        self._places = places
        self._count = max(numbers) + 1
        self.times = KindTimes(self._count, self.workers, padded=padded, max_cost=max_cost)
        self.batches, self.rows = [0] * self._count, [0] * self._count

    def of(self, worker: int) -> int:
        """Return the kind of the worker with this index."""
        return self._numbers[worker % len(self._numbers)]

    def states(self, running: Mapping[int, Dispatch]) -> tuple[KindState, ...]:
        """Return the workers of each kind. `running` are the batches by id."""
        found = []
        for kind in range(self._count):
            own = [worker for worker in self._places if worker.kind == kind and not worker.leaves]
            batches = [running[batch_id] for worker in own for batch_id in worker.batches]
            idle = sum(worker.free > 0 for worker in own)
            found.append(KindState(idle, tuple((each.rows, each.at) for each in batches)))
        return tuple(found)

    def came_back(self, dispatch: Dispatch, now: float, *, learn: bool) -> None:
        """Note a batch that has come back; with `learn`, learn from its time."""
        kind, rows, seconds = self.of(dispatch.worker), dispatch.rows, dispatch.seconds
        self.batches[kind] += 1
        self.rows[kind] += rows
        if learn:
            self.times.learn(rows, seconds, now, dispatch.cost)
            self.times.of[kind].learn(rows, seconds, now, dispatch.cost)

    def workers(self) -> list[int]:
        """Return how many workers of each kind are ready and do not leave."""
        counts = Counter(worker.kind for worker in self._places if not worker.leaves)
        return [counts[kind] for kind in range(self._count)]

    def with_place(self, kind: int | None, rows: int) -> int:
        """Return `kind` if one of its workers has a free place; else, of the kinds with one, that which serves `rows` rows soonest. A kind of which
        little is known yet counts as the soonest."""
        free = {worker.kind for worker in self._places if worker.free > 0}
        return kind if kind in free else min(free, key=lambda each: (self._expected(each, rows), each))

    def _expected(self, kind: int, rows: int) -> float:
        times = self.times.of[kind]
        return times.expected(rows) if times.count >= ENOUGH else 0.0

    def pick(self, kind: int | None, rows: int) -> Worker:
        """Return the worker for the next batch, of `rows` rows: one of the kind that `with_place` returns."""
        chosen = self.with_place(kind, rows)
        return min((each for each in self._places if each.kind == chosen and each.free > 0), key=Worker.rank)

    def idle(self, kind: int) -> int:
        """Return how many workers of `kind` have no batch and take one."""
        return sum(each.free > 0 and not each.batches for each in self._places if each.kind == kind)

    def waited_with(self, kind: int | None, seen: Observation) -> ServiceTime:
        """Return the service times by which a wait must end for the earliest deadline: those of the kind that could begin now; but if it could not
        meet the deadline, those of the `kind` that is waited for."""
        idle = self.times.of[self.with_place(kind, seen.waiting)]
        lower = idle.lower(min(seen.waiting, seen.max_batch_size))
        return idle if kind is None or seen.earliest_deadline > seen.now + lower else self.times.of[kind]


# Workers that several models share.


class WaitingTurn(NamedTuple):
    """Describes the requests of one model that are next, by which models that share workers are compared.

    Attributes:
        waiting: how many rows wait.
        oldest_arrival: when the first of them arrived; instants and durations are in seconds.
        due: the instant at which they must begin: no model starves, and no deadline is missed that could be met.
        seconds: how long a batch of them takes at most, as a rule.
        urgency: how much sooner they must be served than those of another model, as the policy says; None if it does not.
    """

    waiting: int
    oldest_arrival: float
    due: float
    seconds: float
    urgency: float | None


class WorkerUser(Protocol):
    """One of the models that share workers: what drives its batcher."""

    @property
    def claim(self) -> int:
        """The work for a free worker: 2 if requests wait, 1 if only bulk work waits, 0 if nothing waits."""

    @property
    def turn(self) -> WaitingTurn | None:
        """Its requests that are next; None if there are none, but perhaps some that are to run again."""

    def worker_away(self, worker: int) -> None:
        """`worker` works for another model: give it no batch."""

    def worker_back(self, worker: int) -> None:
        """`worker` is no longer away. Give it a batch now if one is due."""


U = TypeVar("U", bound=WorkerUser)


# The orders of models that share workers.
#
# fair: the model whose batches have taken the least time of workers so far. It saves nothing up while it does not use them. So models
#     with much to do get equal shares, and one with little to do soon gets the little.
# oldest: the model whose first request has waited longest.
# longest: the model with the most rows waiting.
# solved: the model whose policy calls its requests the most urgent (see policy/solve/device.py); `longest` until all policies do.
FAIR, OLDEST, LONGEST, SOLVED = ORDERS = ("fair", "oldest", "longest", "solved")


# Why a model was next on a worker: it was free when the batch was due; no other model had requests; the requests had to begin; the order has the
# model first; the policies of the models before it waited for more requests.
FREE, ALONE, DUE, FIRST, OTHERS_WAIT = REASONS = ("free", "alone", "due", "first", "others_wait")


class ComparedTurns(NamedTuple, Generic[U]):
    """Records how models compared when a worker was given away: the requests of each that were next, those that had to begin, and the order."""

    turns: Mapping[U, WaitingTurn | None]
    due: Collection[U]
    order: Sequence[U]


class WorkerTurns(Generic[U]):
    """Says who is next, in one of ORDERS. In all but `fair`, requests that must begin before the batch of another model would be done come first, the
    most pressing one before the others."""

    def __init__(self, order: str = FAIR) -> None:
        self._order = order
        self._running: Counter[U] = Counter()
        self._had: dict[U, float] = {}  # seconds of workers, minus the beginnings of those that run
        self._busy: dict[
            U, float
        ] = {}  # the same; in `_had`, a model that comes back after a rest starts with what others have had
        self._clock = 0.0  # what the last one to begin had had

    def busy(self, user: U, now: float) -> float:
        """Return how many seconds of workers the batches of `user` have taken."""
        return self._busy.get(user, 0.0) + self._running[user] * now

    def had(self, user: U, now: float) -> float:
        """Return how many seconds of workers `user` has had, as they are compared."""
        return max(self._had.get(user, 0.0) + self._running[user] * now, self._clock)

    def began(self, user: U, now: float) -> None:
        """Note that a worker begins a batch of `user`."""
        self._clock = self.had(user, now)
        self._running[user] += 1
        self._had[user] = self._clock - self._running[user] * now
        self._busy[user] = self._busy.get(user, 0.0) - now

    def ended(self, user: U, now: float) -> None:
        """Note that a worker no longer runs a batch of `user`."""
        self._running[user] -= 1
        self._had[user] += now
        self._busy[user] += now

    def forgive(self, user: U, seconds: float) -> None:
        """Leave `seconds`, in which `user` served no requests, out of what the models are compared by."""
        self._had[user] -= seconds

    def forget(self, user: U) -> None:
        """Forget a model whose batches have ended."""
        for each in (self._running, self._had, self._busy):
            each.pop(user, None)

    def compare(self, users: Sequence[U], now: float) -> ComparedTurns[U]:
        """Compare the models. In the order, those with waiting requests are before those with bulk work, and before those with neither."""
        if self._order == FAIR:
            return ComparedTurns({}, (), sorted(users, key=lambda user: (-user.claim, self.had(user, now))))
        turns = {user: user.turn for user in users}
        known = [turn for turn in turns.values() if turn is not None]
        order = LONGEST if self._order == SOLVED and any(turn.urgency is None for turn in known) else self._order
        longest = [*sorted((turn.seconds for turn in known), reverse=True), 0.0]
        # Another model's batch takes as long as the longest.
        due = {
            user: turn.due
            for user, turn in turns.items()
            if turn is not None and turn.due <= now + longest[turn.seconds == longest[0]]
        }

        def rank(user: U) -> tuple[int, float, float]:
            turn = turns[user]
            return (-user.claim, -inf, 0.0) if turn is None else (-user.claim, due.get(user, inf), _rank(turn, order))

        return ComparedTurns(turns, due, sorted(turns, key=rank))


def _rank(turn: WaitingTurn, order: str) -> float:
    """Return the number by which a turn is compared in `order`; the lowest is first."""
    if order == OLDEST:
        return turn.oldest_arrival
    return -float(turn.waiting) if order == LONGEST else -(turn.urgency or 0.0)


class Reservation(Generic[U]):
    """A worker that `user` wants without the batches of other models. `granted` is called when it is so."""

    def __init__(self, user: U, worker: int, granted: Callable[[], None]) -> None:
        self.user = user
        self.worker = worker
        self.granted = granted
        self.since = 0.0
        self.batches = 0  # that the worker has of it


class SharedWorkers(Generic[U]):
    """The workers that several models share. At one time a worker runs batches of one model, and is away for the others.

    A worker that has no batch left is offered to the models in the order of WorkerTurns, until one takes it. A model whose policy waits for more
    requests does not, so the worker is free for the next one; if none takes it, it is free for all. `order` is one of ORDERS.

    Reservations and batches of models alternate on a worker for which both wait.
    """

    def __init__(self, order: str = FAIR) -> None:
        self.users: list[U] = []
        self._turns: WorkerTurns[U] = WorkerTurns(order)
        self._held: dict[int, Counter[U]] = {}  # by worker: how many batches it has of each model; a reservation is one
        self._waiting: dict[int, list[Reservation[U]]] = {}  # for their worker, in order
        self._reserved: dict[int, Reservation[U]] = {}
        self._why = FREE  # of the next batch
        self._compared: ComparedTurns[U] | None = None  # when it is a worker's that is offered
        self._taken: dict[U, Counter[str]] = {}  # how many batches of each model began, by reason
        self._last: dict[U, tuple[str, ComparedTurns[U] | None]] = {}

    def add(self, user: U) -> None:
        """Add a model, for which all workers are away."""
        self.users.append(user)

    def remove(self, user: U, now: float) -> None:
        """Remove a model. What becomes of its batches concerns nobody any more."""
        self.users.remove(user)
        for worker, waiting in self._waiting.items():
            self._waiting[worker] = [each for each in waiting if each.user is not user]
        for worker in list(self._held):
            self.gave_up(user, worker, now)
        self._turns.forget(user)
        self._taken.pop(user, None)
        self._last.clear()  # it may be in the comparisons of others

    def gave_up(self, user: U, worker: int, now: float) -> None:
        """Note that `worker` has no batch of `user` any more. Offer it, if it has none at all."""
        reservation = self._reserved.pop(worker) if self._is_reserved(user, worker) else None
        held = self._held.get(worker, Counter[U]())
        for _ in range(held.pop(user, 0)):
            self._turns.ended(user, now)
        if reservation is not None:
            self._turns.forgive(user, now - reservation.since)
        if not held and self._held.pop(worker, None) is not None:
            self.offer(worker, now, models_first=reservation is not None)

    def reserve(self, reservation: Reservation[U], now: float) -> None:
        """Give a worker to a model alone: now if no other model uses it, else when a batch comes back. What it runs there until `release` is one
        batch to all others."""
        self._waiting.setdefault(reservation.worker, []).append(reservation)
        if not self.holders(reservation.worker):
            self._grant(reservation.worker, now)

    def release(self, reservation: Reservation[U], now: float) -> None:
        """End a reservation, whether it was granted, and its worker lost since, or not."""
        waiting, worker = self._waiting.get(reservation.worker, []), reservation.worker
        if reservation in waiting:
            waiting.remove(reservation)
        elif self._reserved.get(worker) is reservation and not reservation.batches:
            self.gave_up(reservation.user, worker, now)
        elif self._reserved.get(worker) is reservation:  # it was broken off: its batches come back as any others do
            for _ in range(reservation.batches):
                self._hold(reservation.user, worker, now)
            del self._reserved[worker]
            self._turns.forgive(reservation.user, now - reservation.since)
            self.ends(reservation.user, worker, now)

    def _grant(self, worker: int, now: float) -> bool:
        waiting = self._waiting.get(worker)
        if not waiting:
            return False
        reservation = self._reserved[worker] = waiting.pop(0)
        self._hold(reservation.user, worker, now)
        reservation.since = now
        reservation.granted()
        return True

    def _is_reserved(self, user: U, worker: int) -> bool:
        reservation = self._reserved.get(worker)
        return reservation is not None and reservation.user is user

    def is_others(self, user: U, worker: int) -> bool:
        """Return whether `worker` has batches of other models than `user`."""
        return any(other is not user for other in self._held.get(worker, ()))

    def holders(self, worker: int) -> list[U]:
        """Return the models of whose batches `worker` has some."""
        return list(self._held.get(worker, ()))

    def began(self, user: U, worker: int, now: float) -> None:
        """Note that `worker` gets a batch of `user`."""
        if self._is_reserved(user, worker):
            self._reserved[worker].batches += 1
            return
        self._taken.setdefault(user, Counter())[self._why] += 1
        self._last[user] = self._why, self._compared
        self._hold(user, worker, now)

    def _hold(self, user: U, worker: int, now: float) -> None:
        self._turns.began(user, now)
        self._held.setdefault(worker, Counter())[user] += 1
        for other in self.users:
            if other is not user:
                other.worker_away(worker)

    def ends(self, user: U, worker: int, now: float) -> None:
        """Note that a batch is about to come back to `user`. If another model waits, `user` does not just keep the worker."""
        if self._is_reserved(user, worker):
            self._reserved[worker].batches -= 1
            return
        held = self._held[worker]
        held[user] -= 1
        if not held[user]:
            del held[user]
        self._turns.ended(user, now)
        if self._waiting.get(worker) or any(other is not user and other.claim for other in self.users):
            user.worker_away(worker)

    def ended(self, worker: int, now: float) -> None:
        """Note that the batch has come back. Offer the worker, if it has no other."""
        if not self.holders(worker):
            self.offer(worker, now)

    def lost(self, worker: int, now: float) -> None:
        """Note that `worker` is gone, with its batches."""
        reservation = self._reserved.pop(worker, None)
        for user in list(self._held.pop(worker, Counter()).elements()):
            self._turns.ended(user, now)
        if reservation is not None:
            self._turns.forgive(reservation.user, now - reservation.since)

    def offer(self, worker: int, now: float, *, models_first: bool = False) -> None:
        """Let the models give `worker`, which has no batch, one of theirs, unless it goes to a reservation."""
        if not models_first and self._grant(worker, now):
            return
        compared = self._compared = self._turns.compare(self.users, now)
        for index, user in enumerate(compared.order):
            self._why = self._reason(compared, index)
            user.worker_back(worker)
            if self.holders(worker):
                break
        else:
            self._grant(worker, now)
        self._why, self._compared = FREE, None

    def _reason(self, compared: ComparedTurns[U], index: int) -> str:
        """Return why the batch is next if the model at `place` of the order gives it."""
        user, others = compared.order[index], (each for each in compared.order if each is not compared.order[index])
        if not any(other.claim for other in others):
            return ALONE
        if index and compared.order[0].claim:
            return OTHERS_WAIT
        return DUE if user in compared.due else FIRST

    # What others read.

    def busy(self, user: U, now: float) -> float:
        """Return how many seconds of workers the batches of `user` have taken since it was added."""
        return self._turns.busy(user, now)

    def taken(self, user: U) -> dict[str, int]:
        """Return how many batches of `user` began since it was added, by why they were next (REASONS)."""
        counts = self._taken.get(user, Counter[str]())
        return {reason: counts[reason] for reason in REASONS}

    def last(self, user: U) -> tuple[str, ComparedTurns[U] | None]:
        """Return why the last batch of `user` was next ("" if there was none since a model left), and how the models compared then (None: they did not)."""
        return self._last.get(user, ("", None))

    def present(self, now: float) -> ComparedTurns[U]:
        """Compare the models as they are."""
        return self._turns.compare(self.users, now)
