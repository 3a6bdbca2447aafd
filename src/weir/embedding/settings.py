"""The settings of `weir embed serve`: what is computed of a text, on what, and what callers may ask for."""

from dataclasses import dataclass

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, Rule, check, one_of, setting
from weir.embedding.recipe import WINDOW, Pooling, Precision, poolings_named
from weir.embedding.runtime import RUNTIMES
from weir.errors import SettingsError

SHORTEST = 3  # tokens that a text may be cut to: the two special ones and one of its own

_NAMES = ", ".join(pooling.value for pooling in Pooling)


def _are_poolings(value: str) -> bool:
    try:
        return bool(poolings_named(value))
    except SettingsError:
        return False


_POOLING: Rule = (
    _are_poolings,
    f"must be one of {_NAMES}, or a name that bert-as-service has for it, or several of one vector each with + between",
)
_LAYERS: Rule = (
    lambda value: all(layer < 0 for layer in value) and len(set(value)) == len(value),
    "must be counted from the end, -1 is the last, each once",
)
_LENGTH: Rule = (lambda value: value >= SHORTEST, f"must be {SHORTEST} or more")
_FRACTION: Rule = (lambda value: 0 < value <= 1, "must be greater than 0 and at most 1")


@dataclass(frozen=True)
class TextSettings:
    """What is computed of a text. Settings that are not given are read from the model's files."""

    pooling: str | None = setting(
        None, f"how the vectors of the tokens become one: {_NAMES}, or several joined: cls+mean (default: the model's own, else mean)",
        rule=_POOLING, metavar="NAME",
    )  # fmt: skip
    window: int = setting(WINDOW, "tokens that a mean of the pooling hierarchical is over", rule=AT_LEAST_ONE)
    layers: list[int] = setting(
        [], "layers that are pooled, from the end; several are put one after the other: -4,-3,-2,-1 (default: -1 where "
        "the model says how it is pooled or has 1 layer, else -2)",
        rule=_LAYERS, metavar="NUMBERS",
    )  # fmt: skip
    mask_special: bool = setting(False, "leave the first token and the last out of the pooling")
    hide_special: bool = setting(
        False,
        "let no token attend to the first and the last, as -mask_cls_sep does, unless the pooling reads one of them",
    )
    special_tokens: bool = setting(True, "put the model's special tokens around a text")
    word_special_tokens: bool = setting(
        True, "put them around a list of words that are tokens too (is_tokenized), which -no_special_token prevents"
    )
    positions: bool = setting(True, "tell the model where in the text a token stands")
    normalize: bool | None = setting(None, "bring vectors to length 1 (default: as the model says)")
    dimensions: int | None = setting(None, "keep only the first numbers of each vector", rule=AT_LEAST_ONE)
    max_length: int | None = setting(
        None, "tokens of a text that are read, special ones included (default: as many as the model can)", rule=_LENGTH
    )
    truncate: bool = setting(True, "cut texts that are longer than that; otherwise they are refused")
    split: bool = setting(
        False,
        "read texts that are longer than --max-length in pieces, and take the mean of their vectors, by their tokens",
    )
    fixed_length: bool = setting(
        False, "pad all texts, and the vectors of their tokens, to --max-length rather than to the longest of a batch"
    )
    cased: bool | None = setting(
        None, "tell capital letters from small ones, where the files do not say; of a vocab.txt alone"
    )
    pair_separator: str | None = setting(
        None,
        "what stands between the two texts of a pair, such as ' ||| ' (default: texts are no pairs)",
        metavar="TEXT",
    )
    prompt: str | None = setting(
        None, "what is put before every text: the name of one of the model's prompts, or the text itself, which ends with a space or a colon: "
        "'query: ' (default: as the model says)",
        metavar="NAME",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class ComputingSettings:
    """On what, and in which numbers, vectors are computed."""

    runtime: str = setting("onnx", "what computes: onnx or torch", rule=one_of(*RUNTIMES))
    precision: str = setting(
        Precision.FP32.value, "in which numbers: fp32, fp16, bf16 (torch alone) or int8 (onnx alone)",
        rule=one_of(*(precision.value for precision in Precision)),
    )  # fmt: skip
    device_map: list[str] = setting(
        [], "device of each worker, going round: cpu, a GPU's number, or auto for the GPU with most memory free "
        "(default: auto, and the CPU where there is no GPU)",
        metavar="DEVICE",
    )  # fmt: skip
    gpu_memory_fraction: float | None = setting(
        None, "largest part of a GPU's memory that a worker takes", rule=_FRACTION
    )
    compile: bool = setting(False, "compile the model (torch alone)")
    run_tokens: int | None = setting(
        None, "tokens, padding included, that are computed at once (default: as many as a batch may have)",
        rule=POSITIVE,
    )  # fmt: skip
    calibrate: bool = setting(
        True,
        "measure at the first start of a model on a machine how large its batches should be, unless --max-batch-cost says so",
    )
    cache: str | None = setting(
        None,
        "folder of graphs that were made and of what was measured (default: weir in the user's cache folder)",
        metavar="DIR",
    )

    max_cache_size: int = setting(
        16 << 30,
        "graphs in that folder, in bytes: when a server has started, those that nobody has used for longest and nobody uses now are removed",
        rule=AT_LEAST_ZERO,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.precision == "bf16" and self.runtime != "torch":
            raise SettingsError(f"precision='bf16', runtime={self.runtime!r}: only torch computes in bf16")
        if self.precision == "int8" and self.runtime != "onnx":
            raise SettingsError(f"precision='int8', runtime={self.runtime!r}: only onnx computes in int8")
        if self.compile and self.runtime != "torch":
            raise SettingsError(f"compile=True, runtime={self.runtime!r}: only torch compiles")


@dataclass(frozen=True)
class CallerSettings:
    """What callers may ask for. Sizes are in texts."""

    max_texts: int = setting(100_000, "texts that one request may have", rule=AT_LEAST_ONE)

    def __post_init__(self) -> None:
        check(self)


MODEL_PARTS = {"Text": TextSettings, "Computing": ComputingSettings}
