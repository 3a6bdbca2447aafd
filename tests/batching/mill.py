"""A mill that drives the real Batcher in virtual time and holds every decision against the rules."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import ceil, inf, log2
from operator import itemgetter
from typing import Any

import pytest

from weir.batching import BatchingSettings
from weir.batching.batcher import Batcher
from weir.batching.bulk import is_bulk
from weir.batching.collate import Entry, deliver, entries_of, fail_entries, to_batch
from weir.batching.group import FifoQueue, Group, size_class
from weir.batching.padded import LengthQueue, length_of
from weir.batching.request_state import RequestBase, rows_left
from weir.batching.retry import CrashRetry
from weir.errors import DeadlineExceeded, ModelCrashed, WeirError, WorkerLost
from weir.messages import Dispatch, Events, Form, Kind, Reason, Wakeup
from weir.policy.decision import Decision, Greedy, Observation, Policy

TIMEOUT = 30.0
_NEVER = 5e8  # an instant after which no test looks


class Asked(RequestBase):
    """A request that remembers its ends. `killers`: where the ranges start that end their worker."""

    def __init__(self, payload: Any, arrival: float = 0.0, timeout: float = TIMEOUT, **rest: Any) -> None:
        self.killers: frozenset[int] = frozenset(rest.pop("killers", ()))
        large = rest.pop("large", False)
        super().__init__(Form(timeout, **rest), payload, arrival)
        self.large = large
        self.ends: list[Any] = []
        self.cuts_before = 0  # batches that had been cut when it was submitted

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Remember an answer."""
        self.ends.append(output)

    def fail(self, error: WeirError) -> None:
        """Remember an error."""
        self.ends.append(error)


def many(count: int, arrival: float = 0.0, **rest: Any) -> list[Asked]:
    """Return `count` ordinary requests."""
    return [Asked(number, arrival, **rest) for number in range(count)]


def listed(count: int, arrival: float = 0.0, timeout: float = TIMEOUT, **rest: Any) -> Asked:
    """Return a request of `count` items, one row each."""
    return Asked(list(range(count)), arrival, timeout, kind=Kind.ITEMS, rows=count, **rest)


def filled(*requests: Asked, queue: type[FifoQueue] = FifoQueue) -> Group:
    """Return a group in which these wait."""
    group = Group(None, queue)
    for request in requests:
        group.add(request)
    return group


