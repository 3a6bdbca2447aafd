"""Computes an ONNX file that a repository has: any network whose inputs are token ids. Pooling, dense layers and normalization follow in numpy."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError
from weir.numerics import erf
from weir.text_models.checkpoint.onnx_files import LOGITS
from weir.text_models.pooling import WITH_CLASSIFIER, Pooling, Precision, Recipe
from weir.text_models.recipe import dense_layers, dimensions_of
from weir.text_models.runtime.contract import CPU, RuntimeOptions, memory_limit
from weir.text_models.runtime.onnx import CUDA, open_session

if TYPE_CHECKING:
    from weir.text_models.checkpoint.reading import Checkpoint

Array = NDArray[Any]
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_DTYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32, "tensor(bool)": np.bool_}
_LEAST = 1e-9  # the least divisor of a mean, so that a text without any counted token becomes zeros


def open_onnx_file(checkpoint: "Checkpoint", recipe: Recipe, options: RuntimeOptions, device: str) -> "OnnxFileRuntime":
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
    limit = memory_limit(device, options.gpu_memory_fraction)
    try:
        session = open_session(file.path, device, options.threads, limit)
    except SettingsError:
        raise
    except Exception as error:  # onnxruntime's errors have no common class
        raise SettingsError(f"{file.path}: onnxruntime cannot open it: {' '.join(str(error).split())[:300]}") from None
    unknown = [each.name for each in session.get_inputs() if each.name not in INPUTS or each.type not in _DTYPES]
    if unknown:
        raise SettingsError(f"{file.path}: has the input {unknown[0]!r}: must be among {', '.join(INPUTS)}")
    return OnnxFileRuntime(session, checkpoint, recipe, device, dimensions)


class OnnxFileRuntime:
    """A session of a file whose output is the vectors of tokens, those of texts, or the numbers of a classifier; see Runtime."""

    def __init__(self, session: Any, checkpoint: "Checkpoint", recipe: Recipe, device: str, dimensions: int) -> None:
        assert checkpoint.onnx is not None
        self._session = session
        self._recipe = recipe
        self._output = checkpoint.onnx.output(recipe.pooling in WITH_CLASSIFIER)
        self._dense = dense_layers(checkpoint, recipe)
        self._dtypes = {each.name: _DTYPES[each.type] for each in session.get_inputs()}
        self.device = device if device == CPU or CUDA in session.get_providers() else CPU
        self.dimensions = dimensions

    def run(self, ids: Array, mask: Array, types: Array, pool: Array) -> Array:
        """See Runtime."""
        return self.run_several(ids, mask, types, pool, [self._recipe.pooling])[0]

    def widened(self, threads: int) -> None:
        """See Runtime. A file of the repository has its weights in each session."""

    def run_several(
        self, ids: Array, mask: Array, types: Array, pool: Array, poolings: Sequence[Pooling]
    ) -> list[Array]:
        """See Runtime."""
        places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        given = dict(zip(INPUTS, (ids, mask, types, places), strict=True))
        feeds: dict[str, Array] = {name: given[name].astype(dtype, copy=False) for name, dtype in self._dtypes.items()}
        value = self._session.run([self._output], feeds)[0].astype(np.float32, copy=False)
        return [value if pooling in self._recipe.further else self._vectors(value, mask, pool) for pooling in poolings]

    def _vectors(self, value: Array, mask: Array, pool: Array) -> Array:
        recipe = self._recipe
        if self._output == LOGITS:
            vectors = value if recipe.pooling is Pooling.LOGITS else _chances(value, recipe.pooling)
        elif value.ndim == 2:
            vectors = value
        else:
            parts = [pooled(value, mask, pool, pooling, recipe.window) for pooling in recipe.poolings]
            vectors = np.concatenate(parts, axis=-1)
        for layer in self._dense:
            out = vectors @ layer.weight.T + (0 if layer.bias is None else layer.bias)
            made = _ACTIVATIONS[layer.activation](out)
            vectors = made if layer.residual is None else made + vectors @ layer.residual.T
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
    """Return the sum over the window that begins at each place, with zeros behind the end."""
    padded = np.pad(value, ((0, 0), (0, window - 1), (0, 0)))
    found: Array = np.lib.stride_tricks.sliding_window_view(padded, window, axis=1).sum(axis=-1)
    return found


def _chances(logits: Array, pooling: Pooling) -> Array:
    if pooling is Pooling.REGRESSION:
        return _sigmoid(logits)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    found: Array = powers / powers.sum(axis=-1, keepdims=True)
    return found


def _sigmoid(value: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-np.clip(value, -80, 80)))
    return found


def _gelu(value: Array) -> Array:
    found: Array = value * (1 + erf(value / np.sqrt(2))) / 2
    return found


_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "identity": lambda value: value,
    "tanh": np.tanh,
    "relu": lambda value: np.maximum(value, 0),
    "gelu": _gelu,
    "sigmoid": _sigmoid,
}
