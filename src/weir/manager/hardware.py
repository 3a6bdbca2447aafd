"""What this machine computes with: its CPUs, and its GPUs as far as NVIDIA's library tells."""

import os
from dataclasses import asdict, dataclass
from typing import Any

from weir.errors import SettingsError
from weir.profiling.machine import cpu_name
from weir.profiling.nvml import load_library
from weir.workers.launch import available_cpus


@dataclass(frozen=True)
class Hardware:
    """Some equal devices, or one. `kind` is CPU or GPU; `index` is the GPU's number (None for CPUs)."""

    kind: str
    name: str
    count: int
    memory_bytes: int
    index: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return asdict(self)


def find_hardware(library: Any = None) -> list[Hardware]:
    """Return the CPUs that this process may use, then each GPU. `library` stands for pynvml; without it (nvidia-ml-py, the extra
    `gpu`), or without a driver, there are CPUs only."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpus = Hardware("CPU", cpu_name(), len(available_cpus()), memory_bytes)
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
