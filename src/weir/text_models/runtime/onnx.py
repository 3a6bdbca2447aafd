"""The onnx runtime, the default: onnxruntime on CPUs and, with the package onnxruntime-gpu, on NVIDIA GPUs.

It computes graphs that were built from a checkpoint's weights, and ONNX files that a repository has.
"""

import hashlib
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from weir.config import SILENCE
from weir.errors import SettingsError, add_extra
from weir.numerics import erf, sigmoid, softmax
from weir.text_models import WITH_CLASSIFIER, ComputingSettings, Pooling, Precision, Recipe, WorkerShare
from weir.text_models.checkpoint.onnx_files import LOGITS
from weir.text_models.graph.building import VECTORS, WHOLE
from weir.text_models.graph.cache import graph_file, hold, locked, manifest_of, run_child
from weir.text_models.recipe import dense_layers, dimensions_of, quantizes
from weir.text_models.runtime import CPU, Inputs, Pixels, memory_limit

if TYPE_CHECKING:
    from weir.text_models.checkpoint.reading import Checkpoint


Array = NDArray[Any]

DTYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}
CUDA = "CUDAExecutionProvider"

logger = logging.getLogger("weir")

# Those in use in this process: models of one checkpoint that differ in prompts or names only have the weights once.
_open: "WeakValueDictionary[Any, OnnxRuntime]" = WeakValueDictionary()


def library() -> Any:
    """Return the package onnxruntime. Raises SettingsError, with the command that installs it, if it is not installed."""
    os.environ.update({**SILENCE, **os.environ})
    try:
        import onnxruntime
    except ImportError:
        raise SettingsError(f"runtime='onnx': needs onnxruntime; {add_extra('embed')}") from None
    return onnxruntime


def has_cuda() -> bool:
    """Return whether the installed onnxruntime supports GPUs."""
    return CUDA in library().get_available_providers()


def open_onnx(
    checkpoint: "Checkpoint", recipe: Recipe, computing: ComputingSettings, share: WorkerShare, device: str
) -> "OnnxRuntime":
    """Open the graph of `recipe` on `device`; build the graph first if the cache does not have it. See open_runtime."""
    library()
    limit = memory_limit(device, computing.gpu_memory_fraction)
    while True:
        graph = graph_file(checkpoint, recipe, computing.cache, CPU if device == CPU else "cuda")
        held = hold(graph.parent)
        if held is None:  # another server has just removed the graph from the cache
            continue
        packed = prepacked(graph) if share.lone_threads > share.threads and device == CPU else None
        key = (graph, packed, device, share.threads, limit, tuple(recipe.further))
        runtime = _open.get(key)
        if runtime is None:
            runtime = _open[key] = OnnxRuntime(
                graph,
                device,
                threads=share.threads,
                limit_bytes=limit,
                held=held,
                further=recipe.further,
                packed=packed,
            )
        return runtime


class OnnxRuntime:
    """A session of onnxruntime; see Runtime. The object `held`, which keeps the graph in the cache, lives as long as the session. `packed` is the copy of the
    graph that is opened instead, see `prepacked`."""

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

    def run(self, inputs: Inputs | Pixels, poolings: Sequence[Pooling] = ()) -> list[Array]:
        """See Runtime. An array that is no input of the graph is not used.

        The graph that makes all outputs is opened at the first call that needs it, where the usual one does not.
        """
        names = [pooling.value if pooling in self._further else VECTORS for pooling in poolings] or [VECTORS]
        session = self._session
        if not set(names) <= set(self._outputs):
            self._whole = self._whole or self._open(self._graph.with_name(WHOLE))
            session = self._whole
        dtypes = self._dtypes if session is self._session else _dtypes_of(session)
        feeds = {name: getattr(inputs, name).astype(dtype, copy=False) for name, dtype in dtypes.items()}
        found: list[Array] = session.run(names, feeds)
        return found


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


# An ONNX file that a repository has: any network whose inputs are token ids. Pooling, dense layers and normalization follow in numpy.

FILE_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_FILE_DTYPES = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(float)": np.float32,
    "tensor(bool)": np.bool_,
}
_LEAST = 1e-9  # the least divisor of a mean, so that a text without any counted token becomes zeros


