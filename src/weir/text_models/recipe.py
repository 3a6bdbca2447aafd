"""The recipe of a vector: which layers are pooled, how, and in which precision. It does not change while a model is served.

A recipe follows from the user's settings and the model's files, which `read_files` reads for workers and for the server. This module also checks whether a
checkpoint can do what a recipe states; that needs neither onnx nor torch.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weir.errors import SettingsError
from weir.text_models import (
    DEFAULT_TEXT,
    NEVER_NORMALIZED,
    NOT_JOINED,
    OF_LAST_LAYER,
    WITH_CLASSIFIER,
    WITH_HEAD,
    ComputingSettings,
    Pooling,
    Precision,
    Recipe,
    TextSettings,
    poolings_named,
)
from weir.text_models.texts import TokenizerOptions, server_prompt

if TYPE_CHECKING:
    from weir.text_models.checkpoint.families import Architecture
    from weir.text_models.checkpoint.heads import Dense
    from weir.text_models.checkpoint.reading import Checkpoint
    from weir.text_models.tokenizer import Tokenizer


def chosen_recipe(
    checkpoint: "Checkpoint", text: TextSettings = DEFAULT_TEXT, precision: str = Precision.FP32.value
) -> Recipe:
    """Return the recipe for `checkpoint` with these settings.

    Where a setting is not given the model's files decide. If they state no pooling, it is what sentence-transformers pools in the layer `text.bare_layer`, or
    for a model that was trained with a head of its own what the head makes. `dimensions_of` checks whether the model can do what the recipe states.
    """
    stated = checkpoint.poolings or (checkpoint.pooling_of_head or checkpoint.pooling_of_others,)
    own_layer = -1 if checkpoint.poolings else max(text.bare_layer, -checkpoint.architecture.layers)
    chosen, *joined = stated if text.pooling is None else poolings_named(text.pooling)
    normalized = checkpoint.layout.normalize and chosen not in NEVER_NORMALIZED
    recipe = Recipe(
        chosen,
        tuple(text.layers or (own_layer,)),
        text.mask_special,
        text.positions,
        normalized if text.normalize is None else text.normalize,
        text.dimensions,
        Precision(precision),
        tuple(joined),
        text.window,
    )
    recipe = replace(recipe, further=further_poolings(checkpoint, recipe))
    return _with_stated_dimensions(checkpoint, recipe) if text.dimensions is None else recipe


class ModelFiles(NamedTuple):
    """A model as its files and its settings state it: its checkpoint, its recipe, its tokenizer, and the most tokens of a text."""

    checkpoint: "Checkpoint"
    recipe: Recipe
    tokenizer: "Tokenizer"
    max_length: int


def read_files(directory: Path, text: TextSettings, computing: ComputingSettings) -> ModelFiles:
    """Read the directory of a model with these settings. Raises SettingsError naming the file or the setting, and the rule."""
    from weir.text_models.checkpoint.reading import read_for

    checkpoint = read_for(directory, computing, text.router)
    recipe = chosen_recipe(checkpoint, text, computing.precision)
    options = TokenizerOptions(
        lowercase=None if text.cased is None else not text.cased,
        special_tokens=text.special_tokens,
        word_special_tokens=text.word_special_tokens,
        pair_separator=text.pair_separator,
        prompt=server_prompt(text.prompt, checkpoint.prompts),
        judges=recipe.pooling is Pooling.YES_NO,
        late=checkpoint.layout.late if recipe.pooling is Pooling.TOKENS else None,
    )
    max_length = min(text.max_length or checkpoint.max_length, checkpoint.architecture.max_length)
    return ModelFiles(checkpoint, recipe, checkpoint.tokenizer(options), max_length)


def further_poolings(checkpoint: "Checkpoint", recipe: Recipe) -> tuple[Pooling, ...]:
    """Return the poolings whose results one pass can make in addition to one vector for each text: terms, if the model has a small head for them, and vectors of
    tokens, by the model's head or else those that are pooled. A recipe for anything but one vector has none."""
    if (recipe.pooling in NOT_JOINED and recipe.pooling is not Pooling.POOLER) or not checkpoint.has_tokens:
        return ()
    heads = checkpoint.heads
    if recipe.layers != (-1,) and recipe.pooling is not Pooling.POOLER:  # heads read the last layer
        return (Pooling.NONE,)
    terms = (Pooling.SPARSE,) if heads.weights is not None else ()
    return (*terms, Pooling.NONE if heads.tokens is None else Pooling.TOKENS)


def _with_stated_dimensions(checkpoint: "Checkpoint", recipe: Recipe) -> Recipe:
    """Return the recipe with the number of dimensions in the files (`truncate_dim`), if it computes the vectors that the files describe."""
    kept = checkpoint.layout.dimensions
    if kept is None or (recipe.poolings, recipe.layers) != (checkpoint.poolings, (-1,)):
        return recipe
    return replace(recipe, dimensions=min(kept, dimensions_of(checkpoint, recipe)))


