"""The batches that are with workers, and the deadlines of their requests."""

from math import inf

from weir.messages import Dispatch, Request


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