def open_onnx_file(
    checkpoint: "Checkpoint", recipe: Recipe, computing: ComputingSettings, share: WorkerShare, device: str
) -> "OnnxFileRuntime":
    """Open the ONNX file of `checkpoint` on `device`. Raises SettingsError naming the file, and what of the recipe or of its inputs cannot be served."""
    dimensions = dimensions_of(checkpoint, recipe)
    file = checkpoint.onnx
    assert file is not None
    if recipe.pooling is Pooling.POOLER:
        raise SettingsError(f"pooling={recipe.pooling.value!r}: cannot be computed from {file.path}")
    if not checkpoint.has_tokens and recipe.pooling not in (*WITH_CLASSIFIER, Pooling.CLS):
        raise SettingsError(
            f"pooling={recipe.pooling.value!r}: {file.path} makes one vector of a text, so there is nothing to pool"
        )
    if recipe.precision is not Precision.FP32:
        rule = "an ONNX file computes in the numbers that it has: choose another file by --dtype"
        raise SettingsError(f"precision={recipe.precision.value!r}: {file.path}: {rule}")
    if not recipe.positions:
        raise SettingsError(f"positions=False: {file.path}: the positions in an ONNX file cannot be left out")
    limit = memory_limit(device, computing.gpu_memory_fraction)
    try:
        session = open_session(file.path, device, share.threads, limit)
    except SettingsError:
        raise
    except Exception as error:  # onnxruntime's errors have no common class
        raise SettingsError(f"{file.path}: onnxruntime cannot open it: {' '.join(str(error).split())[:300]}") from None
    unknown = [
        each.name for each in session.get_inputs() if each.name not in FILE_INPUTS or each.type not in _FILE_DTYPES
    ]
    if unknown:
        raise SettingsError(f"{file.path}: has the input {unknown[0]!r}: must be among {', '.join(FILE_INPUTS)}")
    return OnnxFileRuntime(session, checkpoint, recipe, device, dimensions)


class OnnxFileRuntime:
    """A session of a file whose output is the vectors of tokens, those of texts, or the numbers of a classifier; see Runtime."""

    def __init__(self, session: Any, checkpoint: "Checkpoint", recipe: Recipe, device: str, dimensions: int) -> None:
        assert checkpoint.onnx is not None
        self._session = session
        self._recipe = recipe
        self._output = checkpoint.onnx.output(recipe.pooling in WITH_CLASSIFIER)
        self._dense = dense_layers(checkpoint, recipe)
        self._quantizes = quantizes(checkpoint, recipe)
        self._dtypes = {each.name: _FILE_DTYPES[each.type] for each in session.get_inputs()}
        self.device = device if device == CPU or CUDA in session.get_providers() else CPU
        self.dimensions = dimensions

    def widened(self, threads: int) -> None:
        """See Runtime. A file of the repository has its weights in each session."""

    def run(self, inputs: Inputs | Pixels, poolings: Sequence[Pooling] = ()) -> list[Array]:
        """See Runtime."""
        assert isinstance(inputs, Inputs)  # a model with a file makes no vectors of images
        ids, mask, types, pool = inputs
        places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        given = dict(zip(FILE_INPUTS, (ids, mask, types, places), strict=True))
        feeds: dict[str, Array] = {name: given[name].astype(dtype, copy=False) for name, dtype in self._dtypes.items()}
        value = self._session.run([self._output], feeds)[0].astype(np.float32, copy=False)
        wanted = poolings or (self._recipe.pooling,)
        return [value if pooling in self._recipe.further else self._vectors(value, mask, pool) for pooling in wanted]

    def _vectors(self, value: Array, mask: Array, pool: Array) -> Array:
        recipe = self._recipe
        if self._output == LOGITS:
            vectors = _CHANCES[recipe.pooling](value)
        elif value.ndim == 2:
            vectors = value
        else:
            parts = [pooled(value, mask, pool, pooling, recipe.window) for pooling in recipe.poolings]
            vectors = np.concatenate(parts, axis=-1)
        for layer in self._dense:
            out = vectors @ layer.weight.T + (0 if layer.bias is None else layer.bias)
            made = _ACTIVATIONS[layer.activation](out)
            vectors = made if layer.residual is None else made + vectors @ layer.residual.T
        if self._quantizes:
            vectors = np.round(np.tanh(vectors) * 127)
        if recipe.dimensions is not None:
            vectors = vectors[..., : recipe.dimensions]
        if recipe.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return np.ascontiguousarray(vectors, np.float32)


def pooled(value: Array, mask: Array, pool: Array, pooling: Pooling, window: int) -> Array:
    """Return the result of one pooling of `value` [texts, length, size]; `mask` and `pool` [texts, length] are those of Runtime.run."""
    weights = pool[..., None]
    if pooling is Pooling.NONE:
        return value * weights
    if pooling is Pooling.CLS:
        return value[:, 0]
    if pooling is Pooling.SEP:
        last: Array = value[np.arange(len(value)), mask.sum(axis=1) - 1]
        return last
    if pooling is Pooling.MAX:
        return _highest(value, weights > 0)
    if pooling is Pooling.MEAN_MAX:
        return np.concatenate([_mean(value, weights), _highest(value, weights > 0)], axis=-1)
    if pooling is Pooling.HIERARCHICAL:
        return _hierarchical(value, weights, window)
    if pooling is Pooling.WEIGHTED_MEAN:
        return _mean(value, weights * weights.cumsum(axis=1))
    return _mean(value, weights, root=pooling is Pooling.MEAN_SQRT)


