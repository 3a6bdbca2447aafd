"""The tokens of queries and documents of late interaction, given how a checkpoint makes them (see late_interaction.py)."""

from collections.abc import Mapping
from typing import NamedTuple

from weir.errors import SettingsError
from weir.text_models.late_interaction import LateInteraction


class LateRole(NamedTuple):
    """What stands before a query, or before a document.

    Attributes:
        prompt: what asks for it.
        text: what is put before a text.
        marker: what is put behind the first special tokens: one token id, or none.
        length: the most tokens; None for as many as the model reads.
    """

    prompt: str
    text: str
    marker: tuple[int, ...]
    length: int | None


class LateTokens:
    """How one tokenizer makes queries and documents.

    Attributes:
        query, document: see LateRole.
        filling: the token id that fills up a query; -1 for none.
        expands_to: see LateInteraction.
        skipped: the ids of tokens that have no vector in a document.
    """

    def __init__(self, late: LateInteraction, vocabulary: Mapping[str, int], mask: int | None, unknown: int) -> None:
        """Raises SettingsError if the vocabulary lacks the token that fills up queries."""
        self.query = _role(late.query, late.query_marker, late.query_length, vocabulary)
        self.document = _role(late.document, late.document_marker, late.document_length, vocabulary)
        self.expands_to = late.expands_to
        filling = vocabulary.get(late.expansion) if late.expansion is not None else mask
        if late.expands_to and filling is None:
            raise SettingsError(
                f"the vocabulary has no token {late.expansion or '[MASK]'!r}, with which queries are filled up"
            )
        self.filling = -1 if filling is None or not late.expands_to else filling
        self.skipped = frozenset(vocabulary[word] for word in late.skipped if vocabulary.get(word, unknown) != unknown)

    def is_query(self, prompt: str | None) -> bool:
        """Return whether the texts with this prompt are queries."""
        return prompt == self.query.prompt != self.document.prompt

    def before(self, prompt: str) -> str:
        """Return what is put before a text with this prompt."""
        return (
            self.query.text
            if self.is_query(prompt)
            else self.document.text
            if prompt == self.document.prompt
            else prompt
        )


def _role(prompt: str, marker: str, length: int | None, vocabulary: Mapping[str, int]) -> LateRole:
    """Return a role. A marker is a token as it stands, with a space behind it (PyLate), or without one; one that the vocabulary lacks is a text."""
    known = next((vocabulary[each] for each in (marker, marker.rstrip()) if marker and each in vocabulary), None)
    if known is None:
        return LateRole(prompt, prompt, (), length)
    return LateRole(prompt, prompt.removeprefix(marker), (known,), length)
