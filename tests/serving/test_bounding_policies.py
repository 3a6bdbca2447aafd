"""A service whose policy keeps the line short, or remembers what it saw."""

import asyncio

import pytest
from tests.serving.kit import request, serving, squares, turns

from weir import Overloaded
from weir.policy.decision import Decision, Observation


class Short:
    """Greedy, with two rows waiting at most."""

    def __init__(self) -> None:
        self.max_waiting = 2
        self.decisions = 0

    def decide(self, seen: Observation) -> Decision:
        """Dispatch one."""
        self.decisions += 1
        return Decision(1)

    def fresh(self) -> "Short":
        """Return one that was never asked."""
        return Short()


async def test_requests_of_frontends_are_refused_and_calls_in_process_wait() -> None:
    async with serving(None, policy=Short()) as rig:
        calls = [rig.service.infer(item) for item in range(5)]
        await turns()
        assert rig.executor.payloads == [[0]]
        rig.executor.answer_next(squares)
        await turns()
        calls += [rig.service.infer(item) for item in (5, 6)]
        assert rig.service.state()["waiting_outside"] == 2
        with pytest.raises(Overloaded):
            request(rig.service, 7)
        for _ in range(6):
            rig.executor.answer_next(squares)
            await turns()
        assert await asyncio.gather(*calls) == squares(list(range(7)))
        assert rig.service.state()["waiting_outside"] == 0


async def test_each_service_has_a_memory_of_its_own() -> None:
    policy = Short()
    async with serving(policy=policy) as one, serving(policy=policy) as other:
        assert await one.service.infer(3) == 9
        mine, others = one.service.policy, other.service.policy
        assert isinstance(mine, Short)
        assert isinstance(others, Short)
        assert (policy.decisions, mine.decisions, others.decisions) == (0, 1, 0)
