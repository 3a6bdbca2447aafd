"""The settings of `weir embed serve`: how vectors are computed, with what, and the limits of requests."""

from dataclasses import dataclass

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, Rule, check, one_of, setting
from weir.embedding.recipe import WINDOW, Pooling, Precision, poolings_named
from weir.embedding.runtime import DTYPES, RUNTIMES, is_dtype
from weir.errors import SettingsError

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
class TextSettings:
    """How the vector of a text is computed. For a setting that is not given, the model's files decide."""

    pooling: str | None = setting(
        None, f"how one vector is made from those of the tokens: {_NAMES}, or several joined: cls+mean (default: the model's own, else mean, and sep for a causal language model)",
        rule=_POOLING, metavar="NAME",
    )  # fmt: skip
    window: int = setting(WINDOW, "consecutive tokens in each mean of the pooling hierarchical", rule=AT_LEAST_ONE)
    layers: list[int] = setting(
        [], "layers to pool, concatenated: -4,-3,-2,-1; -1 is the last (default: -1, or --bare-layer)",
        rule=_LAYERS, metavar="NUMBERS",
    )  # fmt: skip
    bare_layer: int = setting(
        -1, "the layer to pool where the model's files state no pooling; flags of bert-serving-start make it -2",
        rule=(lambda value: value < 0, "must be counted from the end, -1 is the last"),
    )  # fmt: skip
    mask_special: bool = setting(False, "leave the first and the last token out of the pooling")
    hide_special: bool = setting(
        False,
        "let no token attend to the first and the last",
    )
    special_tokens: bool = setting(True, "put the model's special tokens around a text")
    word_special_tokens: bool = setting(True, "special tokens around word lists that are tokens")
    positions: bool = setting(True, "add position embeddings")
    normalize: bool | None = setting(None, "scale vectors to length 1 (default: as the model's files state)")
    dimensions: int | None = setting(None, "keep only the first numbers of each vector", rule=AT_LEAST_ONE)
    max_length: int | None = setting(
        None,
        "tokens read of a text (default: the model's maximum)",
        rule=_LENGTH,
    )
    truncate: bool = setting(True, "cut longer texts, instead of refusing them")
    split: bool = setting(
        False,
        "read longer texts in pieces, and average their vectors",
    )
    fixed_length: bool = setting(False, "pad all texts to --max-length")
    cased: bool | None = setting(
        None,
        "distinguish capital letters (default: as the model's files state)",
    )
    pair_separator: str | None = setting(
        None,
        "separator between two texts of a pair, such as ' ||| '",
        metavar="TEXT",
    )
    prompt: str | None = setting(
        None, "prompt before every text: its text, ending with a space or a colon, or its name (default: as the model's files state)",
        metavar="NAME", may_be_empty=True,
    )  # fmt: skip

    ranges: str | None = setting(
        None, "a .npy file with the least and the greatest number of each dimension, or with vectors to take them from: int8 and uint8 are then "
        "those of sentence-transformers (default: each vector is scaled by its largest number)", metavar="FILE",
    )  # fmt: skip
    router: str | None = setting(
        None, "the route of a model with a Router of sentence-transformers: query, document (default: the route that its files state, else document)",
        metavar="NAME",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class ComputingSettings:
    """The runtime, devices and precision with which vectors are computed, and the cache."""

    runtime: str = setting(
        "onnx", "what computes: onnx (the weights, by onnxruntime), torch, or onnx-file (an ONNX file that the model has, as it is)",
        rule=one_of(*RUNTIMES),
    )  # fmt: skip
    dtype: str | None = setting(
        None, "serve an ONNX file that the model has, in this variant: " + ", ".join(DTYPES) + ", or the name of the file (default: the weights; and "
        "onnx/model.onnx where their family is not computed here)",
        rule=(is_dtype, f"must be one of {', '.join(DTYPES)}, or the name of a file that ends in .onnx"), metavar="NAME",
    )  # fmt: skip
    precision: str = setting(
        Precision.FP32.value, "fp32, fp16, bf16 (torch only) or int8 (onnx only)",
        rule=one_of(*(precision.value for precision in Precision)),
    )  # fmt: skip
    device_map: list[str] = setting(
        [], "devices of the workers, in turn: cpu, a GPU's number, or auto, the GPU with most free memory (default: auto, or cpu)",
        metavar="DEVICE",
    )  # fmt: skip
    gpu_memory_fraction: float | None = setting(None, "largest share of a GPU's memory per worker", rule=_FRACTION)
    compile: bool = setting(False, "compile the model (torch only)")
    run_tokens: int | None = setting(
        None, "tokens computed at once, with padding (default: a whole batch)",
        rule=POSITIVE,
    )  # fmt: skip
    calibrate: bool = setting(
        True,
        "measure the best batch size at the first start, unless --max-batch-cost is set",
    )
    cache: str | None = setting(
        None,
        "folder for graphs and measurements (default: in the user's cache)",
        metavar="DIR",
    )

    allow_pickle: bool = setting(
        False,
        "read pytorch_model.bin and other pickles of torch where there are no safetensors; their tensors are read, and no code in them is run",
    )
    max_cache_size: int = setting(
        16 << 30,
        "bytes of cached graphs, beyond which the least recently used are removed",
        rule=AT_LEAST_ZERO,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.precision == "bf16" and self.runtime != "torch":
            raise SettingsError(f"precision='bf16', runtime={self.runtime!r}: only torch computes in bf16")
        if self.precision == "int8" and self.runtime != "onnx":
            raise SettingsError(f"precision='int8', runtime={self.runtime!r}: only onnx computes in int8")
        if self.dtype is not None and self.runtime == "torch":
            raise SettingsError(
                f"dtype={self.dtype!r}, runtime='torch': names an ONNX file; torch has the setting precision"
            )
        if self.compile and self.runtime != "torch":
            raise SettingsError(f"compile=True, runtime={self.runtime!r}: only torch compiles")


@dataclass(frozen=True)
class CallerSettings:
    """The limits of requests."""

    max_texts: int = setting(100_000, "texts that one request may have", rule=AT_LEAST_ONE)

    def __post_init__(self) -> None:
        check(self)


MODEL_PARTS = {"Text": TextSettings, "Computing": ComputingSettings}
