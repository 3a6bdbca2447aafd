"""Workers whose processes do not run: they are listed so, until they run again."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from tests.workers.models import Obedient, Square
from tests.workers.pools import started

from weir.catalog.registry import Registry
from weir.serving.service import Service
from weir.workers.executor import suspension
from weir.workers.process import pool as pools
from weir.workers.process import supervision
from weir.workers.process.supervision import STANDSTILL, Standstill


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and be impatient."""
    monkeypatch.setattr(pools, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(supervision, "STANDSTILL", 0.02)


async def until(condition: Callable[[], bool]) -> None:
    """Return when `condition`, asked in each turn of the loop, holds."""
    async with asyncio.timeout(200):
        while not condition():  # noqa: ASYNC110  (the kernel tells nobody that a process stops)
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("state", "reason"),
    [("T", "stopped by a signal"), ("t", "stopped by a debugger"), ("D", "in uninterruptible sleep")],
)
def test_a_process_that_does_not_run_for_long_is_found(
    state: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [("S", ["1", "1"])]
    monkeypatch.setattr(supervision, "_scheduling", lambda pid: now[0])
    still = Standstill()
    assert still.reason(7, 0.0) == ""
    now[0] = (state, ["2", "1"])
    assert still.reason(7, 1.0) == still.reason(7, 1.0 + STANDSTILL - 0.1) == ""
    assert f"{reason}, and has not run for 6 s" in still.reason(7, 7.0)
    now[0] = (state, ["3", "1"])  # it has run meanwhile
    assert still.reason(7, 8.0) == ""
    assert still.reason(7, 8.0 + STANDSTILL)
    now[0] = ("R", ["3", "1"])
    assert still.reason(7, 20.0) == ""
    now[0] = (state, ["3", "1"])
    assert still.reason(7, 21.0) == ""


def test_the_kernel_says_how_a_process_is() -> None:
    state, switches = supervision._scheduling(os.getpid())
    assert state == "R" and len(switches) == 2 and all(map(str.isdigit, switches))
    assert supervision._scheduling(2**22 + 1) == ("", [])


def test_a_worker_that_is_stopped_is_suspended_until_it_goes_on(soon: None, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with started(Obedient, workers=2) as pool:
            first, second = pool.pool.states()
            assert first.pid is not None
            os.kill(first.pid, signal.SIGSTOP)
            await until(lambda: first.state == "suspended")
            assert "its process is stopped by a signal, and has not run for" in first.reason
            assert f"worker 0 of 'tried' is paused: {first.reason[:20]}" in caplog.text
            assert (second.state, suspension(pool.pool.states())) == ("ready", "")
            os.kill(first.pid, signal.SIGCONT)
            await until(lambda: first.state == "ready")
            assert first.reason == ""
            assert await pool.ask("index") == [0]
            assert pool.heard.lost == []

    asyncio.run(main())


def test_a_suspended_worker_that_dies_is_replaced(soon: None) -> None:
    async def main() -> None:
        async with started(Obedient) as pool:
            (worker,) = pool.pool.states()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGSTOP)
            await until(lambda: worker.state == "suspended")
            os.kill(worker.pid, signal.SIGKILL)
            await pool.again()
            assert (worker.state, worker.reason) == ("ready", "")
            assert await pool.ask("index") == [0]

    asyncio.run(main())


def test_a_model_all_of_whose_workers_are_suspended_is_not_ready(soon: None) -> None:
    async def main() -> None:
        async with Service(Square, name="tried") as service:
            registry = Registry([service])
            pid: Any = service.executor.states()[0].pid
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: not registry.ready)
            assert service.not_ready_reason.startswith("worker 0: its process is stopped by a signal")
            assert service.state()["workers"][0]["state"] == "suspended"
            answer = service.infer(3)
            os.kill(pid, signal.SIGCONT)
            assert await answer == 9  # what came meanwhile has waited
            await until(lambda: registry.ready)

    asyncio.run(main())
