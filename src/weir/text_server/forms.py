"""Functions that several protocols of texts share: they read JSON, texts, token ids, options and documents to be ranked, and write rankings and labels.

Errors name the field and the rule.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct
from numpy.typing import NDArray

from weir.errors import InvalidRequest, brief
from weir.images import Picture
from weir.numerics import sigmoid, softmax
from weir.text_models.late_interaction import MAXSIM, MEAN_MAXSIM
from weir.text_models.texts import DIRECTIONS, Text, TextOptionFields, TextOutput, chosen_prompt
from weir.text_server.exchange import EmbeddingContext, TextExchange, TextWork
from weir.text_server.pictures import Asked, PictureUrl, read_image
from weir.text_server.texts import Encoded, Encodes, TextFacts, TextOptions, TextTask, no_images
from weir.wire.values import decode_json, half_in, uncollected, without_halves

T = TypeVar("T")

_MAX_CLIENT_ID = 128
_IMAGE_TYPES = ("image_url", "input_image", "image")
# What a part may state as its type, by its field.
_PART_TYPES = {"text": ("text", "input_text"), "image": _IMAGE_TYPES, "image_url": _IMAGE_TYPES}
EMPTY = "empty"  # a key in an error's details
_MOST_TOKENS = 1 << 31  # token ids are below this


def options_of(
    fields: TextOptionFields,
    encoder: Encodes,
    *,
    whole_words: bool = False,
    want_tokens: bool = False,
    outputs: Sequence[str] | None = None,
) -> TextOptions:
    """Return the options that `fields` and the names of `outputs` state for a request to `encoder`.

    Raises InvalidRequest naming the field.
    """
    left = cuts_left(fields.truncation_direction)
    prompt = chosen_prompt(encoder.facts.prompts, fields)
    check_dimensions(fields.dimensions, encoder)
    wanted = () if outputs is None else check_outputs(outputs, encoder, fields.dimensions)
    return TextOptions(fields.dimensions, fields.truncate, prompt, whole_words, want_tokens, left, outputs=wanted)


def cut_to(options: TextOptions, count: int | None, encoder: Encodes) -> TextOptions:
    """Return `options` that cut each text to `count` tokens; -1 cuts it to as many as the model reads, None to no number. Raises InvalidRequest."""
    if count == -1:
        return options._replace(truncate=True)
    if count is not None and not 1 <= count <= encoder.max_length:
        rule = f"must be -1, or 1 to {encoder.max_length}, as many as the model reads"
        raise InvalidRequest(rule).of("truncate_prompt_tokens", str(count))
    return options._replace(max_tokens=count)


def cuts_left(direction: str | None) -> bool:
    """Return whether a text is cut at its beginning. Clients of TEI write left or Left. Raises InvalidRequest for another direction."""
    if direction is not None and direction.lower() not in DIRECTIONS:
        raise InvalidRequest(f"must be one of {', '.join(DIRECTIONS)}").of("truncation_direction", brief(direction))
    return direction is not None and direction.lower() == "left"


def check_outputs(names: Sequence[str], encoder: Encodes, dimensions: int | None = None) -> tuple[TextOutput, ...]:
    """Return the outputs called `names`, in the order in which the model has them; none if they are its own alone.

    Raises InvalidRequest naming those that the model makes, and for `dimensions` without a vector that could be cut.
    """
    known = encoder.facts.outputs
    for name in names:
        if name not in known:
            rule = f"model {encoder.name!r} makes {', '.join(known) or 'labels or scores alone'}"
            raise InvalidRequest(f"{brief(name)}: {rule}").of("outputs")
    if not names:
        raise InvalidRequest(f"must name one or more of {', '.join(known)}").of("outputs")
    if dimensions is not None and TextOutput.DENSE not in names:
        raise InvalidRequest("of dense vectors alone").of("dimensions", str(dimensions))
    wanted = tuple(output for output in known if output in names)
    return () if wanted == known[:1] else wanted


def check_text(text: Any, where: str, *, may_be_empty: bool = False) -> str:
    """Return `text` if it is a string, and not empty unless it may be. Raises InvalidRequest naming `where` and the rule."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}: must be a text, is {brief(text)}")
    if not (text or may_be_empty):
        raise InvalidRequest(f"{where}: must not be empty", details={EMPTY: True})
    return text


