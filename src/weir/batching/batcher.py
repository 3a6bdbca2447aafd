"""Holds the queue, asks the policy, and cuts batches. It does no I/O and has no clock: `now` is an argument.

The driver calls `submit` and `cancel` as they come, then `poll` once; `worker_ready`, `worker_lost` and `finished` as the executor reports, each
followed by `poll`; and `expire`, then `poll`, when the instant `next_wakeup` has come. Instants come from one clock that never goes back.

An ordinary request (one item, one row, unit cost, priority 0) costs a few comparisons and one append. Whatever makes a request not ordinary, or
the moment (full, draining, a tight deadline), is one of those comparisons and leads to `_submit_other`.

Every wait that a policy wishes is clamped to oldest + max_queue_delay and to the earliest deadline - the service time in which most batches are
done: no request starves, and none is held until it can no longer make it. The clamps are instants, compared with the very values that arm the timer.
"""

from collections import deque
from math import inf
from typing import Any, NamedTuple

from weir.batching.collate import Lost, indices_of
from weir.batching.compose import BatchDraft, compose
from weir.batching.forecast import UNKNOWN_WAIT, QueueForecast
from weir.batching.group import FifoQueue, Group
from weir.batching.padded import ByLength, LengthQueue
from weir.batching.queue import RequestQueue
from weir.batching.request_state import settle, steps
from weir.batching.retry import CrashRetry, load_of
from weir.batching.service_time import PaddedTime, ServiceTime
from weir.batching.settings import BatchingSettings
from weir.batching.workers import Places, Running
from weir.errors import DeadlineExceeded, Draining, InvalidRequest, Overloaded
from weir.messages import Dispatch, Kind, Reason, Request, Wakeup
from weir.policy.decision import Decision, Observation, Policy, PolicyBase, complete


def check_size(request: Request, settings: BatchingSettings) -> None:
    """Raise InvalidRequest if `request`, or a single piece of it, can never be in a batch. Where batches are padded, a single one
    that is too long for `max_batch_cost` goes alone."""
    max_rows = settings.max_batch_size
    max_cost = inf if settings.padded or settings.max_batch_cost is None else settings.max_batch_cost
    if request.rows < 1:
        raise InvalidRequest(f"rows={request.rows}: a request has at least 1 row")
    pieces = steps(request)
    rows = request.rows // pieces
    if rows > max_rows:
        raise InvalidRequest(f"rows={rows}: an item that cannot be divided has at most max_batch_size={max_rows} rows")
    if not 0.0 <= request.cost / pieces <= max_cost:
        raise InvalidRequest(f"cost={request.cost / pieces:g}: an item costs from 0 to max_batch_cost={max_cost:g}")


class Bound:
    """The policy's bound on the line; the settings' own stays above it. `rows` is None while the policy has none."""

    __slots__ = ("_largest", "_line", "rows")

    def __init__(self, line: RequestQueue) -> None:
        self._line = line
        self._largest = line.max_rows
        self.rows: int | None = None

    def move(self, rows: int | None) -> None:
        """Let no more than `rows` wait, one at least, or (None) as many as the settings do."""
        self._line.resize(self._largest if rows is None else min(max(1, rows), self._largest))
        self.rows = rows

    def ask(self, policy: PolicyBase, now: float) -> None:
        """The line is full: let more wait if the policy that bounds it says so by now. Raises whatever it raises."""
        if self.rows is not None:
            self.move(policy.full(now))


MARGIN = 0.001  # seconds between the end of a batch and the answer at its caller
# Members of an enum are looked up slowly.
DEADLINE, DELAY, DRAIN, EXPRESS = Reason.DEADLINE, Reason.DELAY, Reason.DRAIN, Reason.EXPRESS
IDLE, POLICY = Reason.IDLE, Reason.POLICY


class Choice(NamedTuple):
    """`rows` > 0: cut a batch of up to that many, for `reason`. 0: wait until `until`, which is after now."""

    rows: int
    reason: Reason
    until: float
    limit: int | None


