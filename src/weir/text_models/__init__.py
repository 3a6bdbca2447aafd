"""Text models: checkpoint, tokenizer, network and runtime, without a server.

Here are the values of a recipe, which are poolings, precisions and the recipe itself; and the settings of a text model: how its vectors are computed, with what,
and with which share of the machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, Checked, Rule, one_of, setting, stated_settings
from weir.errors import SettingsError
from weir.text_models.formats import DEVICE_RULE, DTYPES, RUNTIMES, is_device, is_dtype


class Pooling(Enum):
    """How one vector is made from the vectors of a text's tokens. The value is the name of the pooling in settings and files."""

    NONE = "none"  # one vector per token
    MAX = "max"
    MEAN = "mean"
    MEAN_MAX = "mean-max"  # the mean, followed by the maximum
    CLS = "cls"  # the first token
    SEP = "sep"  # the last token
    POOLER = "pooler"  # the model's own dense layer and tanh on the first token
    PROJECTION = "projection"  # the model's own matrix on the token at the end, into the space that texts share with images (CLIP, SigLIP)
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
    Pooling.PROJECTION,
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
OF_LAST_LAYER = (Pooling.POOLER, Pooling.PROJECTION, *WITH_CLASSIFIER, *WITH_HEAD)
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
        images: the vectors are those of images, which the model's vision tower computes; `precision`, `dimensions` and `normalize` hold for them.
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
    images: bool = False

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


SHORTEST = 3  # the least max_length, in tokens: two special tokens and one token of the text

_NAMES = ", ".join(pooling.value for pooling in Pooling)


def _are_poolings(value: str) -> bool:
    try:
        return bool(poolings_named(value))
    except SettingsError:
        return False


_POOLING: Rule = (
    _are_poolings,
    f"must be one of {_NAMES}, or a name of bert-as-service for one of them, or several that make one vector each, joined by +",
)
_LAYERS: Rule = (
    lambda value: all(layer < 0 for layer in value) and len(set(value)) == len(value),
    "must be counted from the end, -1 is the last, each once",
)
_LENGTH: Rule = (lambda value: value >= SHORTEST, f"must be {SHORTEST} or more")
_FRACTION: Rule = (lambda value: 0 < value <= 1, "must be greater than 0 and at most 1")


@dataclass(frozen=True)
class TextSettings(Checked):
    """How the vector of a text is computed. For a setting that is not given, the model's files decide."""

    pooling: str | None = setting(
        None,
        f"how token vectors become one vector: {_NAMES}, or several concatenated, such as cls+mean (default: the model's own; else mean, or sep for a causal language model)",
        rule=_POOLING,
        metavar="NAME",
    )
    window: int = setting(WINDOW, "tokens in each window of hierarchical pooling", rule=AT_LEAST_ONE)
    layers: list[int] = setting(
        [],
        "layers to pool and concatenate, such as -4,-3,-2,-1; -1 is the last (default: -1, or --bare-layer)",
        rule=_LAYERS,
        metavar="NUMBERS",
    )
    bare_layer: int = setting(
        -1,
        "layer to pool if the model's files state no pooling; with flags of bert-serving-start it is -2",
        rule=(lambda value: value < 0, "must be counted from the end, -1 is the last"),
    )
    mask_special: bool = setting(False, "exclude the first and the last token from pooling")
    hide_special: bool = setting(False, "mask the first and the last token from attention", affects_speed=False)
    special_tokens: bool = setting(True, "add the model's special tokens to each text", affects_speed=False)
    word_special_tokens: bool = setting(
        True, "add special tokens to texts that are sent as lists of tokens", affects_speed=False
    )
    positions: bool = setting(True, "add position embeddings")
    normalize: bool | None = setting(None, "scale vectors to length 1 (default: from the model's files)")
    dimensions: int | None = setting(None, "truncate each vector to this many dimensions", rule=AT_LEAST_ONE)
    max_length: int | None = setting(
        None, "maximum number of tokens per text (default: the model's maximum)", rule=_LENGTH
    )
    truncate: bool = setting(True, "truncate longer texts instead of refusing them", affects_speed=False)
    split: bool = setting(False, "split longer texts into pieces and average the vectors", affects_speed=False)
    fixed_length: bool = setting(False, "pad all texts to --max-length")
    cased: bool | None = setting(
        None, "distinguish upper and lower case (default: from the model's files)", affects_speed=False
    )
    pair_separator: str | None = setting(
        None, "separator between the two texts of a pair, such as ' ||| '", metavar="TEXT", affects_speed=False
    )
    prompt: str | None = setting(
        None,
        "prompt to put before every text: its name, or the text itself, ending with a space or a colon (default: from the model's files)",
        metavar="NAME",
        may_be_empty=True,
        affects_speed=False,
    )

    ranges: str | None = setting(
        None,
        ".npy file with the minimum and maximum of each dimension, or with vectors to compute them from, so that int8 and uint8 "
        "vectors equal those of sentence-transformers (default: each vector is scaled by its largest number)",
        metavar="FILE",
        affects_speed=False,
    )
    router: str | None = setting(
        None,
        "route of a model with a sentence-transformers Router: query or document (default: from its files, else document)",
        metavar="NAME",
    )


