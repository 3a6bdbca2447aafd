"""Chains that a load call describes: there is no file of them, and no code in them, only models that run."""

from collections.abc import Mapping
from typing import Any

from weir.errors import InvalidRequest, ModelNotFound, brief
from weir.manager.naming import NAME
from weir.manager.repository.document import ReadSettings, make_document
from weir.manager.repository.ensemble import ENSEMBLE
from weir.manager.repository.folder import Around
from weir.manager.spec import ModelReading, ModelToServe

MOST = 1000  # that are remembered


class InlineConfigSource:
    """A Repository that knows what it was told: the configuration of a chain, by name, for as long as the server runs."""

    def __init__(self, read_settings: ReadSettings, around: Around) -> None:
        self._read_settings = read_settings
        self._around = around
        self._said: dict[str, Mapping[str, Any]] = {}

    def names(self) -> list[str]:
        """Return those that it was told of."""
        return list(self._said)

    def takes(self, config: Mapping[str, Any] | None) -> bool:
        """Tell whether `config` is that of a chain."""
        return config is not None and config.get("platform") == ENSEMBLE

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """Return the chain that `config` describes, or that it was told of before. Raises SettingsError as for a file."""
        if files:
            raise InvalidRequest(f"model {brief(name)}: a chain has no files")
        if not NAME.fullmatch(name):
            raise ModelNotFound(f"model {brief(name)}: must be of letters, digits and . _ ~ -")
        if name not in self._said and len(self._said) >= MOST:
            raise InvalidRequest(f"model {name!r}: {MOST} chains are described already, which is the most there may be")
        said = {**self._said.get(name, {}), **(config or {})}
        document = make_document(said, name, name, self._read_settings)
        self._said[name] = said
        model = ModelToServe(
            "", name, dict(document.params), list(document.route), self._around(document.settings), version="1",
            platform=ENSEMBLE, attributes=document.attributes,
        )  # fmt: skip
        return ModelReading([model], document.default)
