"""What is computed of a text: of which layers, pooled how, in which precision. It stays the same for as long as a model is served.

A recipe comes from the user's settings and the model's files. Whether a checkpoint can do what a recipe says is decided here, before any graph
is made, and without onnx.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.embedding.checkpoint.config import Architecture
    from weir.embedding.checkpoint.reading import Checkpoint, Dense


class Pooling(Enum):
    """How the vectors of a text's tokens become one. The value is its name in settings and files."""

    NONE = "none"  # one vector per token
    MAX = "max"
    MEAN = "mean"
    MEAN_MAX = "mean-max"  # both, one after the other
    CLS = "cls"  # the first token
    SEP = "sep"  # the last token
    POOLER = "pooler"  # the model's own dense layer and tanh on the first token
    CLASSIFICATION = "classification"  # the softmax of the model's classifier
    REGRESSION = "regression"  # the sigmoid of the model's classifier
    WEIGHTED_MEAN = "weighted-mean"  # later tokens weigh more, by their place
    MEAN_SQRT = "mean-sqrt"  # the sum over the square root of the length
    HIERARCHICAL = (
        "hierarchical"  # the highest of the means over each few tokens in a row: SWEM-hier of Shen et al., 2018
    )


# Those that read the first token or the last, which cannot be hidden from them.
OF_SPECIAL_TOKENS = (Pooling.CLS, Pooling.SEP, Pooling.POOLER, Pooling.CLASSIFICATION, Pooling.REGRESSION)
# A model's files may say that its vectors have length 1. That is not meant of its tokens' vectors, nor of probabilities.
NEVER_NORMALIZED = (Pooling.NONE, Pooling.CLASSIFICATION, Pooling.REGRESSION)
# These read what the model was trained to give: the pooled output of its last layer, whichever layers the recipe names.
WITH_CLASSIFIER = (Pooling.CLASSIFICATION, Pooling.REGRESSION)
OF_LAST_LAYER = (Pooling.POOLER, *WITH_CLASSIFIER)
# No vector of a text, or not of its meaning: further dense layers are not for them.
_WITHOUT_DENSE = (Pooling.NONE, *OF_LAST_LAYER)
# These are not put beside others: a vector for each token, and what the model's own head makes of its last layer.
ALONE = (Pooling.NONE, Pooling.POOLER, Pooling.CLASSIFICATION, Pooling.REGRESSION)

# What bert-as-service calls them, and what it calls them also.
OLD_NAMES = {
    "NONE": Pooling.NONE, "REDUCE_MAX": Pooling.MAX, "REDUCE_MEAN": Pooling.MEAN, "REDUCE_MEAN_MAX": Pooling.MEAN_MAX,
    "FIRST_TOKEN": Pooling.CLS, "CLS_TOKEN": Pooling.CLS, "LAST_TOKEN": Pooling.SEP, "SEP_TOKEN": Pooling.SEP,
    "CLS_POOLED": Pooling.POOLER, "CLASSIFICATION": Pooling.CLASSIFICATION, "REGRESSION": Pooling.REGRESSION,
}  # fmt: skip


class Precision(Enum):
    """In which numbers a model computes. Vectors leave it as float32, whatever it computes in."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"  # torch alone
    INT8 = "int8"  # onnxruntime alone: weights per channel, activations by their range at run time


WINDOW = 5  # tokens that a mean of the hierarchical pooling is over, unless a setting states another number


@dataclass(frozen=True)
class Recipe:
    """What is computed of a text.

    `layers` are counted from the end: -1 is the last, -2 the one before; several are put one after the other, token by token.
    With `mask_special`, the first token and the last do not count in the pooling. Without `positions` the model is not told where a
    token stands. `normalize` brings vectors to length 1, after all else; `dimensions` keeps the first numbers of each
    before that. What the poolings `joined` make comes behind what `pooling` makes. `window` is how many tokens in a row a mean of the hierarchical
    pooling is over; a shorter text has one.
    """

    pooling: Pooling
    layers: tuple[int, ...] = (-1,)
    mask_special: bool = False
    positions: bool = True
    normalize: bool = False
    dimensions: int | None = None
    precision: Precision = Precision.FP32
    joined: tuple[Pooling, ...] = ()
    window: int = WINDOW

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        """All of them, in order."""
        return (self.pooling, *self.joined)


def pooling_named(name: str) -> Pooling:
    """Return the pooling of this name, today's or that of bert-as-service. Raises SettingsError naming those there are."""
    if name in OLD_NAMES:
        return OLD_NAMES[name]
    for pooling in Pooling:
        if pooling.value == name.lower().replace("_", "-"):
            return pooling
    known = ", ".join(pooling.value for pooling in Pooling)
    raise SettingsError(f"pooling={name!r}: must be one of {known}, or a name that bert-as-service has for it")


def poolings_named(names: str) -> tuple[Pooling, ...]:
    """Return the poolings of a name, or of several with + between, such as cls+mean. Raises SettingsError naming those there are, and one
    that is not put beside others."""
    found = tuple(pooling_named(name.strip()) for name in names.split("+"))
    alone = [pooling.value for pooling in found if pooling in ALONE]
    if len(found) > 1 and alone:
        raise SettingsError(f"pooling={names!r}: {alone[0]} stands alone: its vectors are not put beside others")
    return found


def chosen_recipe(
    checkpoint: "Checkpoint", *, pooling: str | None = None, layers: Sequence[int] | None = None,
    mask_special: bool = False, positions: bool = True, normalize: bool | None = None, dimensions: int | None = None,
    precision: str = "fp32", window: int | None = None,
) -> Recipe:  # fmt: skip
    """Return the recipe that these options make of `checkpoint`: None is what its files say, and the mean where they say nothing.

    Raises SettingsError for a name that is none. Whether the model can do it is checked when its runtime is opened.
    """
    try:
        numbers = Precision(precision)
    except ValueError:
        known = ", ".join(each.value for each in Precision)
        raise SettingsError(f"precision={precision!r}: must be one of {known}") from None
    chosen, *joined = checkpoint.poolings or (Pooling.MEAN,) if pooling is None else poolings_named(pooling)
    recipe = Recipe(
        chosen,
        tuple(layers or checkpoint.layers),
        mask_special,
        positions,
        checkpoint.normalize and chosen not in NEVER_NORMALIZED if normalize is None else normalize,
        dimensions,
        numbers,
        tuple(joined),
        window or WINDOW,
    )
    return _shortened(checkpoint, recipe) if dimensions is None else recipe


def _shortened(checkpoint: "Checkpoint", recipe: Recipe) -> Recipe:
    """Keep as many numbers of a vector as the files say (`truncate_dim`). That holds for the vectors that the files describe, and for no others."""
    kept = checkpoint.layout.dimensions
    if kept is None or (recipe.poolings, recipe.layers) != (checkpoint.poolings, checkpoint.layers):
        return recipe
    return replace(recipe, dimensions=min(kept, dimensions_in(checkpoint, recipe)))


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


def dimensions_in(checkpoint: "Checkpoint", recipe: Recipe) -> int:
    """Return how many numbers a vector has, whatever it is computed in. Raises SettingsError as dimensions_of does."""
    return dimensions_of(checkpoint, replace(recipe, precision=Precision.FP32))


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
