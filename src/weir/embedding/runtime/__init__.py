"""Runtimes compute vectors from token ids: the onnx runtime and torch. This module opens them and chooses a device for each worker."""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weir.errors import SettingsError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weir.embedding.checkpoint.reading import Checkpoint
    from weir.embedding.recipe import Pooling, Recipe


RUNTIMES = ("onnx", "torch", "onnx-file")
# The files of each variant of an ONNX file, of which the first that a repository has is served: as transformers.js and sentence-transformers call them.
MODEL, ENDING = "model.onnx", ".onnx"
DTYPES: Mapping[str, Sequence[str]] = {
    "fp32": (MODEL,), "float32": (MODEL,), "fp16": ("model_fp16.onnx",), "float16": ("model_fp16.onnx",),
    "int8": ("model_int8.onnx", "model_quantized.onnx"), "uint8": ("model_uint8.onnx",), "q8": ("model_quantized.onnx", "model_int8.onnx"),
    "q4": ("model_q4.onnx",), "q4f16": ("model_q4f16.onnx",), "bnb4": ("model_bnb4.onnx",),
    **{level: (f"model_{level}.onnx",) for level in ("O1", "O2", "O3", "O4")},
}  # fmt: skip
AUTO, CPU = "auto", "cpu"
RULE = "must be auto, cpu, cuda, or the number of a GPU: cuda:1, or 1"

logger = logging.getLogger("weir")


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
        self, ids: "NDArray[Any]", mask: "NDArray[Any]", types: "NDArray[Any]", pool: "NDArray[Any]", poolings: "Sequence[Pooling]"
    ) -> "list[NDArray[Any]]":  # fmt: skip
        """Compute the results of several poolings in one pass: that of the recipe, and those that the recipe has beside it.

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


def open_runtime(checkpoint: "Checkpoint", recipe: "Recipe", options: RuntimeOptions, device: str = "cpu") -> Runtime:
    """Load `checkpoint` on `device` to compute the vectors of `recipe`.

    Raises SettingsError if the runtime does not exist, is not installed, or cannot do what the recipe states.
    """
    if options.kind == "onnx":
        from weir.embedding.runtime.onnx import open_onnx

        return open_onnx(checkpoint, recipe, options, device)
    if options.kind == "torch":
        from weir.embedding.runtime.torch import open_torch

        return open_torch(checkpoint, recipe, options, device)
    if options.kind == "onnx-file":
        from weir.embedding.runtime.onnx_file import open_onnx_file

        return open_onnx_file(checkpoint, recipe, options, device)
    raise SettingsError(f"runtime={options.kind!r}: must be one of {', '.join(RUNTIMES)}")


def is_dtype(name: str) -> bool:
    """Return whether `name` is a variant in DTYPES, or the name of a file."""
    return name in DTYPES or (name.endswith(ENDING) and "/" not in name)


def check_devices(devices: Sequence[str]) -> None:
    """Raise SettingsError unless each is auto, cpu, cuda, or the number of a GPU, such as cuda:1 or 1."""
    for device in devices:
        if not (isinstance(device, str) and re.fullmatch(r"auto|cpu|cuda|(cuda:)?\d+", device)):
            raise SettingsError(f"devices={list(devices)!r}: {device!r} {RULE}")


def may_use_gpu(devices: Sequence[str]) -> bool:
    """Return whether a worker may be given a GPU: `devices` do not exclude it, and the machine has one.

    No GPU library is loaded, as a process may not be forked safely after that.
    """
    return set(devices) != {CPU} and any(Path("/dev").glob("nvidia[0-9]*"))


def device_for(devices: Sequence[str], worker: int, free: Callable[[], Sequence[int]]) -> str:
    """Return the device of a worker: "cpu", or "cuda:" and a number.

    A worker with the device `auto` or `cuda` gets a GPU, the GPU with the most free memory first, then the others in turn. Without a GPU, `auto` is the
    CPU. If a GPU was named and does not exist, a warning is logged and the device is the CPU.

    Args:
        devices: a device for each worker, repeated if there are more workers; empty for auto.
        worker: the index of the worker, from 0.
        free: returns the free memory, in bytes, of each GPU that the runtime can use.

    Raises SettingsError if one of `devices` is not the name of a device.
    """
    check_devices(devices)
    device = devices[worker % len(devices)] if devices else AUTO
    if device == CPU:
        return CPU
    memory = free()
    if device in (AUTO, "cuda"):
        if memory:
            emptiest_first = sorted(range(len(memory)), key=lambda gpu: -memory[gpu])
            return f"cuda:{emptiest_first[worker % len(memory)]}"
        if device == AUTO:
            return CPU
    elif int(device.rpartition(":")[2]) < len(memory):
        return f"cuda:{int(device.rpartition(':')[2])}"
    logger.warning(
        "device %r: the runtime has %d GPU(s) here; worker %d computes on the CPU instead", device, len(memory), worker
    )
    return CPU


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


def device_of(kind: str, devices: Sequence[str], worker: int) -> str:
    """Return the device of `worker` for the runtime `kind`, one of RUNTIMES; see device_for."""
    return device_for(devices, worker, _torch_memory if kind == "torch" else _onnx_memory)


def _onnx_memory() -> Sequence[int]:
    # Without NVML the number of GPUs is unknown. The first is assumed to exist; if it does not, onnxruntime falls back to the CPU.
    from weir.embedding.runtime.onnx import has_cuda

    return free_memory() or [0] if has_cuda() else []


def _torch_memory() -> Sequence[int]:
    from weir.embedding.runtime.torch import gpu_memory

    return gpu_memory()
