"""What computes vectors of tokens, the onnx runtime or torch, and on which device: as the user chose, or where most memory is free."""

import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weir.errors import SettingsError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weir.embedding.checkpoint.reading import Checkpoint
    from weir.embedding.recipe import Recipe


RUNTIMES = ("onnx", "torch")
AUTO, CPU = "auto", "cpu"
RULE = "must be auto, cpu, cuda, or the number of a GPU: cuda:1, or 1"

logger = logging.getLogger("weir")


class Runtime(Protocol):
    """A model of texts on a device."""

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""

    @property
    def device(self) -> str:
        """Where it computes: cpu, or cuda and a number."""

    def run(
        self, ids: "NDArray[Any]", mask: "NDArray[Any]", types: "NDArray[Any]", pool: "NDArray[Any]"
    ) -> "NDArray[Any]":
        """Return float32 vectors, [texts, dimensions], or [texts, length, dimensions] if each token has one.

        All arguments are [texts, length]: token ids, 1 for a token and 0 for what is filled up, 1 for the second text of a pair (all int32), and how much a token
        counts in the pooling (float32).
        """


class Computing(NamedTuple):
    """On what vectors are computed, besides the device.

    `kind` is the runtime's name; `threads` are for one run on a CPU; `cache` is where graphs are kept (None: the user's cache directory);
    `compiled` has torch compile the model; `gpu_memory_fraction` is the largest part of a GPU's memory that a worker takes.
    """

    kind: str = "onnx"
    threads: int = 1
    cache: Path | None = None
    compiled: bool = False
    gpu_memory_fraction: float | None = None


def open_runtime(checkpoint: "Checkpoint", recipe: "Recipe", computing: Computing, device: str = "cpu") -> Runtime:
    """Return the runtime that computes what `recipe` says of `checkpoint` on `device`.

    Raises SettingsError: unknown, not installed, or it cannot do what the recipe says.
    """
    if computing.kind == "onnx":
        from weir.embedding.runtime.onnx import open_onnx

        return open_onnx(checkpoint, recipe, computing, device)
    if computing.kind == "torch":
        from weir.embedding.runtime.torch import open_torch

        return open_torch(checkpoint, recipe, computing, device)
    raise SettingsError(f"runtime={computing.kind!r}: must be one of {', '.join(RUNTIMES)}")


def check_devices(devices: Sequence[str]) -> None:
    """Raise SettingsError unless each is the name of a device."""
    for device in devices:
        if not (isinstance(device, str) and re.fullmatch(r"auto|cpu|cuda|(cuda:)?\d+", device)):
            raise SettingsError(f"devices={list(devices)!r}: {device!r} {RULE}")


def may_use_gpu(devices: Sequence[str]) -> bool:
    """Tell whether a worker may get a GPU: one is asked for, or not ruled out, and the machine has one. No library is asked, for that may leave the process
    unfit to be forked."""
    return set(devices) != {CPU} and any(Path("/dev").glob("nvidia[0-9]*"))


def device_for(devices: Sequence[str], worker: int, free: Callable[[], Sequence[int]]) -> str:
    """Return the device of `worker`, counted from 0: cpu, or cuda and a number.

    `devices` has one for each worker, going round when there are fewer; none is as one `auto`. `free` returns how many bytes are free on each GPU that the
    runtime can use. Workers of `auto` are dealt out over the GPUs, the one with most free memory first. A GPU
    that is not there is a warning, and the CPU instead. Raises SettingsError for what is no device.
    """
    check_devices(devices)
    wanted = devices[worker % len(devices)] if devices else AUTO
    if wanted == CPU:
        return CPU
    memory = free()
    if wanted in (AUTO, "cuda"):
        if memory:
            fullest_last = sorted(range(len(memory)), key=lambda gpu: -memory[gpu])
            return f"cuda:{fullest_last[worker % len(memory)]}"
        if wanted == AUTO:
            return CPU
    elif int(wanted.rpartition(":")[2]) < len(memory):
        return f"cuda:{int(wanted.rpartition(':')[2])}"
    logger.warning(
        "device %r: the runtime has %d GPU(s) here; worker %d computes on the CPU instead", wanted, len(memory), worker
    )
    return CPU


def free_memory() -> list[int]:
    """Return how many bytes are free on each of NVIDIA's GPUs that programs here can see, in CUDA's order; none without their library (the extra `gpu`)."""
    return [int(memory.free) for memory in _memory()]


def memory_limit(device: str, fraction: float | None) -> int | None:
    """Return how many bytes of the GPU `device` are this part of its memory; None if there is no limit, or nobody to ask."""
    if device == CPU or fraction is None:
        return None
    memory, number = _memory(), int(device.partition(":")[2])
    return int(memory[number].total * fraction) if number < len(memory) else None


def _memory() -> list[Any]:
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
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, by number or by name."""
    by_index, by_name = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [by_index(number) for number in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return [by_index(int(name)) if name.isdigit() else by_name(name) for name in names]


def device_of(kind: str, devices: Sequence[str], worker: int) -> str:
    """Return the device of `worker` for the runtime `kind`. See device_for."""
    return device_for(devices, worker, _onnx_memory if kind == "onnx" else _torch_memory)


def _onnx_memory() -> Sequence[int]:
    """Without NVIDIA's library nobody says how many GPUs there are: onnxruntime is given the first then, and may refuse it."""
    from weir.embedding.runtime.onnx import has_cuda

    return free_memory() or [0] if has_cuda() else []


def _torch_memory() -> Sequence[int]:
    from weir.embedding.runtime.torch import gpu_memory

    return gpu_memory()
