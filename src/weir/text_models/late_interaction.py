"""Late interaction (ColBERT): a query and a document each become vectors of their tokens, and the score of both is MaxSim.

What a checkpoint states of it (in the files of PyLate, of sentence-transformers' MultiVectorEncoder, or of Stanford's ColBERT), the tokens that make queries and
documents, and the score. Sources: Khattab and Zaharia 2020, equation 3; PyLate and MultiVectorEncoder for the markers, the expansion of queries and what does not
count in documents.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError
from weir.text_models.formats import JsonDocument, read_optional

QUERY = -1  # in place of where a second text begins: the tokens are those of a query of late interaction
MAXSIM, MEAN_MAXSIM = "maxsim", "meanmaxsim"  # the names of the scores


@dataclass(frozen=True)
class LateInteraction:
    """How texts become queries and documents.

    Attributes:
        query, document: the text that is put before each; what asks for a query is this prompt.
        query_marker, document_marker: the beginning of that text which is one token, as the files say; "" for none.
        query_length: the most tokens of a query; None for as many as the model reads.
        document_length: the same of a document.
        expands_to: a query is filled up to this many tokens; 0 for none.
        expansion: the token that fills it up; None for the mask.
        attends: whether other tokens attend to those that fill it up.
        skipped: tokens of a document that have no vector.
        mean: whether the score is divided by the number of vectors of the query.
    """

    query: str
    document: str
    query_marker: str = ""
    document_marker: str = ""
    query_length: int | None = None
    document_length: int | None = None
    expands_to: int = 0
    expansion: str | None = None
    attends: bool = False
    skipped: tuple[str, ...] = ()
    mean: bool = False

    @property
    def similarity(self) -> str:
        """The name of the score."""
        return MEAN_MAXSIM if self.mean else MAXSIM


def maxsim(query: NDArray[Any], document: NDArray[Any], *, mean: bool) -> NDArray[np.float32]:
    """Return the score [1] of the vectors [tokens, dimensions] of a query and of a document: the sum, or the `mean`, over the vectors of the query of the
    greatest product with one of the document; 0 if one of both has none."""
    if not len(query) or not len(document):
        return np.zeros(1, np.float32)
    best = (query @ document.T).max(axis=1).astype(np.float64)
    return np.array([best.mean() if mean else best.sum()], np.float32)


class LateRole(NamedTuple):
    """The text that stands before a query, or before a document.

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


STANFORD = "HF_ColBERT"  # the architecture in config.json
METADATA = "artifact.metadata"
MASK_MODULE = "MultiVectorMask"
_PYLATE = "pylate.models.Dense"  # the beginning of the type of its dense layers
_LENGTH = 32  # tokens of a query where the files state none, as in PyLate and Stanford's ColBERT
_DOCUMENT_LENGTH = 180  # the same of a document, in PyLate
_PUNCTUATION = tuple(string.punctuation)


def read_pylate(settings: JsonDocument, types: list[str], prompts: Mapping[str, str]) -> LateInteraction | None:
    """Return what config_sentence_transformers.json states, for the modules of these types; None if PyLate did not save it."""
    if "query_prefix" not in settings and not any(kind.startswith(_PYLATE) for kind in types):
        return None
    markers = [
        "" if settings.values.get(name) == "" else settings.text(name, default=default)
        for name, default in (("query_prefix", "[Q] "), ("document_prefix", "[D] "))
    ]
    length, expands = (
        settings.integer("query_length", default=_LENGTH),
        settings.switch("do_query_expansion", default=True),
    )
    return LateInteraction(
        query=markers[0] + prompts.get("query", "").removeprefix(markers[0]),
        document=markers[1] + prompts.get("document", "").removeprefix(markers[1]),
        query_marker=markers[0],
        document_marker=markers[1],
        query_length=length,
        document_length=settings.integer("document_length", default=_DOCUMENT_LENGTH),
        expands_to=length if expands else 0,
        attends=expands and settings.switch("attend_to_expansion_tokens"),
        skipped=_words(settings, "skiplist_words", _PUNCTUATION),
        mean=_is_mean(settings),
    )


def read_multi_vector(
    settings: JsonDocument, network: JsonDocument, mask: JsonDocument, prompts: Mapping[str, str]
) -> LateInteraction:
    """Return what a MultiVectorEncoder states: in config_sentence_transformers.json, in sentence_bert_config.json, and in the configuration of its mask."""
    for key, rule in (("skiplist_tasks", ["document"]), ("keep_only_token_ids", None)):
        if mask.values.get(key, rule) != rule:
            raise mask.wrong(key, mask.values[key], f"must be {rule}")
    expansion = JsonDocument(network.path, msgspec.convert(network.values.get("query_expansion") or {}, dict[str, Any]))
    width = expansion.integer("length") if expansion.values else 0
    fixed = not expansion.values or expansion.text("strategy") == "fixed"
    stated = network.integer("query_length") if "query_length" in network else None
    return LateInteraction(
        query=prompts.get("query", ""),
        document=prompts.get("document", ""),
        query_length=width if width and fixed else stated,
        document_length=network.integer("document_length") if "document_length" in network else None,
        expands_to=width,
        expansion=expansion.text("token") if "token" in expansion else None,
        attends=expansion.switch("attend"),
        skipped=_words(mask, "skiplist_words", ()),
        mean=_is_mean(settings),
    )


def read_stanford(directory: Path) -> LateInteraction:
    """Return what the file of Stanford's ColBERT next to the weights states; its defaults hold where there is none."""
    stated = read_optional(directory / METADATA)
    query, document = (
        stated.text(name, default=default) + " "
        for name, default in (("query_token_id", "[unused0]"), ("doc_token_id", "[unused1]"))
    )
    length = stated.integer("query_maxlen", default=_LENGTH)
    return LateInteraction(
        query,
        document,
        query,
        document,
        query_length=length,
        expands_to=length,
        document_length=stated.integer("doc_maxlen") if "doc_maxlen" in stated else None,
        attends=stated.switch("attend_to_mask_tokens"),
        skipped=_PUNCTUATION if stated.switch("mask_punctuation", default=True) else (),
    )


def _words(settings: JsonDocument, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(msgspec.convert(settings.values.get(key, default), list[str]))
    except msgspec.ValidationError as error:
        raise SettingsError(f"{settings.path}: {key} must be a list of texts: {error}") from None


def _is_mean(settings: JsonDocument) -> bool:
    return str(settings.values.get("similarity_fn_name")).lower() == MEAN_MAXSIM
