from typing import Any

import pytest

from weir.errors import SettingsError
from weir.profiling.energy import find_nvml


class Library:
    """As much of pynvml as is used, with GPUs of its own."""

    class NVMLError(Exception):
        """As NVML's."""

    def __init__(self, *names: str | bytes, counts: bool = True, limits: bool = True) -> None:
        self.names = names
        self.energy_mj = [100 * number for number in range(len(names))]
        self._counts = counts
        self._limits = limits

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.names):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self.names[handle]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if not self._counts:
            raise self.NVMLError("Not Supported")
        return self.energy_mj[handle]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        if not self._limits:
            raise self.NVMLError("Not Supported")
        return 300_000


def found(library: Any, visible: str | None = None) -> Any:
    return find_nvml(visible, library)


def test_all_gpus_are_read_together() -> None:
    library = Library("A100", b"A100")
    meter = found(library)
    assert (meter.source, meter.name, meter.limit_w, meter.read_mj()) == ("nvml", "A100, A100", 600.0, 100.0)
    library.energy_mj[0] += 7
    assert meter.read_mj() == 107.0


def test_only_those_that_the_worker_sees() -> None:
    library = Library("P4", "T4", "H100")
    assert found(library, "2,1").name == "H100, T4"
    assert found(library, "GPU-1").name == "T4"
    assert found(library, "0,-1,2").name == "P4"


def test_why_there_is_none_is_said() -> None:
    for library, visible, why in (
        (Library(), None, "NVML: there is no GPU"),
        (Library("P4"), "", "NVML: there is no GPU in ''"),
        (Library("P4"), "3", "NVML: the GPU's energy counter cannot be read: Invalid Argument"),
        (Library("K80", counts=False), None, "NVML: the GPU's energy counter cannot be read: Not Supported"),
    ):
        with pytest.raises(SettingsError, match=why):
            found(library, visible)


def test_a_board_without_a_limit_has_none() -> None:
    assert found(Library("P4", limits=False)).limit_w is None


def test_the_real_library_reads_a_counter_or_says_why_not() -> None:
    try:
        meter = find_nvml()
    except SettingsError as error:
        assert error.message.startswith("NVML: ")
    else:
        assert meter.read_mj() > 0.0
