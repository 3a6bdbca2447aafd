"""The endpoints of Cohere, /v2/embed, /v2/rerank and their first versions below /v1, where Jina's /v1/rerank is, too.

Fields that cannot change a response here, such as `priority` and `max_tokens_per_doc`, are left unread.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct

from weir.errors import InvalidRequest, brief
from weir.protocols.response import HttpResponse, error_value, json_response
from weir.text_models.packing import PACKINGS, PackedVector, Packing, packed, packing_named
from weir.text_models.texts import PlainText, TextOptionFields
from weir.text_server import forms
from weir.text_server.exchange import EmbeddingContext, TextExchange, TextWork
from weir.text_server.http import ErrorForm, HttpExchange, HttpWork, JsonList, Listing, TextApi, TextEndpoint
from weir.text_server.pictures import Asked, Part, read_image
from weir.text_server.protocols.openai import TokenUsage, usage_of
from weir.text_server.texts import Encoded, TextTask, listed_name

Version = Literal["1", "2"]
_SOME = Meta(min_length=1)
# Whether a text that is too long is cut, and at which end.
_CUTS = {None: (None, None), "NONE": (False, None), "START": (True, "left"), "END": (True, "right")}


class CohereError(TypedDict):
    """The body of an error: Cohere's clients read `message`, and Jina's `detail`."""

    id: str
    message: str
    detail: str


class CohereEmbedRequest(Struct):
    """A request for the vectors of texts."""

    texts: Annotated[list[PlainText], _SOME] | None = None
    inputs: Annotated[
        list[Any] | None,
        Meta(description="in place of `texts`, each with one text or image: [{content: [{type: text, text: ...}]}]"),
    ] = None
    images: Annotated[
        Annotated[list[str], _SOME] | None, Meta(description="in place of `texts`: images as data: URLs")
    ] = None
    model: Annotated[str | None, Meta(description="the first one if it is not given")] = None
    input_type: Annotated[
        str | None, Meta(description="search_query, search_document, classification or clustering")
    ] = None
    embedding_types: Annotated[list[str] | None, Meta(extra_json_schema={"items": {"enum": [*PACKINGS]}})] = None
    truncate: Annotated[str | None, Meta(extra_json_schema={"enum": [*filter(None, _CUTS), None]})] = None
    output_dimension: Annotated[int | None, Meta(description="keeps the first numbers of each vector")] = None

    def __post_init__(self) -> None:
        if self.input_type == "image":  # the images say so themselves
            self.input_type = None
        if self.embedding_types == []:
            raise InvalidRequest(f"embedding_types: must name one or more of {', '.join(PACKINGS)}")
        given = [name for name in ("texts", "images", "inputs") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"{', '.join(given)}: only one of them may be given")
        if self.truncate not in _CUTS:
            known = ", ".join(filter(None, _CUTS))
            raise InvalidRequest(f"truncate={brief(self.truncate)}: must be one of {known}")


class CohereRerankRequest(Struct):
    """A request for the ranking of documents by how well they answer a query."""

    query: Part
    documents: Annotated[list[Any], Meta(min_length=1, description="texts, or objects with `text` or `image`")]
    model: Annotated[str | None, Meta(description="the first one that ranks, if it is not given")] = None
    top_n: Annotated[int | None, Meta(description="how many of the best are answered")] = None
    return_documents: Annotated[bool | None, Meta(description="/v1 has them unless it is false, /v2 if true")] = None


class BilledUnits(TypedDict, total=False):
    """The units that were computed."""

    input_tokens: int
    search_units: int


class ApiVersion(TypedDict):
    """The version of the endpoints."""

    version: str


class CohereMeta(TypedDict):
    """The fields that Cohere's clients read in addition to the result."""

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
    """A document in the ranking."""

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


def _error_document(error: BaseException, development: bool) -> CohereError:
    message = error_value(error, development=development)["message"]
    return CohereError(id=str(uuid4()), message=message, detail=message)


def _meta(version: Version, billed: BilledUnits) -> CohereMeta:
    return {"api_version": {"version": version}, "billed_units": billed}


cohere_endpoint = partial(TextEndpoint, name="cohere", errors=ErrorForm(_error_document))
_TEXTS = ["A low dam.", "A bird."]
_OF_DOCUMENTS = ErrorForm(_error_document, field="documents")
_EMBED = {"texts": _TEXTS, "input_type": "search_document", "embedding_types": ["float"]}
_RERANK = {"query": "What is a weir?", "documents": _TEXTS, "top_n": 1}


