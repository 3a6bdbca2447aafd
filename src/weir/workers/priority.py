"""A worker gives way to those that serve while it loads: it starts at a lower priority and takes its own back when it is ready.

The server lowers it a little at the start, for an interpreter and Weir itself have to be loaded before the worker can do so.

At the lowest priority it is idle, for the kernel: whoever wakes up runs in its place at once, and its CPU counts as free. Without
that a low priority has the CPU until its slice ends, some milliseconds, and those who serve share the other CPUs.

Lowering one's priority is always allowed, taking it back often is not (it needs CAP_SYS_NICE, or RLIMIT_NICE). Whether it is
gets tried first, in a thread that ends: priorities are the threads'. Where it is not, the worker loads as a batch process,
which the kernel lets preempt nobody. On a machine that never rests the lowest priorities get next to nothing: none lower than
ENOUGH is kept for longer than PATIENCE, nor by who has waited for a CPU for most of a second.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

LOWEST = 19
ENOUGH = 10
PATIENCE = 20.0  # seconds
LOOK_EVERY = 1.0  # seconds
STARVED = 0.7  # the part of that time that a loading thread has waited for a CPU


def lower(pid: int, niceness: int) -> None:
    """Have a process that was just started run at a priority lower than ours by `niceness`, ENOUGH at most, if it can take it back."""
    with suppress(OSError):  # it has ended
        if _comes_back():
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, pid, min(own + min(niceness, ENOUGH), LOWEST))


def give_way(niceness: int, own: int | None = None) -> Callable[[], None]:
    """Run at a priority lower than `own` (None: the present one) by `niceness`, this thread and those that it starts; return
    what takes the own one back."""
    if own is None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
    lower = min(own + niceness, LOWEST)
    if lower == own:
        return lambda: None
    if not _comes_back():
        return _as_batch()
    _set(0, lower)
    enough = own + ENOUGH
    if lower <= enough:
        return lambda: _for_each_thread(lower, own)
    loaded = threading.Event()
    watching = threading.Thread(target=_watch, args=(loaded, own, lower, enough), daemon=True)
    watching.start()

    def take_back() -> None:
        loaded.set()
        watching.join()
        for given in (lower, enough):
            _for_each_thread(given, own)

    return take_back


def _watch(loaded: threading.Event, own: int, lower: int, enough: int) -> None:
    """Give those that have the priority `lower` more of the CPUs, `enough`, when they starve or take long."""
    _set(0, own)  # whoever is to see that others get no CPU needs one
    until = time.monotonic() + PATIENCE
    waited = _waited()
    while not loaded.wait(LOOK_EVERY):
        before, waited = waited, _waited()
        if waited - before > STARVED * LOOK_EVERY or time.monotonic() >= until:
            _for_each_thread(lower, enough)
            return


def _waited() -> float:
    """Return the seconds that the main thread has been ready to run without a CPU; 0 where the system does not count them."""
    try:
        return float(Path("/proc/self/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError):
        return 0.0


def _set(thread: int, priority: int) -> None:
    """Give a thread (0: this one) a priority; it is idle while it has the lowest. Others than ordinary threads stay what they are."""
    os.setpriority(os.PRIO_PROCESS, thread, priority)
    was, becomes = (os.SCHED_OTHER, os.SCHED_IDLE) if priority == LOWEST else (os.SCHED_IDLE, os.SCHED_OTHER)
    if os.sched_getscheduler(thread) == was:
        os.sched_setscheduler(thread, becomes, os.sched_param(0))


@lru_cache(maxsize=1)
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


def _for_each_thread(given: int, priority: int) -> None:
    """Give all threads that have the `given` priority, of libraries too, another one."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # it has ended meanwhile
            if os.getpriority(os.PRIO_PROCESS, thread) == given:
                _set(thread, priority)


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
