"""The onnx runtime, the default: onnxruntime on CPUs and, with the package onnxruntime-gpu, on NVIDIA GPUs."""

import logging
import os
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from weir.config import SILENCE
from weir.errors import SettingsError
from weir.text_models.graph.building import VECTORS, WHOLE
from weir.text_models.pooling import Pooling
from weir.text_models.runtime.contract import CPU, RuntimeOptions, memory_limit

if TYPE_CHECKING:
    from weir.text_models.checkpoint.reading import Checkpoint
    from weir.text_models.pooling import Recipe

DTYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}
CUDA = "CUDAExecutionProvider"
INPUTS = ("ids", "mask", "types", "pool")  # in the order of the arguments of Runtime.run

logger = logging.getLogger("weir")

# Those in use in this process: models of one checkpoint that differ in prompts or names only have the weights once.
_open: "WeakValueDictionary[Any, OnnxRuntime]" = WeakValueDictionary()


def library() -> Any:
    """Return the package onnxruntime. Raises SettingsError, with the command that installs it, if it is not installed."""
    os.environ.update({**SILENCE, **os.environ})
    try:
        import onnxruntime
    except ImportError:
        raise SettingsError("runtime='onnx': needs onnxruntime: pip install 'weir-serving[embed]'") from None
    return onnxruntime


def has_cuda() -> bool:
    """Return whether the installed onnxruntime supports GPUs."""
    return CUDA in library().get_available_providers()


def open_onnx(checkpoint: "Checkpoint", recipe: "Recipe", options: RuntimeOptions, device: str) -> "OnnxRuntime":
    """Open the graph of `recipe` on `device`; build the graph first if the cache does not have it. See open_runtime."""
    from weir.text_models.graph.cache import graph_file, hold
    from weir.text_models.runtime.prepacked import prepacked

    library()
    limit = memory_limit(device, options.gpu_memory_fraction)
    while True:
        graph = graph_file(checkpoint, recipe, options.cache, CPU if device == CPU else "cuda")
        held = hold(graph.parent)
        if held is None:  # another server has just removed the graph from the cache
            continue
        packed = prepacked(graph) if options.prepacked and device == CPU else None
        key = (graph, packed, device, options.threads, limit, tuple(recipe.further))
        runtime = _open.get(key)
        if runtime is None:
            runtime = _open[key] = OnnxRuntime(
                graph,
                device,
                threads=options.threads,
                limit_bytes=limit,
                held=held,
                further=recipe.further,
                packed=packed,
            )
        return runtime


class OnnxRuntime:
    """A session of onnxruntime; see Runtime. The object `held`, which keeps the graph in the cache, lives as long as the session. `packed` is the copy of the
    graph that is opened instead, see prepacked.py."""

    def __init__(
        self, graph: Path, device: str = CPU, *, threads: int = 1, limit_bytes: int | None = None, held: Any = None,
        further: Sequence[Pooling] = (), packed: Path | None = None,
    ) -> None:  # fmt: skip
        self._further = further
        self._held = held
        self._graph = graph
        self._packed = packed
        self._open = partial(open_session, device=device, threads=threads, limit_bytes=limit_bytes)
        self._session = self._open(packed or graph)
        self._outputs = [each.name for each in self._session.get_outputs()]
        self._whole: Any = None
        self.device = device if device == CPU or CUDA in self._session.get_providers() else CPU
        if self.device != device:
            logger.warning("device %r: onnxruntime cannot use it, and computes on the CPU instead", device)
        self._dtypes = _dtypes_of(self._session)
        self.dimensions = int(self._session.get_outputs()[0].shape[-1])

    def widened(self, threads: int) -> "OnnxRuntime | None":
        """See Runtime."""
        if self._packed is None:
            return None
        return OnnxRuntime(self._graph, threads=threads, held=self._held, further=self._further, packed=self._packed)

    def run(self, ids: NDArray[Any], mask: NDArray[Any], types: NDArray[Any], pool: NDArray[Any]) -> NDArray[Any]:
        """See Runtime. An array that is no input of the graph is not used."""
        vectors: NDArray[Any] = self._session.run([VECTORS], self._feeds(self._session, ids, mask, types, pool))[0]
        return vectors

    def run_several(
        self,
        ids: NDArray[Any],
        mask: NDArray[Any],
        types: NDArray[Any],
        pool: NDArray[Any],
        poolings: Sequence[Pooling],
    ) -> list[NDArray[Any]]:
        """See Runtime. The graph that makes all outputs is opened at the first call that needs it, where the usual one does not."""
        names = [pooling.value if pooling in self._further else VECTORS for pooling in poolings]
        session = self._session
        if not set(names) <= set(self._outputs):
            self._whole = self._whole or self._open(self._graph.with_name(WHOLE))
            session = self._whole
        found: list[NDArray[Any]] = session.run(names, self._feeds(session, ids, mask, types, pool))
        return found

    def _feeds(self, session: Any, *arrays: NDArray[Any]) -> dict[str, NDArray[Any]]:
        named = dict(zip(INPUTS, arrays, strict=True))
        dtypes = self._dtypes if session is self._session else _dtypes_of(session)
        return {name: named[name].astype(dtype, copy=False) for name, dtype in dtypes.items()}


def _dtypes_of(session: Any) -> dict[str, Any]:
    return {each.name: DTYPES[each.type] for each in session.get_inputs()}


@cache
def _share_arena() -> None:
    """Have the sessions of this process compute in the same memory: they rarely do at the same time."""
    onnxruntime = library()
    kinds = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    memory = onnxruntime.OrtMemoryInfo("Cpu", kinds[0], 0, kinds[1])
    onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg(0, -1, -1, -1))


def open_session(graph: Path, device: str, threads: int, limit_bytes: int | None) -> Any:
    """Return a session of onnxruntime for a file, on `device`, with at most `limit_bytes` of a GPU's memory."""
    onnxruntime = library()
    options = _options(threads)
    providers: list[Any] = ["CPUExecutionProvider"]
    if device == CPU:
        _share_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
    else:
        limit = {} if limit_bytes is None else {"gpu_mem_limit": str(limit_bytes)}
        providers.insert(0, (CUDA, {"device_id": device.partition(":")[2], **limit}))
    return onnxruntime.InferenceSession(str(graph), options, providers=providers)


def write_prepacked(graph: Path, copy: Path) -> None:
    """Write a copy of `graph` whose weights are as this CPU computes with them, to `copy` and a file next to it."""
    options = _options(1)
    options.optimized_model_filepath = str(copy)
    for name, value in (
        ("session.optimized_model_external_initializers_file_name", copy.with_suffix(".bin").name),
        ("session.optimized_model_external_initializers_min_size_in_bytes", "1024"),
        ("session.save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(name, value)
    library().InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def _options(threads: int) -> Any:
    options = library().SessionOptions()
    options.log_severity_level = 3  # errors only
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # onnxruntime would keep a memory plan for each shape of input, and batches rarely have the same shape twice.
    options.enable_mem_pattern = False
    # Threads that spin while they wait take CPU time from the other workers.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options
