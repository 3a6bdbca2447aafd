"""choice.py: the policy's answer, held within bounds."""

import pytest

from weir.batching.batcher import MARGIN, Choice, bounded, clamp, greedily
from weir.batching.service_time import ServiceTime
from weir.messages import Reason
from weir.policy.decision import Decision, Observation, Policy


class Says:
    """A policy that always says the same."""

    def __init__(self, *answer: object) -> None:
        self.answer = answer

    def decide(self, seen: Observation) -> Decision:
        """Say it."""
        return Decision(*self.answer)  # type: ignore[arg-type]  # the tests give what belongs there


SEEN = Observation(10.0, 5, 9.95, 40.0, 5, 10.0, 1, 1, 8, 0.1, False)


def slow(seconds: float) -> ServiceTime:
    """Return an estimate of so many seconds for any batch."""
    service = ServiceTime()
    service.learn(8, seconds, 0.0, 8.0)
    return service


def choose(policy: Policy, seen: Observation, service: ServiceTime) -> Choice:
    """Return what comes of what `policy` decides."""
    return bounded(policy.decide(seen), seen, service)


def test_a_dispatch_is_at_most_a_batch() -> None:
    assert choose(Says(3, Reason.SIZE, None, 3), SEEN, ServiceTime()) == Choice(3, Reason.SIZE, 10.0, 3)
    assert choose(Says(99), SEEN, ServiceTime()).rows == 8


def test_a_wait_of_the_policy_stays_if_it_is_short() -> None:
    assert choose(Says(0, Reason.SIZE, 10.01, 8), SEEN, ServiceTime()) == Choice(0, Reason.POLICY, 10.01, 8)


@pytest.mark.parametrize("until", [None, 11.0])
def test_no_wait_is_longer_than_max_queue_delay(until: float | None) -> None:
    end = 9.95 + 0.1
    assert choose(Says(0, Reason.SIZE, until), SEEN, ServiceTime()) == Choice(0, Reason.DELAY, end, None)
    then = SEEN._replace(now=end)
    assert choose(Says(0, Reason.SIZE, until), then, ServiceTime()) == Choice(8, Reason.DELAY, end, None)


def test_no_wait_is_so_long_that_the_answer_comes_too_late() -> None:
    seen = SEEN._replace(earliest_deadline=10.05)
    end = 10.05 - 0.02 - MARGIN
    assert choose(Says(0), seen, slow(0.02)) == Choice(0, Reason.DEADLINE, end, None)
    assert choose(Says(0), seen._replace(now=end), slow(0.02)) == Choice(8, Reason.DEADLINE, end, None)
    assert choose(Says(0), seen, slow(7.0)).reason is Reason.DEADLINE


def test_a_wait_that_has_ended_before_it_began_is_none() -> None:
    choice = choose(Says(0, Reason.SIZE, 10.0), SEEN, ServiceTime())
    assert (choice.rows, choice.reason) == (8, Reason.POLICY)


def test_draining_waits_for_nobody() -> None:
    seen = SEEN._replace(draining=True)
    assert choose(Says(0, Reason.SIZE, 10.01, 8), seen, ServiceTime()) == Choice(8, Reason.DRAIN, 10.0, 8)
    assert choose(Says(3), seen, ServiceTime()).reason is Reason.POLICY


def test_the_clamp_uses_the_expression_that_arms_the_timer() -> None:
    """now - oldest >= delay is false for these, at the very instant of the timer."""
    for tenths in range(1000):
        seen = SEEN._replace(oldest_arrival=tenths / 10)
        end, _ = clamp(seen._replace(earliest_deadline=1e9), None, ServiceTime())
        assert choose(Says(0), seen._replace(now=end, earliest_deadline=1e9), ServiceTime()).rows == 8


def test_greed_replaces_a_policy_that_raised() -> None:
    assert greedily(SEEN) == Choice(5, Reason.IDLE, 10.0, None)
    assert greedily(SEEN._replace(waiting=20)).rows == 8
