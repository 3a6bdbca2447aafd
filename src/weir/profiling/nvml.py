"""The total energy counter of NVIDIA's GPUs (Volta and later), read with nvidia-ml-py (the extra `gpu`)."""

from collections.abc import Sequence
from typing import Any

from weir.errors import SettingsError


class NvmlMeter:
    """The GPUs that a worker can see, together. `library` is the module pynvml, initialised."""

    source = "nvml"

    def __init__(self, library: Any, handles: Sequence[Any]) -> None:
        self._library = library
        self._handles = handles
        names = [_text(library.nvmlDeviceGetName(handle)) for handle in handles]
        self.name = ", ".join(names)

    @property
    def limit_w(self) -> float | None:
        """The sum of the boards' power limits, if they say."""
        try:
            limits = [self._library.nvmlDeviceGetEnforcedPowerLimit(handle) for handle in self._handles]
        except self._library.NVMLError:
            return None
        return float(sum(limits)) / 1000.0

    def read_mj(self) -> float:
        """Return the millijoules used since the driver was loaded."""
        return float(sum(self._library.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles))


def find_nvml(visible: str | None = None, library: Any = None) -> NvmlMeter:
    """Return the meter of the GPUs that `visible` lists, in the form of CUDA_VISIBLE_DEVICES; None: of all.

    `library` stands for pynvml. Raises SettingsError that says why there is none.
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
    """Return pynvml, initialised. Raises SettingsError if it, or NVIDIA's driver, is not there."""
    try:
        import pynvml
    except ImportError:
        raise SettingsError("NVML: nvidia-ml-py is not installed (pip install 'weir-serving[gpu]')") from None
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
