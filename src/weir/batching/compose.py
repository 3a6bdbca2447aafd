"""Take the next batch from the line of a group.

Higher priority goes first. Within a priority, requests of about the same size go in the order of arrival, and the sizes share: each
request has as many rows of the batches as any other that waits, so that a request waits in proportion to its rows, with no step at
any size, and a single item goes at once before a crowd of large ones. This is self-clocked fair queueing (Golestani, 1994) among size
classes, each with a weight of as many requests as wait. But `max_overtakes` batches at most go before the oldest of the larger ones;
then that one goes first, and the count starts anew. Requests that can be divided are, so that the batch is filled exactly; where one
of the larger does not fit into what is left, small ones are tried, and the other way round.
"""

from math import inf

from weir.batching.group import FifoQueue, Group, PriorityLevel, SizeClass
from weir.batching.request_state import dispatch, dispatch_items, lead, overtake, rows_left, settle, steps
from weir.messages import Kind, Request


class BatchDraft:
    """What was taken for one batch, and what was left out because its answer would come after its deadline."""

    __slots__ = (
        "cost",
        "departed",
        "divided",
        "late",
        "max_cost",
        "max_rows",
        "start_cutoff",
        "padding",
        "plain",
        "requests",
        "rows",
        "slices",
    )

    def __init__(self, max_rows: int, max_cost: float, start_cutoff: float) -> None:
        self.max_rows = max_rows
        self.max_cost = max_cost
        self.start_cutoff = start_cutoff
        self.requests: list[Request] = []
        self.slices: list[tuple[int, int] | None] | None = None
        self.rows = 0
        self.cost = 0.0
        self.padding = 0.0  # of the cost; see padded.py
        self.departed = 0  # rows that left the line, late ones included
        self.late: list[Request] = []
        self.plain = True  # all are single items
        self.divided: list[Request] = []  # taken in part, the rest still waits

    def take(self, request: Request) -> bool:
        """Take as much of `request` as fits; tell whether that was all of it."""
        total = steps(request)
        start = request.taken
        unit_rows, unit_cost = request.rows // total, request.cost / total
        room = self.max_rows - self.rows
        if not self.requests:
            room = max(room, unit_rows)  # the policy wants less than one item has: it goes all the same, alone
        count = min(total - start, room // unit_rows, self._affordable(unit_cost, total))
        if count <= 0:
            return False
        self.note(request, start, start + count, total)
        self.rows += count * unit_rows
        self.cost += count * unit_cost
        self.departed += count * unit_rows
        return start + count == total

    def note(self, request: Request, start: int, stop: int, total: int) -> None:
        """`request` is in it, from step `start` to `stop` of `total`."""
        whole = start == 0 and stop == total
        if not whole and self.slices is None:
            self.slices = [None] * len(self.requests)
        if self.slices is not None:
            self.slices.append(None if whole else (start, stop))
        self.requests.append(request)
        self.plain = self.plain and request.kind is Kind.ITEM
        dispatch(request, stop, total)

    def _affordable(self, unit_cost: float, total: int) -> int:
        if self.cost + total * unit_cost <= self.max_cost:
            return total
        count = int((self.max_cost - self.cost) / unit_cost)
        while count and self.cost + count * unit_cost > self.max_cost:
            count -= 1
        return count


def compose(group: Group, max_rows: int, max_cost: float, start_cutoff: float, max_overtakes: int) -> BatchDraft:
    """Take up to `max_rows` rows and `max_cost` cost from `group`, in order; one item that is larger goes alone.

    Requests whose deadline is not after `start_cutoff` leave the line too, as `late`; they are marked settled. The load may be
    empty if all are. `group.departed` is brought up to date.
    """
    load = BatchDraft(max_rows, max_cost, start_cutoff)
    nobody_is_late = group.earliest() > start_cutoff
    for level in group.levels:
        small = level.small
        if level.large.waiting:
            FairTurns(load, level, max_overtakes, nobody_is_late).fill()
        else:
            count = min(len(small.waiting) - small.dead, max_rows - load.rows)
            if nobody_is_late and not small.odd and load.cost + count <= max_cost:
                _take_plain(load, small, count)
            else:
                _take_in_order(load, small)
        if load.rows >= max_rows:
            break
    group.departed += load.departed
    group.tidy()
    return load


def _take_plain(load: BatchDraft, lane: FifoQueue, count: int) -> None:
    """Take `count` from a lane of plain requests that all fit and are in time."""
    requests = lane.pop(count)
    dispatch_items(requests)
    load.requests = load.requests + requests if load.requests else requests
    if load.slices is not None:
        load.slices += [None] * count
    load.rows += count
    load.departed += count
    load.cost += count


def _take_in_order(load: BatchDraft, lane: FifoQueue) -> None:
    """Take from a lane, whatever requests it has, until one does not fit."""
    while load.rows < load.max_rows and (request := lane.head) is not None:
        if request.deadline <= load.start_cutoff:
            _leave_out(load, lane, request)
        elif not _take_head(load, lane, request):
            return


def _take_head(load: BatchDraft, lane: FifoQueue, request: Request) -> bool:
    """Take what fits of `request`; tell whether another in the lane may be tried."""
    taken = request.taken
    if load.take(request):
        lane.advance(request)
        return True
    if request.taken > taken:
        load.divided.append(request)
    return False


def _leave_out(load: BatchDraft, lane: FifoQueue, request: Request) -> None:
    load.departed += rows_left(request)
    load.late.append(request)
    settle(request)
    lane.advance(request)


class FairTurns:
    """Fills a batch from a level where large requests wait: small ones and each size class of large ones have their shares.

    `tags` says, for each size class, what each request of it will have had once the next one is taken, and `lowest` is the class
    that is lowest there. They change only when a large request is taken or left out, however many small ones are taken.
    """

    __slots__ = (
        "_has_led", "_is_plain", "_large", "_level", "_load", "_lowest", "_max_overtakes", "_oldest", "_rows_before",
        "_small", "_tags", "_takes_large", "_takes_small", "_was_overtaken",
    )  # fmt: skip

    def __init__(self, load: BatchDraft, level: PriorityLevel, max_overtakes: int, nobody_is_late: bool) -> None:
        self._load = load
        self._level = level
        self._small, self._large = level.small, level.large
        self._max_overtakes = max_overtakes
        self._oldest = self._large.waiting[0]
        self._is_plain = nobody_is_late and not self._small.odd  # small requests need only be counted
        self._rows_before = load.rows
        self._takes_small = self._takes_large = True  # until one does not fit
        self._has_led = self._was_overtaken = False  # what has become of the oldest
        self._tags = {share: share.tag(load.max_rows) for share in self._large.shares.values()}
        self._lowest = min(self._tags, key=self._tags.__getitem__)

    def fill(self) -> None:
        """Take what fits, each request in its turn."""
        load, level = self._load, self._level
        level.come_back()
        while load.rows < load.max_rows and (turn := self._next()) is not None:
            share, request = turn
            if isinstance(share, SizeClass):
                self._take_large(share, request)
            elif self._is_plain and load.cost + self._level.count <= load.max_cost:
                self._take_plain()
            else:
                self._take_small(request)
        level.is_away = self._small.head is None
        if self._has_led or self._was_overtaken:
            if self._has_led:
                lead(self._oldest)
            else:
                overtake(self._oldest, 1)

    def _next(self) -> tuple[PriorityLevel | SizeClass, Request] | None:
        """Return whose turn it is; None when nobody is left who may fit."""
        first = self._small.head if self._takes_small else None
        oldest = self._large.head if self._takes_large else None
        if oldest is None:
            return None if first is None else (self._level, first)
        if oldest.overtaken >= self._max_overtakes and (first is None or oldest.arrival <= first.arrival):
            return self._large.share_of(oldest), oldest
        if first is not None and self._level.had <= self._tags[self._lowest]:
            return self._level, first
        return self._lowest, self._lowest.head

    def _take_plain(self) -> None:
        """Take plain small requests at once, for as long as it is their turn: the first of them in any case."""
        load, level, until = self._load, self._level, self._end_of_turn()
        waiting = self._level.count
        most = min(waiting, load.max_rows - load.rows)
        had, count = level.had + 1.0 / waiting, 1
        while count < most and had <= until:
            had += 1.0 / (waiting - count)
            count += 1
        _take_plain(load, self._small, count)
        self._charge(level, had, load.requests[-1])

    def _end_of_turn(self) -> float:
        """Return what a small request must have had for the turn to go to a large one."""
        oldest = self._large.head if self._takes_large else None
        if oldest is None:
            return inf
        return self._tags[self._lowest] if oldest.overtaken < self._max_overtakes else -inf

    def _take_small(self, request: Request) -> None:
        load, waiting, rows = self._load, self._level.count, self._load.rows
        if request.deadline <= load.start_cutoff:
            _leave_out(load, self._small, request)
            return
        self._takes_small = _take_head(load, self._small, request)
        if load.rows > rows:
            self._charge(self._level, self._level.had + (load.rows - rows) / waiting, request)

    def _take_large(self, share: SizeClass, request: Request) -> None:
        load, waiting, rows = self._load, share.count, self._load.rows
        if request.deadline <= load.start_cutoff:
            _leave_out(load, self._large, request)
        else:
            leads = rows == self._rows_before or (self._takes_small and self._small.head is not None)
            self._takes_large = _take_head(load, self._large, request)
            if load.rows > rows:
                self._charge(share, share.had + (load.rows - rows) / waiting, request)
                self._has_led = self._has_led or (leads and request is self._oldest)
        self._tag(share)

    def _charge(self, share: PriorityLevel | SizeClass, had: float, last: Request) -> None:
        """Each request of `share` has had so much now; `last` is the last that was taken."""
        share.had = had
        oldest, is_oldest = self._oldest, last is self._oldest
        if not is_oldest or oldest.overtaken < self._max_overtakes:
            self._large.clock = max(self._large.clock, had)
        self._was_overtaken = self._was_overtaken or (not is_oldest and oldest.arrival <= last.arrival)

    def _tag(self, share: SizeClass) -> None:
        """A request of `share` was taken or left out: work out its tag anew, and which is the lowest."""
        if share.count:
            self._tags[share] = share.tag(self._load.max_rows)
        else:
            del self._tags[share]
        self._lowest = min(self._tags, key=self._tags.__getitem__, default=share)
