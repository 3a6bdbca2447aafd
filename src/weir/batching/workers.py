"""The workers as the batcher knows them: their places for batches, the batches that they run, and the deadlines in those."""

from collections.abc import Iterator
from math import inf

from weir.messages import Dispatch, Request


class Worker:
    """A worker that is ready. It holds up to `places` batches at once, or one that must be alone with it; one that leaves
    gets no more."""

    __slots__ = ("alone", "batches", "free", "idle_since", "index", "leaves", "places")

    def __init__(self, index: int, places: int, now: float) -> None:
        self.index = index
        self.places = places
        self.free = places  # how many further batches it takes
        self.idle_since = now  # when it last gave something back
        self.batches: dict[int, None] = {}  # ids, in the order given
        self.alone = False
        self.leaves = False

    def count(self) -> int:
        """Bring `free` up to date, and return how many more that is."""
        before = self.free
        self.free = 0 if self.alone or self.leaves else self.places - len(self.batches)
        return self.free - before


class Places:
    """Counts free places. `free` is the total, `staying` how many workers stay; all else is by worker index."""

    __slots__ = ("_workers", "free", "staying")

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self.free = 0
        self.staying = 0

    def __len__(self) -> int:
        return self.staying

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def add(self, index: int, places: int, now: float) -> None:
        """A worker is ready. One that was there under this index must have been removed."""
        self._workers[index] = Worker(index, places, now)
        self.free += places
        self.staying += 1

    def remove(self, index: int) -> list[int]:
        """A worker is gone; return the ids of the batches it had."""
        worker = self._workers.pop(index, None)
        if worker is None:
            return []
        self.free -= worker.free
        self.staying -= not worker.leaves
        return list(worker.batches)

    def leave(self, index: int) -> bool:
        """Give a worker no more batches; tell whether it has none any more."""
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
        """How many workers would begin a batch at once."""
        return sum(worker.free > 0 and not worker.batches for worker in self._workers.values())

    def pick(self, *, empty: bool = False) -> Worker | None:
        """Return the worker for the next batch: fewest batches, then longest idle; with `empty` only one that has none."""
        best = None
        for worker in self._workers.values():
            if worker.free <= 0 or (empty and worker.batches):
                continue
            if best is None or (len(worker.batches), worker.idle_since) < (len(best.batches), best.idle_since):
                best = worker
        return best

    def give(self, worker: Worker, batch_id: int, *, alone: bool = False) -> None:
        """`worker` gets a batch; with `alone` it gets no other until this one is back."""
        worker.batches[batch_id] = None
        worker.alone = alone
        self.free += worker.count()

    def take_back(self, index: int, batch_id: int, now: float) -> float:
        """A batch is back; return since when its worker had nothing else to do before it."""
        worker = self._workers[index]
        since = worker.idle_since
        del worker.batches[batch_id]
        worker.alone = False
        worker.idle_since = now
        self.free += worker.count()
        return since


class Running:
    """Batches by id, each with its earliest deadline (or an earlier instant, put right when that has come)."""

    __slots__ = ("_deadlines", "batches")

    def __init__(self) -> None:
        self.batches: dict[int, Dispatch] = {}
        self._deadlines: dict[int, float] = {}

    def add(self, dispatch: Dispatch, earliest_deadline: float) -> None:
        """A batch went to its worker."""
        self.batches[dispatch.batch_id] = dispatch
        self._deadlines[dispatch.batch_id] = earliest_deadline

    def pop(self, batch_id: int) -> Dispatch:
        """A batch is back, or lost. Raises KeyError if it is not here."""
        del self._deadlines[batch_id]
        return self.batches.pop(batch_id)

    def earliest_deadline(self) -> float:
        """Return an instant before which no deadline passes; infinity if nothing runs."""
        return min(self._deadlines.values(), default=inf)

    def is_late(self, batch_id: int, now: float) -> bool:
        """Tell whether a deadline of the batch may have passed; False if it is not here."""
        return self._deadlines.get(batch_id, inf) <= now

    def passed(self, now: float) -> list[Request]:
        """Return the requests whose deadline is not after `now` and that have not had their end."""
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