def read_texts(value: Any, field: str, context: EmbeddingContext) -> list[Asked]:
    """Return the texts of `field`: a text or a picture, a list of such (see `read_part`), a list of token ids, or a list of such.

    Raises InvalidRequest naming the index and the rule.
    """
    if isinstance(value, (str, dict)):
        return [read_part(value, field, context)]
    if not isinstance(value, list):
        raise InvalidRequest(f"{field}={brief(value)}: must be a text or a list")
    if value and type(value[0]) is int:
        return [token_ids(value, field)]
    return read_list(value, field, context, partial(_text_or_ids, context=context))


def _text_or_ids(value: Any, where: str, context: EmbeddingContext) -> Asked:
    return token_ids(value, where) if isinstance(value, list) else read_part(value, where, context)


def read_list(values: Any, field: str, context: EmbeddingContext, read: Callable[[Any, str], T]) -> list[T]:
    """Return what `read` makes of each element of the list `field` and the element's index, as many as a request may have. Raises InvalidRequest."""
    if not isinstance(values, list):
        raise InvalidRequest(f"must be a list of texts, is {brief(values)}").of(field)
    context.check_count(len(values), field)
    return [read(value, f"{field}[{index}]") for index, value in enumerate(values)]


def read_part(value: Any, where: str, context: EmbeddingContext, *, may_be_empty: bool = False) -> Asked:
    """Return a text, or what an object has alone: the text of `text`, or the picture of `image` or `image_url`; see `read_image`.

    Raises InvalidRequest naming `where` and the rule.
    """
    if isinstance(value, (Picture, PictureUrl)):
        return value
    name = next(iter(value.keys() - {"type"}), None) if isinstance(value, dict) and len(value) <= 2 else None
    if name not in _PART_TYPES or value.keys() - {"type", name}:
        return check_text(value, where, may_be_empty=may_be_empty)
    if value.get("type") not in (None, *_PART_TYPES[name]):
        rule = f"must be {' or '.join(_PART_TYPES[name])}, as the part has `{name}`"
        raise InvalidRequest(f"{where}.type={brief(value['type'])}: {rule}")
    if name == "text":
        return check_text(value[name], where, may_be_empty=may_be_empty)
    return read_image(value[name], f"{where}.{name}", context.images)


def token_ids(value: Any, where: str) -> list[int]:
    """Return `value` if it is a list of token ids that is not empty. Raises InvalidRequest naming `where`."""
    if not isinstance(value, list) or not value:
        rule = "must not be empty" if value == [] else f"must be a list of token ids, is {brief(value)}"
        raise InvalidRequest(f"{where}: {rule}")
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token < _MOST_TOKENS:
            raise InvalidRequest(f"{where}[{index}]: must be a token id, is {brief(token, 40)}")
    return value


def read_text(text: Any, where: str, tokenized: bool | None) -> Text:
    """Return `text` if it is a string, a list of words or a list of token ids; with `tokenized` it must be a list of words.

    Raises InvalidRequest naming `where` and the rule.
    """
    if not isinstance(text, list):
        if tokenized:
            raise InvalidRequest(f"{where}: must be a list of words (is_tokenized), is {brief(text)}")
        return check_text(text, where)
    if not text:
        raise InvalidRequest(f"{where}: must not be empty")
    kind = type(text[0])
    if kind not in (str, int) or (kind is int and tokenized) or any(type(each) is not kind for each in text):
        raise InvalidRequest(f"{where}: must be a text, a list of words, or a list of token ids, is {brief(text)}")
    return text


