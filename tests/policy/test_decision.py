"""decision.py: the members of a policy beside `decide`, and their defaults."""

from math import inf

import pytest
from tests.policy.banks import bank, promised
from tests.rings import subcases

from weir.messages import Reason
from weir.policy.cost.objective import LEAST_DELAY, LatencySLO
from weir.policy.decision import CompletedPolicy, Decision, Observation, Policy, PolicyBase, complete
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.rules import Greedy

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
