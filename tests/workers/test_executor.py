import asyncio

import pytest

from weir.workers.executor import TimeLimit


class Loop(asyncio.SelectorEventLoop):
    """A loop with a clock of its own."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.call_soon(self.stop)
        self.run_forever()


@pytest.fixture
def exceeded() -> list[float]:
    return []


def test_exceeding_it_is_reported_once(exceeded: list[float]) -> None:
    loop = Loop()
    limit = TimeLimit(loop, 1.0, lambda: exceeded.append(loop.now))
    limit.begin()

    loop.pass_time(0.9)
    assert exceeded == []
    loop.pass_time(0.2)
    loop.pass_time(10.0)

    assert exceeded == [1.1]
    loop.close()


def test_beginning_again_counts_anew(exceeded: list[float]) -> None:
    loop = Loop()
    limit = TimeLimit(loop, 1.0, lambda: exceeded.append(loop.now))
    limit.begin()
    for _ in range(5):
        loop.pass_time(0.8)
        limit.begin()
    assert exceeded == []

    loop.pass_time(0.9)
    assert exceeded == []
    loop.pass_time(0.2)
    assert len(exceeded) == 1
    loop.close()


def test_what_has_ended_is_not_exceeded(exceeded: list[float]) -> None:
    loop = Loop()
    limit = TimeLimit(loop, 1.0, lambda: exceeded.append(loop.now))
    limit.begin()
    limit.end()
    loop.pass_time(5.0)
    limit.begin()
    limit.close()
    loop.pass_time(5.0)

    assert exceeded == []
    loop.close()


def test_no_limit_is_never_exceeded(exceeded: list[float]) -> None:
    loop = Loop()
    limit = TimeLimit(loop, None, lambda: exceeded.append(loop.now))
    limit.begin()
    loop.pass_time(1e9)

    assert exceeded == []
    loop.close()
