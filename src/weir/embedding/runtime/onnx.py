"""The default runtime: onnxruntime, on CPUs and, with its GPU package, on NVIDIA's GPUs."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weir.embedding.runtime import CPU, Computing, memory_limit
from weir.errors import SettingsError
from weir.workers.process.launch import SILENCE

if TYPE_CHECKING:
    from weir.embedding.checkpoint.reading import Checkpoint
    from weir.embedding.recipe import Recipe

DTYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}
CUDA = "CUDAExecutionProvider"

logger = logging.getLogger("weir")


def library() -> Any:
    """Return the module onnxruntime. Raises SettingsError naming the extra if it is not installed."""
    os.environ.update({**SILENCE, **os.environ})
    try:
        import onnxruntime
    except ImportError:
        raise SettingsError("runtime='onnx': needs onnxruntime: pip install 'weir-serving[embed]'") from None
    return onnxruntime


def has_cuda() -> bool:
    """Tell whether the onnxruntime that is installed can compute on GPUs."""
    return CUDA in library().get_available_providers()


def open_onnx(checkpoint: "Checkpoint", recipe: "Recipe", computing: Computing, device: str) -> "OnnxRuntime":
    """Return the runtime for `recipe`, whose graph is made if it has not been. See open_runtime."""
    from weir.embedding.graph.cache import graph_file, hold

    library()
    limit = memory_limit(device, computing.gpu_memory_fraction)
    while True:
        graph = graph_file(checkpoint, recipe, computing.cache, CPU if device == CPU else "cuda")
        held = hold(graph.parent)
        if held is not None:  # else a server that has just started has removed it
            return OnnxRuntime(graph, device, threads=computing.threads, limit_bytes=limit, held=held)


class OnnxRuntime:
    """A session of onnxruntime. See Runtime. It keeps `held` for as long as it lives."""

    def __init__(
        self, graph: Path, device: str = CPU, *, threads: int = 1, limit_bytes: int | None = None, held: Any = None
    ) -> None:
        self._held = held
        self._session = _session(graph, device, threads, limit_bytes)
        self.device = device if device == CPU or CUDA in self._session.get_providers() else CPU
        if self.device != device:
            logger.warning("device %r: onnxruntime cannot use it, and computes on the CPU instead", device)
        self._dtypes = {given.name: DTYPES[given.type] for given in self._session.get_inputs()}
        self.dimensions = int(self._session.get_outputs()[0].shape[-1])

    def run(self, ids: NDArray[Any], mask: NDArray[Any], types: NDArray[Any], pool: NDArray[Any]) -> NDArray[Any]:
        """See Runtime. What the graph has no input for is not looked at."""
        given = {"ids": ids, "mask": mask, "types": types, "pool": pool}
        feeds = {name: given[name].astype(dtype, copy=False) for name, dtype in self._dtypes.items()}
        vectors: NDArray[Any] = self._session.run(["vectors"], feeds)[0]
        return vectors


def _session(graph: Path, device: str, threads: int, limit_bytes: int | None) -> Any:
    onnxruntime = library()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Batches are hardly ever of one shape twice: a plan of the memory for each would be kept for nothing.
    options.enable_mem_pattern = False
    # Threads that wait by spinning take the CPU from the other workers.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers: list[Any] = ["CPUExecutionProvider"]
    if device != CPU:
        device_options = {"device_id": device.partition(":")[2]} | (
            {} if limit_bytes is None else {"gpu_mem_limit": str(limit_bytes)}
        )
        providers.insert(0, (CUDA, device_options))
    return onnxruntime.InferenceSession(str(graph), options, providers=providers)
