"""What a worker process is started with: command line, environment and the descriptors it inherits."""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import weir
from weir.workers.priority import lower
from weir.workers.process import set_affinity
from weir.workers.settings import WorkerSettings, for_worker
from weir.workers.template import Own, Process, Template, start_process

# What numeric libraries read, once, when they are first imported.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS",
)  # fmt: skip


def compute_in_one_thread() -> None:
    """Let numeric libraries that are not loaded yet compute in one thread, unless the environment says otherwise.

    A solver's matrices are too small to gain by more, and on a busy machine threads that wait for each other spin: a bank
    took 11 s of processor time instead of 1.5."""
    if "numpy" not in sys.modules:
        for name in THREAD_VARIABLES:
            os.environ.setdefault(name, "1")


# Memory that a batch frees is kept for the next one. By default glibc gives blocks of over 128 KB back at once, and to
# get them again costs more than all the rest: 16 bodies of 600 KB took 375 µs each, and take 25 µs with this.
# Other C libraries do not read these.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}

# From version 1.29 onnxruntime reports its use over the network, unless it is told not to before it is loaded.
SILENCE = {"ORT_DISABLE_TELEMETRY": "1"}

# The CPUs that this process had before it was pinned; empty if it is not.
_before: list[int] = []


@contextmanager
def pinned(cpus: list[int]) -> Iterator[None]:
    """Meanwhile, run the server on these CPUs only (none: on all that it has): this thread, and those that it starts. What computes for it
    has all that the process had before. Raises SettingsError when the machine refuses."""
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
    """Return the CPUs of what this process starts to compute; empty if those are its own."""
    return list(_before)


def available_cpus() -> list[int]:
    """Return the CPUs that may compute."""
    return unpinned() or sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Launch:
    """Everything that one worker's processes have in common.

    `source` is the model (source.py), `request_fd` the descriptor of the request arena, -1 without one. `lends`: its
    results are arrays, which may be read where they lie. `template`: what its processes are forked from, if they are.
    """

    name: str
    index: int
    source: bytes
    settings: WorkerSettings
    max_batch_size: int
    request_fd: int = -1
    request_bytes: int = 0
    result_bytes: int = 0
    lends: bool = False
    template: Template | None = None
    path: Sequence[str] = field(default_factory=lambda: list(sys.path))

    def options(self) -> dict[str, Any]:
        """Return what the Start frame tells the process before it imports the model."""
        return {
            "name": self.name,
            "index": self.index,
            "path": list(self.path),
            "max_batch_size": self.max_batch_size,
            "retry_in_halves": self.settings.retry_in_halves,
            "pipeline_depth": self.settings.pipeline_depth,
            "spin": self.settings.spin,
        }

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the process's environment: `inherited`, then the thread limits, then the worker's own settings."""
        environment = {**MALLOC, **SILENCE, **inherited, "PYTHONPATH": python_path(inherited.get("PYTHONPATH", ""))}
        if not environment["PYTHONPATH"]:
            del environment["PYTHONPATH"]
        if self.settings.threads is not None:
            environment.update(dict.fromkeys(THREAD_VARIABLES, str(self.settings.threads)))
        environment.update(for_worker(self.settings.env, self.index) or {})
        return environment

    def fork(
        self, end: int, result_fd: int, niceness: int, done: Callable[[Process | OSError | None], None]
    ) -> bool:  # fmt: skip
        """Have the template fork a process, as `spawn` starts one, if there is one; return whether it was asked. The
        descriptors stay open until `done` is called: see Template.fork."""
        if self.template is None:
            return False
        told = {
            "niceness": niceness, "cpus": self._cpus, "request_bytes": self.request_bytes if self.request_fd >= 0 else 0,
            "result_bytes": self.result_bytes if result_fd >= 0 else 0,
        }  # fmt: skip
        self.template.fork(told, [fd for fd in (end, self.request_fd, result_fd) if fd >= 0], done)
        return True

    def spawn(self, end: int, result_fd: int, niceness: int, done: Callable[[Process | OSError], None]) -> None:
        """Start a process that inherits the descriptors `end` (its socket) and `result_fd` (its arena's, or -1), which stay open until
        `done` is called: with the process, or with the refusal of the system. While it loads it runs at a priority lower by `niceness`.

        Called on the thread that is to outlive the process: the kernel ends the process with that thread.
        """
        cpus = ",".join(map(str, self._cpus))
        numbers = (end, self.request_fd, self.request_bytes, result_fd, self.result_bytes)
        described = (f"{self.name}/{self.index}", os.getpid(), cpus, niceness, *numbers)
        start_process(
            # -P: without it the current directory would come first on the path and could shadow any module.
            [sys.executable, "-P", "-m", "weir.workers.process", *map(str, described)],
            self.environment(os.environ),
            [fd for fd in (end, self.request_fd, result_fd) if fd >= 0],
            lambda result: done(result if isinstance(result, OSError) else Own(result)),
            begun=(lambda pid: lower(pid, niceness)) if niceness else (lambda _: None),
        )

    @property
    def _cpus(self) -> list[int]:
        return for_worker(self.settings.cpu_affinity, self.index) or unpinned()


def python_path(inherited: str) -> str:
    """Return a PYTHONPATH on which the new process finds this very weir, also one that is not installed."""
    root = str(Path(weir.__file__).parents[1])
    known = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *inherited.split(os.pathsep))
    return inherited if root in known else os.pathsep.join(filter(None, (root, inherited)))
