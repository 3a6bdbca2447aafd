"""The first code of a worker process, or of the template that workers are forked from: `python -m weir.workers.process.entry`.

launch.py starts it with inherited descriptors. What must hold before any library is loaded is done here, with the standard library alone: the
process cannot outlive the server; it runs on the CPUs that it may use, which numeric libraries count when they are imported; and while it
loads it gives way to the workers that serve.

To give way, a process loads at a lower priority and takes its own priority back when it is ready. The server lowers it at the start already,
by ENOUGH at most, because an interpreter and Weir have to be loaded before the process can do so itself. At the LOWEST priority it is idle
for the kernel (SCHED_IDLE): a thread that wakes up runs in its place at once, and its CPU counts as free. A process that merely has a low
priority keeps the CPU until its slice ends, some milliseconds later, and the threads that serve share the other CPUs.

A process may always lower its priority, but often it may not raise it again (that needs CAP_SYS_NICE, or RLIMIT_NICE). This is tried first,
in a thread that then ends, for a priority belongs to a thread. Where it fails, the process loads as a batch process (SCHED_BATCH), which the
kernel lets preempt no other. On a machine that is never idle the lowest priorities get almost no CPU: a priority lower than ENOUGH is given
up after PATIENCE seconds, or as soon as the loading thread has waited for a CPU for most of a second.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from types import FrameType

from weir.errors import SettingsError

PR_SET_PDEATHSIG = 1  # linux/prctl.h

LOWEST = 19
ENOUGH = 10
PATIENCE = 20.0  # seconds at a priority lower than ENOUGH
LOOK_EVERY = 1.0  # seconds between two looks at how long a thread has waited
STARVED = 0.7  # a loading thread that has waited for a CPU for this part of LOOK_EVERY gets no CPU


def main(arguments: list[str]) -> int:
    """Run as the process that `arguments` describe, until it ends; return the exit code.

    They are: "worker" or "template", a name for people who list processes, the server's process id, CPU numbers joined by commas ("": any),
    how much lower the priority is while it loads, and the numbers that program.run_worker or program.run_template takes.
    """
    role, _, parent, cpus, niceness, *numbers = arguments
    loaded, refusal = prepare(int(parent), [int(cpu) for cpu in cpus.split(",") if cpu], int(niceness))
    from weir.workers.process import program  # only now: it loads libraries

    if role == "template":
        return program.run_template(*map(int, numbers), loaded=loaded)
    return program.run_worker(*map(int, numbers), refusal=refusal, loaded=loaded)


def prepare(parent: int, cpus: Sequence[int], niceness: int) -> tuple[Callable[[], None], SettingsError | None]:
    """Bind this process to the process `parent` and to `cpus` (empty: any), and lower its priority by `niceness`.

    Return the function that takes the priority back, and an error if the machine refuses the CPUs.
    """
    die_with(parent)
    ignore_terminal_signals()
    take_back = give_way(niceness, os.getpriority(os.PRIO_PROCESS, parent))  # the parent has lowered ours already
    return take_back, set_affinity(cpus) if cpus else None


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. Exit now if the process `parent` has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(0)


def ignore_terminal_signals() -> None:
    """Ignore the signals that end a server: a service manager sends them to every process at once, and the server ends its workers itself
    once their batches are done. Processes that the model forks obey these signals."""
    own = os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


def set_affinity(cpus: Sequence[int], setting: str = "cpu_affinity") -> SettingsError | None:
    """Run this thread, and those that it starts, on `cpus` only. Return an error that names `setting` if the machine refuses."""
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, OverflowError, ValueError) as error:
        allowed = sorted(os.sched_getaffinity(0))
        return SettingsError(f"{setting}={list(cpus)}: must be among the CPUs {allowed} ({error})")
    return None


# How a loading process gives way.


def lower(pid: int, niceness: int) -> None:
    """Lower the priority of the process `pid`, which was just started, to `niceness` (ENOUGH at most) below ours. Do nothing where it
    could not raise its priority again."""
    with suppress(OSError):  # the process has ended
        if _comes_back():
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, pid, min(own + min(niceness, ENOUGH), LOWEST))


def give_way(niceness: int, own: int | None = None) -> Callable[[], None]:
    """Run this thread, and those that it starts, at a priority lower than `own` (None: the present one) by `niceness`.

    Return the function that takes the own priority back.
    """
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
    """Raise the threads of priority `lower` to `enough` when they get no CPU, or have taken PATIENCE seconds."""
    _set(0, own)  # a thread that watches for starvation must not starve itself
    until = time.monotonic() + PATIENCE
    had = waited()
    while not loaded.wait(LOOK_EVERY):
        before, had = had, waited()
        if had - before > STARVED * LOOK_EVERY or time.monotonic() >= until:
            _for_each_thread(lower, enough)
            return


def cpu_times(pid: int | str = "self") -> tuple[float, float]:
    """Return for how many seconds the main thread of a process has run, and has waited for a CPU; 0 where the system does not count them."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            ran, waited, _ = file.read().split()
        return float(ran) * 1e-9, float(waited) * 1e-9
    except (OSError, ValueError):
        return 0.0, 0.0


def waited() -> float:
    """Return for how many seconds the main thread of this process has waited for a CPU."""
    return cpu_times()[1]


def _set(thread: int, priority: int) -> None:
    """Give a thread (0: this one) a priority. An ordinary thread of the LOWEST priority is made idle, and an idle one of another priority
    ordinary; threads of other scheduling classes keep theirs."""
    os.setpriority(os.PRIO_PROCESS, thread, priority)
    was, becomes = (os.SCHED_OTHER, os.SCHED_IDLE) if priority == LOWEST else (os.SCHED_IDLE, os.SCHED_OTHER)
    if os.sched_getscheduler(thread) == was:
        os.sched_setscheduler(thread, becomes, os.sched_param(0))


@lru_cache(maxsize=1)
def _comes_back() -> bool:
    """Return whether this process may raise a priority that it has lowered."""
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


def become_idle() -> None:
    """Run all threads of this process, and those that they will start, only while nobody else wants their CPU. Raises SettingsError where the
    system refuses."""
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        except ProcessLookupError:  # it has ended meanwhile
            continue
        except OSError as error:
            raise SettingsError(f"bulk_workers: the system does not support idle priority ({error})") from None


def _for_each_thread(given: int, priority: int) -> None:
    """Give another `priority` to all threads of this process that have the `given` one, those of libraries too."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # it has ended meanwhile
            if os.getpriority(os.PRIO_PROCESS, thread) == given:
                _set(thread, priority)


def hurry(pid: int) -> None:
    """Give the threads of the process `pid` the priority of this process, as far as the system allows. One that is idle for the kernel gets no
    CPU on a busy machine, not even to end when it is killed."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(OSError):  # the process has ended
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            with suppress(OSError):
                if os.sched_getscheduler(thread) == os.SCHED_IDLE:
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
