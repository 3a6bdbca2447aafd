import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.profiling.kit import TimedExecutor, items, started
from tests.rings import subcases

from weir import __version__
from weir.errors import SettingsError
from weir.profiling import ProfilingSettings, machine
from weir.profiling.sampling import ServiceTimeSampler
from weir.testing import FakeClock
from weir.workers.cpus import cpu_count


def test_a_profile_says_where_it_was_made() -> None:
    said = machine.describe_machine()
    assert said["versions"]["weir"] == __version__
    assert said["versions"]["numpy"]
    assert "jax" not in said["versions"] or said["versions"]["jax"]
    assert "CPUs" in said["machine"]


def test_the_cpu_has_a_name_also_where_nobody_says_it(tmp_path: Path) -> None:
    known = tmp_path / "cpuinfo"
    known.write_text("processor\t: 0\nmodel name\t: Abacus 5000\n")
    assert machine.cpu_name(known) == "Abacus 5000"
    assert machine.cpu_name(tmp_path / "missing")


def test_meters_are_found_and_why_others_are_not_is_reported() -> None:
    def absent() -> machine.Meter:
        raise SettingsError("NVML: no driver")

    def present() -> machine.Meter:
        return machine.RaplMeter([])

    meters = machine.find_meters({}, [absent, present])
    assert [meter.source for meter in meters.found] == ["rapl"]
    assert meters.missing == "NVML: no driver"


class Library:
    """As much of pynvml as is used, with GPUs of its own. `taken`: the memory that processes have, by GPU."""

    class NVMLError(Exception):
        """As NVML's."""

    def __init__(self, *names: str | bytes, fails: str = "", taken: Any = ()) -> None:
        self.names = names
        self.energy_mj = [100 * number for number in range(len(names))]
        self._fails = fails
        self._taken = taken

    def nvmlDeviceGetCount(self) -> int:
        return self._unless("count", len(self.names))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.names):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=(handle + 1) << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self._taken[handle]]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return self._unless("energy", self.energy_mj[handle])

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return self._unless("limit", 300_000)

    def _unless(self, what: str, value: int) -> int:
        if self._fails == what:
            raise self.NVMLError("Not Supported")
        return value


def test_the_hardware_is_the_cpus_that_this_process_may_use_and_each_gpu() -> None:
    cpus, first, second = machine.find_hardware(Library("New", b"Old"))
    assert (cpus.kind, cpus.index, cpus.count) == ("CPU", None, cpu_count())
    assert cpus.name and cpus.memory_bytes > 1 << 20
    assert set(cpus.to_dict()) == {"kind", "name", "count", "memory_bytes", "index"}
    assert (first.kind, first.name, first.index, first.memory_bytes) == ("GPU", "New", 0, 1 << 30)
    assert (second.name, second.index, second.count) == ("Old", 1, 1)
    # A driver that fails leaves the CPUs.
    assert [each.kind for each in machine.find_hardware(Library(fails="count"))] == ["CPU"]


def test_the_gpu_memory_of_a_process_is_that_on_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[tuple[int, int | None]]] = [[(7, 100), (8, None)], [(7, 20)]]
    assert machine.GpuMemory(Library("P4", "T4", taken=taken)).read() == {7: 120, 8: 0}
    with pytest.raises(SettingsError, match="NVML: the memory of processes cannot be read: Not Supported"):
        machine.GpuMemory(Library(fails="count")).read()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert [each.kind for each in machine.find_hardware()] == ["CPU"]
    with pytest.raises(SettingsError, match="nvidia-ml-py is not installed"):
        machine.GpuMemory().read()


IDLE_W = 50.0


class ModelMeter:
    """Counts `idle_w` always, and `busy_w` beyond it while the executor computes."""

    source = "nvml"
    name = "a GPU"

    def __init__(self, executor: TimedExecutor, busy_w: float, limit_w: float | None = 300.0) -> None:
        self.limit_w = limit_w
        self._executor = executor
        self._busy_w = busy_w

    def read_mj(self) -> float:
        return 1000.0 * (IDLE_W * self._executor.clock() + self._busy_w * self._executor.busy)


