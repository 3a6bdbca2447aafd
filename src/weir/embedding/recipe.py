"""What is computed of a text: of which layers, pooled how, in which precision. Fixed for as long as a model is served."""

from dataclasses import dataclass
from enum import Enum

from weir.errors import SettingsError


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


WINDOW = 5  # tokens that a mean of the hierarchical pooling is over, unless others are said

# These are not put beside others: a vector for each token, and what the model's own head makes of its last layer.
ALONE = (Pooling.NONE, Pooling.POOLER, Pooling.CLASSIFICATION, Pooling.REGRESSION)


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
