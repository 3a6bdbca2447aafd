"""The model that workers run: texts, or the tokens of texts, in; vectors out.

Items become token ids, texts of like length run together, and shorter texts are filled up.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from weir.embedding.recipe import OF_SPECIAL_TOKENS, Pooling, chosen_recipe
from weir.embedding.runtime import CPU, Computing, check_devices, may_use_gpu, open_runtime
from weir.embedding.texts import Tokens
from weir.errors import InvalidRequest
from weir.model import Measure, Model

if TYPE_CHECKING:
    from weir.embedding.checkpoint.reading import Checkpoint
    from weir.embedding.recipe import Recipe
    from weir.embedding.runtime import Runtime
    from weir.embedding.tokens.tokenizer import Tokenizer


# On a CPU larger runs gain nothing, on a GPU smaller ones are slower per text.
RUN_TOKENS_CPU, RUN_TOKENS_GPU = 512, 16384
BYTES_PER_TOKEN = 4  # of ordinary English

TEXT_SCHEMA = {
    "anyOf": [
        {"type": "string", "description": "a text"},
        {"type": "array", "items": {"type": "string"}, "description": "a text as words"},
        {"type": "array", "items": {"type": "integer"}, "description": "a text as token ids, special ones included"},
        {
            "type": "object",
            "properties": {
                "text": {
                    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": ["string", "integer"]}}],
                    "description": "a text, its words, or its token ids",
                },
                "pair": {"type": "string", "description": "a second text, which belongs to the first"},
                "is_tokenized": {"type": ["boolean", "null"], "description": "true: words are tokens as they are"},
                "dimensions": {"type": ["integer", "null"], "minimum": 1},
                "truncate": {"type": ["boolean", "null"]},
                "prompt": {"type": ["string", "null"]},
            },
            "required": ["text"],
            "description": "a text, or two that belong together; at a server of texts also what is wanted of them",
        },
    ]
}
VECTOR_SCHEMA = {
    "type": "array",
    "items": {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]},
}


class TextEncoder(Model):
    """A sentence encoder from a directory in Hugging Face's layout.

    An item is `Tokens`, or a text: a string, words, token ids, in Python a tuple of two strings, elsewhere an object with `text` and `pair`; of the content type
    application/octet-stream, token ids as int32, little-endian. An answer is a vector, or with the pooling `none` a list of them, one for each token.

    `pooling`, `layers`, `normalize` and `max_length` are the model's own where they are None. `devices` has one for each worker (auto, cpu, cuda, cuda:1), going round;
    `threads` are for one run on a CPU. `fixed_length` fills every text up to `max_length` tokens, and with zeros the vectors of its tokens.
    With `hide_special` no token attends to the first and the last, unless the pooling reads one of them.
    `window` is that of the hierarchical pooling. `run_tokens` bounds one run of the network, in tokens with
    what is filled up, which counts `padding_cost` times.
    """

    # Checked item by item in `preprocess_batch`, which says what is wrong in words.
    Input: ClassVar[Any] = Annotated[Any, msgspec.Meta(extra_json_schema=TEXT_SCHEMA)]
    Output: ClassVar[Any] = Annotated[Any, msgspec.Meta(extra_json_schema=VECTOR_SCHEMA)]
    plain_texts: ClassVar[bool] = True
    padded: ClassVar[bool | None] = True
    # Short, so that they fit where long texts are refused.
    examples: ClassVar[Sequence[Any]] = ("First do it", "then do it right", "then do it better")

    def __init__(
        self, directory: str, *, pooling: str | None = None, layers: Sequence[int] | None = None, mask_special: bool = False,
        positions: bool = True, normalize: bool | None = None, dimensions: int | None = None, precision: str = "fp32",
        runtime: str = "onnx", devices: Sequence[str] = (), threads: int = 1, compiled: bool = False,
        gpu_memory_fraction: float | None = None, max_length: int | None = None, fixed_length: bool = False,
        truncate: bool = True, special_tokens: bool = True, cased: bool | None = None, pair_separator: str | None = None,
        run_tokens: int | None = None, padding_cost: float = 1.0, cache: str | None = None, window: int | None = None,
        prompt: str | None = None, hide_special: bool = False,
    ) -> None:  # fmt: skip
        check_devices(devices)
        self.directory = Path(directory)
        self.chosen: dict[str, Any] = {
            "pooling": pooling, "layers": layers, "mask_special": mask_special, "positions": positions,
            "normalize": normalize, "dimensions": dimensions, "precision": precision, "window": window,
        }  # fmt: skip
        self.computing = Computing(
            runtime, threads=threads, cache=None if cache is None else Path(cache), compiled=compiled,
            gpu_memory_fraction=gpu_memory_fraction,
        )  # fmt: skip
        self.devices = list(devices)
        self.max_length = max_length
        self.fixed_length = fixed_length
        self.hide_special = hide_special
        self.truncate = truncate
        self.reading: dict[str, Any] = {
            "lowercase": None if cased is None else not cased,
            "special_tokens": special_tokens,
            "pair_separator": pair_separator,
        }
        self.prompt = prompt
        self.run_tokens = run_tokens
        self._padding_cost = padding_cost
        self._checkpoint: Checkpoint
        self._recipe: Recipe
        self._hides: bool
        self._texts: Texts
        self._runtime: Runtime | None = None

    def load_shared(self) -> None:
        """Read the model's files, make its graph if there is none yet, and open it where that leaves no thread behind."""
        from weir.embedding.checkpoint.reading import read_for
        from weir.embedding.texts import TokenizerOptions, prompt_of_server

        self._checkpoint = checkpoint = read_for(self.computing.kind, self.directory)
        self._recipe = chosen_recipe(checkpoint, **self.chosen)
        self._hides = self.hide_special and not set(self._recipe.poolings) & set(OF_SPECIAL_TOKENS)
        self._longest = min(self.max_length or checkpoint.max_length, checkpoint.architecture.max_length)
        self._pad_id = checkpoint.architecture.pad_id
        prompt = prompt_of_server(self.prompt, checkpoint.prompts)
        tokenizer = checkpoint.tokenizer(TokenizerOptions(**self.reading, prompt=prompt))
        vocabulary = checkpoint.architecture.vocab_size
        self._texts = Texts(tokenizer, max_length=self._longest, truncate=self.truncate, vocabulary=vocabulary)
        if self.computing.threads == 1 and not self.computing.compiled and not may_use_gpu(self.devices):
            self._runtime = open_runtime(checkpoint, self._recipe, self.computing, CPU)

    def load(self) -> None:
        """Open the model on this worker's device, if it is not open yet."""
        from weir.embedding.runtime import device_of

        if self._runtime is None:
            device = device_of(self.computing.kind, self.devices, self.worker_index)
            self._runtime = open_runtime(self._checkpoint, self._recipe, self.computing, device)
        if self.run_tokens is None:
            self.run_tokens = RUN_TOKENS_CPU if self._runtime.device == CPU else RUN_TOKENS_GPU

    def preprocess_batch(self, items: list[Any]) -> list[Any]:
        """Return the token ids of each item, which is tokenised if it is not yet; InvalidRequest in the place of a wrong one."""
        return self._texts.read(items)

    def predict(self, batch: "list[TokenIds]") -> list[Any]:
        """Encode texts of similar length together, so that little is filled up."""

        assert self._runtime is not None
        answers: list[Any] = [None] * len(batch)
        fixed = self._longest if self.fixed_length else None
        lengths = [fixed or len(text.ids) for text in batch]
        for places in runs(lengths, self.run_tokens or 1, self._padding_cost):
            texts = [batch[place] for place in places]
            inputs = filled(
                texts, pad_id=self._pad_id, mask_special=self._recipe.mask_special, length=fixed, hide_special=self._hides,
            )  # fmt: skip
            for place, vector in zip(places, self._runtime.run(*inputs), strict=True):
                answers[place] = vector
        if self._recipe.pooling is Pooling.NONE:
            answers = [self._of_tokens(vectors, len(text.ids)) for vectors, text in zip(answers, batch, strict=True)]
        return answers

    def _of_tokens(self, vectors: Any, count: int) -> Any:
        """Cut off what was filled up, or with a fixed length make it zeros."""
        if not self.fixed_length:
            return vectors[:count]
        vectors[count:] = 0
        return vectors

    @classmethod
    def measure(cls, item: Any) -> Measure:
        """Say how many tokens an item has: exactly if they are known, else estimated from its length."""
        return Measure(cost=float(tokens_in(item)))


