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
from weir.workers.process.supervision import STANDSTILL, Backoff, Standstill


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and be impatient."""
    monkeypatch.setattr(pools, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(supervision, "STANDSTILL", 0.02)


async def until(condition: Callable[[], bool]) -> None:
    """Return when `condition`, asked in each turn of the loop, holds."""
    async with asyncio.timeout(50):
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


def test_the_first_death_costs_no_wait_and_the_next_ones_twice_as_long_each() -> None:
    backoff = Backoff(first=0.1, longest_after_load=1.0)

    waits = [backoff.died(suspect=False) for _ in range(7)]

    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_model_that_loads_is_never_away_for_long() -> None:
    backoff = Backoff()
    for _ in range(100):
        backoff.loaded()

        assert backoff.died(suspect=False) <= 1.0


def test_a_death_with_a_suspect_batch_does_not_count() -> None:
    backoff = Backoff(first=0.1)
    backoff.died(suspect=False)

    assert [backoff.died(suspect=True) for _ in range(10)] == [0.0] * 10
    assert backoff.died(suspect=False) == 0.1


def test_a_finished_batch_makes_the_deaths_forgotten() -> None:
    backoff = Backoff(first=0.1)
    for _ in range(5):
        backoff.died(suspect=False)

    backoff.finished()

    assert backoff.died(suspect=False) == 0.0


def test_what_does_not_load_is_tried_for_ever_and_nobody_waits_for_it_after_several_failures() -> None:
    backoff = Backoff(first=0.1, longest=30.0, patience=4)
    seen = []
    for _ in range(4):
        waits = backoff.failed_to_load()
        seen.append((waits, backoff.failures, backoff.keeps_failing))

    assert seen == [(0.1, 1, False), (0.2, 2, False), (0.4, 3, False), (0.8, 4, True)]
    assert [backoff.failed_to_load() for _ in range(100)][-1] == 30.0


def test_what_the_system_refuses_is_tried_for_ever() -> None:
    backoff = Backoff(first=0.1, longest=30.0, patience=2)

    assert [backoff.refused() for _ in range(20)][:3] == [0.1, 0.2, 0.4]
    assert backoff.refused() == 30.0
    assert backoff.failed_to_load() == 0.1

    backoff.loaded()

    assert backoff.refused() == 0.1


def test_a_load_that_succeeds_makes_the_failures_forgotten() -> None:
    backoff = Backoff(first=0.1, patience=2)
    backoff.failed_to_load()

    backoff.loaded()

    assert backoff.failed_to_load() == 0.1
    assert backoff.failures == 1


def test_a_load_that_succeeds_makes_it_worth_waiting_again() -> None:
    backoff = Backoff(first=0.1, patience=1)
    backoff.failed_to_load()
    failing = backoff.keeps_failing
    backoff.loaded()

    assert (failing, backoff.keeps_failing) == (True, False)


def test_waits_stay_bounded_for_ever() -> None:
    backoff = Backoff(first=0.1, longest=30.0, patience=10_000)

    assert max(backoff.failed_to_load() for _ in range(9_999)) == 30.0
