"""The endpoints of Cohere, /v2/embed, /v2/rerank and their first versions below /v1, where Jina's /v1/rerank is, too.

Fields that cannot change a response here, such as `priority` and `max_tokens_per_doc`, are left unread.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict, cast
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct

from weir.errors import InvalidRequest, Unsupported, brief
from weir.protocols.response import HttpResponse, error_value, json_response
from weir.text_models.packing import PACKINGS, PackedVector, Packing, packed, packing_named
from weir.text_models.texts import PlainText, TextOptionFields
from weir.text_server.exchange import (
    EmbeddingContext,
    RankingForm,
    TextExchange,
    check_texts,
    check_top_n,
    options_of,
    ranked,
    read_pairs,
    text_of_content,
)
from weir.text_server.http import ErrorForm, JsonList, Listing, TextApi, TextCall, TextProtocol
from weir.text_server.protocols.openai import TokenUsage
from weir.text_server.texts import Encoded, TextTask
from weir.wire.schema import read_document

NAME = "cohere"
_SOME = Meta(min_length=1)
# Whether a text that is too long is cut, and at which end.
_CUTS = {"NONE": (False, None), "START": (True, "left"), "END": (True, "right")}


class CohereError(TypedDict):
    """What is wrong: `message` is what Cohere's clients read, and `detail` what Jina's do."""

    id: str
    message: str
    detail: str


class CohereEmbedRequest(Struct):
    """A request for the vectors of texts."""

    texts: Annotated[list[PlainText], _SOME] | None = None
    inputs: Annotated[
        list[Any] | None, Meta(description="texts in place of `texts`: [{content: [{type: text, text: ...}]}]")
    ] = None
    images: Any = None
    model: Annotated[str | None, Meta(description="the first one if it is not given")] = None
    input_type: Annotated[
        str | None, Meta(description="search_query, search_document, classification or clustering")
    ] = None
    embedding_types: Annotated[list[str] | None, Meta(extra_json_schema={"items": {"enum": [*PACKINGS]}})] = None
    truncate: Annotated[str | None, Meta(extra_json_schema={"enum": [*_CUTS, None]})] = None
    output_dimension: Annotated[int | None, Meta(description="keeps the first numbers of each vector")] = None


class CohereRerankRequest(Struct):
    """A request for the ranking of documents by how well they answer a query."""

    query: PlainText
    documents: Annotated[list[Any], Meta(min_length=1, description="texts, or objects with `text`")]
    model: Annotated[str | None, Meta(description="the first one that ranks, if it is not given")] = None
    top_n: Annotated[int | None, Meta(description="how many of the best are answered")] = None
    return_documents: Annotated[bool | None, Meta(description="/v1 has them unless it is false, /v2 if it is true")] = (
        None
    )


class BilledUnits(TypedDict, total=False):
    """What was computed."""

    input_tokens: int
    search_units: int


class ApiVersion(TypedDict):
    """The version of the endpoints."""

    version: str


class CohereMeta(TypedDict):
    """What Cohere's clients read in addition to the result."""

    api_version: ApiVersion
    billed_units: BilledUnits


class CohereVectors(TypedDict):
    """The vectors of texts: a list, or with `embedding_types` and below /v2 a list for each type."""

    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    texts: list[str]
    meta: CohereMeta
    embeddings: dict[str, list[PackedVector]] | list[list[float]]


class DocumentText(TypedDict):
    """The text of a document."""

    text: str


class CohereRank(TypedDict):
    """A document at its place in the ranking."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentText]


class CohereRanking(TypedDict):
    """The ranking, the best document first; `object` and `usage` are Jina's."""

    id: str
    results: list[CohereRank]
    meta: CohereMeta
    model: str
    object: Literal["list"]
    usage: TokenUsage


def _error_document(error: BaseException, identity: Any, development: bool) -> CohereError:
    message = error_value(error, development=development)["message"]
    return CohereError(id=str(uuid4()), message=message, detail=message)


class CohereForm(NamedTuple):
    """How vectors are written: in which types, and whether by type."""

    packings: Sequence[Packing]
    by_type: bool


class CohereProtocol(TextProtocol):
    """What the protocols of one version have in common."""

    name = NAME
    errors = ErrorForm(_error_document)

    def __init__(self, version: Literal["1", "2"], endpoint: str) -> None:
        self.paths = (f"/v{version}/{endpoint}",)
        self._version = version
        self.field = "documents" if endpoint == "rerank" else "texts"

    def _meta(self, **units: int) -> CohereMeta:
        return {"api_version": {"version": self._version}, "billed_units": cast(BilledUnits, units)}


