import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from weir.profiling.machine import find_hardware


class Nvml(SimpleNamespace):
    """pynvml in small."""

    class NVMLError(Exception):
        pass


def library(count: Any) -> Nvml:
    def memory(handle: int) -> Any:
        return SimpleNamespace(total=(handle + 1) << 30)

    return Nvml(
        nvmlDeviceGetCount=count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"Old" if handle else "New",
        nvmlDeviceGetMemoryInfo=memory,
    )


def test_cpus_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (cpus,) = find_hardware()
    assert (cpus.kind, cpus.index, cpus.count) == ("CPU", None, len(os.sched_getaffinity(0)))
    assert cpus.name and cpus.memory_bytes > 1 << 20
    assert set(cpus.to_dict()) == {"kind", "name", "count", "memory_bytes", "index"}


def test_each_gpu_is_listed() -> None:
    _, first, second = find_hardware(library(lambda: 2))
    assert (first.kind, first.name, first.index, first.memory_bytes) == ("GPU", "New", 0, 1 << 30)
    assert (second.name, second.index, second.count) == ("Old", 1, 1)


def test_a_driver_that_fails_leaves_the_cpus() -> None:
    def fail() -> int:
        raise Nvml.NVMLError("lost")

    assert [each.kind for each in find_hardware(library(fail))] == ["CPU"]
