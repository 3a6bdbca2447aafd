"""bulk.py: the size of a bulk batch comes near to the time that it may take, from below."""

import pytest
from tests.policy.banks import bank, promised

from weir.policy.bulk import LEAST_DELAY, BulkSize, delay_within
from weir.policy.decision import Decision, Observation, PolicyBase, complete
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.rules import Greedy


def test_a_promise_leaves_a_twentieth_of_its_time_to_bulk_work() -> None:
    assert delay_within(0.2) == pytest.approx(0.01)
    assert delay_within(0.001) == LEAST_DELAY


@pytest.mark.parametrize("fixed", [0.0, 0.001, 0.003])
def test_the_size_comes_near_to_the_time_and_never_beyond(fixed: float) -> None:
    size = BulkSize()
    assert size.limit == 0.0
    for _ in range(200):
        cost = max(1.0, size.limit)
        seconds = fixed + 0.0001 * cost
        assert seconds <= 0.005 + 1e-9
        size.learn(cost, seconds, 0.005)
    assert size.limit == pytest.approx((0.005 - fixed) / 0.0001, rel=0.02)


def test_a_slow_batch_makes_the_next_smaller_at_once_but_not_by_more_than_half() -> None:
    size = BulkSize()
    size.limit = 100.0
    size.learn(100.0, 0.00625, 0.005)
    assert size.limit == pytest.approx(80.0)
    size.learn(80.0, 5.0, 0.005)
    assert size.limit == pytest.approx(40.0)


def test_a_long_item_does_not_allow_more_than_its_share() -> None:
    size = BulkSize()
    size.limit = 300.0
    size.learn(2000.0, 0.04, 0.005)
    assert size.limit == pytest.approx(250.0)


def test_a_small_batch_says_nothing_about_large_ones() -> None:
    size = BulkSize()
    size.limit = 300.0
    size.learn(100.0, 0.004, 0.005)
    assert size.limit == 300.0


def test_a_batch_without_a_measurable_time_lets_the_size_grow() -> None:
    size = BulkSize()
    size.learn(8.0, 0.0, 0.005)
    size.learn(4.0, 0.0, 0.0)
    assert size.limit > 4.0


class Says:
    """A policy of a user that states the time."""

    bulk_delay = 0.25

    def decide(self, seen: Observation) -> Decision:
        """Never asked."""
        raise NotImplementedError


def test_policies_say_how_long_bulk_work_may_take() -> None:
    assert Greedy().bulk_delay is None
    assert SolvedPolicy().bulk_delay is None
    assert SolvedPolicy(bank()).bulk_delay is None
    assert SolvedPolicy(promised()).bulk_delay == LEAST_DELAY
    assert complete(Says()).bulk_delay == 0.25

    class Silent:
        """A policy without it."""

        def decide(self, seen: Observation) -> Decision:
            """Never asked."""
            raise NotImplementedError

    assert complete(Silent()).bulk_delay is None
    assert isinstance(complete(Silent()), PolicyBase)