def check_dimensions(dimensions: int | None, encoder: Encodes) -> None:
    """Raise InvalidRequest unless `dimensions` is None or 1 to the dimensions of the vectors of `encoder`."""
    if dimensions is not None and not 1 <= dimensions <= encoder.dimensions:
        rule = f"must be 1 to {encoder.dimensions}, the size of the vectors of {encoder.name!r}"
        raise InvalidRequest(rule).of("dimensions", str(dimensions))


def check_client(text: str | None, where: str) -> str:
    """Return the client's id that a request states, "" for None. Raises InvalidRequest naming the field `where` and the rule."""
    if text is None:
        return ""
    if not 0 < len(text) <= _MAX_CLIENT_ID:
        raise InvalidRequest(f"{where} {text[:40]!r}: must have 1 to {_MAX_CLIENT_ID} characters")
    return text


def read_json(body: bytes, *, clean: bool = False) -> Any:
    """Return the value of the JSON `body`; with `clean`, halves of surrogate pairs are read as NULs. Raises InvalidRequest."""
    try:
        with uncollected(len(body)):
            return decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if clean and (cleaned := without_halves(body)) is not None:
            return read_json(cleaned)
        raise InvalidRequest(f"body: {half_in(body) or f'is not JSON ({error})'}") from error


def read_object(body: bytes) -> dict[str, Any]:
    """Return the object that a body is, without its fields that are null, which count as not given. Raises InvalidRequest."""
    document = read_json(body)
    if not isinstance(document, dict):
        raise InvalidRequest("body: must be an object as JSON")
    return {name: value for name, value in document.items() if value is not None}


def read_content(value: Any, where: str, context: EmbeddingContext) -> Asked:
    """Return the text or the picture of an object whose `content` is a text, or a list of one part. Raises InvalidRequest naming `where`."""
    content = value.get("content") if isinstance(value, dict) else None
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list) or len(parts) != 1 or not isinstance(parts[0], (str, dict)):
        rule = "must be an object whose `content` is a list of one text or image: no model here fuses several to one vector"
        raise InvalidRequest(f"{where}={brief(value)}: {rule}")
    return read_part(parts[0], where, context)


# Rankings and labels.


class Ranked(Struct, omit_defaults=True):
    """A document in a ranking: its index in the request, its score, and its text if the request asks for it."""

    index: int
    score: float
    text: str | None = None


class RankingForm(NamedTuple):
    """How a ranking is written: the best `top_n`, with the documents' texts, with the model's own numbers."""

    top_n: int | None = None
    with_texts: bool = False
    raw: bool = False


def read_ranking(
    exchange: TextExchange, query: Any, documents: Any, field: str, model: str | None, form: RankingForm
) -> TextWork[list[Ranked]]:
    """Return the work of ranking `documents`, the list `field`, by `query`, which writes the documents, the best first.

    A document is a text, which may be empty, an object with `text`, or a picture; and so is the query. Each pair of the query and a document is tokenized,
    batched and cut as any other pair of texts: the longer of both first. A model with a vision tower compares vectors instead. Raises InvalidRequest naming
    the field, and ModelNotFound, also if the model does not rank.
    """
    if form.top_n is not None and form.top_n < 1:
        raise InvalidRequest("must be 1 or more").of("top_n", str(form.top_n))
    query = read_part(query, "query", exchange.context)
    texts = read_list(documents, field, exchange.context, partial(_document, context=exchange.context))
    encoder = exchange.choose(model, TextTask.RERANK, [query, *texts])
    vision = encoder.facts.vision

    def write(encoded: Encoded) -> list[Ranked]:
        if vision is not None:
            logits = vision.logits(encoded.vectors[-1:], encoded.vectors[:-1])
            scores = (logits if form.raw else vision.probabilities(logits))[0].tolist()
        else:
            scores = relevance(encoder, encoded, raw=form.raw)
        best = ranking(scores, form.top_n)
        return [Ranked(each.index, each.score, _shown(texts[each.index])) for each in best] if form.with_texts else best

    if vision is None:
        pairs: list[Any] = [(query, text) for text in texts]
        return TextWork(encoder, pairs, write)
    return TextWork(encoder, [*texts, query], write, lists=[(field, len(texts)), ("query", 1)])


