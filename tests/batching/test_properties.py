"""For any sequence of events: exactly one end each, order kept, no batch over its limits, no wait too long, nothing lost."""

from typing import Any

import numpy
from hypothesis import HealthCheck, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.batching.mill import Asked, Mill, check_answer, check_order, crashed, listed

from weir.batching.collate import entries_of
from weir.errors import DeadlineExceeded, Draining, InvalidRequest, ModelCrashed, ModelError, Overloaded, WorkerLost
from weir.messages import EventKind, Events, Express, Kind, Wakeup
from weir.policy.decision import ControlLimit, Decision, FullBatches, Greedy, Observation, Policy, SizeOrDelay


class Moody:
    """A policy that follows no sense: pure, but its answers jump about; sometimes it raises, or lies about time."""

    def decide(self, seen: Observation) -> Decision:
        """Answer by the digits of the observation."""
        mood = hash((seen.waiting, seen.idle_places, seen.arrivals)) % 6
        if mood == 0:
            raise RuntimeError("in no mood")
        if mood == 1:
            return Decision(0, until=seen.now - 1.0)
        if mood == 2:
            return Decision(0)
        if mood == 3:
            return Decision(0, until=seen.now + 0.01 * seen.waiting)
        return Decision(mood * 3)


POLICIES: list[Policy] = [
    Greedy(), SizeOrDelay(3, 0.02), SizeOrDelay(None, 0.5), FullBatches(), FullBatches(2), ControlLimit(3), Moody(),
]  # fmt: skip
timeouts = some.sampled_from([0.03, 0.1, 0.5, 5.0, 30.0]) | some.floats(0.01, 2.0)
keys = some.sampled_from([None, None, None, "a", "b"])


