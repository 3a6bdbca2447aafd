"""What the server itself must know of a model of texts: its tokenizer, its sizes. The workers have the weights."""

from typing import TYPE_CHECKING

from weir.embedding.choosing import chosen_recipe
from weir.embedding.encoder import Encoder
from weir.embedding.runtime.reading import dimensions_in, read_for
from weir.embedding.said import Said
from weir.embedding.tokens.options import TokenizerOptions
from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.manager.service import Service


class Front:
    """Read from the model's directory. Raises SettingsError naming the file, or the setting, and the rule."""

    def __init__(self, said: Said) -> None:
        text = said.text
        checkpoint = read_for(said.computing.runtime, said.directory)
        if text.max_length is not None and text.max_length > checkpoint.architecture.max_length:
            raise SettingsError(
                f"{said.name}: max_length={text.max_length}: the model reads at most {checkpoint.architecture.max_length} tokens"
            )
        self.name = said.name
        self.recipe = chosen_recipe(
            checkpoint, pooling=text.pooling, layers=text.layers or None, mask_special=text.mask_special,
            positions=text.positions, normalize=text.normalize, dimensions=text.dimensions,
            precision=said.computing.precision,
        )  # fmt: skip
        self.dimensions = dimensions_in(checkpoint, self.recipe)
        self.max_length = text.max_length or checkpoint.max_length
        self._text = text
        self._tokenizer = checkpoint.tokenizer(
            TokenizerOptions(
                lowercase=None if text.cased is None else not text.cased, special_tokens=text.special_tokens,
                pair_separator=text.pair_separator,
            )
        )  # fmt: skip

    def encoder(self, service: "Service") -> Encoder:
        """Return what encodes texts by `service`."""
        return Encoder(
            service, self._tokenizer, dimensions=self.dimensions, max_length=self.max_length, name=self.name,
            truncate=self._text.truncate, normalize=self.recipe.normalize,
            fixed_length=self.max_length if self._text.fixed_length else None,
        )  # fmt: skip
