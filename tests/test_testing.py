import asyncio
from collections.abc import Callable, Sequence
from copy import copy
from itertools import pairwise
from typing import Any

import pytest
from tests.rings import subcases
from tests.serving.kit import squares

from weir.messages import JSON, MSGPACK, OBJECT, Batch, Events
from weir.metrics import MetricReport
from weir.policy.decision import Decision, Observation
from weir.testing import BrokenRule, FakeClock, FakeExecutor, check_policy, observations, traffic
from weir.workers.executor import Executor


class Listener:
    def __init__(self) -> None:
        self.ready: list[tuple[int, int]] = []
        self.events: list[Events] = []

    def worker_ready(self, worker: int, places: int, *, bulk: bool = False) -> None:
        self.ready.append((worker, places))

    def worker_lost(self, worker: int, reason: str) -> None:
        self.ready.remove((worker, 1))

    def worker_leaves(self, worker: int) -> None:
        raise AssertionError("no worker leaves")

    def measured(self, worker: int, reports: Sequence[MetricReport]) -> None:
        raise AssertionError("the model has no metrics")

    def received(self, worker: int, events: Events) -> None:
        self.events.append(events)

    def unavailable(self, reason: str) -> None:
        self.ready.clear()


def test_the_clock_stands_still_and_fires_each_timer_at_its_instant() -> None:
    clock, fired = FakeClock(100.0), list[tuple[str, float]]()
    clock.call_at(103.0, lambda: fired.append(("late", clock())))
    clock.call_at(101.0, lambda: fired.append(("early", clock())))
    clock.call_at(101.0, lambda: fired.append(("second", clock())))
    clock.call_at(102.0, lambda: fired.append(("never", clock()))).cancel()
    assert clock() == 100.0
    clock.advance(1.5)
    assert fired == [("early", 101.0), ("second", 101.0)]
    assert clock() == 101.5
    clock.advance(1.5)
    assert fired[2:] == [("late", 103.0)]


def test_a_timer_may_arm_another_for_the_same_stretch_of_time() -> None:
    clock, fired = FakeClock(0.0), list[float]()

    def again() -> None:
        fired.append(clock())
        clock.call_at(clock() + 1.0, again)

    clock.call_at(1.0, again)
    clock.advance(3.5)
    assert fired == [1.0, 2.0, 3.0]


async def test_the_executor_answers_encoded_payloads_as_they_are_wanted() -> None:
    heard, executor = Listener(), FakeExecutor(squares, workers=2)
    typed: Executor = executor
    await typed.start(heard)
    assert heard.ready == [(0, 1), (1, 1)]
    types = [JSON, MSGPACK, OBJECT]
    executor.run(1, Batch(7, [b"3", b"\x04", 5], types, types))
    assert executor.states()[1].in_flight == 1
    await asyncio.sleep(0)
    assert heard.events[0].outputs == [b"9", b"\x10", 25]
    assert heard.events[0].kinds is None
    assert heard.events[0].final
    assert (executor.sizes, executor.payloads) == ([3], [[b"3", b"\x04", 5]])
    assert executor.states()[1].in_flight == 0
    await typed.stop()
    assert executor.gauges()["restarts"] == 0


async def test_a_lost_worker_takes_its_batches_along_and_comes_back() -> None:
    heard, executor = Listener(), FakeExecutor(squares)
    await executor.start(heard)
    executor.run(0, Batch(1, [3], OBJECT, OBJECT))
    executor.lose(0, "gone")
    await asyncio.sleep(0)
    assert heard.events == []
    assert executor.states()[0].reason == "gone"
    executor.revive(0)
    assert executor.states()[0].restarts == 1
    assert heard.ready == [(0, 1)]
    executor.end()
    assert heard.ready == []


