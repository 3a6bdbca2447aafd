"""Workers that end in every way there is: what is heard of it, and what is left."""

import asyncio
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from tests.rings import spread
from tests.waiting import until
from tests.workers.models import Begins, LoadsWhile, Obedient, SlowAndPicky
from tests.workers.pools import started

from weir.policy.backoff import Backoff
from weir.workers.process.launch import KILL_GRACE
from weir.workers.process.supervision import Child


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    readable, _, _ = select.select([pidfd], [], [], 10)
    os.close(pidfd)
    assert readable, f"process {pid} is still there"


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("exit", "it exited with code 3"),
        ("raise_system_exit", "it exited with code 4"),
        ("abort", "it was ended by signal 6 (Aborted)"),
        ("close_everything", "it was ended because it closed its channel"),
    ],
)
async def test_a_worker_that_ends_is_replaced_under_its_index(item: str, reason: str) -> None:
    async with started(Obedient) as pool:
        before = pool.pool.states()[0].pid
        pool.send(item)
        await pool.heard.until(lambda: bool(pool.heard.lost))
        assert pool.heard.lost == [(0, reason)]
        assert before is not None
        assert is_gone(before)

        await pool.again()
        assert pool.heard.ready == [(0, 1), (0, 1)]
        (after,) = await pool.ask("pid")
        assert after not in (before, os.getpid())
        assert pool.pool.gauges()["restarts"] == 1
        assert pool.pool.states()[0].reason == ""


