"""Take the next batch from the queue of a group.

Higher priority goes first. Within a priority, requests of about the same size go in the order of arrival, and the sizes share the batches: each
waiting request gets as many rows as any other. So a request waits in proportion to its rows, with no step at any size, and a single item goes
before many large requests. This is self-clocked fair queueing (Golestani, 1994) among size classes, each weighted by the number of its waiting
requests. But at most `max_overtakes` batches go before the oldest of the large requests; then that request goes first, and the count starts
again. Requests that can be divided are divided, so that the batch is filled exactly. Where a large request does not fit into what is left, small
ones are tried, and the other way round.
"""

from math import inf
from typing import cast

from weir.batching.group import FifoQueue, Group, PriorityLevel, Share
from weir.batching.request_state import dispatch, dispatch_items, lead, overtake, rows_left, settle, steps
from weir.messages import Kind, Request


class BatchDraft:
    """The requests that were taken for one batch, and those that were left out because their responses would come after their deadlines."""

    def __init__(self, max_rows: int, max_cost: float, start_cutoff: float) -> None:
        self.max_rows = max_rows
        self.max_cost = max_cost
        self.start_cutoff = start_cutoff
        self.requests: list[Request] = []
        self.slices: list[tuple[int, int] | None] | None = None
        self.rows = 0
        self.cost = 0.0
        self.padding = 0.0  # the part of `cost` that is padding; see padded.py
        self.departed = 0  # rows that left the queue, those of late requests included
        self.departed_cost = 0.0  # what these rows cost
        self.late: list[Request] = []
        self.undivided = True  # all are single items, or tensors as a whole
        self.divided: list[Request] = []  # taken in part; the rest still waits
        self.bulk = 0  # rows of bulk work among those that were taken
        self.attempt = 0  # how many times a worker has died with these requests

    def take(self, request: Request) -> bool:
        """Take as much of `request` as fits. Return whether that was all of it."""
        total = steps(request)
        start = request.taken
        unit_rows, unit_cost = request.form.rows // total, request.form.cost / total
        room = self.max_rows - self.rows
        if not self.requests:
            room = max(room, unit_rows)  # the policy wants fewer rows than one item has: that item goes alone
        count = min(total - start, room // unit_rows, self._affordable(unit_cost, total))
        if not self.requests:
            count = max(count, 1)  # and less cost than one item has: likewise
        if count <= 0:
            return False
        self.note(request, start, start + count, total)
        self.rows += count * unit_rows
        self.cost += count * unit_cost
        self.departed += count * unit_rows
        self.departed_cost += count * unit_cost
        return start + count == total

    def note(self, request: Request, start: int, stop: int, total: int) -> None:
        """Add `request`, from step `start` to `stop` of `total`."""
        whole = start == 0 and stop == total
        if not whole and self.slices is None:
            self.slices = [None] * len(self.requests)
        if self.slices is not None:
            self.slices.append(None if whole else (start, stop))
        self.requests.append(request)
        self.undivided = self.undivided and whole and request.form.kind is not Kind.ITEMS
        dispatch(request, stop, total)

    def leave_out(self, request: Request) -> None:
        """Settle `request`, whose response would come too late, and note that it leaves the queue."""
        rows = rows_left(request)
        self.departed += rows
        self.departed_cost += rows / request.form.rows * request.form.cost
        self.late.append(request)
        settle(request)

    def reopen(self, max_rows: int, more_cost: float) -> None:
        """Begin to take requests of another group, up to `max_rows` rows in all and `more_cost` cost. What has been taken is accounted for."""
        self.max_rows = max_rows
        self.max_cost = min(self.max_cost, self.cost + more_cost)
        self.departed, self.departed_cost = 0, 0.0
        self.late, self.divided = [], []

    def _affordable(self, unit_cost: float, total: int) -> int:
        if self.cost + total * unit_cost <= self.max_cost:
            return total
        count = int((self.max_cost - self.cost) / unit_cost)
        while count and self.cost + count * unit_cost > self.max_cost:
            count -= 1
        return count


class Composer:
    """Composes batches in the order of the queue. At most `max_overtakes` of them go before the oldest large request."""

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes

    def draft(self, max_rows: int, max_cost: float, start_cutoff: float) -> BatchDraft:
        """Return an empty draft of a batch of up to `max_rows` rows and `max_cost` cost, for requests whose deadline is after the instant
        `start_cutoff`."""
        return BatchDraft(max_rows, max_cost, start_cutoff)

    def fill(self, draft: BatchDraft, group: Group) -> None:
        """Take requests from `group`, in order, as far as they fit into `draft`; an item that is larger goes alone.

        Requests that cannot be started in time leave the queue too, settled, as `late`. The draft stays empty if all are late. `group.departed` is
        updated.
        """
        max_rows, nobody_is_late = draft.max_rows, group.earliest() > draft.start_cutoff
        for level in group.levels:
            small = level.small.queue
            if level.large.waiting:
                FairTurns(draft, level, self._max_overtakes, nobody_is_late).fill()
            else:
                count = min(len(small.waiting) - small.dead, max_rows - draft.rows)
                if nobody_is_late and not small.odd and draft.cost + count <= draft.max_cost:
                    _take_plain(draft, small, count)
                else:
                    _take_in_order(draft, small)
            if draft.rows >= max_rows:
                break
        group.departed += draft.departed
        if group.timeout is None or len(group.levels) > 1:
            group.tidy()


def _take_plain(draft: BatchDraft, queue: FifoQueue, count: int) -> None:
    """Take `count` requests from a queue of plain requests that all fit and are in time."""
    requests = queue.pop(count)
    dispatch_items(requests)
    draft.requests = draft.requests + requests if draft.requests else requests
    if draft.slices is not None:
        draft.slices += [None] * count
    draft.rows += count
    draft.departed += count
    draft.departed_cost += count
    draft.cost += count


def _take_in_order(draft: BatchDraft, queue: FifoQueue) -> None:
    """Take requests of any kind from a queue until one does not fit."""
    while draft.rows < draft.max_rows and (request := queue.head) is not None:
        if request.deadline <= draft.start_cutoff:
            _leave_out(draft, queue, request)
        elif not _take_head(draft, queue, request):
            return


def _take_head(draft: BatchDraft, queue: FifoQueue, request: Request) -> bool:
    """Take what fits of `request`, the head of a queue. Return whether that was all of it, so that the next may be tried."""
    taken = request.taken
    if draft.take(request):
        queue.advance(request)
        return True
    if request.taken > taken:
        draft.divided.append(request)
    return False


def _leave_out(draft: BatchDraft, queue: FifoQueue, request: Request) -> None:
    draft.leave_out(request)
    queue.advance(request)


class FairTurns:
    """Fills a batch from a level where large requests wait: small requests and each size class of large ones take turns.

    `_tags` are the tags of the size classes (see Share), and `_lowest` is the class with the lowest. They change only when a large request is
    taken or left out, however many small ones are taken.
    """

    def __init__(self, draft: BatchDraft, level: PriorityLevel, max_overtakes: int, nobody_is_late: bool) -> None:
        self._draft = draft
        self._level = level
        self._share, self._small, self._large = level.small, level.small.queue, level.large
        self._max_overtakes = max_overtakes
        self._oldest = self._large.waiting[0]
        self._is_plain = nobody_is_late and not self._small.odd  # small requests need only be counted
        self._rows_before = draft.rows
        self._takes_small = self._takes_large = True  # until one does not fit
        self._has_led = self._was_overtaken = False  # the oldest large request
        self._tags = {share: share.tag(draft.max_rows) for share in self._large.shares.values()}
        self._lowest = min(self._tags, key=self._tags.__getitem__)

    def fill(self) -> None:
        """Take what fits, each request in its turn."""
        draft, level = self._draft, self._level
        level.come_back()
        while draft.rows < draft.max_rows and (turn := self._next()) is not None:
            share, request = turn
            if share is not self._share:
                self._take_large(share, request)
            elif self._is_plain and draft.cost + share.count <= draft.max_cost:
                self._take_plain()
            else:
                self._take_small(request)
        level.is_away = self._small.head is None
        if self._has_led or self._was_overtaken:
            if self._has_led:
                lead(self._oldest)
            else:
                overtake(self._oldest, 1)

    def _next(self) -> tuple[Share, Request] | None:
        """Return the request that is next, and its share; None if no request is left that may fit."""
        first = self._small.head if self._takes_small else None
        oldest = self._large.head if self._takes_large else None
        if oldest is None:
            return None if first is None else (self._share, first)
        if oldest.overtaken >= self._max_overtakes and (first is None or oldest.arrival <= first.arrival):
            return self._large.share_of(oldest), oldest
        if first is not None and self._share.had <= self._tags[self._lowest]:
            return self._share, first
        return self._lowest, cast(Request, self._lowest.queue.head)

    def _take_plain(self) -> None:
        """Take plain small requests together for as long as it is their turn, and at least the first."""
        draft, share, until = self._draft, self._share, self._end_of_turn()
        waiting = share.count
        most = min(waiting, draft.max_rows - draft.rows)
        had, count = share.had + 1.0 / waiting, 1
        while count < most and had <= until:
            had += 1.0 / (waiting - count)
            count += 1
        _take_plain(draft, self._small, count)
        self._charge(share, had, draft.requests[-1])

    def _end_of_turn(self) -> float:
        """Return the value of `had` at which the turn of small requests ends."""
        oldest = self._large.head if self._takes_large else None
        if oldest is None:
            return inf
        return self._tags[self._lowest] if oldest.overtaken < self._max_overtakes else -inf

    def _take_small(self, request: Request) -> None:
        draft, waiting, rows = self._draft, self._share.count, self._draft.rows
        if request.deadline <= draft.start_cutoff:
            _leave_out(draft, self._small, request)
            return
        self._takes_small = _take_head(draft, self._small, request)
        if draft.rows > rows:
            self._charge(self._share, self._share.had + (draft.rows - rows) / waiting, request)

    def _take_large(self, share: Share, request: Request) -> None:
        draft, waiting, rows = self._draft, share.count, self._draft.rows
        if request.deadline <= draft.start_cutoff:
            _leave_out(draft, self._large, request)
        else:
            leads = rows == self._rows_before or (self._takes_small and self._small.head is not None)
            self._takes_large = _take_head(draft, self._large, request)
            if draft.rows > rows:
                self._charge(share, share.had + (draft.rows - rows) / waiting, request)
                self._has_led = self._has_led or (leads and request is self._oldest)
        self._tag(share)

    def _charge(self, share: Share, had: float, last: Request) -> None:
        """Set what each request of `share` has had. `last` is the last request that was taken."""
        share.had = had
        oldest, is_oldest = self._oldest, last is self._oldest
        if not is_oldest or oldest.overtaken < self._max_overtakes:
            self._large.clock = max(self._large.clock, had)
        self._was_overtaken = self._was_overtaken or (not is_oldest and oldest.arrival <= last.arrival)

    def _tag(self, share: Share) -> None:
        """Compute the tag of `share` again, of which a request was taken or left out, and which tag is the lowest."""
        if share.count:
            self._tags[share] = share.tag(self._draft.max_rows)
        else:
            del self._tags[share]
        self._lowest = min(self._tags, key=self._tags.__getitem__, default=share)
