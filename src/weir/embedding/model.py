"""The model that workers run: texts, or the tokens of texts, in; vectors out."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from weir.embedding.recipe import OF_SPECIAL_TOKENS, Pooling, chosen_recipe
from weir.embedding.runtime import Computing, open_runtime
from weir.embedding.runtime.devices import CPU, check_devices, may_use_gpu
from weir.embedding.texts import Tokens
from weir.model import Measure, Model

if TYPE_CHECKING:
    from weir.embedding.checkpoint.reading import Checkpoint
    from weir.embedding.padding import Read
    from weir.embedding.raw import Texts
    from weir.embedding.recipe import Recipe
    from weir.embedding.runtime import Runtime

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
        from weir.embedding.prompts import prompt_of_server
        from weir.embedding.raw import Texts
        from weir.embedding.tokens.options import TokenizerOptions

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
        from weir.embedding.runtime.devices import device_of

        if self._runtime is None:
            device = device_of(self.computing.kind, self.devices, self.worker_index)
            self._runtime = open_runtime(self._checkpoint, self._recipe, self.computing, device)
        if self.run_tokens is None:
            self.run_tokens = RUN_TOKENS_CPU if self._runtime.device == CPU else RUN_TOKENS_GPU

    def preprocess_batch(self, items: list[Any]) -> list[Any]:
        """Return the token ids of each item, which is tokenised if it is not yet; InvalidRequest in the place of a wrong one."""
        return self._texts.read(items)

    def predict(self, batch: "list[Read]") -> list[Any]:
        """Encode texts of similar length together, so that little is filled up."""
        from weir.embedding.padding import filled, runs

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
