"""Text models: checkpoint, tokenizer, network and runtime, without a server.

Here are the values of a recipe: poolings, precisions, and the recipe itself.
"""

from dataclasses import dataclass
from enum import Enum

from weir.errors import SettingsError


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
        further: further poolings, each a result of its own that the same pass makes where a text asks for it; see `further_poolings`.
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
    further: tuple[Pooling, ...] = ()

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
