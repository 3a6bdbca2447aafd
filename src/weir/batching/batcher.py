"""Holds the queue, asks the policy, and cuts batches. It does no I/O and has no clock: `now`, an instant in seconds, is an argument.

The driver calls `submit` and `cancel` as requests come and go, then `poll` once; `worker_ready`, `worker_lost` and `finished` as the executor
reports, each followed by `poll`; `expire`, then `poll`, at the instant `next_wakeup`; and `expire` after a `poll` if `has_left_out`. Instants come from one
clock that never goes back.

An ordinary request (one item or row of tensors, unit cost, priority 0) costs a few comparisons and one append. If the request is not ordinary, or the
queue is full or draining, or the deadline is near, one of those comparisons leads to `_submit_other`.

Bulk requests, whose priority is below 0, wait in a queue of their own, which no policy observes. They get what the others leave: see bulk.py.

Every wait of a policy is clamped: see forecast.py.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

from weir.batching import BatchingSettings
from weir.batching.bulk import BulkWork, WorkClass, is_bulk
from weir.batching.collate import Lost
from weir.batching.compose import BatchDraft, Composer
from weir.batching.forecast import (
    BULK,
    IDLE,
    MARGIN,
    TURN_FADE,
    UNKNOWN_WAIT,
    QueueForecast,
    at_once,
    bounded,
    greedily,
)
from weir.batching.group import FifoQueue, Group
from weir.batching.padded import ByLength, LengthQueue
from weir.batching.queue import Bound, Rank, RequestQueue
from weir.batching.request_state import settle, steps
from weir.batching.retry import draft_of
from weir.batching.service_time import ServiceTime
from weir.batching.workers import Places, Running, WaitingTurn, Worker, WorkerKinds
from weir.errors import DeadlineExceeded, InvalidRequest, Overloaded, draining
from weir.messages import Dispatch, Form, Kind, Reason, Request, Wakeup, explained
from weir.policy.decision import Observation, Policy, complete


def check_size(request: Request, settings: BatchingSettings) -> None:
    """Raise InvalidRequest if `request`, or an indivisible piece of it, can never be in a batch.

    Where batches are padded, a piece that costs more than `max_batch_cost` has a batch of its own, so cost is not limited.
    """
    max_rows = settings.max_batch_size
    max_cost = inf if settings.padded or settings.max_batch_cost is None else settings.max_batch_cost
    if request.form.rows < 1:
        raise InvalidRequest(f"rows={request.form.rows}: a request has at least 1 row")
    pieces = steps(request)
    rows = request.form.rows // pieces
    if rows > max_rows:
        raise InvalidRequest(f"rows={rows}: an item that cannot be divided has at most max_batch_size={max_rows} rows")
    if not 0.0 <= request.form.cost / pieces <= max_cost:
        raise InvalidRequest(
            f"cost={request.form.cost / pieces:g}: an item costs from 0 to max_batch_cost={max_cost:g}"
        )


RECENT = 100  # dispatches that are remembered


class History:
    """The `records` of the last dispatches, without their requests. `counts` is the number of batches by reason."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(Reason, 0)
        self.records: deque[tuple[Any, ...]] = deque(maxlen=RECENT)

    def recent(self) -> list[dict[str, Any]]:
        """Return the explanations of the last 100 dispatches, oldest first."""
        return list(map(explained, self.records))


class Poll:
    """The present poll: its instant, what woke the batcher, and the batches that are `cut` by now."""

    __slots__ = ("cut", "now", "wakeup")
    cut: list[Dispatch]
    now: float
    wakeup: Wakeup


ITEM, ITEMS, RETRY = Kind.ITEM, Kind.ITEMS, Reason.RETRY
# A caller that leaves with less than this part of its timeout left counts as missed: its clock may be ahead of ours.
GIVEN_UP = 0.5
# Idle workers share what waits if a share takes less than this part of the time of one batch of everything.
SOONER = 0.75
# `_tight` is computed again at these batch ids, and at every 16th: it allows for the growth of the queue during 16 batches.
SIGHT_BATCHES, FIRST_SIGHTS = 16, (4, 8)