class Says:
    """A policy that always says the same, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def decide(self, seen: Observation) -> Decision:
        """Say it."""
        if isinstance(self.answer, Exception):
            raise self.answer
        answer: Decision = self.answer(seen) if callable(self.answer) else self.answer
        return answer


class Forgetful:
    """A policy whose answer depends on how often all of its kind were asked."""

    asked = 0

    def decide(self, seen: Observation) -> Decision:
        Forgetful.asked += 1
        return Decision(1 + Forgetful.asked // 7 % 2)


class Counts:
    """A policy that remembers how often it was asked: one row, then two, and so on up to nine; its copies are made by `copy`."""

    def __init__(self, copy: Callable[["Counts"], Any] = lambda _: Counts()) -> None:
        self.asked, self.copy = 0, copy

    def decide(self, seen: Observation) -> Decision:
        self.asked += 1
        rows = self.asked % 10
        return Decision(rows, until=None if rows else seen.now + 1.0)

    def fresh(self) -> Any:
        return self.copy(self)


class Shares(Counts):
    """Its copies count together."""

    def decide(self, seen: Observation) -> Decision:
        return Forgetful().decide(seen)


def late_alarm(seen: Observation) -> Decision:
    """Compare a duration, which rounding makes false at the very instant that was asked for."""
    if seen.now - seen.oldest_arrival >= 0.1:
        return Decision(seen.waiting)
    return Decision(0, until=seen.oldest_arrival + 0.1)


@subcases(
    ("policy", "rule"),
    [
        (Says(RuntimeError("no idea")), r"a policy answers every observation.*RuntimeError\('no idea'\)"),
        (Says(5), "a policy returns a Decision"),
        (Says(None), "a policy returns a Decision"),
        (Says(Decision(-1)), "rows is a whole number, 0 or more"),
        (Says(Decision(2.0)), "rows is a whole number, 0 or more"),  # type: ignore[arg-type]  # that is the point
        (Says(Decision(True)), "rows is a whole number, 0 or more"),
        (Says(Decision(1, 3)), "reason is a Reason"),  # type: ignore[arg-type]  # that is the point
        (Says(Decision(1, limit=0)), "limit is None or a whole number, 1 or more"),
        (Says(Decision(0, until=float("inf"))), "until is None or a finite instant"),
        (Says(lambda seen: Decision(0, until=seen.now)), "a wait ends later than now"),
        (Says(lambda seen: Decision(0, until=seen.now - 1.0)), "a wait ends later than now"),
        (Says(late_alarm), "when the end of a wait has come"),
        (Forgetful(), "the same observation gives the same decision"),
    ],
)
def test_a_broken_rule_is_named(policy: Says | Forgetful, rule: str) -> None:
    with pytest.raises(BrokenRule, match=rf"(?s){rule}.*") as caught:
        check_policy(policy)
    assert "Observation(now=" in str(caught.value)


def test_waiting_is_allowed_even_for_ever_because_the_batcher_clamps_it() -> None:
    check_policy(Says(Decision(0)))
    check_policy(Says(lambda seen: Decision(0, until=seen.now + 1.0)))


def test_observations_of_ones_own() -> None:
    one = next(observations())
    check_policy(Says(Decision(1)), [one])
    with pytest.raises(BrokenRule):
        check_policy(Says(Decision(-1)), iter([one]))


def test_observations_are_possible_ones() -> None:
    every, busy = list(observations()), list(traffic())
    assert len(every) > 100 and {seen.draining for seen in every} == {True, False}
    for seen in (*every, *busy):
        assert seen.waiting >= 1 <= seen.idle_places and seen.oldest_arrival <= seen.now
        assert seen.arrivals >= seen.waiting
    half = len(busy) // 2
    for run in (busy[:half], busy[half:]):
        for before, seen in pairwise(run):
            assert seen.now == seen.last_arrival > before.now and seen.arrivals > before.arrivals


def test_a_policy_may_remember_if_its_copies_do_not() -> None:
    policy = Counts()
    policy.decide(next(observations()))
    check_policy(policy)
    check_policy(policy, list(traffic())[:7])
    assert policy.asked == 1  # a copy was asked


@subcases(
    ("policy", "rule"),
    [
        (Shares(lambda _: Shares()), "the same sequence of observations gives the same decisions.*and a fresh copy"),
        (Counts(copy), "the same sequence of observations gives the same decisions.*and a fresh copy"),
        (Counts(lambda itself: itself), r"fresh\(\) returns another policy"),
    ],
)
def test_a_copy_that_is_not_one_is_named(policy: Counts, rule: str) -> None:
    with pytest.raises(BrokenRule, match=rf"(?s){rule}.*"):
        check_policy(policy, list(traffic())[:7])