def _document(value: Any, where: str, context: EmbeddingContext) -> Asked:
    if isinstance(value, dict) and not value.keys() & {"image", "image_url"}:
        if "text" not in value:
            raise InvalidRequest(f"{where}.text: is missing")
        return check_text(value["text"], f"{where}.text", may_be_empty=True)
    return read_part(value, where, context, may_be_empty=True)


def _shown(text: Asked) -> str | None:
    return text if isinstance(text, str) else None


def relevance(encoder: Encodes, encoded: Encoded, *, raw: bool) -> list[float]:
    """Return the score of each document: the model's number with `raw` and in late interaction, else its sigmoid."""
    numbers = encoded.vectors[:, 0]
    as_it_is = raw or encoder.facts.similarity in (MAXSIM, MEAN_MAXSIM)
    scores: list[float] = (numbers if as_it_is else sigmoid(numbers)).tolist()
    return scores


def ranking(scores: Sequence[float], top_n: int | None = None) -> list[Ranked]:
    """Return the best `top_n` documents, all for None, the best first. Of equal ones the first goes first."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return [Ranked(index, scores[index]) for index in order[:top_n]]


class Label(Struct):
    """A label with its score."""

    label: str
    score: float


_LONGEST_TEMPLATE, _MOST_SCORES = 256, 100_000  # the texts and the scores of a request grow with both of its lists


def zero_shot(
    exchange: TextExchange, texts: list[Asked], labels: list[str], template: str, model: str | None, *, raw: bool
) -> TextWork[list[list[Label]]]:
    """Return the work of choosing among `labels` for each picture or text, which writes the labels of each as `labelled` does. A label is compared as the
    text that `template` makes of it in place of {}. Raises InvalidRequest naming the field, and ModelNotFound, also if the model has no vision tower."""
    if template.count("{}") != 1 or len(template) > _LONGEST_TEMPLATE:
        rule = f"must have {{}} once, in place of a label, and at most {_LONGEST_TEMPLATE} characters"
        raise InvalidRequest(rule).of("hypothesis_template", brief(template))
    labels = read_list(labels, "labels", exchange.context, check_text)
    if len(texts) * len(labels) > _MOST_SCORES:
        rule = f"has {len(labels)} for each of {len(texts)} in input, must have at most {_MOST_SCORES:,} together"
        raise InvalidRequest(f"labels: {rule}")
    hypotheses = [template.replace("{}", label) for label in labels]
    encoder = exchange.choose(model, TextTask.EMBED, texts, sees=True)
    vision, facts, count = encoder.facts.vision, encoder.facts._replace(labels=tuple(labels)), len(texts)
    if vision is None:
        raise no_images(encoder.name).about("labels")

    def write(encoded: Encoded) -> list[list[Label]]:
        logits = vision.logits(encoded.vectors[:count], encoded.vectors[count:])
        return labelled(encoded._replace(vectors=logits), facts, raw=raw, independent=vision.independent)

    return TextWork(encoder, [*texts, *hypotheses], write, lists=[("input", count), ("labels", len(labels))])


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
        scores = sigmoid(logits) if independent else softmax(logits)
    return [[Label(facts.labels[each.index], each.score) for each in ranking(row)] for row in scores.tolist()]


def likeliest(logits: NDArray[Any], facts: TextFacts) -> list[Label]:
    """Return the likeliest label of each row of `logits` [tokens, labels], with its probability."""
    shares = softmax(logits)
    best = shares.argmax(axis=-1).tolist()
    return [Label(facts.labels[index], share) for index, share in zip(best, shares.max(axis=-1).tolist(), strict=True)]
