"""Every test here must leave no process, no descriptor and no shared memory behind."""

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import uvloop


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def descriptors() -> dict[str, str]:
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            found[link.name] = os.readlink(link)
        except FileNotFoundError:  # the one that listed the directory
            continue
    return found


@pytest.fixture(scope="session")
def first_loop() -> None:
    """Have libuv open the pipe that it keeps for the life of the process."""
    uvloop.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def nothing_is_left(first_loop: None) -> Iterator[None]:
    gc.collect()
    children, files, shared = processes(), descriptors(), set(os.listdir("/dev/shm"))
    yield
    gc.collect()
    assert processes() <= children
    assert {fd: target for fd, target in descriptors().items() if files.get(fd) != target} == {}
    assert set(os.listdir("/dev/shm")) == shared