class CohereEmbed(CohereProtocol):
    """POST /v1/embed and /v2/embed."""

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """Read the decoded body into `exchange`. Raises InvalidRequest naming the field and the rule, ModelNotFound, and Unsupported for images."""
        request = read_document(document, CohereEmbedRequest)
        if request.images is not None or request.input_type == "image":
            raise Unsupported("images: only texts are encoded here")
        types = request.embedding_types
        if types == []:
            raise InvalidRequest(f"embedding_types: must name one or more of {', '.join(PACKINGS)}")
        packings = [packing_named(name, "embedding_types") for name in dict.fromkeys(types or [Packing.FLOAT])]
        exchange.form = CohereForm(packings, types is not None or self._version == "2")
        exchange.texts = _texts(request, exchange.context)
        exchange.encoder = encoder = exchange.context.encoder(request.model or "", TextTask.EMBED)
        truncate, direction = _cut(request.truncate)
        fields = TextOptionFields(
            dimensions=request.output_dimension,
            truncate=truncate,
            truncation_direction=direction,
            input_type=request.input_type,
        )
        try:
            exchange.options = options_of(fields, encoder)
        except InvalidRequest as error:
            raise error.renamed({"dimensions": "output_dimension"}) from None

    def write(self, exchange: TextExchange, encoded: Encoded) -> Listing:
        """Return the vectors in each of the types."""
        vectors, form = encoded.vectors, exchange.form
        ranges = exchange.chosen.facts.ranges
        by_type = "embeddings_by_type" if form.by_type else "embeddings_floats"
        lead = {
            "id": str(uuid4()),
            "response_type": by_type,
            "texts": exchange.texts,
            "meta": self._meta(input_tokens=sum(encoded.counts)),
        }
        opening = msgspec.json.encode(lead)[:-1] + b',"embeddings":' + (b"{" if form.by_type else b"")
        lists = []
        for packing in form.packings:
            named = opening + (b'"%b":[' % packing.encode() if form.by_type else b"[")
            lists.append(JsonList(named, len(vectors), vectors.shape[1], partial(_part, vectors, packing, ranges)))
            opening = b"],"
        return Listing(lists, b"]}}" if form.by_type else b"]}")


def _part(vectors: Any, packing: Packing, ranges: Any, start: int, stop: int) -> list[Any]:
    return packed(vectors[start:stop], packing, ranges)


def _texts(request: CohereEmbedRequest, context: EmbeddingContext) -> list[str]:
    if request.inputs is None:
        return check_texts(request.texts, "texts", context)
    if request.texts is not None:
        raise InvalidRequest("texts, inputs: only one of them may be given")
    return check_texts(
        [text_of_content(each, f"inputs[{place}]") for place, each in enumerate(request.inputs)], "inputs", context
    )


def _cut(truncate: str | None) -> tuple[bool | None, str | None]:
    if truncate is None:
        return None, None
    if truncate not in _CUTS:
        raise InvalidRequest(f"truncate={brief(truncate)}: must be one of {', '.join(_CUTS)}")
    return _CUTS[truncate]


class CohereRerank(CohereProtocol):
    """POST /v1/rerank, which is also Jina's, and /v2/rerank."""

    def read_document(self, exchange: TextExchange, document: dict[str, Any]) -> None:
        """Read the decoded body into `exchange`. Raises InvalidRequest naming the field and the rule, and ModelNotFound."""
        request = read_document(document, CohereRerankRequest)
        check_top_n(request.top_n)
        documents = read_pairs(exchange, request.query, request.documents, "documents", request.model)
        wanted = request.return_documents
        shown = self._version == "1" if wanted is None else wanted
        exchange.form = RankingForm(request.top_n, documents if shown else None)

    def write(self, exchange: TextExchange, encoded: Encoded) -> HttpResponse:
        """Return the ranking."""
        results: list[CohereRank] = []
        for index, score, document in ranked(exchange, encoded):
            rank = CohereRank(index=index, relevance_score=score)
            results.append(rank if document is None else {**rank, "document": {"text": document}})
        tokens = sum(encoded.counts)
        answer: CohereRanking = {
            "id": str(uuid4()),
            "results": results,
            "meta": self._meta(search_units=1),
            "model": exchange.listed_model,
            "object": "list",
            "usage": {"total_tokens": tokens, "prompt_tokens": tokens},
        }
        return json_response(answer)


class Cohere(TextApi):
    """The endpoints of Cohere. Those below /v1 must come before those of OpenAI, which take the rest."""

    def __init__(self, context: EmbeddingContext) -> None:
        texts = ["A low dam.", "A bird."]
        embed = {"texts": texts, "input_type": "search_document", "embedding_types": ["float"]}
        rerank = {"query": "What is a weir?", "documents": texts, "top_n": 1}
        to_embed = "Encode texts, as Cohere does", CohereEmbedRequest, embed, CohereVectors, TextTask.EMBED
        to_rerank = "Rank documents, as Cohere and Jina do", CohereRerankRequest, rerank, CohereRanking, TextTask.RERANK
        calls = [
            TextCall(CohereEmbed("2", "embed"), *to_embed),
            TextCall(CohereRerank("2", "rerank"), *to_rerank),
            TextCall(CohereEmbed("1", "embed"), *to_embed),
            TextCall(CohereRerank("1", "rerank"), *to_rerank),
        ]
        super().__init__(context, CohereError, calls)