def bounded(decision: Decision, seen: Observation, service: ServiceTime) -> Choice:
    """Return what a policy has decided, within the bounds. A batch that is not too large is within them."""
    rows, reason, until, limit = decision
    largest = seen.max_batch_size
    if rows > 0:
        return Choice(min(rows, largest), reason, seen.now, limit)
    if seen.draining:
        return Choice(largest, DRAIN, seen.now, limit)
    clamped, reason = clamp(seen, until, service)
    return Choice(0 if seen.now < clamped else largest, reason, clamped, limit)


def clamp(seen: Observation, until: float | None, service: ServiceTime) -> tuple[float, Reason]:
    """Return when a wait ends at the latest, and why then."""
    end, reason = seen.oldest_arrival + seen.max_queue_delay, DELAY
    latest_start = seen.earliest_deadline - service.upper(min(seen.waiting, seen.max_batch_size)) - MARGIN
    if latest_start < end:
        end, reason = latest_start, DEADLINE
    if until is not None and until < end:
        end, reason = until, POLICY
    return end, reason


def greedily(seen: Observation) -> Choice:
    """Return the choice that replaces that of a policy which raised."""
    return Choice(min(seen.waiting, seen.max_batch_size), IDLE, seen.now, None)


def at_once(seen: Observation) -> Choice:
    """Return the choice for express calls, about which no policy is asked."""
    return Choice(min(seen.waiting, seen.max_batch_size), EXPRESS, seen.now, None)


RECENT = 100


class History:
    """Remembers dispatches without their requests. `counts` adds up to the number of batches."""

    __slots__ = ("_recent", "counts")

    def __init__(self) -> None:
        self.counts = dict.fromkeys(Reason, 0)
        self._recent: deque[tuple[Any, ...]] = deque(maxlen=RECENT)

    def note(self, cut: Dispatch) -> None:
        """Remember a dispatch."""
        self.counts[cut.reason] += 1
        self._recent.append((
            cut.batch_id, cut.worker, cut.rows, cut.cost, cut.reason, cut.waiting, cut.oldest_age, cut.limit, cut.wakeup,
            cut.at, cut.attempt, False, cut.padding,
        ))  # fmt: skip

    def recent(self) -> list[dict[str, Any]]:
        """Return the explanations of the last 100 dispatches, oldest first."""
        return [
            Dispatch(batch_id, worker, [], None, rows, cost, *explanation).explain()
            for batch_id, worker, rows, cost, *explanation in self._recent
        ]


ITEM, RETRY = Kind.ITEM, Reason.RETRY
GIVEN_UP = 0.5  # of its timeout: whoever leaves with less than that left may have a clock that is ahead of ours
SOONER = 0.75  # of the time of a batch: its share has to be done within that for several idle workers to share it
SIGHT_BATCHES, FIRST_SIGHTS = 16, (4, 8)  # the time in sight has 16 to spare: it is worked out again with these


