"""conformance.py: each broken rule is found, and named with the observation."""

from itertools import pairwise
from typing import Any, ClassVar

import pytest

from weir.messages import Reason
from weir.policy.conformance import BrokenRule, check_policy, observations, traffic
from weir.policy.decision import Decision, Observation


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
    """A policy whose answer depends on how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, seen: Observation) -> Decision:
        """Say something else after a while."""
        self.asked += 1
        return Decision(1 + self.asked // 100)


class Counts:
    """A policy that remembers how often it was asked: one row, then two, and so on up to nine."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, seen: Observation) -> Decision:
        """Say the next number, or wait for it."""
        self.asked += 1
        rows = self.asked % 10
        return Decision(rows, until=None if rows else seen.now + 1.0)

    def fresh(self) -> "Counts":
        """Return one that starts anew."""
        return Counts()


class Shares(Counts):
    """Its copies count together."""

    asked_by_all: ClassVar[list[int]] = []

    def decide(self, seen: Observation) -> Decision:
        """Say what depends on all."""
        self.asked_by_all.append(1)
        return Decision(1 + len(self.asked_by_all) % 2)

    def fresh(self) -> "Shares":
        """Return one that is not really another."""
        return Shares()


class Keeps(Counts):
    """Its copies remember what it remembers."""

    def fresh(self) -> "Keeps":
        """Return a copy, memory and all."""
        made = Keeps()
        made.asked = self.asked
        return made


class Itself(Counts):
    """Its own copy."""

    def fresh(self) -> "Itself":
        """Return itself."""
        return self


def late_alarm(seen: Observation) -> Decision:
    """Compare a duration, which rounding makes false at the very instant that was asked for."""
    if seen.now - seen.oldest_arrival >= 0.1:
        return Decision(seen.waiting)
    return Decision(0, until=seen.oldest_arrival + 0.1)


@pytest.mark.parametrize(
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


def test_waiting_for_ever_is_allowed_because_the_batcher_clamps_it() -> None:
    check_policy(Says(Decision(0)))


def test_waiting_on_is_allowed() -> None:
    check_policy(Says(lambda seen: Decision(0, until=seen.now + 1.0)))


def test_observations_of_ones_own() -> None:
    one = next(observations())
    check_policy(Says(Decision(1)), [one])
    with pytest.raises(BrokenRule):
        check_policy(Says(Decision(-1)), iter([one]))


def test_observations_are_possible_ones() -> None:
    every = list(observations())
    assert len(every) > 100
    for seen in every:
        assert seen.waiting >= 1
        assert seen.oldest_arrival <= seen.now
        assert seen.idle_places >= 1
        assert seen.arrivals >= seen.waiting
    assert {seen.draining for seen in every} == {True, False}
    assert Reason.POLICY is Decision(0).reason


def test_a_policy_may_remember_if_its_copies_do_not() -> None:
    policy = Counts()
    policy.decide(next(observations()))
    check_policy(policy)
    check_policy(policy, list(traffic())[:7])
    assert policy.asked == 1  # a copy was asked


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (Shares(), "the same sequence of observations gives the same decisions.*and a fresh copy"),
        (Keeps(), "the same sequence of observations gives the same decisions.*and a fresh copy"),
        (Itself(), r"fresh\(\) returns another policy"),
    ],
)
def test_a_copy_that_is_not_one_is_named(policy: Counts, rule: str) -> None:
    with pytest.raises(BrokenRule, match=rf"(?s){rule}.*"):
        check_policy(policy, list(traffic())[:7])


def test_traffic_is_possible_and_goes_on() -> None:
    every = list(traffic())
    half = len(every) // 2
    for run in (every[:half], every[half:]):
        for before, seen in pairwise(run):
            assert seen.now > before.now
            assert seen.arrivals > before.arrivals
    for seen in every:
        assert seen.oldest_arrival <= seen.now == seen.last_arrival
        assert seen.arrivals >= seen.waiting
