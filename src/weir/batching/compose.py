"""Take the next batch from the line of a group.

Higher priority goes first. Within a priority small requests go before large ones, until `max_overtakes` batches have
gone before the large request at the head; then that one goes first, and the count starts anew. Within a lane the order
is that of arrival. Requests that can be divided are, so that the batch is filled exactly; where the head of a lane
does not fit into what is left, the next lane is tried, but nobody within a lane is passed over.
"""

from weir.batching.group import Group, Lane, Level
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
    small, large = level.small, level.large
    overtaken, has_led = None, False
    lanes = [small, large]
    while lanes and load.rows < load.max_rows:
        lane = next_lane(lanes, small, large, max_overtakes)
        request = lane.head
        if request is None:
            lanes.remove(lane)
        elif request.deadline <= load.start_cutoff:
            _leave_out(load, lane, request)
        else:
            rival = large.head
            if lane is small and rival is not None and rival.arrival <= request.arrival:
                overtaken = rival
            has_led = has_led or (lane is large and small in lanes and small.head is not None)
            if not _take_head(load, lane, request):
                lanes.remove(lane)
    count_overtaking(large.head, overtaken, has_led)


def _take_head(load: Load, lane: Lane, request: Request) -> bool:
    """Take what fits of the head; tell whether the next one in the lane may be tried."""
    taken = request.taken
    if load.take(request):
        lane.advance()
        return True
    if request.taken > taken:
        load.divided.append(request)
    return False


def next_lane(lanes: list[Lane], small: Lane, large: Lane, max_overtakes: int) -> Lane:
    """Return the lane whose head goes first; `lanes` are those that are left."""
    if len(lanes) == 1:
        return lanes[0]
    first, rival = small.head, large.head
    if first is None or rival is None:
        return small if rival is None else large
    is_due = rival.overtaken >= max_overtakes and rival.arrival <= first.arrival
    return large if is_due else small


def count_overtaking(head: Request | None, overtaken: Request | None, large_has_led: bool) -> None:
    """A batch was taken: keep the count of `head`, the large request that is next, if small ones have gone before it."""
    if head is not None and large_has_led:
        head.overtaken = 0
    elif head is not None and overtaken is head:
        head.overtaken += 1


def _leave_out(load: Load, lane: Lane, request: Request) -> None:
    load.departed += rows_left(request)
    load.late.append(request)
    lane.advance()
    request.settled = True