class Batcher:
    """Decides which requests run, when, where and together with whom.

    Facts to read: `settings`, `policy`, `service` (the service-time estimate), `draining`, `policy_error` (the last
    exception that the policy raised: that decision was greedy instead), and the properties at the end.
    """

    __slots__ = (
        "_bound", "_compose", "_freed", "_history", "_late", "_late_at", "_line", "_max_cost", "_next_id", "_outlook", "_places",
        "_policy", "_refused", "_running", "_small", "_suspects", "_tight", "draining", "policy", "policy_error", "service", "settings",
    )  # fmt: skip

    def __init__(self, settings: BatchingSettings, policy: Policy) -> None:
        self.settings = settings
        self.policy = policy
        self._policy = complete(policy)
        self.service = PaddedTime(settings.max_batch_cost) if settings.padded else ServiceTime()
        self.draining = False
        self.policy_error: Exception | None = None
        self._line = RequestQueue(
            settings.max_queue_size, LengthQueue if settings.padded else FifoQueue, settings.capacity
        )
        by_length = ByLength(settings.max_padding, self.service.expected, settings.padding_cost)
        self._compose = by_length if settings.padded else compose
        self._places = Places()
        self._outlook = QueueForecast(settings, self.service, self._line, self._places)
        self._running = Running()
        self._suspects = CrashRetry()
        self._history = History()
        self._bound = Bound(self._line)
        self._late: list[Request] = []  # left out at dispatch, settled, for `expire` to hand over
        self._late_at = 0.0
        self._refused = 0  # rows that found the line full: arrivals all the same
        self._freed = False  # a place became free since the last poll
        self._max_cost = inf if settings.max_batch_cost is None else settings.max_batch_cost
        self._small = 1 if settings.small_request_size else inf
        # With less time than this left, a request is looked at.
        self._tight = inf if self._max_cost < 1.0 or settings.padded else 0.0
        self._next_id = 1

    # Requests come and go.

    def submit(self, request: Request, now: float) -> None:
        """Put `request` in the line; its state is as `request_state.begin` makes it.

        Raises Draining; InvalidRequest if it, or an indivisible item of it, exceeds what a batch may hold;
        DeadlineExceeded if the deadline has passed or can no longer be met; Overloaded with `retry_after`, when
        `max_waiting` rows wait. It is not in the line then. A request larger than the whole line is taken when nothing waits.
        """
        line = self._line
        if (
            request.rows != 1
            or request.cost != 1.0
            or request.kind is not ITEM
            or request.priority
            or request.large
            or line.arrivals >= line.ceiling
            or request.deadline <= now + self._tight
            or request.arrival < line.last_arrival
        ):
            self._submit_other(request, now)
            return
        group = line.groups.get(request.key)
        if group is None or request.timeout != group.timeout:
            line.enter(request)
            return
        group.append(request)
        group.arrived += 1
        line.arrivals += 1
        line.last_arrival = request.arrival
        if group.asleep:
            line.turns.wake(group)

    def _submit_other(self, request: Request, now: float) -> None:
        if self.draining:
            raise Draining("draining: no new requests are accepted", retry_after=UNKNOWN_WAIT)
        check_size(request, self.settings)
        if request.deadline <= now:
            raise DeadlineExceeded(f"timeout={request.timeout:g}: the deadline passed before the request arrived")
        if not self.room(request.rows) and not self._lengthened(request.rows, now):
            self._refused += request.rows
            raise Overloaded(f"rows={request.rows}: {self._fullness(request.rows)}", retry_after=self.drain_time())
        request.large = request.rows > self._small or (request.large and self._small < inf)
        if request.deadline <= now + self._tight and self._outlook.cannot_make_it(request, now):
            raise DeadlineExceeded(f"timeout={request.timeout:g}: the answer would come too late with this line")
        self._line.enter(request)

    def _fullness(self, rows: int) -> str:
        line = self._line
        waiting = line.waiting + line.again
        if waiting + line.running + rows > line.capacity:
            return f"{waiting} rows wait and {line.running} are with workers, capacity={line.capacity}"
        key = "max_queue_size" if self._bound.rows is None else "max_waiting of the policy"
        return f"{line.waiting} rows wait, {key}={line.max_rows}"

    def cancel(self, request: Request, now: float) -> list[tuple[int, int, list[int]]]:
        """The caller of a submitted `request` left: settle it and take it out of the line.

        Returns where it runs, as (worker, batch id, entry indices); nobody waits for those any more.
        """
        if not settle(request):
            return []
        if request.taken < request.rows:
            self._line.leave(request)
        if not request.taken:
            return []
        if self._suspects.parts:
            self._count_suspects()
        if request.deadline - now <= GIVEN_UP * request.timeout:
            self._miss(request)
        return self.where(request)

    def where(self, request: Request) -> list[tuple[int, int, list[int]]]:
        """Return where `request` runs, as (worker, batch id, entry indices)."""
        return [(each.worker, each.batch_id, indices_of(each, request)) for each in self._running.find(request)]

    def _miss(self, request: Request) -> None:
        """`request` was started, and its caller has not had the answer in time."""
        for dispatch in self._running.find(request):
            if not dispatch.missed:
                dispatch.missed = True
                self._outlook.missed(request)

    def expire(self, now: float) -> list[Request]:
        """Settle and return the requests whose deadline has passed, waiting or running, and those that dispatch has left
        out because they could not make it any more. All of them are the caller's to fail with DeadlineExceeded."""
        late, self._late = self._late, []
        late += self._line.passed(now)
        for request in [*self._running.passed(now), *self._suspects.passed(now)]:
            if settle(request):
                self._miss(request)
                late.append(request)
        if self._suspects.parts:
            self._count_suspects()
        self._line.sweep()
        return late

    # Workers come and go.

    def worker_ready(self, worker: int, places: int, now: float) -> None:
        """`worker` takes up to `places` batches at once."""
        self._places.add(worker, places, now)
        self._freed = True

    def worker_lost(self, worker: int, now: float) -> list[Lost]:
        """`worker` is gone. What it had runs again in halves; returned is, for each batch, what does not."""
        lost = [self._suspects.died(self._take_back(batch_id)) for batch_id in self._places.remove(worker)]
        self._count_suspects()
        return lost

    def _count_suspects(self) -> None:
        """Requests have joined those that are to run again, or left them: their rows count as under way."""
        self._line.run_again(self._suspects.rows)

    def _take_back(self, batch_id: int) -> Dispatch:
        dispatch = self._running.pop(batch_id)
        self._line.ran(-dispatch.rows)
        return dispatch

    def worker_leaves(self, worker: int) -> bool:
        """Give `worker` no more batches; tell whether it has none any more, so that `worker_lost` costs nothing."""
        return self._places.leave(worker)

    def finished(self, batch_id: int, now: float) -> Dispatch:
        """The batch is back: its place is free, its service time is learned. Raises KeyError if it is not running."""
        dispatch = self._take_back(batch_id)
        alone_since = self._places.take_back(dispatch.worker, batch_id, now)
        self._suspects.ended(batch_id)
        dispatch.seconds = now - (alone_since if alone_since > dispatch.at else dispatch.at)
        self.service.learn(dispatch.rows, dispatch.seconds, now, dispatch.cost)
        if not dispatch.missed:
            self._outlook.made_it()
        if self._tight < inf and (batch_id % SIGHT_BATCHES == 0 or batch_id in FIRST_SIGHTS):
            self._tight = self._outlook.time_in_sight()
        self._freed = True
        return dispatch

    def dispatch_of(self, batch_id: int) -> Dispatch | None:
        """Return the running batch of that id."""
        return self._running.batches.get(batch_id)

    def took_turn(self, seconds: float) -> None:
        """The driver's loop went round in so many seconds, while requests arrived."""
        self._outlook.took_turn(seconds)

    def is_late(self, batch_id: int, now: float) -> bool:
        """Tell whether requests of that running batch may be past their deadlines: `expire` ends them."""
        return self._running.is_late(batch_id, now)

    # Decisions.

    def poll(self, now: float, wakeup: Wakeup) -> list[Dispatch]:
        """Return the batches to be run now, each with its worker. Asks the policy only with a place free."""
        line, places = self._line, self._places
        turns = line.turns
        line.sweep()
        turns.wake_due(now)
        cut: list[Dispatch] = []
        if not places.free:
            return cut
        if self._freed:
            self._freed = False
            turns.wake_some()
        while places.free and self._suspects.parts:
            dispatch = self._retry(now, wakeup)
            if dispatch is not None:
                cut.append(dispatch)
            elif self._suspects.parts:
                return cut  # a suspect waits for a worker of its own: let one run empty
        while places.free and (group := turns.first()) is not None:
            dispatch = self._ask(group, now, wakeup)
            if dispatch is not None:
                cut.append(dispatch)
        return cut

    def _ask(self, group: Group, now: float, wakeup: Wakeup) -> Dispatch | None:
        line, settings = self._line, self.settings
        earliest_deadline, oldest_arrival = group.rank()
        seen = Observation(
            now, group.arrived - group.departed, oldest_arrival, earliest_deadline, line.arrivals + self._refused,
            line.last_arrival, self._places.free, self._places.staying, settings.max_batch_size, settings.max_queue_delay,
            self.draining,
        )  # fmt: skip
        rows, reason, until, limit = at_once(seen) if group.express else self._decision(seen)
        if not rows:
            line.turns.park(group, until)
            return None
        load = self._compose(
            group, rows, self._max_cost, self._outlook.start_cutoff(seen, rows, group), settings.max_overtakes
        )
        line.account(group, load)
        if load.late:
            self._late += load.late
            self._late_at = now
        if not load.requests:
            return None
        line.turns.led(group)
        return self._start(load, reason, seen.waiting, now - oldest_arrival, limit, wakeup, now, earliest_deadline)

    def _decision(self, seen: Observation) -> tuple[int, Reason, float, int | None]:
        try:
            decision = self._policy.decide(seen)
            rows, reason, _, limit = decision
            if reason is IDLE and rows > 1 and self._places.free > 1:
                rows = self._share(rows)
            bound = self._policy.max_waiting
            if bound is not self._bound.rows:
                self._bound.move(bound)
            if 0 < rows <= seen.max_batch_size:
                return rows, reason, seen.now, limit
            return bounded(decision, seen, self.service)
        except Exception as error:
            self.policy_error = error
            return greedily(seen)

    def _share(self, rows: int) -> int:
        """Return how many of `rows`, which are all that wait, the next worker gets: its share among the idle ones, if that is done a good deal
        sooner than all of them would be."""
        share = -(-rows // max(1, self._places.idle))
        return share if share < rows and self.service.is_sooner(share, rows, SOONER) else rows

    def _lengthened(self, rows: int, now: float) -> bool:
        """The line is full: tell whether `rows` fit once the policy was asked."""
        try:
            self._bound.ask(self._policy, now)
        except Exception as error:
            self.policy_error = error
        return self.room(rows)

    def _retry(self, now: float, wakeup: Wakeup) -> Dispatch | None:
        """Cut a batch of suspects, for a worker that has nothing else."""
        worker = self._places.pick(empty=True)
        part = self._suspects.pop() if worker is not None else None
        self._count_suspects()
        if part is None:
            return None
        load = load_of(part.entries, self.settings.padding_cost if self.settings.padded else None)
        oldest = min(request.arrival for request in load.requests)
        earliest = min(request.deadline for request in load.requests)
        dispatch = self._start(load, RETRY, self.waiting_rows, now - oldest, None, wakeup, now, earliest, part.attempt)
        self._suspects.started(dispatch.batch_id, part)
        return dispatch

    def _start(
        self, load: BatchDraft, reason: Reason, waiting: int, oldest_age: float, limit: int | None, wakeup: Wakeup,
        now: float, earliest_deadline: float, attempt: int = 0,
    ) -> Dispatch:  # fmt: skip
        batch_id = self._next_id
        self._next_id += 1
        alone = reason is RETRY
        worker = self._places.pick(empty=alone)
        assert worker is not None  # only called with a place free; otherwise this is a bug
        self._places.give(worker, batch_id, alone=alone)
        dispatch = Dispatch(
            batch_id, worker.index, load.requests, load.slices, load.rows, load.cost, reason, waiting, oldest_age, limit,
            wakeup, now, attempt, load.plain, load.padding,
        )  # fmt: skip
        self._running.add(dispatch, earliest_deadline)
        self._line.ran(load.rows)
        self._history.note(dispatch)
        return dispatch

    @property
    def next_wakeup(self) -> float | None:
        """The instant at which `expire` and `poll` are to be called; None if nothing can happen by time alone."""
        if self._late:
            return self._late_at
        turns, running = self._line.turns, self._running
        soonest = min(turns.end_of_wait(), turns.earliest_deadline(), running.earliest_deadline())
        if self._suspects.parts:
            soonest = min(soonest, self._suspects.earliest_deadline())
        return soonest if soonest < inf else None

    def reconsider(self) -> None:
        """The policy is not what it was: the next poll asks it anew about every group that it lets wait."""
        self._line.turns.wake_all()

    # The end.

    def drain(self) -> None:
        """Refuse new requests from now on, and let no policy wait. The rest of the line goes as places become free."""
        self.draining = True
        self._line.close()
        self._line.turns.wake_all()

    def abandon(self) -> list[Request]:
        """Settle and return every request that has not had its end, waiting or running: there is nobody to run them.

        Batches stay with their workers until `finished` or `worker_lost`.
        """
        late, self._late = self._late, []
        left = self.unsettled()
        for request in left:
            settle(request)
        self._line.clear()
        self._suspects.clear()
        self._count_suspects()
        return [*late, *left]

    def unsettled(self) -> list[Request]:
        """Return every request that has not had its end, waiting or running."""
        waiting = [request for group in self._line.groups.values() for request in group]
        suspects = [entry[0] for entry in self._suspects.entries()]
        running = [request for each in self._running.batches.values() for request in each.requests]
        return list({id(each): each for each in [*waiting, *suspects, *running] if not each.settled}.values())

    # Facts.

    @property
    def waiting_rows(self) -> int:
        """Rows in the line."""
        return self._line.waiting

    @property
    def waiting_requests(self) -> int:
        """Requests in the line, also those of which a part is already running."""
        return sum(map(len, self._line.groups.values()))

    @property
    def running(self) -> dict[int, Dispatch]:
        """The batches that are with workers, by id. Not to be changed."""
        return self._running.batches

    @property
    def workers(self) -> int:
        """How many workers are ready."""
        return len(self._places)

    @property
    def suspects(self) -> int:
        """How many parts of lost batches are to run again."""
        return len(self._suspects)

    @property
    def has_waiting(self) -> bool:
        """Whether there is anything to decide, or to hand over by `expire`."""
        line = self._line
        return bool(line.arrivals != line.departed or self._suspects.parts or self._late)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits, runs, or is to run again."""
        return not (self.waiting_rows or self._running.batches or self._suspects or self._late)

    @property
    def arrivals(self) -> int:
        """Rows accepted so far."""
        return self._line.arrivals

    @property
    def counts(self) -> dict[Reason, int]:
        """How many batches were cut for each reason. Not to be changed."""
        return self._history.counts

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The explanations of the last 100 dispatches, oldest first."""
        return self._history.recent()

    @property
    def max_waiting(self) -> int:
        """Rows that may wait: `max_queue_size`, or less where the policy says so (its `max_waiting`)."""
        return self._line.max_rows

    def oldest_age(self, now: float) -> float:
        """Return for how long the oldest request in the line has waited; 0 when the line is empty."""
        oldest = min((group.oldest() for group in self._line.groups.values()), default=inf)
        return now - oldest if oldest < inf else 0.0

    def room(self, rows: int) -> bool:
        """Tell whether a request of so many rows would be accepted now, as far as the length of the line goes."""
        return self._line.room(rows)

    def best_rate(self, now: float) -> float:
        """Return the rows like those of late that all workers serve together in a second, in full batches; infinity while too little is known."""
        return self._outlook.best_rate(now)

    def drain_time(self) -> float:
        """Return how long the line will take at the rate at which batches come back; 1 s if nothing is known."""
        return self._outlook.drain_time(self._line.running + self._line.again)
