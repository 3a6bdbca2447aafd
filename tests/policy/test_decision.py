"""decision.py: the members of a policy beside `decide` and their defaults, and when each of the simple policies dispatches."""

from math import inf
from typing import cast

import pytest
from tests.policy.banks import bank, promised
from tests.rings import subcases

from weir.errors import SettingsError
from weir.messages import Reason
from weir.policy.cost import LEAST_DELAY, LatencySLO
from weir.policy.decision import (
    CompletedPolicy,
    ControlLimit,
    Decision,
    FullBatches,
    Greedy,
    Observation,
    Policy,
    PolicyBase,
    SizeOrDelay,
    complete,
)
from weir.policy.online.adaptive import SolvedPolicy
from weir.testing import check_policy

SEEN = Observation(1.0, 3, 0.5, inf, 3, 0.9, 1, 1, 8, 0.1, False)


class DecideOnly:
    """All that a policy must have."""

    def decide(self, seen: Observation) -> Decision:
        return Decision(seen.waiting, Reason.POLICY)


class Bounding(DecideOnly):
    """Bounds the queue by one row more with each decision."""

    def __init__(self) -> None:
        self.max_waiting: int | None = 5

    def decide(self, seen: Observation) -> Decision:
        assert self.max_waiting is not None
        self.max_waiting += 1
        return super().decide(seen)


class Extending(Bounding):
    """Lets ten more wait in a full queue."""

    def full(self, now: float) -> int | None:
        return 10 + int(now)


class Remembering(DecideOnly):
    """Counts its decisions."""

    def __init__(self) -> None:
        self.count = 0

    def fresh(self) -> "Remembering":
        return Remembering()


class Derived(PolicyBase):
    """Takes the defaults by inheritance."""

    def decide(self, seen: Observation) -> Decision:
        return Decision(1)


@subcases("policy", [DecideOnly(), Derived(), Greedy()])
def test_the_defaults_remember_nothing_and_bound_nothing(policy: Policy) -> None:
    completed = complete(policy)
    assert completed.decide(SEEN) == policy.decide(SEEN) and completed.fresh() is policy
    assert completed.max_waiting is completed.full(2.0) is completed.largest_batch is completed.bulk_delay is None
    assert not completed.remembers and not completed.adopts_banks
    assert isinstance(completed, CompletedPolicy) == isinstance(policy, DecideOnly)


def test_a_bound_is_that_of_the_last_decision() -> None:
    completed = complete(Bounding())
    assert completed.max_waiting == 5
    completed.decide(SEEN)
    assert completed.max_waiting == completed.full(1.0) == 6
    extending = complete(Extending())
    assert (extending.max_waiting, extending.full(3.0)) == (5, 13)


def test_a_fresh_policy_is_another() -> None:
    completed = complete(Remembering())
    made = completed.fresh()
    assert completed.remembers and made is not completed and type(made) is Remembering


class Says(DecideOnly):
    """A policy of a user that states the time of bulk work."""

    bulk_delay = 0.25


def test_policies_say_how_long_bulk_work_may_take() -> None:
    assert SolvedPolicy().bulk_delay is SolvedPolicy(bank()).bulk_delay is None
    assert SolvedPolicy(promised()).bulk_delay == LEAST_DELAY
    assert complete(Says()).bulk_delay == 0.25
    assert LatencySLO(0.2).bulk_delay == pytest.approx(0.01)  # a twentieth of its time
    assert LatencySLO(0.001).bulk_delay == LEAST_DELAY


POLICIES: list[Policy] = [
    Greedy(), SizeOrDelay(), SizeOrDelay(32, 0.005), SizeOrDelay(1, 0.0), FullBatches(), FullBatches(16),
    ControlLimit(8), ControlLimit(1),
]  # fmt: skip


def seen(
    waiting: int, age: float = 0.0, *, largest: int = 64, now: float = 100.0, draining: bool = False
) -> Observation:
    """Return an observation of so many waiting, the oldest of that age."""
    return Observation(now, waiting, now - age, now + 30.0, waiting, now, 1, 1, largest, 0.1, draining)


@subcases("policy", POLICIES)
def test_policies_are_values_that_keep_the_rules(policy: Policy) -> None:
    check_policy(policy)
    assert hash(policy) == hash(policy) and isinstance(policy, Policy)
    with pytest.raises(AttributeError):
        policy.limit = 3  # type: ignore[attr-defined]  # that it cannot be set is the point


@subcases(("waiting", "expected"), [(1, (1, Reason.IDLE)), (64, (64, Reason.SIZE)), (70, (64, Reason.SIZE))])
def test_greedy_takes_what_there_is(waiting: int, expected: tuple[int, Reason]) -> None:
    assert Greedy().decide(seen(waiting))[:2] == expected


def test_size_or_delay_waits_for_enough_and_no_longer_than_its_delay() -> None:
    policy = SizeOrDelay(32, 0.005)
    assert policy.decide(seen(31)) == Decision(0, Reason.DELAY, 100.005, 32)
    for waiting, rows in ((32, 32), (40, 40), (100, 64)):
        assert policy.decide(seen(waiting)) == Decision(rows, Reason.SIZE, None, 32)
    assert policy.decide(seen(1)._replace(now=100.005)) == Decision(1, Reason.DELAY, None, 32)


def test_size_or_delay_without_a_size_waits_for_a_full_batch() -> None:
    assert SizeOrDelay(delay=0.005).decide(seen(7, largest=8)).limit == 8
    assert SizeOrDelay(delay=0.005).decide(seen(8, largest=8)).rows == 8


def test_full_batches_are_of_exactly_that_size() -> None:
    assert FullBatches(16).decide(seen(15)) == Decision(0, Reason.SIZE, None, 16)
    assert FullBatches(16).decide(seen(40)) == Decision(16, Reason.SIZE, None, 16)
    assert FullBatches().decide(seen(63)).rows == 0
    assert FullBatches().decide(seen(65)).rows == 64
    assert FullBatches(16).decide(seen(9, largest=8)).rows == 8


@subcases("limit", [1, 2, 8, 19])
def test_a_control_limit_dispatches_if_at_least_the_limit_waits(limit: int) -> None:
    """Deb and Serfozo dispatch what exceeds their M: our limit is M + 1."""
    for waiting in (*range(1, 20), 100):
        rows = 0 if waiting < limit else min(waiting, 64)
        assert ControlLimit(limit).decide(seen(waiting)) == Decision(rows, Reason.POLICY, None, limit)


@subcases(
    ("make", "message"),
    [
        (lambda: SizeOrDelay(0), "size=0: must be 1 or more"),
        (lambda: SizeOrDelay(1, -0.1), "delay=-0.1: must be 0 or more"),
        (lambda: SizeOrDelay(1, float("nan")), "delay=nan: must be 0 or more"),
        (lambda: FullBatches(0), "size=0: must be 1 or more"),
        (lambda: ControlLimit(0), "limit=0: must be 1 or more"),
        (lambda: ControlLimit(cast(int, "8")), "limit='8': must be a whole number"),
    ],
)
def test_a_wrong_setting_names_key_value_and_rule(make: type, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make()
