"""The hardware of this machine, its meters, and what a profile notes about where it was made."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from weir._version import __version__
from weir.errors import SettingsError
from weir.profiling.energy import Meter, find_nvml, find_rapl, load_library
from weir.workers.cpus import cpu_count

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
    name = library.nvmlDeviceGetName(handle)
    text = name.decode() if isinstance(name, bytes) else str(name)
    return Hardware("GPU", text, 1, int(library.nvmlDeviceGetMemoryInfo(handle).total), index)


def memory_of(pid: int) -> int | None:
    """Return the memory of a process in bytes, where a page that several processes share counts in parts (PSS); None if the kernel does not say."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), None)


class GpuMemory:
    """What processes take of the memory of all GPUs together, as NVIDIA's driver counts it. `library` replaces pynvml."""

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
