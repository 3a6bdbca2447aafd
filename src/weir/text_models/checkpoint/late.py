"""Read what a checkpoint states of late interaction: in the files of PyLate, of sentence-transformers' MultiVectorEncoder, or of Stanford's ColBERT."""

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from weir.errors import SettingsError
from weir.text_models.formats import JsonDocument, read_document
from weir.text_models.late_interaction import MEAN_MAXSIM, LateInteraction

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
    path = directory / METADATA
    stated = read_document(path) if path.is_file() else JsonDocument(path, {})
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
