"""Models without a network: a table with a vector for each token, of which a text gets the mean (StaticEmbedding of sentence-transformers, model2vec)."""

from pathlib import Path

import numpy as np

from weir.errors import SettingsError
from weir.text_models.checkpoint.config import Architecture
from weir.text_models.checkpoint.families import STATIC
from weir.text_models.checkpoint.tensors import Array
from weir.text_models.checkpoint.weights import Store, Weights

MODULE = "StaticEmbedding"
MAX_LENGTH = 32_768  # tokens of a text; the table has no limit of its own
_TABLES = ("embedding.weight", "embeddings")  # of sentence-transformers, and of model2vec


class StaticStore(Store):
    """The files of such a model. model2vec may state for each token a row of a smaller table, and a factor."""

    def __init__(self, directory: Path, *, allow_pickle: bool = False) -> None:
        """Raises SettingsError naming the file, and the table that it lacks or that does not fit."""
        super().__init__(directory, allow_pickle=allow_pickle)
        self._name = next((name for name in _TABLES if name in self.files), "")
        if (
            not self._name
            or len(self.files[self._name].shape(self._name)) != 2
            or not self.files[self._name].floating(self._name)
        ):
            raise SettingsError(
                f"{self.paths[0]}: must hold a table of floating-point numbers called {' or '.join(map(repr, _TABLES))}"
            )
        rows = {len(each) for each in (self._stored("mapping"), self._stored("weights")) if each is not None}
        if len(rows) > 1:
            raise SettingsError(
                f"{self.paths[0]}: 'mapping' and 'weights' must have as many numbers as there are tokens"
            )

    def architecture(self) -> Architecture:
        """Return the sizes of the table: that of a network without layers."""
        table = self._table()
        return Architecture(
            STATIC, hidden_size=table.shape[1], layers=1, heads=1, intermediate_size=1, vocab_size=len(table), max_length=MAX_LENGTH,
            type_vocab_size=0, position_table=False, order=STATIC,
        )  # fmt: skip

    def weights(self, architecture: Architecture) -> Weights:
        """Return the vectors of the tokens."""
        return Weights({"table": {"table": self._table()}}, {"embeddings.word": "table"})  # type: ignore[dict-item]  # a mapping from names to arrays, as a file is

    def _stored(self, name: str) -> Array | None:
        return self.files[name][name] if name in self.files else None

    def _table(self) -> Array:
        table, mapping, weights = self.files[self._name][self._name], self._stored("mapping"), self._stored("weights")
        if mapping is not None:
            if len(mapping) and not 0 <= int(mapping.min()) <= int(mapping.max()) < len(table):
                raise SettingsError(
                    f"{self.paths[0]}: 'mapping' must name rows of {self._name!r}, which has {len(table)}"
                )
            table = table[mapping]
        if weights is None:
            return table
        if len(weights) != len(table):
            raise SettingsError(f"{self.paths[0]}: 'weights' has {len(weights)} numbers, there are {len(table)} tokens")
        scaled: Array = table * np.asarray(weights, np.float32)[:, None]
        return scaled
