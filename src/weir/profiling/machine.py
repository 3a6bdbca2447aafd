"""The hardware of this machine, its meters of energy, and what a profile notes about where it was made.

The energy of a batch is read from a counter while batches of one size run back to back, less that of the idle machine. One batch is far below
what any counter resolves (NVIDIA's is refreshed every 20 to 100 ms), so each size runs for seconds.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weir._version import __version__
from weir.errors import SettingsError, add_extra
from weir.profiling.sampling import ServiceTimeSampler
from weir.workers.cpus import cpu_count

WINDOW = 3.0  # seconds for one size: at least thirty times the longest refresh interval of common counters
IDLE_WINDOW = 2.0  # seconds
SETTLE = 0.5  # seconds for the power to rise or fall before it is read
MOST_SIZES = 5  # at which energy is read
RISEN_W = 1.0  # watts: a device whose power rises by less while batches run does not run them
TOLERANCE = 1.05  # times the power limit; the gain of such sensors is off by a few per cent


class Meter(Protocol):
    """A counter of energy."""

    @property
    def source(self) -> str:
        """One of ENERGY_SOURCES in policy/cost.py."""

    @property
    def name(self) -> str:
        """The part that is metered, for people."""

    @property
    def limit_w(self) -> float | None:
        """The power in watts that the device cannot exceed, if known."""

    def read_mj(self) -> float:
        """Return the millijoules used so far. Only differences have a meaning."""


class Reading(NamedTuple):
    """The readings of one meter.

    Attributes:
        meter: the meter.
        idle_w: power in watts while nothing runs.
        batch_mj: by size, the millijoules of a batch beyond the idle power.
        power_w: by size, the whole power in watts.
    """

    meter: Meter
    idle_w: float
    batch_mj: dict[int, float]
    power_w: dict[int, float]

    @property
    def rise_w(self) -> float:
        """By how many watts the power rose at most while batches ran."""
        return max(self.power_w.values()) - self.idle_w


@dataclass
class Energy:
    """The energy of batches, as far as it is known.

    Attributes:
        source: one of ENERGY_SOURCES in policy/cost.py.
        watts: the power of a busy worker, used if `batch_mj` is empty.
        batch_mj: by size, the millijoules of a batch, as read.
        about: notes for the profile.
        warnings: what makes the figures doubtful.
    """

    source: str
    watts: float = 1.0
    batch_mj: Mapping[int, float] = field(default_factory=dict)
    about: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def modelled(power: float | None = None) -> Energy:
    """Return the energy of a device that draws `power` watts while it computes; one watt, as a unit of time, if None."""
    if power is not None:
        return Energy("stated", power, about={"energy": f"stated: {power:g} W while it computes"})
    return Energy("time", about={"energy": "none read or stated: 1 mJ stands for 1 ms of a busy worker"})


def windows(sizes: Sequence[int]) -> list[int]:
    """Return the few of the measured `sizes` at which energy is read: the smallest, the largest, and some evenly
    between.
    """
    last = len(sizes) - 1
    count = min(MOST_SIZES, len(sizes))
    return sorted({sizes[round(index * last / max(1, count - 1))] for index in range(count)})


async def read_energy(meters: Sequence[Meter], sampler: ServiceTimeSampler, sizes: Sequence[int]) -> list[Reading]:
    """Read all `meters` while nothing runs, then while batches of each size run, and again while nothing runs."""
    clock = sampler.clock
    idle: list[list[float]] = []
    powers: dict[int, list[float]] = {}
    batches: dict[int, tuple[int, float]] = {}

    async def rest() -> None:
        await sampler.sleep(SETTLE)
        before, started = [meter.read_mj() for meter in meters], clock()
        await sampler.sleep(IDLE_WINDOW)
        after, seconds = [meter.read_mj() for meter in meters], clock() - started
        idle.append([_watts(*pair, seconds) for pair in zip(before, after, strict=True)])

    await rest()
    for size in sizes:
        await sampler.back_to_back(size, SETTLE)  # until the power has risen
        before = [meter.read_mj() for meter in meters]
        batches[size] = await sampler.back_to_back(size, WINDOW)
        after = [meter.read_mj() for meter in meters]
        powers[size] = [_watts(*pair, batches[size][1]) for pair in zip(before, after, strict=True)]
    await rest()
    return [_reading(meter, index, idle, powers, batches) for index, meter in enumerate(meters)]


def _watts(before_mj: float, after_mj: float, seconds: float) -> float:
    return (after_mj - before_mj) / (1000.0 * seconds)


def _reading(
    meter: Meter,
    index: int,
    idle: list[list[float]],
    powers: dict[int, list[float]],
    batches: dict[int, tuple[int, float]],
) -> Reading:
    idle_w = sum(each[index] for each in idle) / len(idle)
    power_w = {size: each[index] for size, each in powers.items()}
    batch_mj = {size: (power_w[size] - idle_w) * 1000.0 * seconds / count for size, (count, seconds) in batches.items()}
    return Reading(meter, idle_w, batch_mj, power_w)


def judged(readings: Sequence[Reading], absent: str = "") -> Energy:
    """Return the energy by the first meter whose power rose while batches ran; without one, that of a unit of time.

    `absent` says why there are no meters. Implausible readings cause warnings.
    """
    for reading in readings:
        if reading.rise_w >= RISEN_W:
            return _measured(reading)
    energy = modelled()
    why = absent
    if readings:
        metered = ", ".join(reading.meter.name for reading in readings)
        why = f"the power of {metered} did not rise by {RISEN_W:g} W while batches ran"
    if why:
        energy.about["energy_not_read"] = why
    return energy


def _measured(reading: Reading) -> Energy:
    meter = reading.meter
    lowest, highest = min(reading.power_w.values()), max(reading.power_w.values())
    energy = Energy(meter.source, batch_mj={size: max(0.0, used) for size, used in reading.batch_mj.items()})
    energy.about = {
        "energy": f"{meter.source}: {meter.name}, idle power subtracted",
        "idle_power_w": round(reading.idle_w, 3),
        "power_w": [round(lowest, 3), round(highest, 3)],
        "energy_sizes": list(reading.batch_mj),
    }
    if meter.limit_w is not None:
        energy.about["power_limit_w"] = meter.limit_w
        if highest > TOLERANCE * meter.limit_w:
            energy.warnings.append(
                f"the power read, {highest:.1f} W, is above what {meter.name} allows, {meter.limit_w:g} W: the energies are doubtful"
            )
    below = [size for size, value in reading.batch_mj.items() if value <= 0.0]
    if below:
        energy.warnings.append(f"batches of {below[0]} used no more than the idle machine: their energy is taken as 0")
    return energy


# The energy counters of CPU packages that Linux shows under /sys/class/powercap (Intel's RAPL; AMD's by the same name).


POWERCAP = Path("/sys/class/powercap")


class RaplMeter:
    """The CPU packages of this machine together. They include everything else that runs on it."""

    source = "rapl"

    def __init__(self, packages: Sequence["Package"]) -> None:
        self._packages = packages
        self.name = f"{len(packages)} CPU package{'s' if len(packages) > 1 else ''}"

    @property
    def limit_w(self) -> float | None:
        """The sum of the packages' highest power limits in watts, if all have one."""
        limits = [package.limit_w for package in self._packages]
        return sum(limit for limit in limits if limit is not None) if None not in limits else None

    def read_mj(self) -> float:
        """Return the millijoules used since this object was made.

        It must be called more often than the counters wrap around, which takes minutes.
        """
        return sum(package.read_mj() for package in self._packages)


