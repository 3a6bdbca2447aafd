"""The recipe of a vector: which layers are pooled, how, and in which precision. It does not change while a model is served.

A recipe follows from the user's settings and the model's files. This module also checks whether a checkpoint can do what a recipe states; that needs
neither onnx nor torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.embedding.checkpoint.config import Architecture
    from weir.embedding.checkpoint.heads import Dense
    from weir.embedding.checkpoint.reading import Checkpoint


class Pooling(Enum):
    """How one vector is made from the vectors of a text's tokens. The value is the name of the pooling in settings and files."""

    NONE = "none"  # one vector per token
    MAX = "max"
    MEAN = "mean"
    MEAN_MAX = "mean-max"  # the mean, followed by the maximum
    CLS = "cls"  # the first token
    SEP = "sep"  # the last token
    POOLER = "pooler"  # the model's own dense layer and tanh on the first token
    CLASSIFICATION = "classification"  # the softmax of the model's classifier
    REGRESSION = "regression"  # the sigmoid of the model's classifier
    LOGITS = "logits"  # the numbers of the model's classifier as they are, from which scores and labels are made
    SPARSE = "sparse"  # the terms of a text: for each the id of a word, and its weight (SPLADE, BGE-M3)
    TOKENS = "tokens"  # one vector per token, made by the model's own head and scaled to length 1 (ColBERT, BGE-M3)
    TOKEN_LOGITS = "token-logits"  # for each token the numbers of the model's classifier of tokens
    YES_NO = "yes-no"  # how much likelier a decoder says "yes" than "no" about a query and a document, as a number (Qwen3-Reranker)
    WEIGHTED_MEAN = "weighted-mean"  # the weight of the token at place 1, 2, 3 ... is its place
    MEAN_SQRT = "mean-sqrt"  # the sum, divided by the square root of the number of tokens
    # The maximum of the means over every few consecutive tokens: SWEM-hier of Shen et al., 2018.
    HIERARCHICAL = "hierarchical"


# Poolings that read the first or the last token, so that no setting can hide these tokens.
OF_SPECIAL_TOKENS = (
    Pooling.CLS,
    Pooling.SEP,
    Pooling.POOLER,
    Pooling.CLASSIFICATION,
    Pooling.REGRESSION,
    Pooling.LOGITS,
    Pooling.YES_NO,
)
# These give a list for each text: of one vector for each token, or of terms.
OF_TOKENS = (Pooling.NONE, Pooling.SPARSE, Pooling.TOKENS, Pooling.TOKEN_LOGITS)
# A model's files may state that its vectors have length 1. That holds neither for the vectors of tokens nor for probabilities.
NEVER_NORMALIZED = (*OF_TOKENS, Pooling.CLASSIFICATION, Pooling.REGRESSION, Pooling.LOGITS, Pooling.YES_NO)
# These use the model's own head, which was trained on the last layer: they read that layer, whichever layers the recipe names.
WITH_CLASSIFIER = (Pooling.CLASSIFICATION, Pooling.REGRESSION, Pooling.LOGITS)
WITH_HEAD = (Pooling.SPARSE, Pooling.TOKENS, Pooling.TOKEN_LOGITS, Pooling.YES_NO)
OF_LAST_LAYER = (Pooling.POOLER, *WITH_CLASSIFIER, *WITH_HEAD)
# These give vectors of tokens or the output of a head. The dense layers of sentence-transformers are not applied to them, and they cannot be
# joined with other poolings.
NOT_JOINED = (Pooling.NONE, *OF_LAST_LAYER)

# The names, and second names, of the poolings in bert-as-service.
BERT_AS_SERVICE_NAMES = {
    "NONE": Pooling.NONE, "REDUCE_MAX": Pooling.MAX, "REDUCE_MEAN": Pooling.MEAN, "REDUCE_MEAN_MAX": Pooling.MEAN_MAX,
    "FIRST_TOKEN": Pooling.CLS, "CLS_TOKEN": Pooling.CLS, "LAST_TOKEN": Pooling.SEP, "SEP_TOKEN": Pooling.SEP,
    "CLS_POOLED": Pooling.POOLER, "CLASSIFICATION": Pooling.CLASSIFICATION, "REGRESSION": Pooling.REGRESSION,
}  # fmt: skip


