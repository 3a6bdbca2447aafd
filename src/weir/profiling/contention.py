"""How long the processes that run a batch waited for a CPU that something else was using.

Linux counts for each thread how long it waited, and how often it ran (/proc/PID/task/TID/schedstat: nanoseconds running,
nanoseconds waiting, times). Whoever sleeps waits a little each time it wakes, on an idle machine too; a server pays for that with
each of its batches, and so it belongs to the service time. Only what is beyond WAKING each time is the doing of other
processes. It stays in the durations: the server would see it too. It says how far the durations can be trusted.
"""

from collections.abc import Iterable
from pathlib import Path

WAKING = 200_000  # nanoseconds, the most that waking up takes on an idle machine

Times = dict[int, dict[str, tuple[int, int]]]  # of each process, by thread: nanoseconds waited, and how often it ran


class Contention:
    """Watches processes."""

    def __init__(self, pids: Iterable[int], proc: Path = Path("/proc")) -> None:
        self._folders = {pid: proc / str(pid) / "task" for pid in set(pids)}

    def look(self) -> Times:
        """Return how long each thread has waited so far; nothing of those that do not say."""
        return {pid: _of_threads(folder) for pid, folder in self._folders.items()}

    def since(self, before: Times) -> float:
        """Return the seconds that the processes have waited since `before`, beyond waking up.

        Of each process the thread that waited most counts, as the others wait for it; processes wait one after another.
        """
        return sum(_most(before.get(pid, {}), threads) for pid, threads in self.look().items()) / 1e9


def _of_threads(folder: Path) -> dict[str, tuple[int, int]]:
    times = {}
    try:
        for thread in folder.iterdir():
            _, waited, ran = (thread / "schedstat").read_text().split()
            times[thread.name] = int(waited), int(ran)
    except (OSError, ValueError):  # the thread has ended, or this kernel does not count
        pass
    return times


def _most(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> int:
    waits = [0]
    for thread, (waited, ran) in after.items():
        earlier, times = before.get(thread, (0, 0))
        waits.append(waited - earlier - WAKING * (ran - times))
    return max(waits)