class Batching(RuleBasedStateMachine):
    """Everything that can happen to a batcher."""

    @initialize(
        policy=some.sampled_from(POLICIES),
        workers=some.integers(1, 3),
        bulk_workers=some.sampled_from([0, 0, 1, 2]),
        places=some.integers(1, 2),
        max_batch_size=some.integers(1, 8),
        max_queue_size=some.integers(4, 60),
        max_queue_delay=some.sampled_from([0.0, 0.05, 0.3]),
        max_batch_cost=some.sampled_from([None, 4.0, 10.0]),
        small_request_size=some.integers(0, 4),
        max_overtakes=some.integers(0, 3),
        padded=some.sampled_from([False, False, True]),
        max_padding=some.sampled_from([None, 0.0, 2.0]),
        padding_cost=some.sampled_from([1.0, 1.0, 0.25, 0.0]),
        capacity=some.sampled_from([None, None, 5, 30]),
        max_queue_cost=some.sampled_from([None, None, 6.0, 40.0]),
        bulk_delay=some.sampled_from([None, None, 0.0, 0.05]),
    )
    def begin(self, policy: Policy, workers: int, bulk_workers: int, places: int, **limits: Any) -> None:
        """Start with any settings."""
        self.mill = Mill(policy, workers=workers, bulk_workers=bulk_workers, places=places, now=1000.0, **limits)
        self.killed_at_random = False

    def _submit(self, request: Asked) -> None:
        try:
            self.mill.submit(request)
        except (Overloaded, DeadlineExceeded, InvalidRequest, Draining) as error:
            assert not request.settled
            if isinstance(error, Overloaded):
                assert error.retry_after is not None
                assert error.retry_after > 0.0

    @rule(count=some.integers(1, 12), timeout=timeouts, key=keys)
    def submit_plain(self, count: int, timeout: float, key: str | None) -> None:
        """Ordinary requests arrive."""
        for number in range(count):
            self._submit(Asked(number, self.mill.now, timeout, key=key))

    @rule(
        rows=some.integers(1, 9),
        cost=some.sampled_from([0.0, 0.5, 1.0, 3.0]),
        priority=some.integers(-1, 1),
        timeout=timeouts,
        key=keys,
        late=some.sampled_from([0.0, 0.0, 0.004]),
    )
    def submit_item(self, rows: int, cost: float, priority: int, timeout: float, key: str | None, late: float) -> None:
        """An item arrives that may be large, dear, more or less urgent, or had to wait outside."""
        arrival = self.mill.now - late
        self._submit(Asked(7, arrival, timeout, rows=rows, cost=cost, priority=priority, key=key))

    @rule(count=some.integers(1, 20), each=some.integers(1, 2), timeout=timeouts, key=keys, cost=some.floats(0.0, 9.0))
    def submit_list(self, count: int, each: int, timeout: float, key: str | None, cost: float) -> None:
        """A list arrives."""
        payload = list(range(count))
        arrival = self.mill.now
        self._submit(Asked(payload, arrival, timeout, kind=Kind.ITEMS, rows=count * each, key=key, cost=cost))

    @rule(count=some.integers(1, 20), timeout=timeouts)
    def submit_express(self, count: int, timeout: float) -> None:
        """A list arrives that wants batches of its own."""
        self._submit(listed(count, self.mill.now, timeout, key=Express(object())))

    @rule(rows=some.integers(1, 20), timeout=timeouts)
    def submit_tensors(self, rows: int, timeout: float) -> None:
        """Tensors arrive."""
        payload = {"x": numpy.arange(rows)}
        self._submit(Asked(payload, self.mill.now, timeout, kind=Kind.TENSORS, rows=rows, key="shape"))

    @rule(count=some.integers(1, 9), killer=some.integers(0, 8), priority=some.sampled_from([0, 0, -1]))
    def submit_killer(self, count: int, killer: int, priority: int) -> None:
        """A list arrives with an item in it that ends its worker."""
        self._submit(listed(count, self.mill.now, killers=[killer % count], priority=priority))

    @rule(choice=some.integers(0, 1000))
    def cancel(self, choice: int) -> None:
        """Somebody leaves, perhaps after the end."""
        if self.mill.accepted:
            self.mill.cancel(self.mill.accepted[-1 - choice % len(self.mill.accepted)])

    @precondition(lambda self: self.mill.batcher.running)
    @rule(choice=some.integers(0, 5), seconds=some.floats(0.0, 0.2))
    def run_batch(self, choice: int, seconds: float) -> None:
        """A batch comes back, or its killer strikes."""
        self.mill.advance(self.mill.now + seconds)
        running = list(self.mill.batcher.running.values())
        if running:
            self.mill.run(running[choice % len(running)])

    @precondition(lambda self: self.mill.batcher.running)
    @rule(index=some.integers(0, 20), is_error=some.booleans())
    def answer_one(self, index: int, is_error: bool) -> None:
        """One entry of a batch is answered ahead of the others."""
        dispatch = next(iter(self.mill.batcher.running.values()))
        request, start, _ = entry = entries_of(dispatch)[index % len(entries_of(dispatch))]
        if request.form.kind is Kind.TENSORS:
            return
        output = ModelError("bad") if is_error and request.form.kind is Kind.ITEMS else self._answer(*entry)
        kinds = [EventKind.ERROR if isinstance(output, ModelError) else EventKind.DONE]
        place = index % len(entries_of(dispatch))
        self.mill.give(dispatch, Events(dispatch.batch_id, [output], indices=[place], kinds=kinds, final=False))
        self.mill.turn(Wakeup.ARRIVAL)
        assert start >= 0

    def _answer(self, request: Any, start: int, _: int) -> Any:
        return request.payload[start] if request.form.kind is Kind.ITEMS else request.payload

    @precondition(lambda self: self.mill.batcher.running)
    @rule()
    def tensors_fail(self) -> None:
        """The first tensors in a batch fail: the end of a request of which a part may still wait."""
        dispatch = next(iter(self.mill.batcher.running.values()))
        for place, entry in enumerate(entries_of(dispatch)):
            if entry[0].form.kind is Kind.TENSORS:
                kinds = [EventKind.ERROR]
                events = Events(dispatch.batch_id, [ModelCrashed("bad")], indices=[place], kinds=kinds, final=False)
                self.mill.give(dispatch, events)
                self.killed_at_random = True
                break
        self.mill.turn(Wakeup.ARRIVAL)

    @rule(worker=some.integers(0, 4))
    def kill(self, worker: int) -> None:
        """A worker dies for no reason of the requests."""
        if worker < self.mill.batcher.workers + self.mill.batcher.bulk_workers:
            self.killed_at_random = True
            self.mill.lose(worker)

    @rule(seconds=some.sampled_from([0.0, 0.001, 0.01, 0.05, 0.3, 3.0]))
    def pass_time(self, seconds: float) -> None:
        """Time passes."""
        self.mill.advance(self.mill.now + seconds)

    @rule()
    def pass_time_to_the_timer(self) -> None:
        """Time passes exactly to the instant of the timer."""
        if (wakeup := self.mill.batcher.next_wakeup) is not None:
            self.mill.advance(wakeup)

    @rule()
    def drain(self) -> None:
        """Nothing more will come."""
        self.mill.batcher.drain()
        self.mill.turn(Wakeup.ARRIVAL)

    @invariant()
    def innocents_never_crash(self) -> None:
        """Only killers get ModelCrashed, as long as workers die only of killers."""
        if hasattr(self, "mill") and not self.killed_at_random:
            for request in self.mill.accepted:
                if request.settled:
                    assert crashed(request) <= len(request.killers)

    def teardown(self) -> None:
        """At the end drain: everything has its end, and the answers are right."""
        if not hasattr(self, "mill"):
            return
        mill = self.mill
        mill.batcher.drain()
        mill.turn(Wakeup.ARRIVAL)
        mill.run_all(0.001)
        assert mill.batcher.waiting_rows == 0
        for request in mill.accepted:
            check_answer(request)
        check_order(mill.accepted, mill.cuts, padded=mill.settings.padded)
        assert WorkerLost not in {type(end) for request in mill.accepted for end in request.ends}


Batching.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestBatching = Batching.TestCase