def read_embed(request: CohereEmbedRequest, exchange: HttpExchange, version: Version) -> HttpWork:
    """Return the work of a request for vectors. Raises InvalidRequest naming the field and the rule, and ModelNotFound."""
    types = request.embedding_types
    packings = [packing_named(name, "embedding_types") for name in dict.fromkeys(types or [Packing.FLOAT])]
    by_type = types is not None or version == "2"
    field = next((name for name in ("images", "inputs") if getattr(request, name) is not None), "texts")
    texts: Sequence[Asked] = _read(request, field, exchange.context)
    exchange.errors = exchange.errors._replace(field=field)
    encoder = exchange.choose(request.model, TextTask.EMBED, texts)
    truncate, direction = _CUTS[request.truncate]
    fields = TextOptionFields(
        dimensions=request.output_dimension,
        truncate=truncate,
        truncation_direction=direction,
        input_type=request.input_type,
    )
    try:
        options = forms.options_of(fields, encoder)
    except InvalidRequest as error:
        raise error.renamed({"dimensions": "output_dimension"}) from None

    def write(encoded: Encoded) -> Listing:
        vectors = encoded.vectors
        lead = {
            "id": str(uuid4()),
            "response_type": "embeddings_by_type" if by_type else "embeddings_floats",
            "texts": [text for text in texts if isinstance(text, str)],
            "meta": _meta(version, {"input_tokens": sum(encoded.counts)}),
        }
        opening = msgspec.json.encode(lead)[:-1] + b',"embeddings":' + (b"{" if by_type else b"")
        lists = []
        for packing in packings:
            named = opening + (b'"%b":[' % packing.encode() if by_type else b"[")
            items = partial(_packed_part, vectors, packing, encoder.facts.ranges)
            lists.append(JsonList(named, len(vectors), vectors.shape[1], items))
            opening = b"],"
        return Listing(lists, b"]}}" if by_type else b"]}")

    return TextWork(encoder, texts, write, options)


def _read(request: CohereEmbedRequest, field: str, context: EmbeddingContext) -> Sequence[Asked]:
    """Return the texts and images of the list `field`. Raises InvalidRequest naming the index and the rule."""
    readers: Mapping[str, Callable[[Any, str], Asked]] = {
        "texts": forms.check_text,
        "images": partial(read_image, limits=context.images),
        "inputs": partial(forms.read_content, context=context),
    }
    return forms.read_list(getattr(request, field), field, context, readers[field])


def _packed_part(vectors: Any, packing: Packing, ranges: Any, start: int, stop: int) -> list[Any]:
    return packed(vectors[start:stop], packing, ranges)


def read_rerank(request: CohereRerankRequest, exchange: TextExchange, version: Version) -> HttpWork:
    """Return the work of a request for a ranking. Raises InvalidRequest naming the field and the rule, and ModelNotFound."""
    with_texts = version == "1" if request.return_documents is None else request.return_documents
    form = forms.RankingForm(request.top_n, with_texts)
    ranking = forms.read_ranking(exchange, request.query, request.documents, "documents", request.model, form)

    def write(encoded: Encoded) -> HttpResponse:
        results, meta = [_rank(each) for each in ranking.write(encoded)], _meta(version, {"search_units": 1})
        own, name, usage = str(uuid4()), listed_name(ranking.encoder), usage_of(encoded)
        return json_response(CohereRanking(id=own, results=results, meta=meta, model=name, object="list", usage=usage))

    return ranking.written(write)


def _rank(ranked: forms.Ranked) -> CohereRank:
    rank = CohereRank(index=ranked.index, relevance_score=ranked.score)
    return rank if ranked.text is None else {**rank, "document": {"text": ranked.text}}


def _endpoints(version: Version) -> list[TextEndpoint]:
    titles = "Encode texts and images, as Cohere does", "Rank documents, as Cohere and Jina do"

    @cohere_endpoint(f"/v{version}/embed", titles[0], _EMBED, CohereVectors, TextTask.EMBED)
    def embed(request: CohereEmbedRequest, exchange: HttpExchange) -> HttpWork:
        return read_embed(request, exchange, version)

    @cohere_endpoint(f"/v{version}/rerank", titles[1], _RERANK, CohereRanking, TextTask.RERANK, errors=_OF_DOCUMENTS)
    def rerank(request: CohereRerankRequest, exchange: TextExchange) -> HttpWork:
        return read_rerank(request, exchange, version)

    return [embed, rerank]


def cohere_api(context: EmbeddingContext) -> TextApi:
    """Return the endpoints of Cohere. Those below /v1 must come before those of OpenAI, which take the rest."""
    return TextApi(context, CohereError, [*_endpoints("2"), *_endpoints("1")])