class Precision(Enum):
    """The numbers in which a model computes. Its vectors are float32 in any case."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"  # torch alone
    INT8 = "int8"  # onnxruntime alone: weights per channel, activations by their range at run time


WINDOW = 5  # default: consecutive tokens in each mean of the hierarchical pooling


@dataclass(frozen=True)
class Recipe:
    """How the vector of a text is computed.

    Attributes:
        pooling: how one vector is made from the vectors of the tokens.
        layers: the layers that are pooled, counted from the end: -1 is the last. The vectors of several layers are concatenated for each token.
        mask_special: leave the first and the last token out of the pooling.
        positions: add the position embeddings; without them the model does not know the order of the tokens.
        normalize: scale each vector to length 1, as the last step.
        dimensions: how many numbers at the start of each vector are kept, before `normalize`; None for all.
        precision: the numbers in which the model computes.
        joined: further poolings, whose results are appended to that of `pooling`.
        window: consecutive tokens in each mean of the hierarchical pooling. A shorter text has one mean.
        beside: further poolings, each a result of its own that the same pass makes where a text asks for it; see `poolings_beside`.
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
    beside: tuple[Pooling, ...] = ()

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        """All poolings, in the order of their results in the vector."""
        return (self.pooling, *self.joined)


def pooling_named(name: str) -> Pooling:
    """Return the pooling with this name, Weir's or that of bert-as-service. Raises SettingsError naming the poolings that exist."""
    if name in BERT_AS_SERVICE_NAMES:
        return BERT_AS_SERVICE_NAMES[name]
    for pooling in Pooling:
        if pooling.value == name.lower().replace("_", "-"):
            return pooling
    known = ", ".join(pooling.value for pooling in Pooling)
    raise SettingsError(f"pooling={name!r}: must be one of {known}, or a name that bert-as-service has for it")


def poolings_named(names: str) -> tuple[Pooling, ...]:
    """Return the poolings of one name, or of several joined by +, such as cls+mean.

    Raises SettingsError for a name that does not exist, and for a pooling that cannot be joined with others.
    """
    found = tuple(pooling_named(name.strip()) for name in names.split("+"))
    single = [pooling.value for pooling in found if pooling in NOT_JOINED]
    if len(found) > 1 and single:
        raise SettingsError(f"pooling={names!r}: {single[0]} cannot be joined with other poolings")
    return found


def chosen_recipe(
    checkpoint: "Checkpoint", *, pooling: str | None = None, layers: Sequence[int] | None = None,
    mask_special: bool = False, positions: bool = True, normalize: bool | None = None, dimensions: int | None = None,
    precision: str = "fp32", window: int | None = None, bare_layer: int = -1,
) -> Recipe:  # fmt: skip
    """Return the recipe for `checkpoint` with these options, see Recipe. For an option that is None the model's files decide; if they state no pooling,
    it is what sentence-transformers pools, or for a model that was trained with a head of its own what the head makes. `bare_layer` is the layer that
    is then pooled, if the model has as many.

    Raises SettingsError for a name that does not exist. `dimensions_of` checks whether the model can do what the recipe states.
    """
    try:
        numeric = Precision(precision)
    except ValueError:
        known = ", ".join(each.value for each in Precision)
        raise SettingsError(f"precision={precision!r}: must be one of {known}") from None
    stated = checkpoint.poolings or (checkpoint.pooling_of_head or checkpoint.pooling_of_others,)
    own_layer = -1 if checkpoint.poolings else max(bare_layer, -checkpoint.architecture.layers)
    chosen, *joined = stated if pooling is None else poolings_named(pooling)
    recipe = Recipe(
        chosen,
        tuple(layers or (own_layer,)),
        mask_special,
        positions,
        checkpoint.normalize and chosen not in NEVER_NORMALIZED if normalize is None else normalize,
        dimensions,
        numeric,
        tuple(joined),
        window or WINDOW,
    )
    recipe = replace(recipe, beside=poolings_beside(checkpoint, recipe))
    return _with_stated_dimensions(checkpoint, recipe) if dimensions is None else recipe


def poolings_beside(checkpoint: "Checkpoint", recipe: Recipe) -> tuple[Pooling, ...]:
    """Return the poolings whose results one pass can make beside one vector for each text: terms, if the model has a small head for them, and vectors of
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
    size = architecture.hidden_size * len(layers) * (len(recipe.poolings) + recipe.poolings.count(Pooling.MEAN_MAX))
    if recipe.pooling in WITH_CLASSIFIER:
        size = architecture.labels
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
