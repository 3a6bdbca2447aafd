import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weir import __version__
from weir.errors import SettingsError
from weir.profiling.energy import Meter, RaplMeter
from weir.profiling.machine import GpuMemory, cpu_name, describe_machine, find_hardware, find_meters, memory_of
from weir.workers.cpus import cpu_count


def test_a_profile_says_where_it_was_made() -> None:
    said = describe_machine()
    assert said["versions"]["weir"] == __version__
    assert said["versions"]["numpy"]
    assert "jax" not in said["versions"] or said["versions"]["jax"]
    assert "CPUs" in said["machine"]


def test_the_cpu_has_a_name_also_where_nobody_says_it(tmp_path: Path) -> None:
    known = tmp_path / "cpuinfo"
    known.write_text("processor\t: 0\nmodel name\t: Abacus 5000\n")
    assert cpu_name(known) == "Abacus 5000"
    assert cpu_name(tmp_path / "missing")


def test_meters_that_are_there_are_found_and_why_the_others_are_not_is_reported() -> None:
    def absent() -> Meter:
        raise SettingsError("NVML: no driver")

    def present() -> Meter:
        return RaplMeter([])

    meters = find_meters({}, [absent, present])
    assert [meter.source for meter in meters.found] == ["rapl"]
    assert meters.missing == "NVML: no driver"


def test_those_of_this_machine_can_be_looked_for() -> None:
    meters = find_meters({"CUDA_VISIBLE_DEVICES": ""})
    assert all(meter.source == "rapl" for meter in meters.found)
    assert "NVML: " in meters.missing


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
    assert (cpus.kind, cpus.index, cpus.count) == ("CPU", None, cpu_count())
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


def test_the_memory_of_a_process_that_there_is_not_is_unknown() -> None:
    assert memory_of(1 << 30) is None


def test_the_gpu_memory_of_a_process_is_that_on_all_gpus() -> None:
    taken: dict[int, list[tuple[int, int | None]]] = {0: [(7, 100), (8, None)], 1: [(7, 20)]}
    library = Nvml(
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in taken[handle]
        ],
    )
    assert GpuMemory(library).read() == {7: 120, 8: 0}


def test_gpu_memory_that_cannot_be_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise Nvml.NVMLError("lost")

    with pytest.raises(SettingsError, match="NVML: the memory of processes cannot be read: lost"):
        GpuMemory(Nvml(nvmlDeviceGetCount=fail)).read()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(SettingsError, match="nvidia-ml-py is not installed"):
        GpuMemory().read()