class Package:
    """One counter in a folder of the powercap tree. It counts microjoules, and wraps around at `max_energy_range_uj`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._range_uj = _number(folder / "max_energy_range_uj")
        self._last_uj = self._read_uj()
        self._total_uj = 0

    @property
    def limit_w(self) -> float | None:
        """The highest of its power limits in watts; None if it has none."""
        limits = [_number(path) for path in self._folder.glob("constraint_*_power_limit_uw")]
        return max(limits) / 1e6 if any(limits) else None

    def read_mj(self) -> float:
        """Return the millijoules used since this object was made."""
        now_uj = self._read_uj()
        passed = now_uj - self._last_uj
        self._total_uj += passed if passed >= 0 else passed + self._range_uj + 1
        self._last_uj = now_uj
        return self._total_uj / 1000.0

    def _read_uj(self) -> int:
        return _number(self._folder / "energy_uj")


def find_rapl(root: Path = POWERCAP) -> RaplMeter:
    """Return the meter of all CPU packages. Raises SettingsError with the reason if there is none.

    Only packages count: core, uncore and dram are parts of them or not supported everywhere, and psys contains all of
    them.
    """
    packages = [folder for folder in sorted(root.glob("intel-rapl:*")) if _is_package(folder)]
    if not packages:
        raise SettingsError(f"RAPL: there are no CPU packages in {root} (virtual machines have none)")
    try:
        return RaplMeter([Package(folder) for folder in packages])
    except PermissionError as error:
        raise SettingsError(f"RAPL: {error.filename} is readable by root only") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"RAPL: cannot be read: {error}") from None


def _is_package(folder: Path) -> bool:
    try:
        return (folder / "name").read_text().startswith("package")
    except OSError:
        return False


def _number(path: Path) -> int:
    return int(path.read_text())


# The total energy counter of NVIDIA's GPUs (Volta and later), read with nvidia-ml-py (the extra `gpu`).


class NvmlMeter:
    """The GPUs that a worker can see, together. `library` is the initialised module pynvml."""

    source = "nvml"

    def __init__(self, library: Any, handles: Sequence[Any]) -> None:
        self._library = library
        self._handles = handles
        names = [_text(library.nvmlDeviceGetName(handle)) for handle in handles]
        self.name = ", ".join(names)

    @property
    def limit_w(self) -> float | None:
        """The sum of the boards' power limits in watts, if they have any."""
        try:
            limits = [self._library.nvmlDeviceGetEnforcedPowerLimit(handle) for handle in self._handles]
        except self._library.NVMLError:
            return None
        return float(sum(limits)) / 1000.0

    def read_mj(self) -> float:
        """Return the millijoules used since the driver was loaded."""
        return float(sum(self._library.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles))


