"""The workers as the batcher sees them: their places for batches, the batches that they run, and the deadlines in those batches."""

from collections.abc import Iterator
from math import inf

from weir.messages import Dispatch, Request


class Worker:
    """A worker that is ready. It holds up to `places` batches at once, or one that must be alone on it. If it leaves, it gets no more."""

    __slots__ = ("alone", "batches", "free", "idle_since", "index", "leaves", "places")

    def __init__(self, index: int, places: int, now: float) -> None:
        self.index = index
        self.places = places
        self.free = places  # how many further batches it takes
        self.idle_since = now  # the instant at which it last returned a batch
        self.batches: dict[
            int, bool
        ] = {}  # by id, in the order in which they were given: whether the batch is bulk work only
        self.alone = False
        self.leaves = False

    def rank(self) -> tuple[int, bool, float]:
        """Return by what the worker for the next batch is chosen: the lowest is."""
        batches = self.batches
        return len(batches), not all(batches.values()), self.idle_since

    def count(self) -> int:
        """Compute `free` anew, and return by how much it has grown."""
        before = self.free
        self.free = 0 if self.alone or self.leaves else self.places - len(self.batches)
        return self.free - before


class Places:
    """The workers by index. `free` is how many free places they have together, `staying` how many workers do not leave."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self.free = 0
        self.staying = 0

    def __len__(self) -> int:
        return self.staying

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def add(self, index: int, places: int, now: float) -> None:
        """Add a worker that is ready. An earlier one of this index must have been removed."""
        self._workers[index] = Worker(index, places, now)
        self.free += places
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

    @property
    def idle(self) -> int:
        """How many workers have no batch and take one."""
        return sum(worker.free > 0 and not worker.batches for worker in self._workers.values())

    def pick(self, *, empty: bool = False) -> Worker | None:
        """Return the worker for the next batch: the one with the fewest batches, then one with bulk work only, which is done soon, then the one that
        is idle longest; None if no worker has a free place. With `empty` only workers without a batch count."""
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
        worker.idle_since = now
        self.free += worker.count()
        return since


class Running:
    """The running batches by id, each with its earliest deadline (or an earlier instant, which is corrected when it has come)."""

    def __init__(self) -> None:
        self.batches: dict[int, Dispatch] = {}
        self._deadlines: dict[int, float] = {}

    def add(self, dispatch: Dispatch, earliest_deadline: float) -> None:
        """Add a batch that goes to its worker."""
        self.batches[dispatch.batch_id] = dispatch
        self._deadlines[dispatch.batch_id] = earliest_deadline

    def pop(self, batch_id: int) -> Dispatch:
        """Remove and return a batch that is back, or lost. Raises KeyError if it does not run."""
        del self._deadlines[batch_id]
        return self.batches.pop(batch_id)

    def earliest_deadline(self) -> float:
        """Return an instant before which no deadline passes; infinity if nothing runs."""
        return min(self._deadlines.values(), default=inf)

    def is_late(self, batch_id: int, now: float) -> bool:
        """Tell whether a deadline of the batch may have passed; False if it does not run."""
        return self._deadlines.get(batch_id, inf) <= now

    def passed(self, now: float) -> list[Request]:
        """Return the unsettled requests whose deadline is not after `now`."""
        late = []
        for batch_id, earliest in self._deadlines.items():
            if earliest > now:
                continue
            alive = [request for request in self.batches[batch_id].requests if not request.settled]
            late += [request for request in alive if request.deadline <= now]
            left = [request.deadline for request in alive if request.deadline > now]
            self._deadlines[batch_id] = min(left, default=inf)
        return late

    def find(self, request: Request) -> list[Dispatch]:
        """Return the batches that `request` is in."""
        return [each for each in self.batches.values() if any(member is request for member in each.requests)]
