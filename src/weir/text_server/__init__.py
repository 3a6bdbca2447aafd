"""The text server: vectors, scores and labels, over the protocols of several servers.

Here are the settings of `weir embed serve`: how vectors are computed, with what, and the limits of requests.
"""

from dataclasses import dataclass

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, Checked, Rule, check, one_of, setting
from weir.errors import SettingsError
from weir.text_models import WINDOW, Pooling, Precision, poolings_named
from weir.text_models.formats import DEVICE_RULE, DTYPES, RUNTIMES, is_device, is_dtype

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
    hide_special: bool = setting(False, "mask the first and the last token from attention")
    special_tokens: bool = setting(True, "add the model's special tokens to each text")
    word_special_tokens: bool = setting(True, "add special tokens to texts that are sent as lists of tokens")
    positions: bool = setting(True, "add position embeddings")
    normalize: bool | None = setting(None, "scale vectors to length 1 (default: from the model's files)")
    dimensions: int | None = setting(None, "truncate each vector to this many dimensions", rule=AT_LEAST_ONE)
    max_length: int | None = setting(
        None, "maximum number of tokens per text (default: the model's maximum)", rule=_LENGTH
    )
    truncate: bool = setting(True, "truncate longer texts instead of refusing them")
    split: bool = setting(False, "split longer texts into pieces and average the vectors")
    fixed_length: bool = setting(False, "pad all texts to --max-length")
    cased: bool | None = setting(None, "distinguish upper and lower case (default: from the model's files)")
    pair_separator: str | None = setting(
        None, "separator between the two texts of a pair, such as ' ||| '", metavar="TEXT"
    )
    prompt: str | None = setting(
        None,
        "prompt to put before every text: its name, or the text itself, ending with a space or a colon (default: from the model's files)",
        metavar="NAME",
        may_be_empty=True,
    )

    ranges: str | None = setting(
        None,
        ".npy file with the minimum and maximum of each dimension, or with vectors to compute them from, so that int8 and uint8 "
        "vectors equal those of sentence-transformers (default: each vector is scaled by its largest number)",
        metavar="FILE",
    )
    router: str | None = setting(
        None,
        "route of a model with a sentence-transformers Router: query or document (default: from its files, else document)",
        metavar="NAME",
    )


@dataclass(frozen=True)
class ComputingSettings:
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
        None, "tokens to compute at once, including padding (default: a whole batch)", rule=POSITIVE
    )
    calibrate: bool = setting(True, "measure the best batch size on the first start, unless --max-batch-cost is set")
    cache: str | None = setting(
        None, "directory for cached graphs and measurements (default: in the user's cache)", metavar="DIR"
    )

    allow_pickle: bool = setting(
        False,
        "if there are no safetensors, read tensors from pytorch_model.bin and other PyTorch pickles; no code in them is run",
    )
    max_cache_size: int = setting(
        16 << 30, "maximum size of cached graphs in bytes; the least recently used are removed", rule=AT_LEAST_ZERO
    )

    def __post_init__(self) -> None:
        check(self)
        if self.precision == "bf16" and self.runtime != "torch":
            raise SettingsError(f"precision='bf16', runtime={self.runtime!r}: only torch computes in bf16")
        if self.precision == "int8" and self.runtime != "onnx":
            raise SettingsError(f"precision='int8', runtime={self.runtime!r}: only onnx computes in int8")
        if self.dtype is not None and self.runtime == "torch":
            rule = f"dtype={self.dtype!r}, runtime='torch': names an ONNX file; torch has the setting precision"
            raise SettingsError(rule)
        if self.compile and self.runtime != "torch":
            raise SettingsError(f"compile=True, runtime={self.runtime!r}: only torch compiles")


@dataclass(frozen=True)
class CallerSettings(Checked):
    """The limits of requests."""

    max_texts: int = setting(100_000, "maximum number of texts in one request", rule=AT_LEAST_ONE)


MODEL_PARTS = {"Text": TextSettings, "Computing": ComputingSettings}
