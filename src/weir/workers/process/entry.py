"""The first code of a worker process, or of the template that workers are forked from: `python -m weir.workers.process.entry`.

launch.py starts it with inherited descriptors. What must hold before any library is loaded is done here, with the standard library alone: the
process cannot outlive the server, and it runs on the CPUs that it may use, which numeric libraries count when they are imported.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType

from weir.errors import SettingsError, reason_of

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    """Run as the process that `arguments` describe, until it ends; return the exit code.

    They are: "worker" or "template", a name for people who list processes, the server's process id, CPU numbers joined by commas ("": any), and then the
    numbers that program.run_worker takes, or the module whose `run_template` runs and the number that this takes.
    """
    role, _, parent, cpus, *others = arguments
    refusal = prepare(int(parent), [int(cpu) for cpu in cpus.split(",") if cpu])
    # Only now: these load libraries.
    if role == "template":
        code: int = import_module(others[0]).run_template(int(others[1]))
        return code
    from weir.workers.process import program

    return program.run_worker(*map(int, others), refusal=refusal)


def prepare(parent: int, cpus: Sequence[int]) -> SettingsError | None:
    """Bind this process to the process `parent` and to `cpus` (empty: any). Return an error if the machine refuses the CPUs."""
    die_with(parent)
    ignore_terminal_signals()
    return set_affinity(cpus) if cpus else None


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
        return SettingsError(f"{setting}={list(cpus)}: must be among the CPUs {allowed} ({reason_of(error)})")
    return None


def cpu_times(pid: int | str = "self") -> tuple[float, float]:
    """Return for how many seconds the main thread of a process has run, and has waited for a CPU; 0 where the system does not count them."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            ran, waited, _ = file.read().split()
        return float(ran) * 1e-9, float(waited) * 1e-9
    except (OSError, ValueError):
        return 0.0, 0.0


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
