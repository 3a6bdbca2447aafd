"""Which recipes a checkpoint cannot be cooked by: said before any graph is made, and without onnx."""

from typing import TYPE_CHECKING

from weir.embedding.recipe import Pooling, Precision, Recipe
from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.embedding.checkpoint.architecture import Architecture
    from weir.embedding.checkpoint.layout import Dense
    from weir.embedding.checkpoint.reading import Checkpoint

# These read what the model was trained to give: the pooled output of its last layer, whichever layers the recipe names.
WITH_CLASSIFIER = (Pooling.CLASSIFICATION, Pooling.REGRESSION)
OF_LAST_LAYER = (Pooling.POOLER, *WITH_CLASSIFIER)
# No vector of a text, or not of its meaning: further dense layers are not for them.
_WITHOUT_DENSE = (Pooling.NONE, *OF_LAST_LAYER)


def dense_layers(checkpoint: "Checkpoint", recipe: Recipe) -> "list[Dense]":
    """Return the dense layers of the checkpoint that come after this recipe's pooling."""
    return [] if recipe.pooling in _WITHOUT_DENSE else list(checkpoint.dense)


def used_layers(architecture: "Architecture", recipe: Recipe) -> list[int]:
    """Return the layers that are read, counted from 0. Raises SettingsError naming one that there is not."""
    if recipe.pooling in OF_LAST_LAYER:
        return [architecture.layers - 1]
    if not recipe.layers:
        raise SettingsError("layers=(): must name at least one layer")
    count = architecture.layers
    for layer in recipe.layers:
        if not -count <= layer <= -1:
            rule = (
                "must be -1: the model has 1 layer"
                if count == 1
                else f"must be -{count} to -1: the model has {count} layers"
            )
            raise SettingsError(f"layers: {layer}: {rule}")
    return [count + layer for layer in recipe.layers]


def dimensions_of(checkpoint: "Checkpoint", recipe: Recipe, device: str = "cpu") -> int:
    """Return how many numbers a vector has. Raises SettingsError naming what of the recipe the checkpoint cannot do, and the rule."""
    architecture = checkpoint.architecture
    layers = used_layers(architecture, recipe)
    _refuse_precision(recipe.precision, device)
    if recipe.pooling is Pooling.POOLER and not architecture.has_pooler:
        raise SettingsError(f"pooling='pooler': {checkpoint.directory} has no weights of a pooler")
    if recipe.pooling in WITH_CLASSIFIER and not architecture.labels:
        raise SettingsError(f"pooling={recipe.pooling.value!r}: {checkpoint.directory} has no weights of a classifier")
    size = architecture.hidden_size * len(layers) * (len(recipe.poolings) + recipe.poolings.count(Pooling.MEAN_MAX))
    if recipe.pooling in WITH_CLASSIFIER:
        size = architecture.labels
    size = _after_dense(checkpoint, recipe, size)
    if recipe.dimensions is not None and not 1 <= recipe.dimensions <= size:
        raise SettingsError(
            f"dimensions={recipe.dimensions}: must be from 1 to {size}, which is what the model's vectors have"
        )
    return recipe.dimensions or size


def _after_dense(checkpoint: "Checkpoint", recipe: Recipe, size: int) -> int:
    for dense in dense_layers(checkpoint, recipe):
        after, before = dense.weight.shape
        if before != size:
            raise SettingsError(
                f"layers={recipe.layers}, pooling={recipe.pooling.value!r}: make vectors of {size} numbers, and the dense layer in"
                f" {checkpoint.directory} reads {before}"
            )
        size = after
    return size


def _refuse_precision(precision: Precision, device: str) -> None:
    if precision is Precision.BF16:
        raise SettingsError("precision='bf16': onnxruntime has none: --precision fp16, or --runtime torch")
    if precision is Precision.INT8 and device == "cuda":
        raise SettingsError("precision='int8': the onnx runtime has none on GPUs; fp16 there, or device='cpu'")