@pytest.mark.parametrize("run", spread([uvloop.run, asyncio.run]))
def test_a_worker_that_is_killed_while_it_computes_in_c_is_replaced(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with started(Obedient, workers=2) as pool:
            pool.send("spin", worker=1)
            victim = pool.pool.states()[1].pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            await pool.heard.until(lambda: bool(pool.heard.lost))
            assert pool.heard.lost == [(1, "it was ended by signal 9 (Killed, killed from outside or out of memory)")]
            assert pool.pool.states()[1].state == "lost"
            assert await pool.ask("index", worker=0) == [0]
            await pool.again(3)
            assert await pool.ask("index", worker=1) == [1]

    run(main())


async def test_answers_before_the_end_are_heard_and_no_batch_is_taken_after_it() -> None:
    async with started(Obedient, pipeline_depth=2) as pool:
        first, last = pool.send("index"), pool.send("exit")
        await pool.heard.until(lambda: bool(pool.heard.lost))
        assert pool.heard.events[first].outputs == [0]
        pool.pool.cancel(0, last, [0])
        with pytest.raises(RuntimeError, match="worker 0 of 'tried' was given a batch while lost"):
            pool.send("index")


@pytest.mark.parametrize(("how", "end"), spread(product(("start_a_program", "fork"), ("exit", "kill", "stop")), 3))
async def test_what_the_model_started_ends_with_its_worker(how: str, end: str) -> None:
    async with started(Obedient) as pool:
        (grandchild,) = await pool.ask(how)
        assert not is_gone(grandchild)
        if end == "exit":
            pool.send("exit")
        elif end == "kill":
            os.kill(pool.pool.states()[0].pid or 0, signal.SIGKILL)
        else:
            await pool.pool.stop()
        if end != "stop":
            await pool.heard.until(lambda: bool(pool.heard.lost))
        wait_until_gone(grandchild)


@pytest.mark.parametrize("run", spread([uvloop.run, asyncio.run]))
def test_an_answer_that_was_in_time_counts_though_the_server_was_held_up(
    run: Callable[[Any], None], tmp_path: Path
) -> None:
    async def main() -> None:
        begun = tmp_path / "begun"
        async with started(Begins, {"path": str(begun)}, predict_timeout=0.3) as pool:
            batch = pool.send("index")
            while not begun.exists():
                time.sleep(0.001)  # noqa: ASYNC251 - this, too, holds the server up
            time.sleep(0.6)  # noqa: ASYNC251 - this is what does
            assert await pool.answer(batch) == ["index"]
            assert pool.heard.lost == []

    run(main())


async def test_the_time_limit_starts_anew_with_each_part_of_a_batch() -> None:
    """It is run again for a bad item, in five parts of half a second each."""
    async with started(SlowAndPicky, predict_timeout=2.0) as pool:
        batch = pool.send("bad", "good", "good", "good")
        await pool.heard.until(lambda: bool(pool.heard.lost) or batch in pool.heard.ended)
        assert pool.heard.lost == []
        assert pool.heard.events[batch].outputs[1:] == ["good"] * 3


async def test_a_worker_that_answers_what_it_was_not_sent_is_ended() -> None:
    async with started(Obedient) as pool:
        batch = pool.send("fork_unnoticed")
        await pool.heard.until(lambda: bool(pool.heard.lost))
        assert pool.heard.lost == [(0, f"it was ended because it answered batch {batch}, which it did not have")]


async def test_a_fork_that_comes_back_or_exits_ends_alone_and_sys_exit_is_logged(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with started(Obedient) as pool:
        (forked,) = await pool.ask("fork_and_come_back")
        wait_until_gone(forked)
        assert await pool.ask("fork_and_exit") == [0]
        assert await pool.ask("pid") == [pool.pool.states()[0].pid]
        assert pool.heard.lost == []
        logged = capfd.readouterr().err
        assert "a process that the model forked came back to the worker's code" in logged
        assert "ends this worker" not in logged
        pool.send("raise_system_exit")
        await pool.heard.until(lambda: bool(pool.heard.lost))
    assert re.search(r"sys\.exit\(4\) in .*models\.py, line \d+, ends this worker", capfd.readouterr().err)


async def test_signals_for_the_server_end_no_workers_but_what_these_fork() -> None:
    async with started(Obedient) as pool:
        (forked,) = await pool.ask("fork")
        worker = pool.pool.states()[0].pid
        assert worker is not None
        assert os.getpgid(worker) == worker
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker, number)
            assert await pool.ask("pid") == [worker]
        os.kill(forked, signal.SIGTERM)
        wait_until_gone(forked)
        assert pool.heard.lost == []


async def test_workers_that_do_not_load_any_more_are_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "weights"
    weights.touch()
    monkeypatch.setattr(Backoff, "_wait", lambda self, earlier: 0.0)
    async with started(LoadsWhile, {"file": str(weights)}, workers=2) as pool:
        weights.unlink()
        for worker in (0, 1):
            pool.send("exit", worker=worker)
        await pool.heard.until(lambda: bool(pool.heard.reasons))
        # Each time with its reason: two deaths, and ten attempts to load, or more of the one that is quicker.
        assert len(pool.heard.lost) >= 12
        reason = pool.heard.reasons[0]
        assert reason.startswith("no worker of 'tried' is left: ")
        assert "FileNotFoundError" in reason
        assert "times in a row; it is tried again in 0 s, for as long as the server runs" in reason
        tries = len(pool.heard.lost)
        await pool.heard.until(lambda: len(pool.heard.lost) > tries + 2)

        weights.touch()
        await pool.again(4)
        assert [await pool.ask("index", worker=worker) for worker in (0, 1)] == [[0], [1]]
        assert [(state.state, state.reason) for state in pool.pool.states()] == [("ready", "")] * 2


@pytest.mark.parametrize(
    ("module", "what", "refusals"),
    [
        (subprocess, "Popen", 7),  # more than a model that does not load is given
        (socket, "socketpair", 3), (os, "memfd_create", 3), (os, "pidfd_open", 3),
    ],
)  # fmt: skip
async def test_what_the_system_refuses_a_worker_is_tried_again(
    module: Any, what: str, refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(Obedient, arena_bytes=1 << 20) as pool:
        give = getattr(module, what)

        def refuse(*_: Any, **__: Any) -> None:
            nonlocal refusals
            refusals -= 1
            if not refusals:
                monkeypatch.setattr(module, what, give)
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(Backoff, "_wait", lambda self, earlier: 0.0)
        pool.send("exit")
        await pool.heard.until(lambda: bool(pool.heard.lost))
        monkeypatch.setattr(module, what, refuse)
        await pool.again()
        assert (refusals, pool.heard.reasons) == (0, [])
        assert "Too many open files" in pool.heard.lost[-1][1]


def unkillable(monkeypatch: pytest.MonkeyPatch, *pids: int) -> None:
    """Have the kernel leave these processes alone, as it does while they are in uninterruptible sleep."""
    signal_all, set_timer = Child._signal, Child._set_timer

    def hurry(child: Child, seconds: float, act: Any, *arguments: Any) -> None:
        set_timer(child, 0.01 if seconds == KILL_GRACE and child.pid in pids else seconds, act, *arguments)

    monkeypatch.setattr(Child, "_set_timer", hurry)  # others that are killed have the time that they need
    monkeypatch.setattr(Child, "_signal", lambda child: None if child.pid in pids else signal_all(child))


async def test_a_worker_that_does_not_end_although_it_was_killed_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(Obedient, predict_timeout=1.0) as pool:
        (pid,) = await pool.ask("pid")
        unkillable(monkeypatch, pid)
        os.kill(pid, signal.SIGSTOP)
        pool.send("index")
        await pool.again()
        ((_, reason),) = pool.heard.lost
        assert f"process {pid} is left behind" in reason
        assert "predict_timeout=1.0" in reason
        assert await pool.ask("pid") == [pool.pool.states()[0].pid]
        assert f"process {pid}, worker 0 of 'tried', is still running after it was killed" in caplog.text
        end_process(pid)


async def test_a_pool_stops_whatever_a_worker_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(Obedient, workers=2, stop_grace=0.01) as pool:
        pid = pool.pool.states()[1].pid
        assert pid is not None
        unkillable(monkeypatch, pid)
        os.kill(pid, signal.SIGSTOP)
        await pool.pool.stop()
        assert f"process {pid}, worker 1 of 'tried', is still running after it was killed" in caplog.text
        assert [state.state for state in pool.pool.states()] == ["stopped", "stopped"]
        end_process(pid)
        await until(lambda: not psutil.pid_exists(pid))  # a zombie until the loop has heard of its end


def end_process(pid: int) -> None:
    """Have it end after all."""
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