def tokens_in(item: Any) -> int:
    """Return how many tokens `item` has; of a text, about how many."""
    if isinstance(item, Tokens):
        return max(len(item.ids) // 4, 1)
    if isinstance(item, (bytes, bytearray, memoryview)):
        return max(len(item) // 4, 1)
    if isinstance(item, str):
        return 3 + len(item) // BYTES_PER_TOKEN
    if isinstance(item, dict):
        return sum(map(tokens_in, item.values())) or 1
    if isinstance(item, (list, tuple)):
        return sum(3 + len(part) // BYTES_PER_TOKEN if isinstance(part, str) else 1 for part in item) or 1
    return 1


class Inputs(NamedTuple):
    """What a runtime takes, all [texts, length]: see Runtime.run."""

    ids: NDArray[Any]
    mask: NDArray[Any]
    types: NDArray[Any]
    pool: NDArray[Any]


class TokenIds(NamedTuple):
    """One text's token ids, and where its second text begins: 0 if it has none."""

    ids: NDArray[Any]
    second: int


def runs(lengths: Sequence[int], run_tokens: int, padding_cost: float = 1.0) -> Iterator[list[int]]:
    """Cut texts of these lengths into runs; yield the places of each, texts of like length together, short ones first.

    A run of n texts, filled up to its longest, has at most `run_tokens` tokens, where one of padding counts `padding_cost`; a text that is
    longer than that runs alone.
    """
    run: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        longest = lengths[place]
        tokens += longest
        if run and tokens + padding_cost * (longest * (len(run) + 1) - tokens) > run_tokens:
            yield run
            run, tokens = [], longest
        run.append(place)
    if run:
        yield run


def filled(
    texts: Sequence[TokenIds], *, pad_id: int, mask_special: bool, length: int | None = None, hide_special: bool = False
) -> Inputs:
    """Return the arrays of one run, filled up with `pad_id` to the longest text, or to `length` tokens.

    With `mask_special` the first token and the last of a text do not count in the pooling, unless it has no others. With `hide_special` they,
    and the one before the second text, are not there for the other tokens either: they keep their places, and nobody looks at them.
    """
    shape = len(texts), length or max(len(text.ids) for text in texts)
    ids = np.full(shape, pad_id, np.int32)
    mask, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    pool = np.zeros(shape, np.float32)
    for row, (tokens, second) in enumerate(texts):
        count = len(tokens)
        ids[row, :count] = tokens
        mask[row, :count] = 1
        if second:
            types[row, second:count] = 1
        inner = slice(1, count - 1) if mask_special and count > 2 else slice(0, count)
        pool[row, inner] = 1
        if hide_special and count > 2:
            mask[row, [0, count - 1, *([second - 1] if second else [])]] = 0
            pool[row] *= mask[row]
    return Inputs(ids, mask, types, pool)


KINDS = "must be a text, a list of words or of token ids, or an object with `text` and perhaps `pair`"


class Texts:
    """Reads the items of a model: `vocabulary` is the number of its tokens, `max_length` the most that a text may have."""

    def __init__(self, tokenizer: "Tokenizer", *, max_length: int, truncate: bool, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._truncate = truncate
        self._vocabulary = vocabulary

    def read(self, items: Sequence[Any]) -> list[TokenIds | InvalidRequest]:
        """Return what each item is, in order; an error in the place of one that is wrong."""
        results: list[Any] = [self._tokens(item) for item in items]
        texts = [(place, _text(items[place])) for place, result in enumerate(results) if result is None]
        good = [(place, text) for place, text in texts if not isinstance(text, InvalidRequest)]
        results_of = dict(texts)
        if good:
            results_of |= zip([place for place, _ in good], self._tokenized([text for _, text in good]), strict=True)
        for place, result in results_of.items():
            results[place] = result
        return results

    def _tokens(self, item: Any) -> TokenIds | InvalidRequest | None:
        """Return what an item of token bytes is; None for any other."""
        ids, second = item if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], bytes) else (item, 0)
        if not isinstance(ids, bytes):
            return None
        return self._checked(Tokens(ids, second))

    def _tokenized(self, texts: list[Any]) -> "list[TokenIds | InvalidRequest]":
        found = self._tokenizer.encode(texts, max_length=self._max_length, truncate=self._truncate)
        return [
            each if isinstance(each, InvalidRequest) else TokenIds(np.frombuffer(each.ids, "<i4"), each.second)
            for each in found
        ]

    def _checked(self, tokens: Tokens) -> TokenIds | InvalidRequest:
        if not tokens.ids or len(tokens.ids) % 4:
            return InvalidRequest(
                f"token ids of {len(tokens.ids)} bytes: must be one or more, each an int32 of 4 bytes"
            )
        ids = np.frombuffer(tokens.ids, "<i4")
        if len(ids) > self._max_length:
            return InvalidRequest(f"{len(ids)} token ids: must be at most {self._max_length}")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            return InvalidRequest(f"token ids from {ids.min()} to {ids.max()}: must be 0 to {self._vocabulary - 1}")
        return TokenIds(ids, tokens.second)


def _text(item: Any) -> Any:
    """Return the item as one of the forms of Text."""
    if isinstance(item, dict):
        if not {"text"} <= item.keys() <= {"text", "pair"} or not all(isinstance(part, str) for part in item.values()):
            return InvalidRequest(f"an object with {sorted(map(str, item))}: {KINDS}, all strings")
        return (item["text"], item["pair"]) if "pair" in item else item["text"]
    if isinstance(item, (str, list, tuple)):
        return item
    return InvalidRequest(f"an item of type {type(item).__name__}: {KINDS}")
