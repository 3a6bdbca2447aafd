"""Runtimes compute vectors from token ids: the onnx runtime and torch. This module opens them and chooses a device for each worker."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weir.errors import SettingsError
from weir.text_models.formats import DEVICE_RULE, RUNTIMES, is_device
from weir.text_models.runtime.contract import AUTO, CPU, Runtime, RuntimeOptions, free_memory

if TYPE_CHECKING:
    from weir.text_models.checkpoint.reading import Checkpoint
    from weir.text_models.pooling import Recipe

logger = logging.getLogger("weir")


def open_runtime(checkpoint: "Checkpoint", recipe: "Recipe", options: RuntimeOptions, device: str = "cpu") -> Runtime:
    """Load `checkpoint` on `device` to compute the vectors of `recipe`.

    Raises SettingsError if the runtime does not exist, is not installed, or cannot do what the recipe states.
    """
    if options.kind == "onnx":
        from weir.text_models.runtime.onnx import open_onnx

        return open_onnx(checkpoint, recipe, options, device)
    if options.kind == "torch":
        from weir.text_models.runtime.torch import open_torch

        return open_torch(checkpoint, recipe, options, device)
    if options.kind == "onnx-file":
        from weir.text_models.runtime.onnx import open_onnx_file

        return open_onnx_file(checkpoint, recipe, options, device)
    raise SettingsError(f"runtime={options.kind!r}: must be one of {', '.join(RUNTIMES)}")


def check_devices(devices: Sequence[str]) -> None:
    """Raise SettingsError unless each is auto, cpu, cuda, or the number of a GPU, such as cuda:1 or 1."""
    for device in devices:
        if not is_device(device):
            raise SettingsError(f"devices={list(devices)!r}: {device!r} {DEVICE_RULE}")


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


def device_of(kind: str, devices: Sequence[str], worker: int) -> str:
    """Return the device of `worker` for the runtime `kind`, one of RUNTIMES; see device_for."""
    return device_for(devices, worker, _torch_memory if kind == "torch" else _onnx_memory)


def _onnx_memory() -> Sequence[int]:
    # Without NVML the number of GPUs is unknown. The first is assumed to exist; if it does not, onnxruntime falls back to the CPU.
    from weir.text_models.runtime.onnx import has_cuda

    return free_memory() or [0] if has_cuda() else []


def _torch_memory() -> Sequence[int]:
    from weir.text_models.runtime.torch import gpu_memory

    return gpu_memory()