def dense_layers(checkpoint: "Checkpoint", recipe: Recipe) -> "list[Dense]":
    """Return the dense layers of the checkpoint that are applied after this recipe's pooling."""
    return [] if recipe.pooling in NOT_JOINED else list(checkpoint.dense)


def quantizes(checkpoint: "Checkpoint", recipe: Recipe) -> bool:
    """Return whether a module of the checkpoint makes whole numbers of this recipe's vectors."""
    return checkpoint.layout.quantized and recipe.pooling not in NOT_JOINED


def used_layers(architecture: "Architecture", recipe: Recipe) -> list[int]:
    """Return the layers that the recipe reads, counted from 0. Raises SettingsError naming a layer that the model does not have."""
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


def dimensions_of(checkpoint: "Checkpoint", recipe: Recipe, device: str | None = None) -> int:
    """Return how many numbers a vector has.

    Raises SettingsError naming the part of the recipe that the checkpoint cannot do, and the rule. With a `device`, "cpu" or "cuda", it is also
    checked whether onnxruntime computes in the recipe's precision there.
    """
    architecture = checkpoint.architecture
    layers = used_layers(architecture, recipe)
    if device is not None:
        _check_precision(recipe.precision, device)
    if recipe.pooling is Pooling.POOLER and not architecture.has_pooler:
        raise SettingsError(f"pooling='pooler': {checkpoint.directory} has no weights of a pooler")
    if recipe.pooling in WITH_CLASSIFIER and not architecture.labels:
        raise SettingsError(f"pooling={recipe.pooling.value!r}: {checkpoint.directory} has no weights of a classifier")
    if (recipe.pooling is Pooling.PROJECTION) != (architecture.projection_size > 0):
        rule = "only a model of texts and images has projection, and it has no other"
        raise SettingsError(f"pooling={recipe.pooling.value!r}: {checkpoint.directory}: {rule}")
    size = architecture.hidden_size * len(layers) * (len(recipe.poolings) + recipe.poolings.count(Pooling.MEAN_MAX))
    if recipe.pooling in WITH_CLASSIFIER:
        size = architecture.labels
    if recipe.pooling is Pooling.PROJECTION:
        size = architecture.projection_size
    if recipe.pooling in WITH_HEAD:
        size = _size_of_head(checkpoint, recipe)
    size = _after_dense(checkpoint, recipe, size)
    if recipe.dimensions is not None and recipe.pooling in WITH_HEAD and recipe.pooling is not Pooling.TOKENS:
        raise SettingsError(f"dimensions={recipe.dimensions}: terms and labels have no dimensions to cut")
    if recipe.dimensions is not None and not 1 <= recipe.dimensions <= size:
        raise SettingsError(
            f"dimensions={recipe.dimensions}: must be from 1 to {size}, the size of the model's vectors"
        )
    return recipe.dimensions or size


TERM = 2  # numbers of a term: the id of a word, and its weight


def _size_of_head(checkpoint: "Checkpoint", recipe: Recipe) -> int:
    """Return how many numbers there are for each term or token. Raises SettingsError if the checkpoint does not have the head."""
    heads, pooling = checkpoint.heads, recipe.pooling
    if checkpoint.onnx is not None:
        raise SettingsError(f"pooling={pooling.value!r}: cannot be computed from {checkpoint.onnx.path}")
    if pooling is Pooling.YES_NO:
        return len(checkpoint.answers.weight)
    if pooling is Pooling.SPARSE and (heads.words is not None or heads.weights is not None):
        return TERM
    head = heads.tokens if pooling is Pooling.TOKENS else heads.labels if pooling is Pooling.TOKEN_LOGITS else None
    if head is not None:
        return len(head.weight)
    unread = f": {', '.join(heads.pickled)} are pickles, which --allow-pickle reads" if heads.pickled else ""
    raise SettingsError(f"pooling={pooling.value!r}: {checkpoint.directory} has no head for it{unread}")


def _after_dense(checkpoint: "Checkpoint", recipe: Recipe, size: int) -> int:
    for dense in dense_layers(checkpoint, recipe):
        after, before = dense.weight.shape
        if before != size:
            raise SettingsError(
                f"layers={recipe.layers}, pooling={recipe.pooling.value!r}: make vectors of {size} numbers, but the dense layer in"
                f" {checkpoint.directory} takes {before}"
            )
        size = after
    return size


def _check_precision(precision: Precision, device: str) -> None:
    if precision is Precision.BF16:
        raise SettingsError(
            "precision='bf16': onnxruntime does not compute in bf16: set precision fp16 or runtime torch"
        )
    if precision is Precision.INT8 and device == "cuda":
        raise SettingsError(
            "precision='int8': the onnx runtime does not compute in int8 on GPUs: set precision fp16 or the device cpu"
        )
