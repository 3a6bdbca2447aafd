"""Take the next batch from the line of a group.

Higher priority goes first. Within a priority, requests of about the same size go in the order of arrival, and the sizes share: each
request has as many rows of the batches as any other that waits, so that a request waits in proportion to its rows, with no step at
any size, and a single item goes at once before a crowd of large ones. This is self-clocked fair queueing (Golestani, 1994) among size
classes, each with a weight of as many requests as wait. But `max_overtakes` batches at most go before the oldest of the larger ones;
then that one goes first, and the count starts anew. Requests that can be divided are, so that the batch is filled exactly; where one
of the larger does not fit into what is left, small ones are tried, and the other way round.
"""

from operator import itemgetter
from typing import cast

from weir.batching.group import Group, Lane, Level, Share, SharedLane
from weir.batching.pieces import rows_left, steps
from weir.messages import Kind, Request


class Load:
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
        request.taken = request.rows if stop == total else stop

    def _affordable(self, unit_cost: float, total: int) -> int:
        if self.cost + total * unit_cost <= self.max_cost:
            return total
        count = int((self.max_cost - self.cost) / unit_cost)
        while count and self.cost + count * unit_cost > self.max_cost:
            count -= 1
        return count


def compose(group: Group, max_rows: int, max_cost: float, start_cutoff: float, max_overtakes: int) -> Load:
    """Take up to `max_rows` rows and `max_cost` cost from `group`, in order; one item that is larger goes alone.

    Requests whose deadline is not after `start_cutoff` leave the line too, as `late`; they are marked settled. The load may be
    empty if all are. `group.departed` is brought up to date.
    """
    load = Load(max_rows, max_cost, start_cutoff)
    nobody_is_late = group.earliest() > start_cutoff
    for level in group.levels:
        small = level.small
        count = min(len(small.waiting) - small.dead, max_rows - load.rows)
        if nobody_is_late and not small.odd and not level.large.waiting and load.cost + count <= max_cost:
            _take_plain(load, small, count)
        else:
            _take_level(load, level, max_overtakes)
        if load.rows >= max_rows:
            break
    group.departed += load.departed
    group.tidy()
    return load


def _take_plain(load: Load, lane: Lane, count: int) -> None:
    """Take `count` from a lane of plain requests that all fit and are in time."""
    requests = lane.pop(count)
    for request in requests:
        request.taken = 1
    load.requests = load.requests + requests if load.requests else requests
    if load.slices is not None:
        load.slices += [None] * count
    load.rows += count
    load.departed += count
    load.cost += count


def _take_level(load: Load, level: Level, max_overtakes: int) -> None:
    small, large = level.small, cast(SharedLane, level.large)
    oldest, begun = large.head, load.rows
    was_overtaken, has_led = False, False
    lanes: list[Lane] = [small, large]
    level.come_back()
    while lanes and load.rows < load.max_rows:
        lane, request = _next(level, lanes, max_overtakes, load.max_rows)
        if request is None:
            break
        if request.deadline <= load.start_cutoff:
            _leave_out(load, lane, request)
            continue
        is_oldest, rows = request is oldest, load.rows
        leads = is_oldest and (rows == begun or (small in lanes and small.head is not None))
        share: Level | Share = level if lane is small else large.share_of(request)
        count = share.count
        if not _take_head(load, lane, request):
            lanes.remove(lane)
        if oldest is not None and load.rows > rows:
            share.had += (load.rows - rows) / count
            if not is_oldest or oldest.overtaken < max_overtakes:
                large.clock = max(large.clock, share.had)
            has_led = has_led or leads
            was_overtaken = was_overtaken or (not is_oldest and oldest.arrival <= request.arrival)
    level.is_away = small.head is None
    if oldest is not None and (has_led or was_overtaken):
        oldest.overtaken = 0 if has_led else oldest.overtaken + 1


def _next(level: Level, lanes: list[Lane], max_overtakes: int, max_rows: int) -> tuple[Lane, Request | None]:
    """Return whose turn it is in the `lanes` that are left, and its lane."""
    small, large = level.small, cast(SharedLane, level.large)
    first = small.head if small in lanes else None
    oldest = large.head if large in lanes else None
    if oldest is None:
        return small, first
    if oldest.overtaken >= max_overtakes and (first is None or oldest.arrival <= first.arrival):
        return large, oldest
    tag, share = min(((each.tag(max_rows), each) for each in large.shares.values()), key=itemgetter(0))
    if first is not None and level.had <= tag:
        return small, first
    return large, share.head


def _take_head(load: Load, lane: Lane, request: Request) -> bool:
    """Take what fits of `request`; tell whether another in the lane may be tried."""
    taken = request.taken
    if load.take(request):
        lane.advance(request)
        return True
    if request.taken > taken:
        load.divided.append(request)
    return False


def _leave_out(load: Load, lane: Lane, request: Request) -> None:
    load.departed += rows_left(request)
    load.late.append(request)
    request.settled = True
    lane.advance(request)