class Batcher:
    """Decides which requests run, when, on which worker and in which batch.

    Attributes to read: `settings`, `policy`, `service` (the service-time estimate), `draining`, `policy_error` (the last exception that the
    policy raised; that decision was greedy instead), `kinds` (what is known of the kinds of workers; None if all are alike), and the properties at the
    end. The argument `kinds` has the number of each worker's kind, going round; empty if all are alike.
    """

    __slots__ = (
        "_bound", "_bulk", "_bulk_seen", "_classes", "_composer", "_freed", "_history", "_in_sight", "_interactive", "_largest_item", "_late", "_late_at", "_queue", "_max_cost", "_next_id", "_forecast", "_ordinary", "_places",
        "_policy", "_polled", "_refused", "_running", "_small", "_tight", "draining", "kinds", "policy", "policy_error", "service", "settings",
    )  # fmt: skip

    def __init__(self, settings: BatchingSettings, policy: Policy, kinds: Sequence[int] = ()) -> None:
        self.settings = settings
        self.policy = policy
        self._policy = complete(policy)
        self.draining = False
        self.policy_error: Exception | None = None
        queue_type = LengthQueue if settings.padded else FifoQueue
        self._interactive, self._bulk = self._classes = WorkClass(settings, queue_type), BulkWork(settings, queue_type)
        self._queue = self._interactive.queue
        self._places = places = self._interactive.places
        padded, max_cost = settings.padded, settings.max_batch_cost
        self.kinds = WorkerKinds(kinds, places, padded=padded, max_cost=max_cost) if kinds else None
        self.service = ServiceTime(padded=padded, max_cost=max_cost) if self.kinds is None else self.kinds.times
        self._bulk_seen = False  # until the first bulk request nothing is done for such
        by_length = ByLength(settings, self.service.expected)
        self._composer = by_length if settings.padded else Composer(settings.max_overtakes)
        self._forecast = QueueForecast(settings, self.service, self._queue, self._places)
        self._running = Running()
        self._history = History()
        self._polled = Poll()
        self._bound = Bound(self._queue)
        self._late: list[Request] = []  # left out at dispatch and settled; `expire` returns them
        self._late_at = 0.0
        self._refused = 0  # rows that were refused because the queue was full; they count as arrivals for the policy
        self._freed = False  # a place became free since the last poll
        self._max_cost = inf if settings.max_batch_cost is None else settings.max_batch_cost
        self._ordinary: Form | None = None  # the last form that was ordinary
        self._small = 1 if settings.small_request_size else inf
        # A request with less time than this until its deadline is checked in `_submit_other`, in seconds; so is each whose cost counts.
        counts_costs = self._max_cost < 1.0 or settings.padded or settings.max_queue_cost is not None
        self._tight = inf if counts_costs else 0.0
        # What is checked there can make it if it has more time than this and costs no more than a batch; infinity until that is known.
        self._in_sight = self._tight
        self._largest_item = inf if settings.padded else self._max_cost
        self._next_id = 1

    # Requests.

    def submit(self, request: Request, now: float) -> None:
        """Put `request` in the queue; its state is `request_state.NEW`.

        Raises Draining; InvalidRequest if the request, or an indivisible item of it, exceeds what a batch may hold; DeadlineExceeded if the
        deadline has passed or can no longer be met; Overloaded with `retry_after` (seconds) when `max_waiting` rows wait. It is not in the
        queue then. A request larger than the whole queue is accepted when nothing waits.
        """
        queue, form = self._queue, request.form
        if (
            (form is not self._ordinary and not self._is_ordinary(form))
            or queue.arrivals >= queue.ceiling
            or request.deadline <= now + self._tight
            or request.arrival < queue.last_arrival
        ):
            self._submit_other(request, now)
            return
        group = queue.groups.get(form.key)
        if group is None or form.timeout != group.timeout:
            queue.enter(request)
            return
        group.append(request)
        group.arrived += 1
        queue.arrivals += 1
        queue.last_arrival = request.arrival
        if group.asleep:
            queue.scheduler.wake(group)

    def submit_alike(self, requests: Sequence[Request], now: float) -> Sequence[Request]:
        """Put `requests` in the queue, which differ in payload and arrival only and are in order of arrival. Return them all, for `submit`, if they must be
        looked at one by one: they are not ordinary, or one might be refused. A frame of 16 requests takes 3.0 µs a request this way, and 4.3 µs one by one."""
        first, queue = requests[0], self._queue
        if (
            not self._is_ordinary(first.form)
            or queue.arrivals + len(requests) > queue.ceiling
            or first.deadline <= now + self._tight
        ):
            return requests
        queue.enter_alike(requests)
        return ()

    def _is_ordinary(self, form: Form) -> bool:
        """Return whether requests of `form` are items or tensors of priority 0, one row and unit cost. Most requests have the form of the one before."""
        if form.rows != 1 or form.cost != 1.0 or form.kind is ITEMS or form.priority:
            return False
        self._ordinary = form
        return True

    def _submit_other(self, request: Request, now: float) -> None:
        if self.draining:
            raise draining("the model", UNKNOWN_WAIT)
        if (
            request.form.rows != 1
            or request.form.kind is not ITEM
            or not 0.0 <= request.form.cost <= self._largest_item
        ):
            check_size(request, self.settings)
        if request.deadline <= now:
            raise DeadlineExceeded(f"timeout={request.form.timeout:g}: the deadline passed before the request arrived")
        request.large = request.form.rows > self._small
        if is_bulk(request):
            self._submit_bulk(request)
            return
        if not self.room(request.form.rows, request.form.cost) and not self._lengthened(request, now):
            self._refused += request.form.rows
            raise Overloaded(self._fullness(self._queue, request), retry_after=self.drain_time())
        is_near = request.deadline <= now + self._in_sight or request.form.cost > self._max_cost
        if is_near and self._forecast.cannot_make_it(request, now):
            raise DeadlineExceeded(
                f"timeout={request.form.timeout:g}: the response would miss the deadline with the current queue"
            )
        self._queue.enter(request)

    def _submit_bulk(self, request: Request) -> None:
        queue = self._bulk.queue
        if not queue.room(request.form.rows, request.form.cost):
            raise Overloaded(f"bulk {self._fullness(queue, request)}", retry_after=self.drain_time())
        self._bulk_seen = True
        queue.enter(request)

    def _fullness(self, queue: RequestQueue, request: Request) -> str:
        waiting, rows = queue.waiting + queue.again, f"rows={request.form.rows}: "
        if waiting + queue.running + request.form.rows > queue.capacity:
            return f"{rows}{waiting} rows wait and {queue.running} are with workers, capacity={queue.capacity}"
        if queue.cost + request.form.cost > queue.max_cost:
            return f"{rows}requests that cost {queue.cost:g} wait, this costs {request.form.cost:g}, max_queue_cost={queue.max_cost:g}"
        key = "max_queue_size" if self._bound.rows is None else "max_waiting of the policy"
        return f"{rows}{queue.waiting} rows wait, {key}={queue.max_rows}"

    def cancel(self, request: Request, now: float) -> list[tuple[int, int, list[int]]]:
        """Settle a submitted `request` whose caller has left, and take it out of the queue.

        Return where it runs, as (worker, batch id, entry indices): no caller waits for those entries any more.
        """
        if not settle(request):
            return []
        if request.taken < request.form.rows:
            (self._bulk if is_bulk(request) else self._interactive).queue.leave(request)
        if not request.taken:
            return []
        self._count_suspects()
        if request.deadline - now <= GIVEN_UP * request.form.timeout:
            self._miss(request)
        return self.where([request])

    def where(self, requests: Iterable[Request]) -> list[tuple[int, int, list[int]]]:
        """Return where `requests`, which have ended, run, as (worker, batch id, entry indices): the workers may leave them out."""
        return self._running.leave_out({id(request) for request in requests if request.taken})

    def _miss(self, request: Request) -> None:
        """Note that the response of `request`, which was started, came too late."""
        for dispatch in self._running.find(request):
            if not dispatch.missed:
                dispatch.missed = True
                if not dispatch.gives_way:
                    self._forecast.missed(request)

    def expire(self, now: float) -> list[Request]:
        """Settle and return the requests whose deadline has passed, waiting or running, and those that dispatch has left out because their
        deadline could no longer be met. The driver fails them with DeadlineExceeded."""
        self._settle_late(self._running.passed(now), now)
        for each in self._classes:
            self._late += each.queue.passed(now)
            self._settle_late(each.suspects.passed(now), now)
        late, self._late = self._late, []
        self._count_suspects()
        for each in self._classes:
            if each.queue.divided:
                each.queue.sweep()
        return late

    def _settle_late(self, requests: Iterable[Request], now: float) -> None:
        """Settle those of `requests`, which have been started before, that are not settled, for `expire` to return."""
        for request in requests:
            if settle(request):
                self._miss(request)
                self._late.append(request)
                self._late_at = now

    # Workers.

    def worker_ready(self, worker: int, places: int, now: float, *, bulk: bool = False) -> None:
        """Note that `worker` is ready and takes up to `places` batches at once. With `bulk` it is a bulk worker: it gets bulk work only, and all of
        it."""
        if bulk:
            self._bulk.workers.add(worker)
        else:
            self._freed = True
        kinds = self.kinds
        self._served_by(worker).places.add(worker, places, now, 0 if kinds is None else kinds.of(worker))

    def _served_by(self, worker: int) -> WorkClass:
        """Return the class of work that decides what `worker` gets."""
        return self._bulk if worker in self._bulk.workers else self._interactive

    def worker_lost(self, worker: int, now: float) -> list[Lost]:
        """Note that `worker` is gone, or once more that it could not be replaced. Its entries run again, in halves, and on a bulk worker if it was one.
        Return, for each of its batches, the entries that do not."""
        work = self._served_by(worker)
        if work is self._bulk and worker not in work.places:
            self._give_up(worker)
        lost = [work.suspects.died(self._take_back(batch_id)) for batch_id in work.places.remove(worker)]
        self._count_suspects(changed=True)
        return lost

    def _give_up(self, worker: int) -> None:
        """Do not wait for the replacement of a bulk worker. After the last one the others run bulk work."""
        bulk = self._bulk
        bulk.workers.discard(worker)
        if not bulk.workers:
            self._interactive.suspects.parts += bulk.suspects.parts
            bulk.suspects.clear()
            self._freed = True

    def _count_suspects(self, *, changed: bool = False) -> None:
        """Tell the queues how many rows are to run again: they count as under way. Without `changed`, only if there are any."""
        for each in self._classes:
            each.count_suspects(changed=changed)

    def _take_back(self, batch_id: int) -> Dispatch:
        dispatch = self._running.batches.pop(batch_id)
        self._queue.ran(dispatch.bulk - dispatch.rows)
        if dispatch.bulk:
            self._bulk.queue.ran(-dispatch.bulk)
        return dispatch

    def worker_leaves(self, worker: int) -> bool:
        """Give `worker` no more batches. Return whether it has none left, so that it can be ended."""
        return self._served_by(worker).places.leave(worker)

    def finished(self, batch_id: int, now: float) -> Dispatch:
        """Note that a batch has come back: its place is free, and its service time is learned. Raises KeyError if it is not running."""
        dispatch = self._take_back(batch_id)
        worker = dispatch.worker
        work = self._bulk if dispatch.gives_way else self._interactive
        alone_since = work.places.take_back(worker, batch_id, now)
        if work.suspects.last_tries:
            work.suspects.last_tries.discard(batch_id)  # it did not end its worker
        dispatch.seconds = now - (alone_since if alone_since > dispatch.at else dispatch.at)
        if not dispatch.gives_way:  # those give way to others meanwhile, so their times say nothing
            self._freed = True
            self._learn(dispatch, now)
        return dispatch

    def _learn(self, dispatch: Dispatch, now: float) -> None:
        """Learn from a batch that has come back."""
        kinds = self.kinds
        service = self.service if kinds is None else kinds.times.of[kinds.of(dispatch.worker)]
        learn = not dispatch.shorter or dispatch.seconds > service.expected(dispatch.rows)
        if kinds is not None:
            kinds.came_back(dispatch, now, learn=learn)
        elif learn:
            service.learn(dispatch.rows, dispatch.seconds, now, dispatch.cost)
        if self._bulk_seen and not self._bulk.workers:
            self._bulk.ended(dispatch, self.bulk_delay, now, self._queue.last_arrival)
        if self._forecast.margin and not dispatch.missed:
            self._forecast.made_it()
        batch_id = dispatch.batch_id
        if batch_id % SIGHT_BATCHES == 0 or batch_id in FIRST_SIGHTS:
            self._in_sight = self._forecast.time_in_sight()
            if self._tight < inf:
                self._tight = self._in_sight

    def took_turn(self, seconds: float) -> None:
        """Note that a turn of the driver's loop, in which requests arrived, took `seconds`."""
        turn = self._forecast.turn
        self._forecast.turn = seconds if seconds > turn else TURN_FADE * turn + (1.0 - TURN_FADE) * seconds

    def worker_away(self, worker: int) -> None:
        """Give `worker`, which need not be ready, no batch until it is back: it works for another model that shares it."""
        self._places.set_away(worker, True)

    def worker_back(self, worker: int) -> None:
        """Note that `worker` is not away, or no longer."""
        self._places.set_away(worker, False)
        self._freed = True

    # Decisions.

    def poll(self, now: float, wakeup: Wakeup) -> list[Dispatch]:
        """Return the batches to be run now, each with its worker. The policy is asked only while a worker has a free place."""
        queue, places, bulk, polled = self._queue, self._places, self._bulk, self._polled
        polled.now, polled.wakeup, polled.cut = now, wakeup, []
        for each in self._classes if self._bulk_seen else (self._interactive,):
            if each.suspects.parts:  # before the sweep: the rest of a divided request may wait
                self._settle_late(each.suspects.passed(now), now)
            if each.queue.divided:
                each.queue.sweep()
        if queue.scheduler.parked.entries:
            queue.scheduler.wake_due(now)
        if places.free and (not self._interactive.suspects.parts or self._cut_again(self._interactive, polled)):
            self._cut_as_decided(polled)
            if self._bulk_seen and bulk.waiting and places.free and not bulk.workers:
                self._cut_bulk(places, polled)
        if bulk.places.free and self._cut_again(bulk, polled):
            self._cut_bulk(bulk.places, polled)
        cut, polled.cut = polled.cut, []  # so that it keeps no request
        return cut

    def _cut_again(self, work: WorkClass, polled: Poll) -> bool:
        """Cut batches of what is to run again. Return whether other batches may be cut now."""
        while work.places.free and work.suspects.parts:
            if not self._retry(work, polled) and work.suspects.parts:
                return False  # a retry needs a worker without other batches: wait until one has none
        return True

    def _cut_as_decided(self, polled: Poll) -> None:
        """Cut the batches that the policy wants now."""
        places, scheduler = self._places, self._queue.scheduler
        if self._freed:
            self._freed = False
            if scheduler.parked.entries:
                scheduler.wake_some()
        while places.free and (group := scheduler.first()) is not None:
            self._ask(group, polled)

    def _ask(self, group: Group, polled: Poll) -> None:
        """Ask the policy about `group`, and cut a batch of it if the policy wants one."""
        queue, settings, places, kinds, now = self._queue, self.settings, self._places, self.kinds, polled.now
        earliest_deadline, oldest_arrival = rank = group.rank()
        seen = Observation(
            now, group.arrived - group.departed, oldest_arrival, earliest_deadline, queue.arrivals + self._refused,
            queue.last_arrival, places.free, places.staying, settings.max_batch_size, settings.max_queue_delay,
            self.draining, () if kinds is None else kinds.states(self._running.batches),
        )  # fmt: skip
        rows, reason, until, limit, kind = at_once(seen) if group.express else self._decision(seen)
        if not rows:
            queue.scheduler.park(group, until)
            return
        if kinds is None:
            worker, service = places.pick(), self.service
        else:
            worker = kinds.pick(kind, rows)
            service = kinds.times.of[worker.kind]
        cutoff = self._forecast.start_cutoff(seen, rows, group, service)
        draft = self._composer.draft(rows, self._max_cost, cutoff)
        self._take(self._interactive, group, draft, now)
        if not draft.requests:
            return
        queue.scheduler.express_was_last = group.express
        if self._bulk_seen and self._fill_up(draft, group, oldest_arrival, now):
            # Bulk work may be due before all that leads the batch.
            rank = min(earliest_deadline, *[request.deadline for request in draft.requests]), oldest_arrival
        self._start(polled, worker, draft, reason, seen.waiting, rank, limit)

    def _fill_up(self, draft: BatchDraft, group: Group, oldest_arrival: float, now: float) -> bool:
        """Have bulk requests join `draft`, a batch from `group`, as far as they may. Return whether any do."""
        bulk, rows, cost, most = self._bulk, draft.rows, draft.cost, self.settings.max_batch_size
        if not bulk.waiting or bulk.workers:
            return False
        bulk.serves(oldest_arrival, self.bulk_delay, alone=not self._queue.running, spare=self._places.free > 1)
        room = bulk.room_beside(draft, group)
        if room is None or self._queue.waiting or rows >= most or group.express:
            return False
        ours, more_cost = room
        draft.reopen(most, more_cost)
        self._take(bulk, ours, draft, now)
        bulk.joined(draft.cost - cost)
        draft.bulk = draft.rows - rows
        return draft.bulk > 0

    def _cut_bulk(self, places: Places, polled: Poll) -> None:
        """Cut batches of bulk requests for the workers of `places`: for bulk workers as large as batches may be; for others, which must have nothing else
        to do, as large as may be now."""
        bulk, now = self._bulk, polled.now
        is_shared = places is self._places
        is_limited = is_shared and not self.draining
        limit, delay = bulk.limit(self.bulk_delay, now, self._queue.last_arrival) if is_limited else (inf, 0.0)
        scheduler = bulk.queue.scheduler
        while (worker := places.pick(empty=is_shared)) is not None and (group := scheduler.first()) is not None:
            if is_limited and places.free == 1 and self._queue.scheduler.end_of_wait() < now + delay:
                return  # the last free worker is kept for interactive requests whose wait is about to end
            waiting, rank = group.waiting, group.rank()
            draft = self._composer.draft(self.settings.max_batch_size, min(self._max_cost, limit), now)
            self._take(bulk, group, draft, now)
            if draft.requests:
                scheduler.express_was_last = group.express
                draft.bulk = draft.rows
                self._start(polled, worker, draft, BULK, waiting, rank)

    def _take(self, work: WorkClass, group: Group, draft: BatchDraft, now: float) -> None:
        """Take requests from `group`, of this class of work, as far as they fit into `draft`."""
        self._composer.fill(draft, group)
        work.queue.account(group, draft)
        if draft.late:
            self._late += draft.late
            self._late_at = now

    def _decision(self, seen: Observation) -> tuple[int, Reason, float, int | None, int | None]:
        try:
            decision = self._policy.decide(seen)
            rows, reason, _, limit, kind = decision
            if reason is IDLE and rows > 1 and self._places.free > 1:
                rows = self._share(rows, kind)
            bound = self._policy.max_waiting
            if bound is not self._bound.rows or bound == 0:
                self._bound.move(bound, 0 if rows else 1)
            if 0 < rows <= seen.max_batch_size:
                return rows, reason, seen.now, limit, kind
            kinds = self.kinds
            return bounded(decision, seen, self.service if kinds is None else kinds.waited_with(kind, seen))
        except Exception as error:
            self.policy_error = error
            return greedily(seen)

    def _share(self, rows: int, kind: int | None) -> int:
        """Return how many of the `rows` that wait the next worker gets: an equal share of the idle workers (of its kind), if that is done so much
        sooner than all rows (SOONER); else all."""
        kinds = self.kinds
        if kinds is None:
            idle, service = self._places.idle, self.service
        else:
            kind = kinds.with_place(kind, rows)
            idle, service = kinds.idle(kind), kinds.times.of[kind]
        share = -(-rows // max(1, idle))
        return share if share < rows and service.is_sooner(share, rows, SOONER) else rows

    def _lengthened(self, request: Request, now: float) -> bool:
        """Return whether `request` fits into the full queue after the policy was asked for more room."""
        try:
            self._bound.ask(self._policy, now)
        except Exception as error:
            self.policy_error = error
        return self.room(request.form.rows, request.form.cost)

    def _retry(self, work: WorkClass, polled: Poll) -> bool:
        """Cut a batch of entries that run again, for a worker without other batches. Return False if there is none of either."""
        worker = work.places.pick(empty=True)
        part = work.suspects.pop() if worker is not None else None
        self._count_suspects(changed=True)
        if part is None:
            return False
        draft = draft_of(part.entries, self.settings.padding_cost if self.settings.padded else None)
        draft.attempt, draft.bulk = part.attempt, draft.rows if work is self._bulk else 0
        rank = min(request.deadline for request in draft.requests), min(request.arrival for request in draft.requests)
        dispatch = self._start(polled, worker, draft, RETRY, self.waiting_rows, rank)
        work.suspects.started(dispatch.batch_id, part)
        return True

    def _start(
        self, polled: Poll, worker: Worker | None, draft: BatchDraft, reason: Reason, waiting: int, rank: Rank, limit: int | None = None
    ) -> Dispatch:  # fmt: skip
        """Give `worker` the batch `draft`. `waiting` rows waited for it, and `rank` is the earliest deadline and the earliest arrival."""
        assert worker is not None  # only called with a place free; otherwise this is a bug
        batch_id, now, bulk = self._next_id, polled.now, draft.bulk
        self._next_id += 1
        gives_way = worker.index in self._bulk.workers
        (self._bulk if gives_way else self._interactive).places.give(
            worker, batch_id, alone=reason is RETRY, bulk=reason is BULK
        )
        dispatch = Dispatch(
            batch_id, worker.index, draft.requests, draft.slices, draft.rows, draft.cost, reason, waiting, now - rank[1],
            limit, polled.wakeup, now, draft.attempt, draft.undivided, draft.padding, bulk, gives_way, rank[0],
        )  # fmt: skip
        polled.cut.append(dispatch)
        self._running.batches[batch_id] = dispatch
        self._queue.ran(draft.rows - bulk)
        if bulk:
            self._bulk.queue.ran(bulk)
        self._history.counts[reason] += 1
        self._history.records.append(dispatch.record())
        return dispatch

    @property
    def next_wakeup(self) -> float | None:
        """The instant at which `expire` and `poll` are to be called; None if nothing happens until another call."""
        if self._late:
            return self._late_at
        scheduler, running = self._queue.scheduler, self._running
        soonest = min(scheduler.earliest_deadline(), running.earliest_deadline())
        if scheduler.parked.entries:
            soonest = min(soonest, scheduler.end_of_wait())
        if self._bulk_seen and self._bulk.waiting:
            soonest = min(soonest, self._bulk.queue.scheduler.earliest_deadline())
        for each in self._classes:
            if each.suspects.parts:
                soonest = min(soonest, each.suspects.earliest_deadline())
        return soonest if soonest < inf else None

    def reconsider(self) -> None:
        """Note that the policy has changed: the next poll asks it again about every group that waits."""
        self._queue.scheduler.wake_all()

    # The end.

    def drain(self) -> None:
        """Refuse new requests from now on, and let no policy wait. The rest of the queue is dispatched as places become free."""
        self.draining = True
        for each in self._classes:
            each.queue.close()
        self._queue.scheduler.wake_all()

    def abandon(self) -> list[Request]:
        """Settle and return every unsettled request, waiting or running: there is no worker to run them.

        Batches stay with their workers until `finished` or `worker_lost`.
        """
        late, self._late = self._late, []
        left = self.unsettled()
        for request in left:
            settle(request)
        for each in self._classes:
            each.clear()
        self._count_suspects(changed=True)
        return [*late, *left]

    def unsettled(self) -> list[Request]:
        """Return every unsettled request, waiting or running."""
        found = [request for work in self._classes for request in work.unsettled()]
        found += [request for each in self._running.batches.values() for request in each.requests]
        return list({id(each): each for each in found if not each.settled}.values())

    # What others read.

    def could_grow(self, least: int) -> bool:
        """Return whether at least `least` rows wait, a worker is free for them, and a batch has room for more."""
        queue = self._queue
        return bool(self._places.free) and least <= queue.arrivals - queue.departed < self.settings.max_batch_size

    @property
    def waiting_rows(self) -> int:
        """The number of waiting rows, bulk work included."""
        return self._queue.waiting + self._bulk.waiting

    @property
    def waiting_interactive(self) -> int:
        """The number of waiting rows, without bulk work."""
        return self._queue.arrivals - self._queue.departed

    @property
    def waiting_bulk(self) -> int:
        """The number of waiting rows of bulk work."""
        return self._bulk.waiting

    @property
    def bulk_limit(self) -> float:
        """The most that a batch of bulk work may cost now; 0 until it is known, which means a single item."""
        if self._bulk.workers:
            return float(self.settings.max_batch_size) if self._max_cost == inf else self._max_cost
        return self._bulk.size.limit

    @property
    def bulk_delay(self) -> float:
        """The most seconds that bulk work may add to an interactive request: 0 with bulk workers, which give way to it."""
        return 0.0 if self._bulk.workers else self._bulk.delay(self._policy)

    @property
    def waiting_requests(self) -> int:
        """The number of waiting requests, including those of which a part is already running."""
        return sum(len(group) for each in self._classes for group in each.queue.groups.values())

    @property
    def running(self) -> dict[int, Dispatch]:
        """The batches that are with workers, by id. Not to be changed."""
        return self._running.batches

    @property
    def workers(self) -> int:
        """The number of ready workers, without those that take bulk work only."""
        return len(self._places)

    @property
    def free_places(self) -> int:
        """The number of batches that the workers could take now, without those that take bulk work only."""
        return self._places.free

    @property
    def bulk_workers(self) -> int:
        """The number of workers that take bulk work only and are ready, or are being replaced."""
        return len(self._bulk.workers)

    @property
    def backlog(self) -> int:
        """The rows that wait, or must run again because their worker died, without what bulk workers take."""
        return self._queue.waiting + self._queue.again + (0 if self._bulk.workers else self._bulk.waiting)

    @property
    def suspects(self) -> int:
        """The number of parts of lost batches that must run again."""
        return sum(len(each.suspects) for each in self._classes)

    @property
    def has_waiting(self) -> bool:
        """Whether there is anything to decide, or `expire` has anything to return."""
        queue = self._queue
        if queue.arrivals != queue.departed or self._late or self._interactive.suspects.parts:
            return True
        return self._bulk_seen and bool(self._bulk.waiting or self._bulk.suspects.parts)

    @property
    def has_left_out(self) -> bool:
        """Whether dispatch has settled requests that `expire` has not returned yet. Nobody may see them before they have their ends."""
        return bool(self._late)

    @property
    def claim(self) -> int:
        """The work for a free worker: 2 if requests wait, 1 if only bulk work waits, 0 if nothing waits."""
        queue = self._queue
        if queue.arrivals != queue.departed or self._interactive.suspects.parts:
            return 2
        return int(self._bulk.waiting > 0)

    @property
    def turn(self) -> WaitingTurn | None:
        """See WorkerUser. Where requests form several groups, it is that of the group that is next."""
        group = self._queue.scheduler.next()
        if group is None:
            return None
        deadline, oldest_arrival = group.rank()
        waiting = group.arrived - group.departed
        seconds = self.service.upper(min(waiting, self.settings.max_batch_size))
        due = min(oldest_arrival + self.settings.max_queue_delay, deadline - seconds - MARGIN)
        return WaitingTurn(waiting, oldest_arrival, due, seconds, self._policy.urgency(waiting))

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits, runs, or is to run again."""
        return not (self.waiting_rows or self._running.batches or self.suspects or self._late)

    @property
    def arrivals(self) -> int:
        """The number of rows accepted so far, without bulk work."""
        return self._queue.arrivals

    @property
    def offered(self) -> int:
        """The number of rows that have arrived so far: those accepted, and those refused because the queue was full."""
        return self._queue.arrivals + self._refused

    @property
    def counts(self) -> dict[Reason, int]:
        """The number of batches cut for each reason. Callers must not change it."""
        return self._history.counts

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The explanations of the last 100 dispatches, oldest first."""
        return self._history.recent()

    @property
    def max_waiting(self) -> int:
        """The most rows that may wait: `max_queue_size`, or the policy's `max_waiting` if that is less."""
        return self._queue.max_rows

    def oldest_age(self, now: float) -> float:
        """Return for how many seconds the oldest request has waited; 0 when the queue is empty. Bulk work does not count."""
        oldest = min((group.oldest() for group in self._queue.groups.values()), default=inf)
        return now - oldest if oldest < inf else 0.0

    def room(self, rows: int, cost: float = 0.0, bulk: bool = False) -> bool:
        """Return whether the queue, or that of `bulk` work, has room for a request of these `rows` and this `cost`."""
        return (self._bulk.queue if bulk else self._queue).room(rows, cost)

    def best_rate(self, now: float) -> float:
        """Return how many rows per second all workers serve together in full batches; infinity while too little is known."""
        return self._forecast.best_rate(now)

    def drain_time(self) -> float:
        """Return how many seconds the queue will take at the rate at which batches come back; 1 s if nothing is known."""
        return self._forecast.drain_time(self._queue.running + self._queue.again)


class BatcherUser(ABC):
    """A driver of a `batcher` whose workers other models may share: see WorkerUser."""

    batcher: Batcher

    @property
    def claim(self) -> int:
        """The work for a free worker; see Batcher.claim."""
        return self.batcher.claim

    @property
    def turn(self) -> WaitingTurn | None:
        """Its requests that are next; see Batcher.turn."""
        return self.batcher.turn

    def worker_away(self, worker: int) -> None:
        """Give `worker` no batch until it is back."""
        self.batcher.worker_away(worker)

    def worker_back(self, worker: int) -> None:
        """Give `worker` a batch, if one is due."""
        self.batcher.worker_back(worker)
        self.poll_worker()

    @abstractmethod
    def poll_worker(self) -> None:
        """Poll the batcher, as a worker is free, and run what it cuts."""
