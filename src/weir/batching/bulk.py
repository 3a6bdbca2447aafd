"""Bulk work: requests with a priority below 0, which get the time and the room that interactive requests leave.

They wait in a queue of their own, so that no policy sees them: neither their number nor their age makes it dispatch. A bulk batch is cut when a worker
has nothing to do and no interactive request is to be dispatched. It is at most as large as takes the time that bulk work may add to an interactive
request (`BulkSize`), as a request that arrives meanwhile waits for its end. While none has come for long, it may take longer.

An interactive batch after which nothing interactive waits is filled up with bulk requests of the same key, as far as there is room. They make it
longer, so this counts against the same time: what a bulk batch has already added to the requests that now wait is subtracted, and so is what was added
to the batches before this one, until a worker is idle again. So bulk work adds no more to a request than one bulk batch does, and one item in any case.

All that is for workers that run both kinds of work. Where there are bulk workers, which give way to the others by themselves (processes of idle
priority), they get all bulk work, in full batches, and the other workers none.

A `WorkClass` is what interactive and bulk work have in common.
"""

from math import inf

from weir.batching import BatchingSettings
from weir.batching.compose import BatchDraft
from weir.batching.group import FifoQueue, Group
from weir.batching.queue import RequestQueue
from weir.batching.retry import CrashRetry
from weir.batching.workers import Places
from weir.messages import Dispatch, Request
from weir.policy.decision import PolicyBase

DEFAULT_DELAY = 0.005  # seconds that bulk work may add, where neither the setting nor the policy says it
QUIET_SHARE = 0.01  # what bulk work may add to the request that ends a quiet time, as a part of that time
GROWTH = 0.25  # how much of the way to a larger size one batch that took less time leads
MOST_GROWTH = 2.0  # the largest size that is aimed at, as a multiple of what is known to take little enough time
MOST_FALL = 0.5  # the smallest share of its size that one slow batch leaves


class WorkClass:
    """One class of work. `queue` has the requests that wait, `places` the workers that are ready, and `suspects` the entries that such a worker had when
    it died."""

    __slots__ = ("places", "queue", "suspects")

    def __init__(self, settings: BatchingSettings, queue_type: type[FifoQueue]) -> None:
        self.queue = RequestQueue(settings.max_queue_size, queue_type, settings.capacity, settings.max_queue_cost)
        self.places = Places()
        self.suspects = CrashRetry()

    def count_suspects(self, *, changed: bool = False) -> None:
        """Tell the queue how many rows are to run again: they count as under way. Without `changed`, only if there are any."""
        if changed or self.suspects.parts:
            self.queue.run_again(self.suspects.rows)

    def unsettled(self) -> list[Request]:
        """Return the requests that wait or are to run again. A request may be there several times."""
        return [
            *(request for group in self.queue.groups.values() for request in group),
            *(entry[0] for entry in self.suspects.entries()),
        ]

    def clear(self) -> None:
        """Forget what waits and what is to run again."""
        self.queue.clear()
        self.suspects.clear()


def delay_after(quiet: float, delay: float) -> float:
    """Return how many seconds a bulk batch may take when no interactive request has come for `quiet` seconds: `delay`, or more after a long time.

    So a server without interactive requests does its bulk work in batches of any size.
    """
    return max(delay, QUIET_SHARE * quiet)


class BulkSize:
    """The largest bulk batch, in units of cost (rows, or tokens where a model measures them); `limit` is 0 until a batch came back, which means a single row or item.

    A batch that took longer than it may makes the limit smaller at once, in proportion. One that took less time makes it larger little by little: with
    a fixed time per batch, the proportion is below the size that takes just as long as it may, so the limit comes near to that size from below.
    """

    __slots__ = ("limit",)

    def __init__(self) -> None:
        self.limit = 0.0

    def learn(self, cost: float, seconds: float, delay: float) -> None:
        """Learn that a bulk batch of this `cost` took `seconds`, of which it may take `delay`."""
        most = MOST_GROWTH * max(self.limit, cost)
        wanted = most if seconds <= 0.0 else min(most, cost * delay / seconds)
        if seconds > delay:
            self.limit = min(self.limit, max(wanted, MOST_FALL * self.limit))
        elif wanted > self.limit:
            self.limit += GROWTH * (wanted - self.limit)


