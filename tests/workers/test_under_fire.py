"""Workers killed at random moments under load: every batch is answered or known to be lost, never both."""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import uvloop
from tests.rings import spread
from tests.workers.models import Square
from tests.workers.pools import make_pool

from weir.messages import OBJECT, OCTETS, Batch, Events
from weir.metrics import MetricReport

WORKERS = 3
ARENA_BYTES = 8 << 20


class Driver:
    """Keeps every ready worker busy, with as many batches as it has places for."""

    def __init__(self, depth: int, kills: int) -> None:
        self.most_kills = kills
        self.pool = make_pool(Square, workers=WORKERS, arena_bytes=ARENA_BYTES, pipeline_depth=depth)
        self.chance = random.Random(depth)
        self.flying: dict[int, int] = {}  # batch -> worker
        self.numbers: dict[int, list[int]] = {}  # batch -> what was sent
        self.answered = self.lost = self.batches = 0
        self.kills = 0
        self.kill_at = 100  # answers
        self.done = asyncio.Event()

    def worker_ready(self, worker: int, places: int, *, bulk: bool = False) -> None:
        for _ in range(places):
            self.send(worker)

    def worker_leaves(self, worker: int) -> None:
        raise AssertionError("no worker leaves")

    def measured(self, worker: int, reports: Sequence[MetricReport]) -> None:
        raise AssertionError("the model has no metrics")

    def worker_lost(self, worker: int, reason: str) -> None:
        for batch in [batch for batch, runs_on in self.flying.items() if runs_on == worker]:
            del self.flying[batch]
            self.lost += 1
        self.check_done()

    def received(self, worker: int, events: Events) -> None:
        assert self.flying.pop(events.batch_id) == worker
        numbers = self.numbers.pop(events.batch_id)
        assert events.outputs[:-1] == [x * x for x in numbers]
        self.answered += 1
        if self.answered >= self.kill_at:
            self.kill()
        self.send(worker)
        self.check_done()

    def kill(self) -> None:
        """Kill a worker, whatever it is doing, and say when to kill the next one."""
        victim = self.chance.choice([state for state in self.pool.states() if state.pid is not None])
        os.kill(victim.pid or 0, signal.SIGKILL)
        self.kills += 1
        self.kill_at = self.answered + self.chance.randrange(1, 200)

    def unavailable(self, reason: str) -> None:
        raise AssertionError(reason)

    def send(self, worker: int) -> None:
        if self.kills == self.most_kills:
            return
        self.batches += 1
        numbers = self.numbers[self.batches] = [self.batches, *range(self.batches % 64)]
        self.flying[self.batches] = worker
        types = [OBJECT] * len(numbers) + [OCTETS]
        block = self.pool.reserve(40_000)
        payload = b"not a number" if block is None else block
        self.pool.run(worker, Batch(self.batches, [*numbers, payload], types, OBJECT, attempt=1))
        if block is not None:
            block.release()

    def check_done(self) -> None:
        if self.kills == self.most_kills and not self.flying:
            self.done.set()


SOAK = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("run", "depth", "kills"),
    [*spread([(uvloop.run, 2, 8), (asyncio.run, 1, 8)]), pytest.param(uvloop.run, 2, 1000, marks=SOAK)],
)
def test_every_batch_is_answered_or_lost_and_nothing_is_leaked(
    run: Callable[[Any], None], depth: int, kills: int
) -> None:
    async def main() -> None:
        driver = Driver(depth, kills)
        await driver.pool.start(driver)
        await driver.done.wait()
        assert driver.answered + driver.lost == driver.batches
        assert 0 < driver.lost <= kills * depth
        assert driver.pool.gauges()["arena_free_bytes"] == ARENA_BYTES
        assert driver.pool.gauges()["results_held_bytes"] == 0
        await driver.pool.stop()

    run(main())