def read(powers: Sequence[float], sizes: Sequence[int]) -> list[machine.Reading]:
    """Return what meters of a device with these powers say."""

    async def story() -> list[machine.Reading]:
        executor = TimedExecutor(FakeClock(), lambda b: 0.002 * b + 0.01)
        measuring = await started(executor)
        sampler = ServiceTimeSampler(measuring, items(), ProfilingSettings())
        return await machine.read_energy([ModelMeter(executor, power) for power in powers], sampler, sizes)

    return asyncio.run(story())


def test_the_energy_of_a_batch_is_what_is_used_beyond_the_idle_machine() -> None:
    (reading,) = read([100.0], [1, 8])
    assert reading.idle_w == pytest.approx(IDLE_W)
    assert reading.batch_mj == pytest.approx({1: 100.0 * 12.0, 8: 100.0 * 26.0})
    assert reading.power_w == pytest.approx({1: 150.0, 8: 150.0})
    assert reading.rise_w == pytest.approx(100.0)


def test_the_first_meter_whose_power_rises_counts_or_what_is_stated() -> None:
    energy = machine.judged(read([0.0, 100.0], [1, 8]))
    assert energy.source == "nvml"
    assert energy.batch_mj == pytest.approx({1: 1200.0, 8: 2600.0})
    assert energy.about["idle_power_w"] == pytest.approx(IDLE_W)
    assert energy.about["power_limit_w"] == 300.0
    assert energy.warnings == []
    energy = machine.judged(read([0.2], [1, 8]))
    assert energy.source == "time"
    assert energy.about["energy_not_read"] == "the power of a GPU did not rise by 1 W while batches ran"
    assert machine.judged([], "no driver").about["energy_not_read"] == "no driver"
    assert machine.modelled(70.0) == machine.Energy("stated", 70.0, about={"energy": "stated: 70 W while it computes"})
    assert machine.modelled(None).watts == 1.0


def test_a_power_above_what_the_board_allows_is_warned_of() -> None:
    (reading,) = read([270.0], [1])
    energy = machine.judged([reading])
    assert energy.warnings == ["the power read, 320.0 W, is above what a GPU allows, 300 W: the energies are doubtful"]
    reading.meter.limit_w = None  # type: ignore[misc]  # a test's meter may change
    assert machine.judged([reading]).warnings == []


def test_a_batch_that_uses_less_than_the_idle_machine_is_warned_of() -> None:
    (reading,) = read([100.0], [1, 8])
    energy = machine.judged([reading._replace(batch_mj={1: -3.0, 8: 40.0})])
    assert energy.batch_mj == {1: 0.0, 8: 40.0}
    assert energy.warnings == ["batches of 1 used no more than the idle machine: their energy is taken as 0"]


def test_energy_is_read_at_a_few_sizes_the_ends_among_them() -> None:
    assert machine.windows([1]) == [1]
    assert machine.windows([1, 2, 3]) == [1, 2, 3]
    assert machine.windows([*range(1, 17), 20, 25, 31, 39, 49, 61, 64]) == [1, 7, 12, 20, 64]


def found(library: Any, visible: str | None = None) -> Any:
    return machine.find_nvml(visible, library)


def test_all_gpus_that_the_worker_sees_are_read_together() -> None:
    library = Library("A100", b"A100")
    meter = found(library)
    assert (meter.source, meter.name, meter.limit_w, meter.read_mj()) == ("nvml", "A100, A100", 600.0, 100.0)
    library.energy_mj[0] += 7
    assert meter.read_mj() == 107.0
    library = Library("P4", "T4", "H100")
    assert [found(library, visible).name for visible in ("2,1", "GPU-1", "0,-1,2")] == ["H100, T4", "T4", "P4"]
    assert found(Library("P4", fails="limit")).limit_w is None


