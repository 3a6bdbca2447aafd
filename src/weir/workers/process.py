"""The start of a worker process: `python -m weir.workers.process`, run by launch.py with inherited descriptors.

What must hold before any library is loaded is done here, with the standard library alone: that the process cannot outlive
the server, and on which CPUs it runs, which numeric libraries count when they are imported.
"""

import ctypes
import os
import signal
import sys
from types import FrameType

from weir.errors import SettingsError
from weir.workers.priority import give_way

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    """Be the worker that `arguments` describe (see Launch.start), to its end. Returns the exit code."""
    _, parent, cpus, niceness, *descriptors = arguments
    die_with(int(parent))
    ignore_terminal_signals()
    take_back = give_way(int(niceness), os.getpriority(os.PRIO_PROCESS, int(parent)))  # which has lowered ours
    refusal = set_affinity([int(cpu) for cpu in cpus.split(",")]) if cpus else None
    from weir.workers.program import run

    return run(*map(int, descriptors), refusal=refusal, loaded=take_back)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, and see that it has not ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(0)


def ignore_terminal_signals() -> None:
    """Leave the signals that end a server to it; it ends its workers itself once their batches are done: a service
    manager sends them to every process at once. Processes that the model forks obey them."""
    own = os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


def set_affinity(cpus: list[int], setting: str = "cpu_affinity") -> SettingsError | None:
    """Run on these CPUs only, as `setting` says: this thread and those that it starts. Returns what is wrong when the machine refuses."""
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, OverflowError, ValueError) as error:
        return SettingsError(f"{setting}={cpus}: must be among the CPUs {sorted(os.sched_getaffinity(0))} ({error})")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
