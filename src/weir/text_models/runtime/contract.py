"""What a runtime offers, its options, and the memory of devices."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weir.text_models.pooling import Pooling

AUTO, CPU = "auto", "cpu"


class Runtime(Protocol):
    """A text encoder that is loaded on a device."""

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""

    @property
    def device(self) -> str:
        """The device that computes: "cpu", or "cuda:" and a number."""

    def run(
        self, ids: "NDArray[Any]", mask: "NDArray[Any]", types: "NDArray[Any]", pool: "NDArray[Any]"
    ) -> "NDArray[Any]":
        """Compute the vectors of a batch of texts with padding on the right. All arguments are [texts, length].

        Args:
            ids: token ids, int32.
            mask: 1 for a token, 0 for padding, int32.
            types: 1 for a token of the second text of a pair, else 0, int32.
            pool: the weight of a token in the pooling, float32.

        Returns:
            float32 [texts, dimensions], or [texts, length, dimensions] for Pooling.NONE.
        """

    def widened(self, threads: int) -> "Runtime | None":
        """Return the same model with more threads of the CPU, if that takes hardly any memory; else None."""

    def run_several(
        self,
        ids: "NDArray[Any]",
        mask: "NDArray[Any]",
        types: "NDArray[Any]",
        pool: "NDArray[Any]",
        poolings: "Sequence[Pooling]",
    ) -> "list[NDArray[Any]]":
        """Compute the results of several poolings in one pass: that of the recipe, and those that the recipe has in addition.

        Args and results are those of `run`; for Pooling.NONE [texts, length, dimensions], of any value for padding.
        """


class RuntimeOptions(NamedTuple):
    """The options of a runtime.

    Attributes:
        kind: the runtime: one of RUNTIMES.
        threads: how many threads compute one batch on a CPU.
        cache: the directory where graphs are kept; None for the user's cache directory.
        compiled: whether torch compiles the model.
        prepacked: whether the onnx runtime reads weights as this CPU computes with them from a file, see prepacked.py, so that sessions share them.
        gpu_memory_fraction: the most of a GPU's memory that a worker may take, above 0 and at most 1; None for no limit.
    """

    kind: str = "onnx"
    threads: int = 1
    cache: Path | None = None
    compiled: bool = False
    gpu_memory_fraction: float | None = None
    prepacked: bool = False


def free_memory() -> list[int]:
    """Return the free memory, in bytes, of each NVIDIA GPU that CUDA_VISIBLE_DEVICES leaves, in CUDA's order; empty without the extra `gpu`."""
    return [int(memory.free) for memory in _memory()]


def memory_limit(device: str, fraction: float | None) -> int | None:
    """Return `fraction` of the memory of `device`, in bytes; None on the CPU, without a fraction, or if the GPU's memory is unknown."""
    if device == CPU or fraction is None:
        return None
    memory, number = _memory(), int(device.partition(":")[2])
    return int(memory[number].total * fraction) if number < len(memory) else None


def _memory() -> list[Any]:
    """Return NVML's memory information of each visible GPU; empty if NVML is missing or fails."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in _visible(pynvml)]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _visible(nvml: Any) -> list[Any]:
    """Return NVML's handles of the GPUs in CUDA_VISIBLE_DEVICES, which has numbers or UUIDs; all GPUs if it is not set."""
    by_index, by_name = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [by_index(number) for number in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return [by_index(int(name)) if name.isdigit() else by_name(name) for name in names]
