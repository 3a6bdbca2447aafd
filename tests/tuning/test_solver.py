"""The real solving process."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import uvloop
from tests.leaks import processes
from tests.rings import spread
from tests.waiting import turns, until

from weir import tuning
from weir.errors import ModelError, SettingsError
from weir.policy.cost import LatencySLO, Prices, Profile
from weir.policy.solve.bank import Bank, solve_bank
from weir.tuning import Solver, SolveRequest, SolvingProcess

# A solve takes seconds of processor time, and minutes where other work takes both processors. None of these tests is about that.
LIMIT = 240.0
pytestmark = [pytest.mark.timeout(2 * LIMIT), pytest.mark.usefixtures("quick_solves")]

BOTH_LOOPS = pytest.mark.parametrize("run", spread([uvloop.run, asyncio.run]))
SMALL = Profile.linear(alpha_ms=1.0, tau0_ms=3.0, max_batch_size=4, cv=0.1, about={"model": "small"})
LONG = SolveRequest(SMALL, Prices(), 4, LatencySLO(0.05, 0.01))  # takes seconds
STEADY = replace(SMALL, cv=np.zeros(4))  # solved in half the time
WISH = SolveRequest(STEADY, Prices(1.0, 2.0, 300.0), 1, None)


def solving_process() -> SolvingProcess:
    """One that takes its share of the CPUs: beside two busy tests it would hardly get any."""
    return SolvingProcess(niceness=0)


@asynccontextmanager
async def solving() -> AsyncIterator[tuple[SolvingProcess, set[int]]]:
    """A solving process, closed also when a test fails, and the processes there were before."""
    process, before = solving_process(), processes()
    try:
        yield process, before
    finally:
        await process.close()


async def solve_outside(wish: SolveRequest, limit: float) -> Bank:
    async with solving() as (process, _):
        return await process.solve(wish, limit)


@BOTH_LOOPS
def test_one_process_solves_wish_after_wish_until_it_is_killed(
    run: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, nothing_is_left: None
) -> None:
    monkeypatch.setattr(tuning, "DROPPED_LIMIT", LIMIT)  # a busy machine takes longer than a server waits

    async def main() -> None:
        async with solving() as (process, before):
            bank = await process.solve(WISH, LIMIT)
            children = processes() - before
            assert np.array_equal(bank.profile.service_time_ms, STEADY.service_time_ms)
            assert not bank.tables.flags.writeable and not bank.profile.cv.flags.writeable
            assert np.array_equal(bank.tables, solve_bank(STEADY, WISH.prices).tables)
            assert (bank.prices, bank.workers, bank.objective) == (WISH.prices, 1, None)
            objective = (await process.solve(WISH._replace(objective=LatencySLO(0.05, 0.01)), LIMIT)).objective
            assert objective is not None and objective.margin >= 0.0005  # that of a server
            with pytest.raises(SettingsError, match="p99=2ms"):
                await process.solve(WISH._replace(objective=LatencySLO(0.002, 0.01)), LIMIT)
            dropped = asyncio.create_task(process.solve(WISH._replace(prices=Prices(1.0, 5.0)), LIMIT))
            await asyncio.sleep(0)
            dropped.cancel()
            assert (await process.solve(WISH._replace(prices=Prices(1.0, 6.0)), LIMIT)).prices == Prices(1.0, 6.0)
            assert dropped.cancelled()
            assert processes() - before == children
            (child,) = children
            os.kill(child, signal.SIGKILL)
            with pytest.raises(ModelError, match=r"the solving process ended: it was ended by signal 9"):
                await process.solve(LONG, LIMIT)
            assert (await process.solve(WISH, LIMIT)).prices == WISH.prices
            assert child not in processes()
        assert processes() == before

    run(main())


async def test_a_dropped_wish_that_takes_long_costs_its_process(
    monkeypatch: pytest.MonkeyPatch, nothing_is_left: None
) -> None:
    monkeypatch.setattr(tuning, "DROPPED_LIMIT", 0.0)
    async with solving() as (process, before):
        await process.solve(WISH, LIMIT)
        children = processes() - before
        dropped = asyncio.create_task(process.solve(LONG, LIMIT))
        await turns(2)
        dropped.cancel()
        assert (await process.solve(WISH, LIMIT)).prices == WISH.prices
        assert not processes() & children


def test_times_that_vary_wildly_are_solved_for_as_they_are() -> None:
    profile = replace(SMALL.up_to(2), cv=np.array([3.0, 0.2]))
    (bank,) = Solver().predict([WISH._replace(profile=profile)])
    assert bank.profile.cv.tolist() == [3.0, 0.2] and bank.rates[-1] > 300.0


class Raising(Solver):
    def predict(self, batch: list[SolveRequest]) -> list[bytes | str]:
        raise RuntimeError("no memory")


class Leaving(Solver):
    def load(self) -> None:
        os._exit(3)


@pytest.mark.parametrize(("kind", "reason"), [(Raising, "no memory"), (Leaving, "exited with code 3")])
def test_a_process_that_fails_is_no_bank(
    monkeypatch: pytest.MonkeyPatch, nothing_is_left: None, kind: type[Solver], reason: str
) -> None:
    monkeypatch.setattr(tuning, "Solver", kind)
    with pytest.raises(ModelError, match=reason):
        asyncio.run(solve_outside(WISH, LIMIT))


def test_a_process_that_cannot_be_started_is_no_bank(monkeypatch: pytest.MonkeyPatch, nothing_is_left: None) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ModelError, match=r"No such file"):
        asyncio.run(solve_outside(WISH, LIMIT))


async def test_it_does_not_outlast_its_time(nothing_is_left: None) -> None:
    with pytest.raises(TimeoutError):
        await solve_outside(WISH, 0.0)


@pytest.mark.parametrize("when", ["starting", "running"])
async def test_cancelling_ends_it(when: str, nothing_is_left: None) -> None:
    task = asyncio.create_task(solve_outside(LONG, LIMIT))
    await until(lambda: when != "running" or processes())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


SERVER = """
import asyncio
import psutil
from tests.tuning.test_solver import LIMIT, LONG, solve_outside

async def main():
    solving = asyncio.create_task(solve_outside(LONG, LIMIT))
    while not (children := psutil.Process().children()):
        await asyncio.sleep(0.001)
    print(children[0].pid, flush=True)
    await solving

asyncio.run(main())
"""


def test_it_ends_with_the_server_however_that_ends() -> None:
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as server:
        assert server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
        server.kill()
    child.wait(200)
