"""What a test must not leave behind: processes, descriptors, shared memory."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import uvloop
from tests import template

PATIENCE = 60.0  # seconds


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def descriptors() -> dict[str, str]:
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that listed the directory
            found[link.name] = os.readlink(link)
    return {fd: target for fd, target in found.items() if "/mpl-data/" not in target}  # matplotlib keeps fonts open


def shared_memory() -> list[str]:
    """Return what of it is mapped here, or has a name of ours: Weir's own has none. Tests beside this one name theirs otherwise."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:weir" in line]
    return mapped + [name for name in os.listdir("/dev/shm") if "weir" in name]


def left_over(before: dict[str, str]) -> dict[str, str]:
    """Return the descriptors that are not as they were `before`, once they have stayed for PATIENCE seconds.

    Threads of libraries (gRPC's, for one) that outlive a test open files for an instant. What has gone when one looks again has not been left behind.
    """
    until = time.monotonic() + PATIENCE
    left = {fd: target for fd, target in descriptors().items() if before.get(fd) != target}
    while left and time.monotonic() < until:
        time.sleep(0.01)
        now = descriptors()
        left = {fd: target for fd, target in left.items() if now.get(fd) == target}
    return left


@contextmanager
def no_leaks() -> Iterator[None]:
    """Fail if after the block there is a process, a descriptor or shared memory that was not there before."""
    uvloop.run(asyncio.sleep(0))  # libuv opens a pipe that it keeps for the life of the process
    template.start()  # as the process is that servers are forked from
    gc.collect()
    children, files, memory = processes(), descriptors(), shared_memory()
    yield
    gc.collect()
    assert processes() <= children, processes() - children
    left = left_over(files)
    assert left == {}, f"descriptors {left}; threads {[thread.name for thread in threading.enumerate()]}"
    assert set(shared_memory()) <= set(memory), shared_memory()
