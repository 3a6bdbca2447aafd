"""A worker that loads gives way to those that serve."""

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from weir import Model, Service
from weir.workers.process.entry import LOWEST, hurry, lower

SCRIPT = """
import os, threading
from weir.workers.process import entry as priority
{before}
own = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
back = priority.give_way({niceness})
event = threading.Event()
thread = threading.Thread(target=event.wait)
thread.start()
print(os.getpriority(os.PRIO_PROCESS, thread.native_id) - own[0], os.sched_getscheduler(thread.native_id) - own[1])
back()
print(os.getpriority(os.PRIO_PROCESS, thread.native_id) - own[0], os.sched_getscheduler(thread.native_id) - own[1])
event.set()
"""
MAY_NOT = "priority._comes_back = lambda: False"


def said(niceness: int, before: str = "") -> list[str]:
    script = SCRIPT.format(niceness=niceness, before=before)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def may_come_back() -> bool:
    answers: list[bool] = []

    def attempt() -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, own + 1)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, own)
        except OSError:
            return
        answers.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(answers)


needs_a_way_back = pytest.mark.skipif(not may_come_back(), reason="this system lets nobody take a priority back")


@needs_a_way_back
@pytest.mark.parametrize("niceness", [5, 19])
def test_a_lower_priority_is_taken_back_by_every_thread(niceness: int) -> None:
    lowest = f"{19 - max(0, os.getpriority(os.PRIO_PROCESS, 0))} {os.SCHED_IDLE}"
    assert said(niceness) == ["5 0" if niceness == 5 else lowest, "0 0"]


@needs_a_way_back
def test_a_process_is_low_before_it_can_do_so_itself() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        lower(process.pid, 19)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(own + 10, 19)  # more would take too long
        process.communicate(b"\n")
    lower(process.pid, 19)  # it has ended, which is no error


HURRIED = """
import itertools, os, threading
from weir.workers.process import entry as priority
hurried = threading.Event()
def for_each(before, after, act=priority._for_each_thread):
    act(before, after)
    hurried.set()
priority._for_each_thread, priority.LOOK_EVERY = for_each, 0.001
{before}
own = os.getpriority(os.PRIO_PROCESS, 0)
back = priority.give_way(19 - own)
hurried.wait()
print(os.getpriority(os.PRIO_PROCESS, 0) - own, os.sched_getscheduler(0))
back()
print(os.getpriority(os.PRIO_PROCESS, 0) - own, threading.active_count())
"""


@pytest.mark.parametrize("before", ["priority.PATIENCE = 0.0", "priority.waited = itertools.count().__next__"])
def test_a_load_that_takes_long_or_starves_gets_more(before: str) -> None:
    if not may_come_back() or os.getpriority(os.PRIO_PROCESS, 0) >= 9:
        pytest.skip("this system lets nobody take a priority back, or the tests have a low one themselves")
    done = subprocess.run(
        [sys.executable, "-c", HURRIED.format(before=before)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["10", str(os.SCHED_OTHER), "0", "1"]


def test_where_it_could_not_be_taken_back_it_is_a_batch_process() -> None:
    assert said(5, MAY_NOT) == [f"0 {os.SCHED_BATCH}", "0 0"]
    assert said(0) == ["0 0", "0 0"]


class Nice(Model):
    def load(self) -> None:
        self._loading = os.getpriority(os.PRIO_PROCESS, 0)

    def predict(self, batch: list[Any]) -> list[Any]:
        return [(self._loading, os.getpriority(os.PRIO_PROCESS, 0), os.getpid()) for _ in batch]


async def test_a_worker_serves_at_its_own_priority() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    async with Service(Nice, load_niceness=3) as service:
        loading, serving, _ = await service.infer(0)
    assert (loading - own, serving - own) == (3 if may_come_back() else 0, 0)


def test_a_process_that_is_to_end_is_no_longer_idle_for_the_kernel() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST)
        hurry(process.pid)
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER
        process.kill()
        process.wait()
        hurry(process.pid)  # it is gone
