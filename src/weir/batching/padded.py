"""Batches of a model that pads every request to the longest of its batch: which request leads, and which requests of similar length join it.

A batch costs its tokens plus its padding. The padding is rows times the longest length, minus the tokens; each unit of it counts `padding_cost`. A
batch costs at most `max_cost`; a request that costs more goes alone.

The request that is next *leads*: it is always in the batch. That is a request that would otherwise miss its deadline, but at most `max_overtakes`
times in a row before the same older request. If there is none, it is the next by priority, then by the shares of the size classes, as in
compose.py, but counted in cost rather than rows, and within a class by tag and arrival. So every request leads at some time.

The other requests are added in the order in which they cost the least padding, from the next shorter and the next longer lengths; first those of
the same class, then those of the class that is next, until rows or cost are full or the padding would exceed `max_padding`. If `max_padding` is at
most what a batch costs beyond its tokens, no batch is made that would have been done sooner as two. Half of that is about best, because requests
that are left out join others of more similar length later.

Together with small requests, large ones make a batch cost at most BESIDE_SMALL times `max_padding`: a small request that has overtaken many large ones
then does not wait for a batch full of them, and only the fixed cost of a further batch is lost.

To find requests by length there is a queue for each length, and a sorted list of the lengths. A request that was taken or settled in the middle of
a queue is removed when it comes to the front, or together with others when such requests are more than half.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import cast

from weir.batching import BatchingSettings
from weir.batching.compose import BatchDraft, Composer
from weir.batching.group import SLACK, FifoQueue, Group, PriorityLevel, Share
from weir.batching.request_state import is_gone, lead, overtake, rows_left, steps
from weir.messages import Request


def length_of(request: Request) -> float:
    """Return the length of `request`: what one row of it costs."""
    return request.form.cost / request.form.rows


def turn_of(request: Request) -> tuple[float, float]:
    """Return the key by which requests take turns: the lowest goes first."""
    return request.tag, request.arrival


class LengthQueue(FifoQueue):
    """A queue whose requests are found by length too. `waiting` is in order of arrival.

    Each queue of `by_length` is in order of turns; its first request waits, and some of the others may have gone. `lengths` are the keys of
    `by_length`, sorted.
    """

    __slots__ = ("_added", "_turns", "brief", "by_length", "lengths")

    def __init__(self) -> None:
        super().__init__()
        self._turns: list[tuple[tuple[float, float], int, Request]] = []  # sorted, and the first waits
        self._added = 0
        self.brief = 0  # how many requests are brief
        self.by_length: dict[float, deque[Request]] = {}
        self.lengths: list[float] = []

    @staticmethod
    def size(request: Request) -> float:
        """Return the cost of `request`, at least 1."""
        return max(1.0, request.form.cost)

    @staticmethod
    def portion(request: Request, max_rows: int, max_cost: float) -> float:
        """Return how much of the cost of `request` a batch of up to `max_rows` rows and `max_cost` takes."""
        return min(min(rows_left(request), max_rows) * length_of(request), max_cost)

    @property
    def head(self) -> Request | None:
        """The request that is next; None if none waits."""
        return self._turns[0][2] if self._turns else None

    @property
    def oldest(self) -> Request | None:
        """The request that arrived first; None if none waits."""
        return self.waiting[0] if self.waiting else None

    def add(self, request: Request) -> None:
        """Add a request."""
        # Most requests come in order, and each call of a function would cost as much as a line here.
        waiting, turns = self.waiting, self._turns
        if waiting and request.arrival < waiting[-1].arrival:
            self._line_up(request)
        else:
            waiting.append(request)
        self._added += 1
        self.brief += request.brief
        turn, length = (request.tag, request.arrival), request.form.cost / request.form.rows
        if turns and turn < turns[-1][0]:
            insort(turns, (turn, self._added, request))
        else:
            turns.append((turn, self._added, request))
        queue = self.by_length.get(length)
        if queue is None:
            insort(self.lengths, length)
            self.by_length[length] = deque((request,))
        elif queue and turn < turn_of(queue[-1]):
            queue.insert(bisect_right(queue, turn, key=turn_of), request)
        else:
            queue.append(request)

    def leave(self, request: Request) -> None:
        """Remove a request that was settled or wholly dispatched, anywhere in the queue."""
        self.leave_together((request,))

    def leave_together(self, requests: Sequence[Request]) -> None:
        """Remove requests that were settled or wholly dispatched, anywhere in the queue."""
        self.dead += len(requests)
        lengths = set()
        for request in requests:
            self.brief -= request.brief
            lengths.add(request.form.cost / request.form.rows)
        self._drop_turns()
        waiting = self.waiting
        while self.dead > 0 and ((first := waiting[0]).settled or first.taken >= first.form.rows):
            waiting.popleft()
            self.dead -= 1
        for length in lengths:
            self._trim(length)
        if self.dead > SLACK and 2 * self.dead > len(waiting):
            self._sweep()

    def _drop_turns(self) -> None:
        """Remove requests that have gone from the front of the turns."""
        first = 0
        for _, _, request in self._turns:
            if not request.settled and request.taken < request.form.rows:
                break
            first += 1
        del self._turns[:first]

    def next(self, rows: float, cost: float) -> list[Request]:
        """Return the requests that are next, in order: about as many as have `rows`, or about as many as have `cost`."""
        found: list[Request] = []
        for _, _, request in self._turns:
            if rows <= 0 or cost <= 0.0:
                break
            if not request.settled and request.taken < request.form.rows:
                found.append(request)
                rows, cost = rows - request.form.rows, cost - request.form.cost
        return found

    def _trim(self, length: float) -> None:
        """Remove requests that have gone from the front of the queue of this length, and the queue if it is empty then."""
        queue = self.by_length.get(length)
        if queue is None:
            return
        while queue and ((first := queue[0]).settled or first.taken >= first.form.rows):
            queue.popleft()
        if not queue:
            del self.by_length[length]
            del self.lengths[bisect_left(self.lengths, length)]

    def _sweep(self) -> None:
        alive = [request for request in self.waiting if not is_gone(request)]
        # `dead` is below 0 while requests have gone for which `leave` is still to be called.
        self.dead -= len(self.waiting) - len(alive)
        self.waiting.clear()
        self.waiting.extend(alive)
        self._turns = [turn for turn in self._turns if not is_gone(turn[2])]
        for queue in self.by_length.values():
            left = [request for request in queue if not is_gone(request)]
            queue.clear()
            queue.extend(left)


# The largest cost of a batch of small and large requests, as a multiple of `max_padding`: if that is half of what a batch costs beyond its tokens,
# such a batch spends four fifths of its time on tokens.
BESIDE_SMALL = 8
# The largest cost of a batch with brief requests, as a multiple of the cost of the brief requests that are in it or next.
BESIDE_BRIEF = 2
# Requests that are next, up to this multiple of a batch, go before others of the same length.
SOON = 2


class PaddedDraft(BatchDraft):
    """A draft whose cost is its `tokens` plus its padding up to `longest`, each unit of which counts `padding_cost`."""

    def __init__(
        self, max_rows: int, max_cost: float, start_cutoff: float, max_padding: float, padding_cost: float
    ) -> None:
        super().__init__(max_rows, max_cost, start_cutoff)
        self.max_padding = max_padding
        self.padding_cost = padding_cost
        self.longest = 0.0
        self.max_length = inf  # of the requests that are still to join
        self.tokens = 0.0

    def reopen(self, max_rows: int, more_cost: float) -> None:
        """See BatchDraft. The requests that join are no longer than those that are there, whose rows would cost more otherwise."""
        super().reopen(max_rows, more_cost)
        self.max_length = self.longest

    def take(self, request: Request) -> bool:
        """Take as much of `request` as fits. Return whether that was all of it."""
        if request.form.rows == 1:
            return self._take_row(request)
        total, start = steps(request), request.taken
        unit_rows, length = request.form.rows // total, length_of(request)
        room = self.max_rows - self.rows
        least = 0 if self.requests else 1  # the leader goes in any case, alone if necessary
        count = max(least, min(total - start, room // unit_rows))
        while count > least and not self._fits(self.rows + count * unit_rows, length, count * unit_rows):
            count -= 1
        if not count:
            return False
        rows = count * unit_rows
        self.note(request, start, start + count, total)
        self._add(rows, length)
        if start + count < total:
            self.divided.append(request)
        return start + count == total

    def _take_row(self, request: Request) -> bool:
        """Do what `take` does for a request of one row, as most are, which is not divided."""
        length, rows = request.form.cost, self.rows + 1
        longest = length if length > self.longest else self.longest
        tokens = self.tokens + length
        padding = self.padding_cost * (rows * longest - tokens)
        if self.requests and (
            rows > self.max_rows
            or length > self.max_length
            or tokens + padding > self.max_cost
            or padding > self.max_padding
        ):
            return False
        self.note(request, 0, 1, 1)
        self.rows, self.tokens, self.longest = rows, tokens, longest
        self.padding, self.cost = padding, tokens + padding
        self.departed += 1
        self.departed_cost += length
        return True

    def _add(self, rows: int, length: float) -> None:
        """Count `rows` of this length that were taken."""
        self.rows += rows
        self.departed += rows
        self.departed_cost += rows * length
        self.tokens += rows * length
        self.longest = max(self.longest, length)
        self.padding = self.padding_cost * (self.rows * self.longest - self.tokens)
        self.cost = self.tokens + self.padding

    def _fits(self, rows: int, length: float, more: int) -> bool:
        tokens = self.tokens + more * length
        padding = self.padding_cost * (rows * max(self.longest, length) - tokens)
        return length <= self.max_length and tokens + padding <= self.max_cost and padding <= self.max_padding


class ByLength(Composer):
    """Composes batches by length, with at most `max_padding` units of padding in each (None: any number).

    A unit of padding costs `padding_cost` times as much as a token. `expected` returns the seconds that a batch of some rows takes, after which
    the next one is cut.
    """

    def __init__(self, settings: BatchingSettings, expected: Callable[[float], float]) -> None:
        super().__init__(settings.max_overtakes)
        self._max_padding = inf if settings.max_padding is None else settings.max_padding
        self._expected = expected
        self._padding_cost = settings.padding_cost

    def draft(self, max_rows: int, max_cost: float, start_cutoff: float) -> "PaddedDraft":
        """See Composer."""
        return PaddedDraft(max_rows, max_cost, start_cutoff, self._max_padding, self._padding_cost)

    def fill(self, draft: BatchDraft, group: Group) -> None:
        """See Composer."""
        assert isinstance(draft, PaddedDraft)
        tight = group.tight(draft.start_cutoff + self._expected(draft.max_rows))
        for level in group.levels:
            _take_level(draft, level, self._max_overtakes, tight)
            if draft.rows >= draft.max_rows:
                break
        group.departed += draft.departed
        group.tidy()


def _take_level(draft: PaddedDraft, level: PriorityLevel, max_overtakes: int, tight: Sequence[Request]) -> None:
    heads, is_first = _heads(level), not draft.requests
    hurried = _hurried(draft, level, max_overtakes, tight) if is_first else None
    due = _due(level, max_overtakes)
    turns = _turns(draft, level, due)
    if turns:
        first = _queue_of(turns[0])
        leader = hurried or (_leader(first, max_overtakes) if is_first else cast(Request, first.head))
        sharing = _Sharing(draft, level, turns)
        if leader is not first.head and leader.deadline > draft.start_cutoff:
            sharing.take(leader)
        sharing.fill(in_turn=due is None)
        _count_overtaking(heads, leader, is_first)


def _due(level: PriorityLevel, max_overtakes: int) -> Request | None:
    """Return the oldest large request if it has been overtaken `max_overtakes` times and is older than the small ones; else None."""
    first, oldest = level.small.queue.head, level.large.head
    if oldest is None or oldest.overtaken < max_overtakes:
        return None
    return oldest if first is None or oldest.arrival <= first.arrival else None


def _turns(draft: PaddedDraft, level: PriorityLevel, due: Request | None) -> list[Share]:
    """Return what shares the batch, in the order of turns: small requests and each size class of large ones. The class of `due` is first."""
    tags: dict[Share, float] = {}
    if level.large.waiting:
        level.come_back()
    if level.small.queue.head is not None:
        tags[level.small] = level.small.had
    for share in level.large.shares.values():
        tags[share] = share.tag(draft.max_rows, draft.max_cost)
    turns = sorted(tags, key=tags.__getitem__)  # small ones go before others with the same tag
    if due is not None:
        turns.sort(key=lambda share: share is not level.share_of(due))
    return turns


class _Sharing:
    """Fills a batch from one level. If large requests wait, the `had` of each of `turns` grows by what it gets."""

    def __init__(self, draft: PaddedDraft, level: PriorityLevel, turns: Sequence[Share]) -> None:
        self._draft = draft
        self._level = level
        self._turns = turns
        self._counts = {share: share.count for share in turns} if level.large.waiting else {}
        self._tokens = draft.tokens

    def take(self, leader: Request) -> None:
        """Take `leader` before all others."""
        share = self._level.share_of(leader)
        if self._draft.take(leader):
            self._level.queue_of(leader).leave(leader)
        self._charge(share)

    def fill(self, *, in_turn: bool) -> None:
        """Take the requests that are nearest in length, from each of `turns`. `in_turn`: the first of them is first by its tag."""
        draft, level = self._draft, self._level
        beside = BESIDE_SMALL * draft.max_padding if _has_small(draft, level) else inf
        for share in self._turns:
            if draft.rows < draft.max_rows:
                began = share.had
                _fill(draft, level, _queue_of(share), inf if share is level.small else beside)
                if self._charge(share) and (in_turn or share is not self._turns[0]):
                    level.large.clock = max(level.large.clock, began)
        if self._counts:
            level.is_away = level.small.queue.head is None

    def _charge(self, share: Share) -> bool:
        tokens, self._tokens = self._draft.tokens - self._tokens, self._draft.tokens
        if tokens and self._counts:
            share.had += tokens / self._counts[share]
        return bool(tokens)


def _queue_of(share: Share) -> LengthQueue:
    return cast(LengthQueue, share.queue)


def _heads(level: PriorityLevel) -> list[Request]:
    """Return the request that is next in each queue, and the small request that arrived first."""
    small = _queue_of(level.small)
    return list(dict.fromkeys(each for each in (small.head, small.oldest, level.large.head) if each is not None))


def _leader(queue: LengthQueue, max_overtakes: int) -> Request:
    """Return the request of a queue that leads: the next one, or the oldest if it has been overtaken by `max_overtakes` batches."""
    head, oldest = cast(Request, queue.head), cast(Request, queue.oldest)
    return head if oldest.overtaken < max_overtakes else oldest


def _hurried(draft: PaddedDraft, level: PriorityLevel, max_overtakes: int, tight: Sequence[Request]) -> Request | None:
    """Return the request that would miss its deadline unless it leads; None if there is none, or an older request has been overtaken
    `max_overtakes` times."""
    mine = [each for each in tight if each.form.priority == level.priority and each.deadline > draft.start_cutoff]
    if not mine:
        return None
    hurried = min(mine, key=lambda each: each.deadline)
    for head in (level.small.queue.head, level.large.head):
        if head is None or head is hurried or head.overtaken < max_overtakes:
            continue
        if head.arrival <= hurried.arrival:
            return None
    return hurried


def _has_small(draft: PaddedDraft, level: PriorityLevel) -> bool:
    return level.small.queue.head is not None or not all(each.large for each in draft.requests)


def _count_overtaking(heads: Sequence[Request], leader: Request, is_first: bool) -> None:
    """Count how often `heads`, the requests that were next and still wait, have been overtaken, now that `leader` was taken."""
    for head in heads:
        if is_gone(head):
            continue
        if head is not leader:
            overtake(head, head.arrival <= leader.arrival)
        elif is_first:
            lead(head)


def _fill(draft: PaddedDraft, level: PriorityLevel, queue: LengthQueue, max_cost: float) -> None:
    """Take the requests of a queue that are nearest in length, until the whole draft costs `max_cost`. An empty draft gets the next request first.

    If there are brief requests, those that are next come before others, and the batch is kept short.
    """
    gone: list[Request] = []
    whole, draft.max_cost = draft.max_cost, min(draft.max_cost, max_cost)
    head = queue.head if draft.requests else _lead(draft, level, queue, gone)
    if head is not None:
        if queue.brief:
            soon = queue.next(SOON * draft.max_rows, SOON * draft.max_cost)
            brief = sum(request.form.cost for request in [*draft.requests, *soon] if request.brief)
            draft.max_cost = min(draft.max_cost, max(BESIDE_SMALL * draft.max_padding, BESIDE_BRIEF * brief))
            if len(soon) + len(gone) < len(queue):
                _spread(draft, *_by_length(soon), gone)
        _spread(draft, queue.lengths, queue.by_length, gone)
    draft.max_cost = whole
    if queue is level.small.queue:
        if gone:
            queue.leave_together(gone)
        return
    for request in gone:
        level.queue_of(request).leave(request)


def _by_length(requests: Sequence[Request]) -> tuple[list[float], dict[float, deque[Request]]]:
    queues: defaultdict[float, deque[Request]] = defaultdict(deque)
    for request in requests:
        queues[length_of(request)].append(request)
    return sorted(queues), queues


def _lead(draft: PaddedDraft, level: PriorityLevel, queue: LengthQueue, gone: list[Request]) -> Request | None:
    """Take and return the first request of the queue that can still meet its deadline; None if there is none."""
    while (request := queue.head) is not None:
        if request.deadline > draft.start_cutoff:
            if draft.take(request):
                gone.append(request)
            break
        draft.leave_out(request)
        level.queue_of(request).leave(request)
    return request


def _spread(
    draft: PaddedDraft, lengths: Sequence[float], by_length: Mapping[float, deque[Request]], gone: list[Request]
) -> None:
    """Take from the queues of lengths around `draft.longest`, in the order of the padding that they cost."""
    up = bisect_right(lengths, draft.longest)
    down = up - 1
    while draft.rows < draft.max_rows:
        below = draft.longest - lengths[down] if down >= 0 else inf
        above = draft.rows * (lengths[up] - draft.longest) if up < len(lengths) else inf
        if below <= above:
            if down < 0:
                return
            down = down - 1 if _take_queue(draft, by_length[lengths[down]], gone) else -1
        else:
            up = up + 1 if _take_queue(draft, by_length[lengths[up]], gone) else len(lengths)


def _take_queue(draft: PaddedDraft, queue: deque[Request], gone: list[Request]) -> bool:
    """Take what fits of a queue. Return whether that was all of it."""
    while queue:
        request = queue[0]
        if not request.settled and request.taken < request.form.rows:
            if request.deadline <= draft.start_cutoff:
                draft.leave_out(request)
            elif not draft.take(request):
                return False
            gone.append(request)
        queue.popleft()
    return True
