"""A worker gives way to those that serve while it loads: it starts at a lower priority and takes its own back when it is ready.

Lowering one's priority is always allowed, taking it back often is not (it needs CAP_SYS_NICE, or RLIMIT_NICE). Whether it is
gets tried first, in a thread that ends: priorities are the threads'. Where it is not, the worker loads as a batch process,
which the kernel lets preempt nobody. On a machine that never rests the lowest priorities get next to nothing, so none lower than
ENOUGH is kept for longer than PATIENCE.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress

LOWEST = 19
ENOUGH = 10
PATIENCE = 20.0  # seconds


def give_way(niceness: int) -> Callable[[], None]:
    """Run at a priority lower by `niceness`, this thread and those that it starts; return what takes the own one back."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    lower = min(own + niceness, LOWEST)
    if lower == own:
        return lambda: None
    if not _comes_back():
        return _as_batch()
    os.setpriority(os.PRIO_PROCESS, 0, lower)
    enough = own + ENOUGH
    if lower <= enough:
        return lambda: _for_each_thread(lower, own)
    hurry = threading.Timer(PATIENCE, _for_each_thread, (lower, enough))
    hurry.daemon = True
    hurry.start()

    def take_back() -> None:
        hurry.cancel()
        hurry.join()
        for given in (lower, enough):
            _for_each_thread(given, own)

    return take_back


def _comes_back() -> bool:
    answers: list[bool] = []

    def attempt() -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, own + 1)
            os.setpriority(os.PRIO_PROCESS, 0, own)
        except OSError:
            return
        answers.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(answers)


def _for_each_thread(lower: int, own: int) -> None:
    """Give all threads that have the lower priority, of libraries too, the own one."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # it has ended meanwhile
            if os.getpriority(os.PRIO_PROCESS, thread) == lower:
                os.setpriority(os.PRIO_PROCESS, thread, own)


def _as_batch() -> Callable[[], None]:
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return lambda: None
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return _as_ordinary


def _as_ordinary() -> None:
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):
            if os.sched_getscheduler(thread) == os.SCHED_BATCH:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
