"""Runtimes compute vectors from token ids: the onnx runtime and torch. This module states what a runtime offers, opens one, and chooses a device for each worker.

It also decides how many threads compute a batch that runs alone on the CPU. More threads are not always faster: a short text is too little work for them, above
all in int8, and the CPU of an idle worker may be busy with other work, such as the server's own. So `Widths` times each number of threads on the batches
themselves, by size, and the fewest threads that are nearly as fast as any win.
"""

import ctypes
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weir.errors import SettingsError
from weir.text_models import ALONE, DEFAULT_COMPUTING, ComputingSettings, WorkerShare

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weir.text_models import Pooling, Recipe
    from weir.text_models.checkpoint.reading import Checkpoint

logger = logging.getLogger("weir")

AUTO, CPU = "auto", "cpu"


class Inputs(NamedTuple):
    """A batch of texts with padding on the right. All arrays are [texts, length].

    Attributes:
        ids: token ids, int32.
        mask: 1 for a token, 0 for padding, int32.
        types: 1 for a token of the second text of a pair, else 0, int32.
        pool: the weight of a token in the pooling, float32.
    """

    ids: "NDArray[Any]"
    mask: "NDArray[Any]"
    types: "NDArray[Any]"
    pool: "NDArray[Any]"


class Pixels(NamedTuple):
    """A batch of images.

    Attributes:
        pixels: [images, 3, height, width], float32, as the model's preparation makes them.
    """

    pixels: "NDArray[Any]"


class Runtime(Protocol):
    """A text encoder, or the encoder of images beside it, that is loaded on a device."""

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""

    @property
    def device(self) -> str:
        """The device that computes: "cpu", or "cuda:" and a number."""

    def run(self, inputs: Inputs | Pixels, poolings: "Sequence[Pooling]" = ()) -> "list[NDArray[Any]]":
        """Compute the results of several poolings of a batch of texts in one pass. Each is the recipe's own or one that it has in addition; none: its own alone.

        Returns for each pooling float32 [texts, dimensions], or [texts, length, dimensions] for Pooling.NONE, of any value for padding.
        The runtime of a recipe of images takes Pixels, any other Inputs.
        """

    def widened(self, threads: int) -> "Runtime | None":
        """Return the same model with more threads of the CPU, if that takes hardly any memory; else None."""


def free_memory() -> list[int]:
    """Return the free memory, in bytes, of each NVIDIA GPU that CUDA_VISIBLE_DEVICES leaves, in CUDA's order; empty without the extra `gpu`."""
    return [int(memory.free) for memory in _memory()]


