"""Tells which CPUs this process and its workers may use, how many that makes, and how many threads each worker gets.

Everything that depends on a number of CPUs asks `cpu_count`. The affinity of the process bounds it, and so does the time that the kernel gives its
control group: a container has such a quota where its CPUs are limited, but not chosen.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weir.workers.process.entry import set_affinity
from weir.workers.settings import WorkerSettings, for_worker

# Environment variables that numeric libraries read once, when they are first imported.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


def compute_in_one_thread() -> None:
    """Have numeric libraries that are not loaded yet compute in one thread, unless the environment says otherwise.

    The matrices of a solver are too small to gain from more threads, and on a busy machine threads that wait for each other spin: a bank of
    tables took 11 s of processor time instead of 1.5.
    """
    if "numpy" not in sys.modules:
        for name in THREAD_VARIABLES:
            os.environ.setdefault(name, "1")


# The CPUs that this process had before it was pinned; empty if it is not pinned.
_before: list[int] = []


@contextmanager
def pinned(cpus: list[int]) -> Iterator[None]:
    """Within the block, run this thread and those that it starts on `cpus` only (empty: on all that the process has).

    Worker processes may use all CPUs that this process had before. Raises SettingsError when the machine refuses.
    """
    if not cpus:
        yield
        return
    before = sorted(os.sched_getaffinity(0))
    refusal = set_affinity(cpus, "server_cpu_affinity")
    if refusal is not None:
        raise refusal
    _before[:] = before
    try:
        yield
    finally:
        _before.clear()
        os.sched_setaffinity(0, before)


def unpinned() -> list[int]:
    """Return the CPUs of workers that have no setting of their own; empty if they are those of this process."""
    return list(_before)


def affinity() -> list[int]:
    """Return the numbers of the CPUs on which workers may run. A quota may allow the time of fewer: see `cpu_count`."""
    return unpinned() or sorted(os.sched_getaffinity(0))


def cpu_count() -> int:
    """Return how many CPUs this process and its workers may use together, whole ones, at least 1."""
    return max(1, int(min(len(affinity()), cpu_quota())))


def cpu_quota(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the time of how many CPUs the kernel gives the control group of this process; infinity without a limit.

    `groups` and `root` are where the kernel shows the groups of this process, and their limits, of version 1 or 2.
    """
    quota = math.inf
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers == "":
                quota = min(quota, _least(root, path, "cpu.max"))
            elif "cpu" in controllers.split(","):
                for folder in {controllers, "cpu"}:
                    quota = min(quota, _least(root / folder, path, "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return quota


def _least(root: Path, path: str, *files: str) -> float:
    """Return the least quota of the group at `path` and those above it. In a container the group itself may be mounted at `root`."""
    own, least = root.joinpath(*Path(path).parts[1:]), math.inf
    for folder in (own, *own.parents):
        with suppress(OSError, ValueError):  # "max 100000" and -1 are not limits
            quota, period = (int(each) for file in files for each in (folder / file).read_text().split())
            if quota > 0:
                least = min(least, quota / period)
        if folder == root:
            break
    return least


def share_of_cpus(settings: WorkerSettings, index: int) -> int:
    """Return how many CPUs worker `index` has for itself if all workers compute at once, at least 1."""
    lists = settings.cpu_affinity
    own = len(for_worker(lists, index) or affinity())
    together = math.ceil(settings.most_workers / max(1, len(lists)))  # workers on the same CPUs
    return max(1, int(min(own // together, cpu_quota() / settings.most_workers)))


def threads_here() -> int:
    """Return how many threads a library is to compute with in this process: what OMP_NUM_THREADS says, which each worker process has, or
    `cpu_count`."""
    stated = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(stated) if stated.isdecimal() and int(stated) else cpu_count()


def gpu_count() -> int:
    """Return how many GPUs of NVIDIA this process sees, without a library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip()])
    listed = Path("/proc/driver/nvidia/gpus")
    return len(list(listed.iterdir())) if listed.is_dir() else 0
