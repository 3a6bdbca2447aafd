"""Which GPUs a runtime can use here, and which of them a worker gets."""

from collections.abc import Sequence

from weir.embedding.runtime.devices import device_for, free_memory


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