def release_free_memory() -> None:
    """Have the C library return free memory to the system, also from the middle of its heap. This takes milliseconds.

    A C library without `malloc_trim`, such as musl, does nothing.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


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


MOST_SESSIONS = 3  # beside the worker's own: each takes 1 to 3 MB
TRIES = 3  # the last times that count for a number of threads; their median is compared
EVERY = (
    16  # one batch in this many of a size tries a number of threads by turns, since what else the CPUs do may change
)
GAIN = 1.1  # how many times as fast more threads must be: they take more CPU time for the same batch


def widened(runtime: "Runtime", threads: int, most: int) -> "Widths | None":
    """Open the model of `runtime`, which has `threads`, also with twice as many, four times as many and so on, at most `most`.

    Returns None if `most` is no more, or if the runtime cannot do it in little memory, see Runtime.widened.
    """
    runtimes = {threads: runtime}
    for step in range(1, MOST_SESSIONS + 1):
        count = min(threads * 2**step, most)
        if count in runtimes:
            break
        other = runtime.widened(count)
        if other is None:
            return None
        runtimes[count] = other
    return Widths(runtimes) if len(runtimes) > 1 else None


class Widths:
    """One model with several numbers of threads: `runtimes` by their threads."""

    def __init__(self, runtimes: "Mapping[int, Runtime]", clock: Callable[[], float] = time.perf_counter) -> None:
        self._runtimes = dict(sorted(runtimes.items()))
        self._clock = clock
        self._sizes: defaultdict[int, _Times] = defaultdict(_Times)

    def run(self, most: int, inputs: Inputs | Pixels) -> "list[NDArray[Any]]":
        """Compute a batch as Runtime.run does, with at most `most` threads."""
        tokens = inputs[0].size
        times = self._sizes[tokens.bit_length()]
        threads = times.choose([count for count in self._runtimes if count <= most])
        began = self._clock()
        vectors = self._runtimes[threads].run(inputs)
        times.note(threads, (self._clock() - began) / tokens)
        return vectors


class _Times:
    """The last times of each number of threads, in seconds for a token, for batches of about one size."""

    def __init__(self) -> None:
        self._last: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=TRIES))
        self._batches = 0

    def choose(self, counts: Sequence[int]) -> int:
        """Return which of these numbers of threads, in ascending order, computes the next batch."""
        untried = next((count for count in counts if len(self._last[count]) < TRIES), None)
        if untried is not None:
            return untried
        self._batches += 1
        turn, rest = divmod(self._batches, EVERY)
        if rest == 0:
            return counts[turn % len(counts)]
        usual = {count: median(self._last[count]) for count in counts}
        least = min(usual.values())
        return next(count for count in counts if usual[count] <= least * GAIN)

    def note(self, threads: int, seconds: float) -> None:
        """Add the time of a batch, for a token."""
        self._last[threads].append(seconds)


def open_runtime(
    checkpoint: "Checkpoint",
    recipe: "Recipe",
    computing: ComputingSettings = DEFAULT_COMPUTING,
    share: WorkerShare = ALONE,
    device: str = CPU,
) -> Runtime:
    """Load `checkpoint` on `device` to compute the vectors of `recipe`, with the runtime that the settings name.

    Raises SettingsError if the runtime is not installed, or cannot do what the recipe states.
    """
    if computing.runtime == "torch":
        from weir.text_models.runtime.torch import open_torch

        return open_torch(checkpoint, recipe, computing, share, device)
    from weir.text_models.runtime.onnx import open_onnx, open_onnx_file

    open_it = open_onnx if computing.runtime == "onnx" else open_onnx_file
    return open_it(checkpoint, recipe, computing, share, device)


def may_use_gpu(devices: Sequence[str]) -> bool:
    """Return whether a worker may be given a GPU: `devices` do not exclude it, and the machine has one.

    No GPU library is loaded, as a process may not be forked safely after that.
    """
    return set(devices) != {CPU} and any(Path("/dev").glob("nvidia[0-9]*"))


def wanted_device(devices: Sequence[str], worker: int) -> str:
    """Return the device that is wanted for `worker`: one of `devices`, repeated if there are more workers; auto if there are none."""
    return devices[worker % len(devices)] if devices else AUTO


def device_for(devices: Sequence[str], worker: int, free: Callable[[], Sequence[int]]) -> str:
    """Return the device of a worker: "cpu", or "cuda:" and a number.

    A worker with the device `auto` or `cuda` gets a GPU, the GPU with the most free memory first, then the others in turn. Without a GPU, `auto` is the
    CPU.

    Args:
        devices: a device for each worker, repeated if there are more workers; empty for auto.
        worker: the index of the worker, from 0.
        free: returns the free memory, in bytes, of each GPU that the runtime can use.

    Raises SettingsError for a GPU that is not there.
    """
    device = wanted_device(devices, worker)
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
    raise no_gpu(device, len(memory))


def no_gpu(device: str, count: int) -> SettingsError:
    """Return the error for a GPU that was asked for where the runtime finds `count` others."""
    found = f"GPUs 0 to {count - 1}" if count > 1 else "only GPU 0" if count else "no GPU"
    needs = "" if count else " (onnxruntime needs the package onnxruntime-gpu for one, torch a build for CUDA)"
    return SettingsError(
        f"device {device!r}: the runtime finds {found} here{needs}; use another device, or auto, which is the CPU where there is no GPU"
    )


def device_of(computing: ComputingSettings, worker: int) -> str:
    """Return the device of `worker` with these settings; see device_for."""
    return device_for(computing.device_map, worker, _torch_memory if computing.runtime == "torch" else _onnx_memory)


def _onnx_memory() -> Sequence[int]:
    # Without NVML the number of GPUs is unknown. The first is assumed to exist; if it does not, onnxruntime falls back to the CPU.
    from weir.text_models.runtime.onnx import has_cuda

    return free_memory() or [0] if has_cuda() else []


def _torch_memory() -> Sequence[int]:
    from weir.text_models.runtime.torch import gpu_memory

    return gpu_memory()