def find_nvml(visible: str | None = None, library: Any = None) -> NvmlMeter:
    """Return the meter of the GPUs that `visible` lists in the form of CUDA_VISIBLE_DEVICES; None: of all.

    `library` replaces pynvml. Raises SettingsError with the reason if there is none.
    """
    library = library or load_library()
    try:
        handles = [_handle(library, device) for device in _devices(library, visible)]
        if not handles:
            raise SettingsError("NVML: there is no GPU" + ("" if visible is None else f" in {visible!r}"))
        meter = NvmlMeter(library, handles)
        meter.read_mj()
    except library.NVMLError as error:
        raise SettingsError(f"NVML: the GPU's energy counter cannot be read: {error}") from None
    return meter


def load_library() -> Any:
    """Return pynvml, initialised. Raises SettingsError if it, or NVIDIA's driver, is not installed."""
    try:
        import pynvml
    except ImportError:
        raise SettingsError(f"NVML: nvidia-ml-py is not installed; {add_extra('gpu')}") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise SettingsError(f"NVML: {error}") from None
    return pynvml


def _devices(library: Any, visible: str | None) -> list[str]:
    if visible is None:
        return list(map(str, range(library.nvmlDeviceGetCount())))
    devices = []
    for device in filter(None, map(str.strip, visible.split(","))):
        if device == "-1":  # this and what follows is hidden
            break
        devices.append(device)
    return devices