class Notes:
    """Greedy, and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def decide(self, seen: Observation) -> Decision:
        """Dispatch."""
        self.seen.append(seen)
        return Decision(seen.waiting, Reason.IDLE)


def kills(entry: Entry) -> bool:
    """Return whether this entry ends its worker."""
    request, start, stop = entry
    assert isinstance(request, Asked)
    return any(start <= killer < stop for killer in request.killers)


class Mill:
    """Drives a batcher as the service does: `turn` after whatever happened, `advance` for time."""

    def __init__(
        self, policy: Policy | None = None, *, workers: int = 1, bulk_workers: int = 0, places: int = 1, now: float = 0.0,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.settings = BatchingSettings(**settings)
        self.batcher = Batcher(self.settings, policy or Greedy())
        self.now = now
        self.places = places
        self.accepted: list[Asked] = []
        self.cuts: list[Dispatch] = []
        self.first_sizes: dict[tuple[int, int], int] = {}
        self.bulk_workers = range(workers, workers + bulk_workers)
        for worker in range(workers + bulk_workers):
            self.batcher.worker_ready(worker, places, now, bulk=worker in self.bulk_workers)

    # What happens.

    def submit(self, *requests: Asked) -> list[Dispatch]:
        """Submit, then poll once; return the batches cut."""
        for request in requests:
            self.batcher.submit(request, self.now)
            request.cuts_before = len(self.cuts)
            self._check_capacity(request)
            self.accepted.append(request)
        return self.turn(Wakeup.ARRIVAL)

    def cancel(self, request: Asked) -> list[tuple[int, int, list[int]]]:
        """The caller of `request` leaves."""
        if request.settled:
            assert self.batcher.cancel(request, self.now) == []
            return []
        places = self.batcher.cancel(request, self.now)
        request.ends.append("cancelled")
        self.turn(Wakeup.ARRIVAL)
        return places

    def finish(self, dispatch: Dispatch, outputs: Sequence[Any] | None = None) -> list[Dispatch]:
        """The worker answers the whole batch (by default each entry with its payload); return what is cut then."""
        answers = list(to_batch(dispatch).payloads) if outputs is None else list(outputs)
        self.give(dispatch, Events(dispatch.batch_id, answers))
        self.batcher.finished(dispatch.batch_id, self.now)
        return self.turn(Wakeup.WORKER)

    def give(self, dispatch: Dispatch, events: Events) -> None:
        """Events arrive; a final one is for `finish`."""
        for request, output in deliver(dispatch, events):
            assert isinstance(request, Asked)
            request.finish(output, dispatch)

    def lose(self, worker: int, *, replace: bool = True) -> list[Dispatch]:
        """A worker dies, and by default is replaced at once."""
        for lost in self.batcher.worker_lost(worker, self.now):
            for request, output in fail_entries(lost, "killed"):
                assert isinstance(request, Asked)
                request.finish(output, lost.dispatch)
        return self.ready(worker) if replace else self.turn(Wakeup.WORKER)

    def ready(self, worker: int) -> list[Dispatch]:
        """A worker is ready."""
        self.batcher.worker_ready(worker, self.places, self.now, bulk=worker in self.bulk_workers)
        return self.turn(Wakeup.WORKER)

    def run(self, dispatch: Dispatch) -> list[Dispatch]:
        """The worker runs the batch: it dies if there is a killer in it, else it answers."""
        alive = [entry for entry in entries_of(dispatch) if not entry[0].settled]
        return self.lose(dispatch.worker) if any(map(kills, alive)) else self.finish(dispatch)

    def run_all(self, seconds: float = 0.0) -> None:
        """Let batches run, each for so long, until nothing waits or runs."""
        rounds = 0
        while not self.batcher.is_empty:
            rounds += 1
            assert rounds < 10_000, "the batcher never gets empty"
            if self.batcher.running:
                self.now += seconds
                self.run(next(iter(self.batcher.running.values())))
            else:
                assert self.batcher.next_wakeup is not None, "something waits, and nothing would ever move it"
                self.advance(self.batcher.next_wakeup)

    def advance(self, instant: float) -> list[Dispatch]:
        """Let time pass, with the timer going off whenever it must."""
        cut: list[Dispatch] = []
        while (wakeup := self.batcher.next_wakeup) is not None and wakeup <= instant:
            self.now = max(self.now, wakeup)
            cut += self.turn(Wakeup.TIMER)
        self.now = max(self.now, instant)
        return cut

    def play(self, seconds: Callable[[Dispatch], float], until: float = inf) -> None:
        """Let time pass to the instant `until`, or else until nothing happens any more. Each batch takes its `seconds`."""
        while True:
            ends = ((each.at + seconds(each), each) for each in self.batcher.running.values())
            end, dispatch = min(ends, default=(inf, None), key=itemgetter(0))
            wakeup = self.batcher.next_wakeup
            soonest = min(end, inf if wakeup is None or wakeup > _NEVER else wakeup)
            if soonest > until or soonest == inf:
                break
            self.advance(soonest)
            if dispatch is not None and end == soonest:
                self.finish(dispatch)
        if until < inf:
            self.advance(until)

    def turn(self, wakeup: Wakeup) -> list[Dispatch]:
        """Expire and poll until the timer is in the future; check everything."""
        cut: list[Dispatch] = []
        for _ in range(100):
            self._expire()
            new = self.batcher.poll(self.now, wakeup)
            for dispatch in new:
                self._check_dispatch(dispatch)
            cut += new
            soonest = self.batcher.next_wakeup
            if soonest is None or soonest > self.now:
                break
            wakeup = Wakeup.TIMER
        else:
            raise AssertionError(f"the timer spins: next_wakeup={soonest} at {self.now}")
        self.cuts += cut
        self._check_books()
        self._check_waits()
        return cut

    def _expire(self) -> None:
        for request in self.batcher.expire(self.now):
            assert isinstance(request, Asked)
            assert request.settled
            request.fail(DeadlineExceeded("too late"))

    # What must hold.

    def _check_capacity(self, request: Asked) -> None:
        batcher, settings = self.batcher, self.settings
        ours = [each for each in self.waiting if is_bulk(each) == is_bulk(request)]
        waiting = sum(map(rows_left, ours)) + rows_left(request)
        if is_bulk(request):
            running, suspects = sum(dispatch.bulk for dispatch in batcher.running.values()), batcher._bulk.suspects
        else:
            running = sum(dispatch.rows - dispatch.bulk for dispatch in batcher.running.values())
            suspects = batcher._interactive.suspects
        again = self._rows(suspects)
        under_way = waiting + running + ceil(again - 1e-9)
        assert under_way in (request.form.rows, min(under_way, settings.capacity or inf))
        cost = sum(rows_left(each) / each.form.rows * each.form.cost for each in ours) + request.form.cost
        assert waiting == request.form.rows or cost <= (settings.max_queue_cost or inf) + 1e-9

    @property
    def waiting(self) -> list[Asked]:
        """The requests in the line, as far as they know themselves."""
        return [each for each in self.accepted if not each.settled and each.taken < each.form.rows]

    def _check_dispatch(self, dispatch: Dispatch) -> None:
        requests, settings = dispatch.requests, self.settings
        assert requests
        assert dispatch.rows <= settings.max_batch_size
        is_alone = settings.padded and len(entries_of(dispatch)) == 1
        assert is_alone or dispatch.cost <= (settings.max_batch_cost or inf) + 1e-9
        assert len({request.form.key for request in requests}) == 1 or dispatch.reason is Reason.RETRY
        assert not any(request.settled or request.deadline <= self.now for request in requests)
        self._check_bulk(dispatch)
        entries = entries_of(dispatch)
        assert len(set(entries)) == len(entries) == len(to_batch(dispatch).payloads)
        assert dispatch.rows == ceil(sum(self._share(entry) * entry[0].form.rows for entry in entries) - 1e-9)
        if settings.padded:
            self._check_padding(dispatch)
        for entry in entries:
            first = self.first_sizes.setdefault((id(entry[0]), entry[1]), len(entries))
            assert dispatch.attempt <= ceil(log2(first)) + 1
        if dispatch.reason is Reason.RETRY:
            alone = [each for each in self.batcher.running.values() if each.worker == dispatch.worker]
            assert alone == [dispatch], "a suspect shares its worker"

    def _check_bulk(self, dispatch: Dispatch) -> None:
        assert dispatch.gives_way == (dispatch.worker in self.bulk_workers)
        if dispatch.gives_way:
            assert all(map(is_bulk, dispatch.requests)), "a bulk worker got something else"
        elif self.batcher.bulk_workers and dispatch.reason is not Reason.RETRY:
            assert not dispatch.bulk, "bulk work is for the bulk workers"
        if dispatch.reason is Reason.RETRY:
            return
        rows = [self._share(entry) * entry[0].form.rows for entry in entries_of(dispatch) if is_bulk(entry[0])]
        assert dispatch.bulk == ceil(sum(rows) - 1e-9)
        assert (dispatch.bulk == dispatch.rows) == (dispatch.reason is Reason.BULK)
        if 0 < dispatch.bulk < dispatch.rows:
            assert not any(not is_bulk(each) for each in self.waiting), "bulk work took the place of a request"

    def _check_padding(self, dispatch: Dispatch) -> None:
        entries = entries_of(dispatch)
        longest = max(length_of(request) for request, _, _ in entries)
        tokens = sum(self._share(entry) * entry[0].form.cost for entry in entries)
        padding = self.settings.padding_cost * (dispatch.rows * longest - tokens)
        assert dispatch.padding == pytest.approx(padding, abs=1e-9)
        assert dispatch.cost == pytest.approx(tokens + padding)
        if dispatch.reason is not Reason.RETRY and self.settings.max_padding is not None:
            assert dispatch.padding <= self.settings.max_padding + 1e-9

    def _share(self, entry: Entry) -> float:
        request, start, stop = entry
        whole = (
            request.form.rows
            if request.form.kind is Kind.TENSORS
            else len(request.payload)
            if request.form.kind is Kind.ITEMS
            else 1
        )
        return (stop - start) / whole

    def _rows(self, suspects: CrashRetry) -> float:
        return sum(self._share(entry) * entry[0].form.rows for entry in suspects.entries())

    def _check_books(self) -> None:
        batcher = self.batcher
        waiting = self.waiting
        ours = sum(rows_left(each) for each in waiting if not is_bulk(each) or not batcher.bulk_workers)
        assert batcher.backlog == ours + self._rows(batcher._interactive.suspects)
        assert batcher.waiting_rows == sum(map(rows_left, waiting))
        assert batcher.waiting_requests == len(waiting)
        assert sum(batcher.counts.values()) == len(self.cuts)
        assert [each["batch_id"] for each in batcher.recent] == [each.batch_id for each in self.cuts[-100:]]
        assert batcher.waiting_bulk == sum(rows_left(each) for each in waiting if is_bulk(each))
        oldest = min((each.arrival for each in waiting if not is_bulk(each)), default=self.now)
        assert batcher.oldest_age(self.now) == self.now - oldest
        for request in self.accepted:
            assert len(request.ends) == int(request.settled), "each request has exactly one end"
            assert request.settled or request.deadline > self.now, "nobody outlives the deadline"

    def _check_waits(self) -> None:
        batcher, waiting = self.batcher, self.waiting
        held = Counter[int]()
        for dispatch in batcher.running.values():
            held[dispatch.worker] += self.places if dispatch.reason is Reason.RETRY else 1
        self._check_bulk_workers(held)
        held = Counter({worker: count for worker, count in held.items() if worker not in self.bulk_workers})
        is_free = len(held) < batcher.workers or any(count < self.places for count in held.values())
        if not waiting:
            return
        soonest = batcher.next_wakeup
        assert soonest is not None
        assert soonest <= min(each.deadline for each in waiting)
        interactive = [each for each in waiting if not is_bulk(each)]
        if is_free and not batcher.suspects and interactive:
            assert not batcher.draining, "a place is free, nothing more will come, and something waits"
            assert soonest <= min(each.arrival for each in interactive) + self.settings.max_queue_delay
        if len(held) < batcher.workers and not batcher.suspects and not batcher.bulk_workers:
            assert interactive, "a worker has nothing to do, and only bulk work waits"

    def _check_bulk_workers(self, held: Counter[int]) -> None:
        free = [worker.index for worker in self.batcher._bulk.places if held[worker.index] < self.places]
        if free and not self.batcher.suspects:
            assert not self.batcher.waiting_bulk, "a bulk worker has a free place, and bulk work waits"


def queue_of(request: RequestBase) -> tuple[Any, ...]:
    """Return what must agree for two requests to keep their order."""
    return request.form.key, request.form.priority, request.large


def check_order(accepted: Iterable[Asked], cuts: Iterable[Dispatch], *, padded: bool = False) -> None:
    """Hold first dispatches against arrival: within a queue nobody goes before one of about its size that arrived earlier and was there. Where
    batches are `padded`, this is so among those of equal length, unless the deadline is earlier."""
    first: dict[int, tuple[int, int]] = {}
    for number, dispatch in enumerate(cuts):
        if dispatch.reason is not Reason.RETRY:
            for place, request in enumerate(dispatch.requests):
                first.setdefault(id(request), (number, place))
    queues: dict[tuple[Any, ...], list[Asked]] = {}
    for request in accepted:
        if id(request) in first:
            size = size_class((LengthQueue if padded else FifoQueue).size(request)) if request.large else None
            queues.setdefault((queue_of(request), size, length_of(request) if padded else None), []).append(request)
    for members in queues.values():
        members.sort(key=lambda each: each.arrival)
        for earlier, later in combinations(members, 2):
            was_there = earlier.cuts_before <= first[id(later)][0]
            hurries = padded and later.deadline < earlier.deadline
            assert not was_there or hurries or first[id(earlier)] < first[id(later)], (
                "order within a queue is that of arrival"
            )


def check_answer(request: Asked) -> None:
    """Hold a request's answer against its payload."""
    (end,) = request.ends
    if isinstance(end, (WeirError, str)):
        assert end == "cancelled" or isinstance(end, (DeadlineExceeded, ModelCrashed, WorkerLost))
    elif request.form.kind is Kind.ITEMS:
        pairs = zip(request.payload, end, strict=True)
        assert all(answer == item or isinstance(answer, WeirError) for item, answer in pairs)
    elif request.form.kind is Kind.ITEM:
        assert end == request.payload
    else:
        assert (end["x"] == request.payload["x"]).all()


def crashed(request: Asked) -> int:
    """Count the entries of `request` that ended their worker, as its answer says."""
    (end,) = request.ends
    ends = end if isinstance(end, list) else [end]
    return sum(isinstance(each, ModelCrashed) for each in ends)
