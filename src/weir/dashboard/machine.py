"""What processes use of the machine, as Linux says it; elsewhere nothing is known."""

import os
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_USER_TIME, _SYSTEM_TIME = (
    11,
    12,
)  # fields of /proc/PID/stat after the name, from 0 (proc(5) counts from 1, name and all)


class Use(NamedTuple):
    """Of one process: resident memory, shared pages included, and processor time since its start in seconds."""

    memory_bytes: int
    cpu: float


def use_of(pid: int) -> Use | None:
    """Return what the process uses; None if that cannot be known, as of one that has ended."""
    process = Path("/proc", str(pid))
    try:
        resident = int((process / "statm").read_bytes().split()[1])
        times = (process / "stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, IndexError, ValueError):
        return None
    return Use(resident * _PAGE_BYTES, (int(times[_USER_TIME]) + int(times[_SYSTEM_TIME])) / _TICKS)