def _mean(value: Array, weights: Array, root: bool = False) -> Array:
    count = np.maximum(weights.sum(axis=1), _LEAST)
    found: Array = (value * weights).sum(axis=1) / (np.sqrt(count) if root else count)
    return found


def _highest(value: Array, counts: Array) -> Array:
    highest = np.where(counts, value, -np.inf).max(axis=1)
    found: Array = np.where(counts.any(axis=1), highest, 0.0)
    return found


def _hierarchical(value: Array, weights: Array, window: int) -> Array:
    """Return the maximum of the means over each window that is full, or that holds all tokens of a shorter text."""
    sums, counts = _in_windows(value * weights, window), _in_windows(weights, window)
    full = np.minimum(weights.sum(axis=1, keepdims=True), window) - 0.5
    return _highest(sums / np.maximum(counts, _LEAST), counts > np.maximum(full, _LEAST))


def _in_windows(value: Array, window: int) -> Array:
    """Return the sum over the window that begins at each position, with zeros behind the end."""
    padded = np.pad(value, ((0, 0), (0, window - 1), (0, 0)))
    found: Array = np.lib.stride_tricks.sliding_window_view(padded, window, axis=1).sum(axis=-1)
    return found


def _gelu(value: Array) -> Array:
    found: Array = value * (1 + erf(value / np.sqrt(2))) / 2
    return found


# What is made of the numbers of a classifier.
_CHANCES: Mapping[Pooling, Callable[[Array], Array]] = {
    Pooling.LOGITS: lambda value: value,
    Pooling.REGRESSION: sigmoid,
    Pooling.CLASSIFICATION: softmax,
}
_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "identity": lambda value: value,
    "tanh": np.tanh,
    "relu": lambda value: np.maximum(value, 0),
    "gelu": _gelu,
    "sigmoid": sigmoid,
}


# Copies of graphs whose weights lie in a file as this CPU computes with them.
#
# onnxruntime rearranges the weights of matrix products when a session is opened, and each session keeps what it made: half as much again as the weights
# themselves. From such a copy every session maps them, in all workers, so that a session with more threads costs hardly any memory, and opens sooner.
#
# The order depends on the CPU and on the release of onnxruntime, so a copy is made for each, next to the graph in the cache, and is removed with it. A
# child process makes it, which is this module as a program: the memory that this takes is returned with the process.

# What /proc/cpuinfo calls that by which onnxruntime chooses how to compute, on x86 and on ARM.
_DECIDES = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features",
)  # fmt: skip


def prepacked(graph: Path, cpuinfo: Path = Path("/proc/cpuinfo")) -> Path | None:
    """Return the copy of `graph` for this CPU, which is made if it is missing. Keep the graph in the cache meanwhile, see cache.hold.

    None if there is none: nothing says which CPU this is, or the cache cannot be written.
    """
    cpu = cpu_key(cpuinfo)
    if cpu is None:
        return None
    copy = graph.with_name(f"{graph.stem}-{cpu}{graph.suffix}")
    try:
        if not _is_complete(copy):
            with locked(graph.parent):
                if not _is_complete(copy):
                    _make(graph, copy)
    except (OSError, SettingsError) as error:
        logger.info("%s: the weights cannot be cached in this CPU's layout: %s", graph, error)
        return None
    return copy


def cpu_key(cpuinfo: Path) -> str | None:
    """Return what stands for the CPU and the release of onnxruntime in the name of a copy; None if the kernel does not describe the CPU."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    decides = [found[name] for name in _DECIDES if name in found]
    if not decides:
        return None
    whole = repr([platform.machine(), version("onnxruntime"), *decides])
    return hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()


def _weights(copy: Path) -> Path:
    return copy.with_suffix(".bin")


def _manifest(copy: Path) -> Path:
    return copy.with_suffix(".json")


def _is_complete(copy: Path) -> bool:
    try:
        return bool(json.loads(_manifest(copy).read_text()) == manifest_of([copy], _weights(copy)))
    except (OSError, ValueError):
        return False


def _make(graph: Path, copy: Path) -> None:
    """Write the copy aside, and move its files to their place, last the one that says what they are."""
    aside = graph.parent / "packing"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        run_child("weir.text_models.runtime.onnx", str(graph), str(aside / copy.name))
        written = aside / copy.name
        _weights(written).touch()  # a small model may have all of them in the graph
        _manifest(written).write_text(json.dumps(manifest_of([written], _weights(written))))
        for file in (_weights(written), written, _manifest(written)):
            file.rename(graph.parent / file.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


if __name__ == "__main__":
    write_prepacked(*map(Path, sys.argv[1:]))
