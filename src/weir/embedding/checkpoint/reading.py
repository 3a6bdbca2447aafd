"""A directory with a model of texts, understood: `read_checkpoint`."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from weir.embedding.recipe import Pooling
from weir.embedding.tokens.options import AS_THE_FILES_SAY, TokenizerOptions
from weir.embedding.tokens.tokenizer import Tokenizer
from weir.errors import SettingsError

from .architecture import Architecture, read_architecture, read_family
from .documents import read_document
from .layout import Dense, Layout, read_layout
from .names import POOLER
from .weights import Store, Weights

CONFIG = "config.json"


@dataclass(frozen=True)
class Checkpoint:
    """A model's directory: what is computed, with which weights, of which texts.

    `layers` are those that are pooled unless the user says otherwise; `max_length` is the most tokens of a text that are read, special ones
    included; `prompts` are texts to put before a text, by name, and `default_prompt` the name of the one that sentence-transformers
    would put before every text. `dense` come behind the pooling, before the normalisation.
    """

    directory: Path
    architecture: Architecture
    normalize: bool
    layers: tuple[int, ...]
    max_length: int
    prompts: dict[str, str]
    default_prompt: str | None
    dense: tuple[Dense, ...]
    layout: Layout
    store: Store

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        """The poolings that the files ask for, joined in this order; none for a plain model."""
        return self.layout.pooled or ()

    def tokenizer(self, options: TokenizerOptions = AS_THE_FILES_SAY) -> Tokenizer:
        """Return the tokenizer. Raises SettingsError if its files are missing, broken or do not fit the weights."""
        if options.prompt is None and self.default_prompt is not None:
            options = replace(options, prompt=self.prompts[self.default_prompt])
        if self.layout.lowercase:
            options = replace(options, lowercase_text=True)
        return Tokenizer(self.layout.network, options, vocab_size=self.architecture.vocab_size)

    def weights(self) -> Weights:
        """Return the weights by canonical name, float32, mapped from the files and read when looked at."""
        return self._weights

    def content_hash(self) -> str:
        """Return a hash of all that decides the vectors, other than the recipe: weights, configuration, pooling. Reads the weights once."""
        digest = hashlib.blake2b(digest_size=16)
        for path in (self.layout.network / CONFIG, *self.store.paths, *self.layout.files):
            digest.update(f"{path.relative_to(self.directory)}:{path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        return digest.hexdigest()

    @cached_property
    def _weights(self) -> Weights:
        return self.store.weights(self.architecture)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Understand the directory of a model: Hugging Face's layout, or that of sentence-transformers.

    Sizes, names and shapes are checked; values are not read. Raises SettingsError naming the file and the rule.
    """
    directory = Path(directory).resolve()
    layout = read_layout(directory)
    if not (layout.network / CONFIG).is_file() and list(directory.glob("*.ckpt.index")):
        raise SettingsError(
            f"{directory}: is a TensorFlow checkpoint: convert it with `weir embed convert {directory} TARGET`"
        )
    config = read_document(layout.network / CONFIG)
    family = read_family(config)
    store = Store(layout.network)
    architecture = read_architecture(
        config, has_pooler=store.stored.has(POOLER), has_classifier=store.stored.head(family) is not None
    )
    store.weights(architecture)
    _check_dense(layout, architecture)
    return Checkpoint(
        directory=directory,
        architecture=architecture,
        normalize=layout.normalize,
        layers=layout.layers(architecture.layers),
        max_length=longest_text(layout, architecture),
        prompts=layout.prompts,
        default_prompt=layout.default_prompt,
        dense=layout.dense,
        layout=layout,
        store=store,
    )


def longest_text(layout: Layout, architecture: Architecture) -> int:
    """Return the most tokens of a text that are read: what the files say, and at most what the position embeddings reach."""
    longest = layout.max_length
    path = layout.network / "tokenizer_config.json"
    if longest is None and path.is_file():
        # Files say 1e30 where the tokenizer has no bound of its own.
        said = read_document(path).values.get("model_max_length")
        longest = said if isinstance(said, int) and said > 2 else None
    return min(longest or architecture.max_length, architecture.max_length)


def _check_dense(layout: Layout, architecture: Architecture) -> None:
    """Each dense layer must take what the one before gives; a pooling may give a multiple of the hidden size."""
    width = architecture.hidden_size * len(layout.pooled or (None,))
    for layer in layout.dense:
        if layer.weight.shape[1] != width:
            raise SettingsError(
                f"{layout.network}: a dense layer takes vectors of {layer.weight.shape[1]} numbers, what it gets has {width}"
            )
        width = layer.weight.shape[0]
