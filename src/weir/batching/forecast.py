"""What is to be expected: how fast the line moves, and who can still make it. From the service times that were learned."""

from math import inf

from weir.batching.group import FifoQueue, Group
from weir.batching.padded import length_of
from weir.batching.queue import RequestQueue
from weir.batching.request_state import is_gone
from weir.batching.service_time import ServiceTime
from weir.batching.settings import BatchingSettings
from weir.batching.workers import Places
from weir.messages import Request
from weir.policy.decision import Observation

UNKNOWN_WAIT = 1.0  # seconds; what Retry-After says before anything was measured

# The margin of `start_cutoff`: how it grows with each batch in which somebody was missed, and shrinks with each other one.
MARGIN_GROWTH, MARGIN_DECAY = 1.5, 0.99
FIRST_MARGIN = 0.1  # of the time of a batch

# A request may have waited for a turn of the driver's loop before anybody read it, and its answer may wait for another one.
TURNS, TURN_FADE = 2.0, 0.9


class QueueForecast:
    """Expectations about one line and its workers. Rates are in rows per second, of all workers together.

    `margin` is what requests have to spare, in seconds, that are started while more wait than can be answered in time; `turn` is
    how long a turn of the driver's loop takes, of the last turns one of the longest.
    """

    __slots__ = ("_largest", "_line", "_max_rows", "_padded", "_places", "_service", "margin", "turn")

    def __init__(self, settings: BatchingSettings, service: ServiceTime, line: RequestQueue, places: Places) -> None:
        self._largest = settings.max_batch_size
        self._max_rows = settings.max_queue_size
        self._padded = settings.padded
        self._service = service
        self._line = line
        self._places = places
        self.margin = 0.0
        self.turn = 0.0

    def rate(self, waiting: int) -> float:
        """Return the rows per second that all workers serve together while so many wait."""
        rows = self._service.typical_rows() if len(self._line.groups) > 1 else waiting
        return self._service.rate(max(1, int(min(rows, self._largest)))) * max(1, len(self._places))

    def best_rate(self, now: float) -> float:
        """Return the rows per second that all workers serve together in full batches; infinity while too little is known."""
        is_known = self._service.is_trusted(now) and len(self._places)
        return self.rate(self._largest) if is_known else inf

    def drain_time(self, running: int) -> float:
        """Return how long the line, and so many rows that run, will take; 1 s if nothing is known."""
        waiting = self._line.waiting
        rate = self.rate(waiting)
        return (waiting + running / 2) / rate if 0.0 < rate < inf else UNKNOWN_WAIT

    def time_in_sight(self) -> float:
        """Return a time in which a request that arrives now is surely answered, unless the line grows a lot meanwhile."""
        rows = min(self._max_rows, 2 * self._line.waiting + 16 * self._largest)
        return self._service.upper(self._largest) + (rows + self._largest) / self.rate(rows)

    def cannot_make_it(self, request: Request, now: float) -> bool:
        """Tell whether even with luck the answer would be late: whoever is ahead for certain, then its own service."""
        if not self._service.is_trusted(now) or not len(self._places):
            return False
        group = self._line.groups.get(request.key)
        lane = FifoQueue() if group is None else group.lane_of(request)
        rate = self.rate(self._line.waiting)
        done = now + self._service.alone(min(request.rows, self._largest), length_of(request))
        if done + lane.ahead(request) / rate < request.deadline:
            return False
        return not self._padded or done + _before(lane, request) / rate >= request.deadline

    def start_cutoff(self, seen: Observation, rows: int, group: Group) -> float:
        """Return the instant after which a deadline must lie for the request to be started.

        While more wait than fit, a place is precious: it goes to requests that will very likely make it, with a margin that
        was learned from those that did not; where none has that much to spare, to the last that came. Otherwise only those
        are left out that have hardly a chance.
        """
        if seen.earliest_deadline == inf or not self._service.is_trusted(seen.now):
            return seen.now
        if seen.waiting <= rows:
            return seen.now + self._service.lower(seen.waiting)
        needed = self._service.upper(rows)
        spare = seen.earliest_deadline - seen.oldest_arrival - needed
        margin = min(max(self.margin, TURNS * self.turn), spare / 2.0)
        if margin <= 0.0:
            return seen.now + needed
        return seen.now + max(needed, min(needed + margin, group.last_deadline(rows) - seen.now))

    def took_turn(self, seconds: float) -> None:
        """Note how long a turn of the loop took."""
        self.turn = seconds if seconds > self.turn else TURN_FADE * self.turn + (1.0 - TURN_FADE) * seconds

    def missed(self, request: Request) -> None:
        """`request` was started and had no answer by its deadline: leave more time from now on, up to half of what it had to spare.

        Under overload all that is started is as old as it may be. What this server cannot see, how long a request was on its
        way here and its answer back, then makes all answers late rather than a few.
        """
        needed = self._service.upper(self._largest)
        grown = max(FIRST_MARGIN * needed, MARGIN_GROWTH * self.margin)
        self.margin = max(self.margin, min(grown, (request.timeout - needed) / 2.0))

    def made_it(self) -> None:
        """A batch came back with nobody missed: leave a little less time."""
        self.margin *= MARGIN_DECAY


def _before(lane: FifoQueue, request: Request) -> int:
    """Return how many of a lane are ahead of `request` for certain where those who would miss their deadlines go before those who would not."""
    deadline, tag = request.deadline, request.tag
    return sum(each.deadline <= deadline and each.tag <= tag for each in lane.waiting if not is_gone(each))