@subcases(
    ("library", "visible", "why"),
    [
        (Library(), None, "NVML: there is no GPU"),
        (Library("P4"), "", "NVML: there is no GPU in ''"),
        (Library("P4"), "3", "NVML: the GPU's energy counter cannot be read: Invalid Argument"),
        (Library("K80", fails="energy"), None, "NVML: the GPU's energy counter cannot be read: Not Supported"),
    ],
)
def test_why_there_is_none_is_reported(library: Library, visible: str | None, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        found(library, visible)


RANGE_UJ = 262_143_328_850


class Powercap:
    """A tree like /sys/class/powercap, whose counters the test moves."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._counts: dict[str, int] = {}

    def add(self, zone: str, name: str, count_uj: int = 0, limits_w: tuple[float, ...] = ()) -> Path:
        folder = self.root / zone
        folder.mkdir()
        (folder / "name").write_text(name + "\n")
        (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
        for number, limit in enumerate(limits_w):
            (folder / f"constraint_{number}_power_limit_uw").write_text(f"{round(limit * 1e6)}\n")
        self._counts[zone] = count_uj
        self.use(zone, 0.0)
        return folder

    def use(self, zone: str, joules: float) -> None:
        """Count energy, going round as the hardware does."""
        self._counts[zone] = (self._counts[zone] + round(joules * 1e6)) % (RANGE_UJ + 1)
        (self.root / zone / "energy_uj").write_text(f"{self._counts[zone]}\n")


@pytest.fixture
def powercap(tmp_path: Path) -> Powercap:
    return Powercap(tmp_path)


def test_packages_are_added_up_and_nothing_else(powercap: Powercap) -> None:
    powercap.add("intel-rapl:0", "package-0", 5_000_000, (65.0, 90.0))
    powercap.add("intel-rapl:1", "package-1", 7_000_000, (65.0, 90.0))
    powercap.add("intel-rapl:0:0", "core")
    powercap.add("intel-rapl:0:1", "dram")
    powercap.add("intel-rapl:2", "psys")
    (powercap.root / "intel-rapl").mkdir()
    meter = machine.find_rapl(powercap.root)
    assert meter.source == "rapl" and meter.name == "2 CPU packages"
    assert meter.limit_w == 180.0
    assert meter.read_mj() == 0.0
    for zone in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0", "intel-rapl:2"):
        powercap.use(zone, 1.5)
    assert meter.read_mj() == 3000.0


def test_a_counter_that_goes_round_goes_on(powercap: Powercap) -> None:
    powercap.add("intel-rapl:0", "package-0", RANGE_UJ - 1_000_000)
    meter = machine.find_rapl(powercap.root)
    powercap.use("intel-rapl:0", 2.5)
    assert meter.read_mj() == pytest.approx(2500.0, abs=0.01)
    powercap.use("intel-rapl:0", 1.0)
    assert meter.read_mj() == pytest.approx(3500.0, abs=0.01)
    assert meter.name == "1 CPU package"


def test_why_there_is_no_rapl_meter_is_reported(powercap: Powercap) -> None:
    with pytest.raises(SettingsError, match=r"RAPL: there are no CPU packages in .* \(virtual machines have none\)"):
        machine.find_rapl(powercap.root)
    folder = powercap.add("intel-rapl:0", "package-0")
    (folder / "energy_uj").write_text("nothing")
    with pytest.raises(SettingsError, match="RAPL: cannot be read"):
        machine.find_rapl(powercap.root)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_counter_for_root_only_is_reported_as_such(powercap: Powercap) -> None:
    folder = powercap.add("intel-rapl:0", "package-0")
    (folder / "energy_uj").chmod(0)
    with pytest.raises(SettingsError, match="energy_uj is readable by root only"):
        machine.find_rapl(powercap.root)
