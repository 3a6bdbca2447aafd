"""Scores of a classifier: probabilities of labels, and the ranking of documents. What every protocol with scores shares."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy
from numpy.typing import NDArray

from weir.errors import InvalidRequest, brief
from weir.text_models.late_interaction import MAXSIM, MEAN_MAXSIM
from weir.text_models.texts import TextOutput
from weir.text_server.exchange import TextExchange, check_text
from weir.text_server.texts import Encoded, TextFacts, TextOptions, TextTask


class Ranked(NamedTuple):
    """A document at its place in a ranking: its place in the request, and its score."""

    place: int
    score: float


class Label(NamedTuple):
    """A label with its score."""

    label: str
    score: float


def read_pairs(
    exchange: TextExchange,
    query: Any,
    documents: Any,
    field: str,
    model: str | None,
    truncate: bool | None = None,
    *,
    left: bool = False,
) -> list[str]:
    """Read the pairs of `query` with each of `documents` into `exchange`; return the documents. A document is a text, or an object with `text`; it may be empty.

    Each pair is tokenized, batched and cut as any other pair of texts: the longer of both first. Raises InvalidRequest naming the field, and
    ModelNotFound, also if the model does not rank.
    """
    query = check_text(query, "query")
    if not isinstance(documents, list):
        raise InvalidRequest(f"must be a list of texts, is {brief(documents)}").of(field)
    exchange.context.check_count(len(documents), field)
    found = [_document(each, f"{field}[{place}]") for place, each in enumerate(documents)]
    exchange.encoder = exchange.context.encoder(model or "", TextTask.RERANK)
    exchange.texts = [(query, document) for document in found]
    exchange.options = TextOptions(truncate=truncate, truncate_left=left)
    return found


def _document(value: Any, where: str) -> str:
    if isinstance(value, dict):
        if "text" not in value:
            raise InvalidRequest(f"{where}.text: is missing")
        return check_text(value["text"], f"{where}.text", may_be_empty=True)
    return check_text(value, where, may_be_empty=True)


def check_top_n(top_n: int | None) -> None:
    """Raise InvalidRequest unless `top_n` is None or at least 1."""
    if top_n is not None and top_n < 1:
        raise InvalidRequest("must be 1 or more").of("top_n", str(top_n))


def relevance(exchange: TextExchange, encoded: Encoded, *, raw: bool) -> list[float]:
    """Return the score of each document: the model's number with `raw` and in late interaction, else its sigmoid."""
    numbers = encoded.vectors[:, 0]
    assert exchange.encoder is not None  # read_pairs sets it
    as_it_is = raw or exchange.encoder.facts.similarity in (MAXSIM, MEAN_MAXSIM)
    scores: list[float] = (numbers if as_it_is else _sigmoid(numbers)).tolist()
    return scores


def ranking(scores: Sequence[float], top_n: int | None = None) -> list[Ranked]:
    """Return the best `top_n` documents, all for None, the best first. Of equal ones the first goes first."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return [Ranked(index, scores[index]) for index in order[:top_n]]


def labelled(encoded: Encoded, facts: TextFacts, *, raw: bool, independent: bool | None = None) -> list[list[Label]]:
    """Return the labels of each text with their scores, the likeliest first. Scores are the model's numbers with `raw`, else probabilities.

    They are sigmoids if the labels are `independent`, else a softmax; None: as the model states.
    """
    logits = encoded.vectors
    if raw:
        scores = logits
    else:
        if independent is None:
            independent = facts.independent_labels or logits.shape[1] == 1
        scores = _sigmoid(logits) if independent else _softmax(logits)
    return [[Label(facts.labels[each.place], each.score) for each in ranking(row)] for row in scores.tolist()]


def likeliest(logits: NDArray[Any], facts: TextFacts) -> list[Label]:
    """Return the likeliest label of each row of `logits` [tokens, labels], with its probability."""
    shares = _softmax(logits)
    best = shares.argmax(axis=-1).tolist()
    return [Label(facts.labels[place], share) for place, share in zip(best, shares.max(axis=-1).tolist(), strict=True)]


def terms(encoded: Encoded, row: int) -> list[tuple[int, float]]:
    """Return the terms of the text `row`, which a sparse vector consists of: the id of a token of the vocabulary, and its weight."""
    count = None if encoded.lengths is None else encoded.lengths[row]
    return [(int(index), weight) for index, weight in encoded.vectors[row][:count].tolist()]


def each_output(encoded: Encoded, outputs: Sequence[TextOutput], row: int) -> dict[TextOutput, NDArray[Any]]:
    """Return the results of the text `row` for `outputs`, which the request asked for: a vector, terms [terms, 2], or the vectors of tokens."""
    first = encoded.vectors[row]
    own = first if encoded.lengths is None else first[: encoded.lengths[row]]
    return {outputs[0]: own, **{output: rows[row] for output, rows in encoded.further.items()}}


class SparseVector(TypedDict):
    """Terms: ids of words of the vocabulary, and their weights."""

    indices: list[int]
    values: list[float]


def sparse_vector(found: NDArray[Any]) -> SparseVector:
    """Return terms [terms, 2] as a document."""
    return {"indices": found[:, 0].astype(int).tolist(), "values": found[:, 1].tolist()}


def _sigmoid(logits: NDArray[Any]) -> NDArray[Any]:
    # Of a large negative number the exponential would overflow.
    small = numpy.exp(-numpy.abs(logits))
    found: NDArray[Any] = numpy.where(logits >= 0, 1 / (1 + small), small / (1 + small))
    return found


def _softmax(logits: NDArray[Any]) -> NDArray[Any]:
    powers = numpy.exp(logits - logits.max(axis=-1, keepdims=True))
    found: NDArray[Any] = powers / powers.sum(axis=-1, keepdims=True)
    return found


def without_nulls(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document without its fields that are null, which count as not given."""
    return {name: value for name, value in document.items() if value is not None}
