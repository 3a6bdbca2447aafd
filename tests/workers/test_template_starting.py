"""starting.py: the loop goes on while a process is started, and none is left behind whatever becomes of the loop meanwhile."""

import _thread
import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.workers.models import Forked, Square
from tests.workers.pools import Recorder, make_pool

from weir.errors import ModelError
from weir.workers.template import Popen, start_process

SLEEP = ["sleep", "1000"]
ASKS_TO_END = """
import os, sys, threading
from weir.workers.process import die_with
die_with(int(sys.argv[1]))
os.write(int(sys.argv[2]), b"1")
threading.Event().wait()
"""


class SlowStarts:
    """Lets no process be started before the test does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.started: list[Popen] = []
        self._start: Callable[..., Popen] = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", self._slow)

    def _slow(self, *arguments: Any, **rest: Any) -> Popen:
        self.entered.release()
        self.go_on.wait()
        self.started.append(self._start(*arguments, **rest))
        return self.started[-1]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowStarts:
    return SlowStarts(monkeypatch)


def test_the_loop_goes_on_while_a_process_is_started(slow: SlowStarts) -> None:
    async def main() -> None:
        pool = make_pool(Square)
        starting = asyncio.create_task(pool.start(Recorder()))
        await asyncio.to_thread(slow.entered.acquire)
        assert pool.pids() == []
        slow.go_on.set()
        await starting
        assert pool.pids() == [slow.started[0].pid]
        await pool.stop()

    asyncio.run(main())


@pytest.mark.parametrize(("model", "workers"), [(Square, 1), (Forked, 2)])
def test_a_start_that_is_cancelled_leaves_no_process(slow: SlowStarts, model: Any, workers: int) -> None:
    async def main() -> None:
        pool = make_pool(model, workers=workers)
        starting = asyncio.create_task(pool.start(Recorder()))
        await asyncio.to_thread(slow.entered.acquire)
        starting.cancel()
        await asyncio.sleep(0)
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())
    assert [each.returncode for each in slow.started] == [-9]


def test_a_process_whose_loop_was_closed_meanwhile_is_ended(slow: SlowStarts) -> None:
    async def main() -> None:
        start_process(SLEEP, {"PATH": "/usr/bin:/bin"}, [], lambda _: None, begun=lambda _: begun.set())

    begun = threading.Event()
    asyncio.run(main())
    slow.go_on.set()
    begun.wait()
    slow.started[0].wait()
    assert slow.started[0].returncode == -9


def test_what_cannot_be_started_is_told() -> None:
    async def refusal(arguments: list[str], environment: dict[str, str]) -> Popen | OSError:
        told: asyncio.Future[Popen | OSError] = asyncio.get_running_loop().create_future()
        start_process(arguments, environment, [], told.set_result)
        return await told

    assert isinstance(asyncio.run(refusal(["/no/such/program"], {})), FileNotFoundError)
    assert "null" in str(asyncio.run(refusal(SLEEP, {"A": "b\0c"})))


def test_a_system_without_threads_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("weir.workers.template._of_thread", threading.local())  # as where none has been started yet
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    with pytest.raises(ModelError, match=r"the process cannot be started: .* can't start new thread"):
        asyncio.run(make_pool(Square).start(Recorder()))


def test_processes_end_with_the_thread_that_started_them() -> None:
    ours, theirs = os.pipe()

    async def start() -> None:
        told: asyncio.Future[Popen | OSError] = asyncio.get_running_loop().create_future()
        arguments = [sys.executable, "-c", ASKS_TO_END, str(os.getpid()), str(theirs)]
        start_process(arguments, dict(os.environ), [theirs], told.set_result)
        popen = await told
        assert not isinstance(popen, OSError)
        started.append(popen)
        os.close(theirs)
        assert await asyncio.to_thread(os.read, ours, 1) == b"1"
        assert popen.poll() is None

    started: list[Popen] = []
    thread = threading.Thread(target=asyncio.run, args=(start(),))
    thread.start()
    thread.join()
    os.close(ours)
    assert started[0].wait() == -9
