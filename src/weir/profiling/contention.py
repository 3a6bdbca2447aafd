"""How long the processes that run a batch waited for a CPU that something else was using.

Linux counts it for each thread (the second number of /proc/PID/task/TID/schedstat, in nanoseconds). What a worker waits
on a crowded machine is no property of its model, so it is taken off the duration of a batch. Looking costs a few
dozen microseconds, in which an idle worker may fall asleep, so batches faster than QUICK are left as they are: of those,
only few meet a pause at all, and estimate.py leaves these out.
"""

from collections.abc import Iterable
from pathlib import Path

QUICK = 0.002  # seconds

Times = dict[int, dict[str, int]]  # of each process: nanoseconds by thread


class Contention:
    """Watches processes."""

    def __init__(self, pids: Iterable[int], proc: Path = Path("/proc")) -> None:
        self._folders = {pid: proc / str(pid) / "task" for pid in set(pids)}

    def look(self) -> Times:
        """Return how long each thread has waited so far; nothing of those that do not say."""
        return {pid: _of_threads(folder) for pid, folder in self._folders.items()}

    def since(self, before: Times) -> float:
        """Return the seconds that the processes have waited since `before`.

        Of each process the thread that waited most counts, as the others wait for it; processes wait one after another.
        """
        return sum(_most(before.get(pid, {}), threads) for pid, threads in self.look().items()) / 1e9


def _of_threads(folder: Path) -> dict[str, int]:
    times = {}
    try:
        for thread in folder.iterdir():
            times[thread.name] = int((thread / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # the thread has ended, or this kernel does not count
        pass
    return times


def _most(before: dict[str, int], after: dict[str, int]) -> int:
    return max((after[thread] - before.get(thread, 0) for thread in after), default=0)
