"""POST /predict_tokens: the labels of the tokens of texts, such as names of persons and places, in the form of transformers' pipeline.

Labels that begin with B- and I- begin and continue what is labelled. Tokens that continue it are joined to one entity, unless each is wanted.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct
from numpy.typing import NDArray

from weir.errors import InvalidRequest, brief
from weir.protocols.response import HttpResponse, json_response
from weir.text_models.texts import PlainText, TokenDetail
from weir.text_server.exchange import (
    EmbeddingContext,
    Label,
    TextExchange,
    TextWork,
    check_texts,
    likeliest,
    own_output,
)
from weir.text_server.http import HttpWork, TextApi, TextEndpoint
from weir.text_server.protocols.tei import NAME, TEI_ERRORS, TeiError, compute_headers
from weir.text_server.texts import Encoded, TextFacts, TextOptions, TextTask
from weir.wire.schema import any_of

STRATEGIES = ("simple", "none")
_OUTSIDE = ("O",)  # the labels of tokens that are nothing, which are left out unless the request names others


class TokenLabelParameters(Struct):
    """How entities are made of tokens."""

    aggregation_strategy: Annotated[
        str | None, Meta(description="simple joins tokens to entities", extra_json_schema={"enum": [*STRATEGIES, None]})
    ] = None
    ignore_labels: Annotated[
        list[str] | None, Meta(description="labels that are left out: O unless others are named")
    ] = None

    def __post_init__(self) -> None:
        strategy = self.aggregation_strategy
        if strategy not in (None, *STRATEGIES):
            raise InvalidRequest(f"must be one of {', '.join(STRATEGIES)}").of("aggregation_strategy", brief(strategy))

    @property
    def joined(self) -> bool:
        """Whether tokens are joined to entities."""
        return self.aggregation_strategy != "none"

    @property
    def ignored(self) -> Sequence[str]:
        """The labels that are left out."""
        return _OUTSIDE if self.ignore_labels is None else self.ignore_labels


class TokenLabelRequest(Struct):
    """A request for the labels of tokens."""

    inputs: Annotated[Any, any_of(PlainText, Annotated[list[PlainText], Meta(min_length=1)])]
    parameters: TokenLabelParameters | None = None
    truncate: bool | None = None
    model: Annotated[str | None, Meta(description="the first one that labels tokens, if it is not given")] = None


class Entity(Struct, omit_defaults=True):
    """A part of a text with its label: `entity_group` of joined tokens, `entity` of one. `start` and `end` count characters."""

    score: float
    word: str
    start: int
    end: int
    entity_group: str = ""
    entity: str = ""


class LabelledToken(NamedTuple):
    """A token that is not a special one, with its likeliest label."""

    label: str
    score: float
    start: int
    end: int


_LABEL, _EXAMPLE = "Label the tokens of texts, as transformers does", {"inputs": "Ada lives in Paris"}


@TextEndpoint("/predict_tokens", _LABEL, _EXAMPLE, Any, TextTask.PREDICT_TOKENS, name=NAME, errors=TEI_ERRORS)
def predict_tokens(request: TokenLabelRequest, exchange: TextExchange) -> HttpWork:
    """Read a request for the labels of tokens. Errors have TEI's shape."""
    single = isinstance(request.inputs, str)
    texts = check_texts([request.inputs] if single else request.inputs, "inputs", exchange.context)
    form = request.parameters or TokenLabelParameters()
    encoder = exchange.choose(request.model, TextTask.PREDICT_TOKENS)
    options = TextOptions(truncate=request.truncate, prompt="")

    async def compute(timeout: float | None) -> Encoded:
        details = await encoder.tokenize(texts, special=True, prompt="", timeout=timeout)
        encoded = await encoder.encode(texts, exchange.query(options, timeout, exchange.trace))
        return encoded._replace(details=details)

    def write(encoded: Encoded) -> HttpResponse:
        logits = [own_output(encoded, row) for row in range(len(texts))]
        rows = zip(texts, logits, encoded.details or (), strict=True)
        found = [_entities(text, of_text, details, encoder.facts, form) for text, of_text, details in rows]
        return json_response(found[0] if single else found, compute_headers(encoder, texts, encoded))

    return TextWork(encoder, texts, write, options, compute=compute)


def _entities(
    text: str, logits: NDArray[Any], details: Sequence[TokenDetail], facts: TextFacts, form: TokenLabelParameters
) -> list[Entity]:
    """Return the entities of one text, given the logits of the tokens that were computed and all of its tokens."""
    tokens = list(_labelled(likeliest(logits, facts), details))
    entities: list[Entity] = []
    for group in _groups(tokens) if form.joined else [[each] for each in tokens]:
        name = _split_label(group[0].label)[1] if form.joined else group[0].label
        if name not in form.ignored:
            start, end = group[0].start, group[-1].end
            score = sum(each.score for each in group) / len(group)
            names = (name, "") if form.joined else ("", name)
            entities.append(Entity(score, text[start:end], start, end, *names))
    return entities


def _labelled(labels: Sequence[Label], details: Sequence[TokenDetail]) -> Iterator[LabelledToken]:
    # Of a text that was cut, the last token that was computed is the special one at the end.
    last = len(labels) - 1 if len(details) > len(labels) else len(labels)
    for label, detail in zip(labels[:last], details, strict=False):
        if detail.start is not None and detail.stop is not None:
            yield LabelledToken(label.label, label.score, detail.start, detail.stop)


def _groups(tokens: Sequence[LabelledToken]) -> list[list[LabelledToken]]:
    """Return the tokens in groups of one entity each: a token joins the one before if their labels are the same and it does not begin another."""
    groups: list[list[LabelledToken]] = []
    before = ""
    for token in tokens:
        begins, name = _split_label(token.label)
        if groups and name == before and not begins:
            groups[-1].append(token)
        else:
            groups.append([token])
        before = name
    return groups


def _split_label(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, and its name without B- and I-."""
    return (label.startswith("B-"), label[2:]) if label[:2] in ("B-", "I-") else (False, label)


def token_labels_api(context: EmbeddingContext) -> TextApi:
    """Return the endpoint for labels of tokens."""
    return TextApi(context, TeiError, [predict_tokens])
