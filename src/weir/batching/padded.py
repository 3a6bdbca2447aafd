"""Batches of a model that pads all in them to the longest: which request leads, and those nearest to it in length.

A batch costs its tokens and its padding, which is by how much its rows times its longest is more and counts in full, or by the share
`padding_cost`; it may cost `max_cost`, and one that costs more alone goes alone. The request that is next leads: it is always in the batch. That is
the one that would miss its deadline if it were not, but no more than `max_overtakes` times in a row before the same older request; else it goes by
priority, then by shares of the size classes, as in compose.py, but counted in cost rather than rows, and in each class by tag and arrival. So
every request is next at some time. The others are added in the order in which they cost the least padding, from the shorter ones and the longer
ones around, first those of the same class, then those of the class that is next, until rows or cost are full or the padding would be more than
`max_padding`. If that is no more than what a batch costs beyond its tokens, no batch is made that would have been done sooner as two; half of it is
about best, for what is left out finds texts nearer to it later.

Beside small requests large ones make a batch no dearer than BESIDE_SMALL times that: a small request that has overtaken many large ones does not
then wait for a batch full of them, and all that is lost is what the further batch costs beyond its tokens.

To find requests by length there is a queue for each length, and the lengths there are, sorted, so that those nearest to a length are found without
looking at the others. What was taken from the middle, or was settled there, is dropped when it comes to a front, or with all of its kind once such
are more than half.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import cast

from weir.batching.compose import BatchDraft
from weir.batching.group import SLACK, FairQueue, FifoQueue, Group, PriorityLevel, SizeClass, size_class
from weir.batching.request_state import is_gone, lead, overtake, rows_left, settle, steps
from weir.messages import Request


def length_of(request: Request) -> float:
    """Return the length of `request`: what one row of it costs."""
    return request.cost / request.rows


def turn_of(request: Request) -> tuple[float, float]:
    """Return what says whose turn it is: the lowest goes first."""
    return request.tag, request.arrival


class LengthQueue(FifoQueue):
    """A lane whose requests are found by length as well. `waiting` is in order of arrival. Each queue of `by_length` is in order of turns,
    and the first of it waits; of the others some may be gone. `lengths` are its keys, sorted."""

    __slots__ = ("_added", "_turns", "brief", "by_length", "lengths")

    def __init__(self) -> None:
        super().__init__()
        self._turns: list[tuple[tuple[float, float], int, Request]] = []  # sorted, and the first waits
        self._added = 0
        self.brief = 0  # those that are brief
        self.by_length: dict[float, deque[Request]] = {}
        self.lengths: list[float] = []

    @staticmethod
    def beside() -> FairQueue:
        """Return a lane for the large requests of the same priority."""
        return FairQueue(LengthSizeClass)

    @property
    def head(self) -> Request | None:
        """The request whose turn it is."""
        return self._turns[0][2] if self._turns else None

    @property
    def oldest(self) -> Request | None:
        """The request that arrived first."""
        return self.waiting[0] if self.waiting else None

    def add(self, request: Request) -> None:
        """Add a request."""
        super().add(request)
        self._added += 1
        self.brief += request.brief
        insort(self._turns, (turn_of(request), self._added, request))
        length = length_of(request)
        queue = self.by_length.get(length)
        if queue is None:
            insort(self.lengths, length)
            queue = self.by_length[length] = deque()
        if queue and turn_of(request) < turn_of(queue[-1]):
            queue.insert(bisect_right(queue, turn_of(request), key=turn_of), request)
        else:
            queue.append(request)

    def leave(self, request: Request) -> None:
        """A request somewhere in the lane was settled, or wholly taken."""
        self.dead += 1
        waiting, turns = self.waiting, self._turns
        self.brief -= request.brief
        first = 0
        while first < len(turns) and is_gone(turns[first][2]):
            first += 1
        del turns[:first]
        while self.dead > 0 and is_gone(waiting[0]):
            waiting.popleft()
            self.dead -= 1
        self._trim(length_of(request))
        if self.dead > SLACK and 2 * self.dead > len(waiting):
            self._sweep()

    def next(self, rows: float, cost: float) -> list[Request]:
        """Return those whose turn is next, in order: about so many rows, or of about so much `cost`."""
        found: list[Request] = []
        for _, _, request in self._turns:
            if rows <= 0 or cost <= 0.0:
                break
            if not is_gone(request):
                found.append(request)
                rows, cost = rows - request.rows, cost - request.cost
        return found

    def _trim(self, length: float) -> None:
        """Have one that waits at the front of the queue of this length, or no such queue."""
        queue = self.by_length.get(length)
        if queue is None:
            return
        while queue and is_gone(queue[0]):
            queue.popleft()
        if not queue:
            del self.by_length[length]
            del self.lengths[bisect_left(self.lengths, length)]

    def _sweep(self) -> None:
        alive = [request for request in self.waiting if not is_gone(request)]
        self.dead -= len(self.waiting) - len(
            alive
        )  # less than 0 as long as some are gone whose leaving is still to be told
        self.waiting.clear()
        self.waiting.extend(alive)
        self._turns = [turn for turn in self._turns if not is_gone(turn[2])]
        for queue in self.by_length.values():
            left = [request for request in queue if not is_gone(request)]
            queue.clear()
            queue.extend(left)


class LengthSizeClass(SizeClass):
    """The requests of one size class, which are found by length in `lane`. Sizes, and what each `had`, are in units of cost."""

    __slots__ = ("lane",)

    def __init__(self, had: float) -> None:
        super().__init__(had)
        self.lane = LengthQueue()

    @staticmethod
    def class_of(request: Request) -> int:
        """Return the size class of `request`."""
        return size_class(max(1.0, request.cost))

    def tag(self, max_rows: int, max_cost: float = inf) -> float:
        """Return what each will have had once the next of them has up to `max_rows` rows more, or `max_cost`: the lowest goes first."""
        request = cast(Request, self.lane.head)
        cost = min(rows_left(request), max_rows) * length_of(request)
        return self.had + min(cost, max_cost) / self.count

    def add(self, request: Request) -> None:
        """Add a request."""
        self.count += 1
        self.lane.add(request)

    def leave(self, request: Request) -> None:
        """`request` has gone."""
        self.count -= 1
        self.lane.leave(request)


# Times `max_padding`: if that is half of what a batch costs beyond its tokens, one that small requests share with large ones does
# four fifths of its time for tokens.
BESIDE_SMALL = 8
BESIDE_BRIEF = 2  # times what brief requests cost that are in a batch, or soon: so much it may cost with others
SOON = 2  # times what a batch may cost: who is within that goes before others that are as near in length


class PaddedDraft(BatchDraft):
    """A load whose cost is its rows times `longest`, where what is beyond its `tokens` counts `padding_cost` times."""

    __slots__ = ("longest", "max_padding", "padding_cost", "tokens")

    def __init__(
        self, max_rows: int, max_cost: float, start_cutoff: float, max_padding: float, padding_cost: float
    ) -> None:
        super().__init__(max_rows, max_cost, start_cutoff)
        self.max_padding = max_padding
        self.padding_cost = padding_cost
        self.longest = 0.0
        self.tokens = 0.0

    def take(self, request: Request) -> bool:
        """Take as much of `request` as fits; tell whether that was all of it."""
        total, start = steps(request), request.taken
        unit_rows, length = request.rows // total, length_of(request)
        room = self.max_rows - self.rows
        least = 0 if self.requests else 1  # whose turn it is goes in any case, alone if need be
        count = max(least, min(total - start, room // unit_rows))
        while count > least and not self._fits(self.rows + count * unit_rows, length, count * unit_rows):
            count -= 1
        if not count:
            return False
        rows = count * unit_rows
        self.note(request, start, start + count, total)
        self.rows += rows
        self.departed += rows
        self.tokens += rows * length
        self.longest = max(self.longest, length)
        self.padding = self.padding_cost * (self.rows * self.longest - self.tokens)
        self.cost = self.tokens + self.padding
        if start + count < total:
            self.divided.append(request)
        return start + count == total

    def _fits(self, rows: int, length: float, more: int) -> bool:
        tokens = self.tokens + more * length
        padding = self.padding_cost * (rows * max(self.longest, length) - tokens)
        return tokens + padding <= self.max_cost and padding <= self.max_padding


class ByLength:
    """Composes batches as `compose` does, by length, with at most `max_padding` units of cost of padding in each (None: any). Padding costs
    `padding_cost` times what as many tokens do.

    `expected` says how many seconds a batch of so many rows takes: so much later the next one is cut."""

    def __init__(
        self, max_padding: float | None, expected: Callable[[float], float], padding_cost: float = 1.0
    ) -> None:
        self._max_padding = inf if max_padding is None else max_padding
        self._expected = expected
        self._padding_cost = padding_cost

    def __call__(
        self, group: Group, max_rows: int, max_cost: float, start_cutoff: float, max_overtakes: int
    ) -> BatchDraft:
        """Take up to `max_rows` rows and `max_cost` cost from `group`; see `compose`."""
        load = PaddedDraft(max_rows, max_cost, start_cutoff, self._max_padding, self._padding_cost)
        tight = group.tight(start_cutoff + self._expected(max_rows))
        for level in group.levels:
            _take_level(load, level, max_overtakes, tight)
            if load.rows >= max_rows:
                break
        group.departed += load.departed
        group.tidy()
        return load


def _take_level(load: PaddedDraft, level: PriorityLevel, max_overtakes: int, tight: Sequence[Request]) -> None:
    heads, is_first = _heads(level), not load.requests
    hurried = _hurried(load, level, max_overtakes, tight) if is_first else None
    due = _due(level, max_overtakes)
    turns = _turns(load, level, due)
    if turns:
        first = _lane_of(turns[0])
        leader = hurried or (_leader(first, max_overtakes) if is_first else cast(Request, first.head))
        sharing = _Sharing(load, level, turns)
        if leader is not first.head and leader.deadline > load.start_cutoff:
            sharing.take(leader)
        sharing.fill(in_turn=due is None)
        _count_overtaking(heads, leader, is_first)


def _due(level: PriorityLevel, max_overtakes: int) -> Request | None:
    """Return the oldest large request if it has been overtaken enough."""
    first, oldest = level.small.head, level.large.head
    if oldest is None or oldest.overtaken < max_overtakes:
        return None
    return oldest if first is None or oldest.arrival <= first.arrival else None


def _turns(load: PaddedDraft, level: PriorityLevel, due: Request | None) -> list[PriorityLevel | SizeClass]:
    """Return what shares the batch, in the order of turns: small requests and each size class of large ones; that of `due` first."""
    tags: dict[PriorityLevel | SizeClass, float] = {}
    if level.large.waiting:
        level.come_back()
    if level.small.head is not None:
        tags[level] = level.had
    for share in level.large.shares.values():
        tags[share] = cast(LengthSizeClass, share).tag(load.max_rows, load.max_cost)
    turns = sorted(tags, key=tags.__getitem__)  # small ones go before others with the same tag
    if due is not None:
        turns.sort(key=lambda share: share is not level.share_of(due))
    return turns


class _Sharing:
    """Fills a batch from one level, where what is large waits, each of `turns` is charged for what it has had."""

    def __init__(self, load: PaddedDraft, level: PriorityLevel, turns: Sequence[PriorityLevel | SizeClass]) -> None:
        self._load = load
        self._level = level
        self._turns = turns
        self._counts = {share: share.count for share in turns} if level.large.waiting else {}
        self._tokens = load.tokens

    def take(self, leader: Request) -> None:
        """Take `leader` before all others."""
        share = self._level.share_of(leader)
        if self._load.take(leader):
            self._level.leave(leader)
        self._charge(share)

    def fill(self, *, in_turn: bool) -> None:
        """Take from each what is nearest in length. `in_turn`: the first of them is the one whose turn it is."""
        load, level = self._load, self._level
        beside = BESIDE_SMALL * load.max_padding if _has_small(load, level) else inf
        for share in self._turns:
            if load.rows < load.max_rows:
                began = share.had
                _fill(load, level, _lane_of(share), inf if share is level else beside)
                if self._charge(share) and (in_turn or share is not self._turns[0]):
                    level.large.clock = max(level.large.clock, began)
        if self._counts:
            level.is_away = level.small.head is None

    def _charge(self, share: PriorityLevel | SizeClass) -> bool:
        tokens, self._tokens = self._load.tokens - self._tokens, self._load.tokens
        if tokens and self._counts:
            share.had += tokens / self._counts[share]
        return bool(tokens)


def _lane_of(share: PriorityLevel | SizeClass) -> LengthQueue:
    return cast(LengthQueue, share.small) if isinstance(share, PriorityLevel) else cast(LengthSizeClass, share).lane


def _heads(level: PriorityLevel) -> list[Request]:
    """Return whose turn it is in each lane, and who arrived first there."""
    small = cast(LengthQueue, level.small)
    return list(dict.fromkeys(each for each in (small.head, small.oldest, level.large.head) if each is not None))


def _leader(lane: LengthQueue, max_overtakes: int) -> Request:
    """Return whose turn it is in a lane: by tag, but who arrived first there is not passed over for more than `max_overtakes` batches."""
    head, oldest = cast(Request, lane.head), cast(Request, lane.oldest)
    return head if oldest.overtaken < max_overtakes else oldest


def _hurried(load: PaddedDraft, level: PriorityLevel, max_overtakes: int, tight: Sequence[Request]) -> Request | None:
    """Return who would miss the deadline without leading; None if nobody would, or somebody older has been overtaken enough."""
    mine = [each for each in tight if each.priority == level.priority and each.deadline > load.start_cutoff]
    if not mine:
        return None
    hurried = min(mine, key=lambda each: each.deadline)
    for head in (level.small.head, level.large.head):
        if head is None or head is hurried or head.overtaken < max_overtakes:
            continue
        if head.arrival <= hurried.arrival:
            return None
    return hurried


def _has_small(load: PaddedDraft, level: PriorityLevel) -> bool:
    return level.small.head is not None or not all(each.large for each in load.requests)


def _count_overtaking(heads: Sequence[Request], leader: Request, is_first: bool) -> None:
    """A batch was taken: keep the counts of those whose turn it was and who still wait, as far as `leader` has gone before them."""
    for head in heads:
        if is_gone(head):
            continue
        if head is not leader:
            overtake(head, head.arrival <= leader.arrival)
        elif is_first:
            lead(head)


def _fill(load: PaddedDraft, level: PriorityLevel, lane: LengthQueue, max_cost: float) -> None:
    """Take from a lane what is nearest in length, up to `max_cost` in all; from an empty load, first whose turn it is. Where some are brief,
    those whose turn is next come before the others, and the batch is short."""
    gone: list[Request] = []
    whole, load.max_cost = load.max_cost, min(load.max_cost, max_cost)
    head = lane.head if load.requests else _lead(load, level, lane, gone)
    if head is not None:
        if lane.brief:
            soon = lane.next(SOON * load.max_rows, SOON * load.max_cost)
            brief = sum(request.cost for request in [*load.requests, *soon] if request.brief)
            load.max_cost = min(load.max_cost, max(BESIDE_SMALL * load.max_padding, BESIDE_BRIEF * brief))
            _spread(load, *_by_length(soon), gone)
        _spread(load, lane.lengths, lane.by_length, gone)
    load.max_cost = whole
    for request in gone:
        level.leave(request)


def _by_length(requests: Sequence[Request]) -> tuple[list[float], dict[float, deque[Request]]]:
    queues: dict[float, deque[Request]] = {}
    for request in requests:
        queues.setdefault(length_of(request), deque()).append(request)
    return sorted(queues), queues


def _lead(load: PaddedDraft, level: PriorityLevel, lane: LengthQueue, gone: list[Request]) -> Request | None:
    """Take the first of the lane that can still make it."""
    while (request := lane.head) is not None:
        if request.deadline > load.start_cutoff:
            if load.take(request):
                gone.append(request)
            break
        _leave_out(load, request)
        level.leave(request)
    return request


def _spread(
    load: PaddedDraft, lengths: Sequence[float], by_length: Mapping[float, deque[Request]], gone: list[Request]
) -> None:
    """Take from the queues around `load.longest`, that which costs less padding first."""
    up = bisect_right(lengths, load.longest)
    down = up - 1
    while load.rows < load.max_rows:
        below = load.longest - lengths[down] if down >= 0 else inf
        above = load.rows * (lengths[up] - load.longest) if up < len(lengths) else inf
        if below <= above:
            if down < 0:
                return
            down = down - 1 if _take_queue(load, by_length[lengths[down]], gone) else -1
        else:
            up = up + 1 if _take_queue(load, by_length[lengths[up]], gone) else len(lengths)


def _take_queue(load: PaddedDraft, queue: deque[Request], gone: list[Request]) -> bool:
    """Take what fits of a queue; tell whether that was all of it."""
    while queue:
        request = queue[0]
        if not is_gone(request):
            if request.deadline <= load.start_cutoff:
                _leave_out(load, request)
            elif not load.take(request):
                return False
            gone.append(request)
        queue.popleft()
    return True


def _leave_out(load: BatchDraft, request: Request) -> None:
    load.departed += rows_left(request)
    load.late.append(request)
    settle(request)