@dataclass(frozen=True)
class ComputingSettings(Checked):
    """The runtime, devices and precision with which vectors are computed, and the cache."""

    runtime: str = setting(
        "onnx",
        "what runs the model: onnx (onnxruntime, from the weights), torch, or onnx-file (an ONNX file of the model, unchanged)",
        rule=one_of(*RUNTIMES),
    )
    dtype: str | None = setting(
        None,
        "variant of the model's ONNX file to serve: "
        + ", ".join(DTYPES)
        + ", or the name of the file (default: the weights, or "
        "onnx/model.onnx if Weir does not support their architecture)",
        rule=(is_dtype, f"must be one of {', '.join(DTYPES)}, or the name of a file that ends in .onnx"),
        metavar="NAME",
    )
    precision: str = setting(
        Precision.FP32.value,
        "number format: fp32, fp16, bf16 (torch only) or int8 (onnx only)",
        rule=one_of(*(precision.value for precision in Precision)),
    )
    device_map: list[str] = setting(
        [],
        "device of each worker, in turn: cpu, the number of a GPU, or auto for the GPU with the most free memory (default: auto, or cpu without a GPU)",
        rule=(lambda value: all(map(is_device, value)), f"each {DEVICE_RULE}"),
        metavar="DEVICE",
    )
    gpu_memory_fraction: float | None = setting(None, "share of a GPU's memory that one worker may use", rule=_FRACTION)
    compile: bool = setting(False, "compile the model (torch only)")
    run_tokens: int | None = setting(
        None,
        "tokens to compute at once, including padding (default: a whole batch)",
        rule=POSITIVE,
        affects_speed=False,
    )
    calibrate: bool = setting(
        True, "measure the best batch size on the first start, unless --max-batch-cost is set", affects_speed=False
    )
    cache: str | None = setting(
        None,
        "directory for cached graphs and measurements (default: in the user's cache)",
        metavar="DIR",
        affects_speed=False,
    )

    allow_pickle: bool = setting(
        False,
        "if there are no safetensors, read tensors from pytorch_model.bin and other PyTorch pickles; no code in them is run",
        affects_speed=False,
    )
    max_cache_size: int = setting(
        16 << 30,
        "maximum size of cached graphs in bytes; the least recently used are removed",
        rule=AT_LEAST_ZERO,
        affects_speed=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision == "bf16" and self.runtime != "torch":
            raise SettingsError(f"precision='bf16', runtime={self.runtime!r}: only torch computes in bf16")
        if self.precision == "int8" and self.runtime != "onnx":
            raise SettingsError(f"precision='int8', runtime={self.runtime!r}: only onnx computes in int8")
        if self.dtype is not None and self.runtime == "torch":
            rule = f"dtype={self.dtype!r}, runtime='torch': names an ONNX file; torch has the setting precision"
            raise SettingsError(rule)
        if self.compile and self.runtime != "torch":
            raise SettingsError(f"compile=True, runtime={self.runtime!r}: only torch compiles")


DEFAULT_TEXT, DEFAULT_COMPUTING = TextSettings(), ComputingSettings()


class WorkerShare(NamedTuple):
    """The part of the machine that a worker has, and how it divides its batches.

    Attributes:
        threads: how many threads compute one batch on a CPU.
        lone_threads: the most threads that compute a batch on a CPU while enough other workers have none, see runtime/__init__.py; as `threads` if it is not
            more.
        run_tokens: the most tokens of one run of the network, unless the settings state another number; None for a default of the device.
        padding_cost: how many times a token of padding counts in a run.
    """

    threads: int = 1
    lone_threads: int = 1
    run_tokens: int | None = None
    padding_cost: float = 1.0


ALONE = WorkerShare()


def split_settings(settings: Mapping[str, Any]) -> tuple[TextSettings, ComputingSettings, dict[str, Any]]:
    """Return the settings of a text model among `settings`, and the others. Raises SettingsError naming the setting that breaks its rule."""
    parts = [stated_settings(kind, settings) for kind in (TextSettings, ComputingSettings)]
    rest = {name: value for name, value in settings.items() if not any(name in part for part in parts)}
    return TextSettings(**parts[0]), ComputingSettings(**parts[1]), rest