class BulkWork(WorkClass):
    """The bulk requests, and how many of them go next. The places and the suspects are those of bulk workers.

    The queue has bounds of its own, as those of interactive requests: bulk work never makes the queue full for them. `size` is that of a bulk batch,
    and `quiet_size` that after some time without interactive requests. `workers` are the bulk workers that are ready or being replaced, by index.
    """

    __slots__ = ("_busy_until", "_delay", "_ended_at", "_left", "quiet_size", "size", "workers")

    def __init__(self, settings: BatchingSettings, queue_type: type[FifoQueue]) -> None:
        super().__init__(settings, queue_type)
        self.size, self.quiet_size = BulkSize(), BulkSize()
        self.workers: set[int] = set()
        self._delay = settings.bulk_delay
        self._left = 1.0  # the part of `delay` that may still be added to the interactive requests of this busy time
        self._ended_at = -inf  # the instant at which the last bulk batch ended
        self._busy_until = -inf  # the instant at which the last other batch ended

    @property
    def waiting(self) -> int:
        """The number of waiting bulk rows."""
        return self.queue.arrivals - self.queue.departed

    def delay(self, policy: PolicyBase) -> float:
        """Return how many seconds bulk work may add to an interactive request: what the setting says, else the policy."""
        if self._delay is not None:
            return self._delay
        return DEFAULT_DELAY if policy.bulk_delay is None else policy.bulk_delay

    def limit(self, delay: float, now: float, last_arrival: float) -> tuple[float, float]:
        """Return how much a bulk batch may cost now, and how many seconds it may take. The last interactive request came at `last_arrival`."""
        allowed = delay_after(now - last_arrival, delay)
        return (self.size if allowed <= delay else self.quiet_size).limit, allowed

    def ended(self, cut: Dispatch, delay: float, now: float, last_arrival: float) -> None:
        """Note that the batch `cut` is back. One of bulk requests only may take `delay` seconds, or more if the last other request came long ago."""
        if cut.bulk < cut.rows:
            self._busy_until = now
        else:
            self.size.learn(cut.cost, cut.seconds, delay)
            self.quiet_size.learn(cut.cost, cut.seconds, delay_after(now - last_arrival, delay))
            self._ended_at = now

    def serves(self, oldest_arrival: float, delay: float, *, alone: bool, spare: bool) -> None:
        """Note that interactive requests are dispatched, the oldest of which came at `oldest_arrival`; bulk work may add `delay` seconds to them.

        `alone`: no others run; `spare`: a further worker has nothing to do. What was added to earlier ones does not count if these found a worker that
        had nothing to do, or only bulk work.
        """
        if delay <= 0.0:
            self._left = 0.0
        elif spare or (alone and oldest_arrival > self._busy_until):
            added = max(0.0, self._ended_at - oldest_arrival)
            self._left = max(0.0, 1.0 - added / delay)

    def room_beside(self, draft: BatchDraft, group: Group) -> tuple[Group, float] | None:
        """Return the bulk requests that may join `draft`, an interactive batch from `group`, and the cost that they may add; None if none may."""
        ours = self.queue.groups.get(group.key)
        cost = self._left * self.size.limit
        return None if ours is None or not ours.waiting or cost <= 0.0 else (ours, cost)

    def joined(self, cost: float) -> None:
        """Note that bulk requests have added `cost` to an interactive batch."""
        self._left = max(0.0, self._left - cost / self.size.limit)


def is_bulk(request: Request) -> bool:
    """Return whether `request` is bulk work: its priority is below 0."""
    return request.form.priority < 0