def _handle(library: Any, device: str) -> Any:
    if device.isdigit():
        return library.nvmlDeviceGetHandleByIndex(int(device))
    return library.nvmlDeviceGetHandleByUUID(device)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


# Libraries whose version is noted if installed.
NOTED = ("numpy", "onnxruntime", "torch", "jax", "tensorflow", "scikit-learn")


class Meters(NamedTuple):
    """The meters of this machine, the most trusted first, and why others are missing."""

    found: list[Meter]
    missing: str


def find_meters(environment: Mapping[str, str], finders: Sequence[Callable[[], Meter]] = ()) -> Meters:
    """Return the counters that can be read: of the GPUs that a worker with this `environment` sees, then of the CPU.

    `finders` replace the functions that look for them; each returns a meter or raises SettingsError.
    """
    found: list[Meter] = []
    missing: list[str] = []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    for find in finders or (lambda: find_nvml(visible), find_rapl):
        try:
            found.append(find())
        except SettingsError as error:
            missing.append(error.message)
    return Meters(found, "; ".join(missing))


def describe_machine() -> dict[str, Any]:
    """Return the CPU, the versions and the date, as texts and numbers."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{cpu_name()}, {cpu_count()} of {os.cpu_count()} CPUs",
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"weir": __version__, "python": platform.python_version(), **_installed()},
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the CPU."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _installed() -> dict[str, str]:
    versions = {}
    for name in NOTED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


@dataclass(frozen=True)
class Hardware:
    """One or several equal devices.

    Attributes:
        kind: CPU or GPU.
        name: what the device calls itself.
        count: how many there are.
        memory_bytes: of a device.
        index: the GPU's number; None for CPUs.
    """

    kind: str
    name: str
    count: int
    memory_bytes: int
    index: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return asdict(self)


def find_hardware(library: Any = None) -> list[Hardware]:
    """Return the CPUs that this process may use, then each GPU.

    `library` replaces pynvml. Without it (nvidia-ml-py, the extra `gpu`), or without a driver, there are CPUs only.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpus = Hardware("CPU", cpu_name(), cpu_count(), memory_bytes)
    try:
        library = library or load_library()
    except SettingsError:
        return [cpus]
    return [cpus, *_gpus(library)]


def _gpus(library: Any) -> list[Hardware]:
    try:
        return [_gpu(library, index) for index in range(library.nvmlDeviceGetCount())]
    except library.NVMLError:
        return []


def _gpu(library: Any, index: int) -> Hardware:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    name = _text(library.nvmlDeviceGetName(handle))
    return Hardware("GPU", name, 1, int(library.nvmlDeviceGetMemoryInfo(handle).total), index)


def memory_of(pid: int) -> int | None:
    """Return the memory of a process in bytes, where a page that several processes share counts in parts (PSS); None if the kernel does not say."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), None)


class GpuMemory:
    """Reads what processes take of the memory of all GPUs together, as NVIDIA's driver counts it. `library` replaces pynvml."""

    def __init__(self, library: Any = None) -> None:
        self._library = library

    def read(self) -> dict[int, int]:
        """Return the bytes of each process that uses a GPU, by process id; none where the driver does not say, as in some containers.

        Raises SettingsError without nvidia-ml-py (the extra `gpu`) or a driver.
        """
        library = self._library = self._library or load_library()
        found: dict[int, int] = {}
        try:
            for index in range(library.nvmlDeviceGetCount()):
                for each in library.nvmlDeviceGetComputeRunningProcesses(library.nvmlDeviceGetHandleByIndex(index)):
                    found[each.pid] = found.get(each.pid, 0) + (each.usedGpuMemory or 0)
        except library.NVMLError as error:
            raise SettingsError(f"NVML: the memory of processes cannot be read: {error}") from None
        return found
