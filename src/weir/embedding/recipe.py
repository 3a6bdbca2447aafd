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


@dataclass(frozen=True)
class Recipe:
    """What is computed of a text.

    `layers` are counted from the end: -1 is the last, -2 the one before; several are put one after the other, token by token.
    With `mask_special`, the first token and the last do not count in the pooling. Without `positions` the model is not told where a
    token stands. `normalize` brings vectors to length 1, after all else; `dimensions` keeps the first numbers of each
    before that.
    """

    pooling: Pooling
    layers: tuple[int, ...] = (-1,)
    mask_special: bool = False
    positions: bool = True
    normalize: bool = False
    dimensions: int | None = None
    precision: Precision = Precision.FP32


def pooling_named(name: str) -> Pooling:
    """Return the pooling of this name, today's or that of bert-as-service. Raises SettingsError naming those there are."""
    if name in OLD_NAMES:
        return OLD_NAMES[name]
    for pooling in Pooling:
        if pooling.value == name.lower().replace("_", "-"):
            return pooling
    known = ", ".join(pooling.value for pooling in Pooling)
    raise SettingsError(f"pooling={name!r}: must be one of {known}, or a name that bert-as-service has for it")
