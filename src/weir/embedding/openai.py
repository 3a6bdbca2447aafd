"""OpenAI's endpoints: POST /v1/embeddings, GET /v1/models.

A text that is longer than the model reads is cut, unless the server was told not to; the answer says so in `truncated` and
in the header X-Weir-Truncated. OpenAI's own refuses it.
"""

import time
from base64 import b64encode
from collections.abc import Mapping
from functools import partial
from typing import Any

from numpy.typing import NDArray
from starlette.routing import Route

from weir.embedding.exchange import (
    EmbeddingContext,
    TextExchange,
    TextOptions,
    as_json,
    check_text,
    read_field,
    read_json,
    truncated_places,
)
from weir.embedding.http import (
    DIMENSIONS_SCHEMA,
    IDS_SCHEMA,
    PROMPT_SCHEMA,
    TEXT_SCHEMA,
    TRUNCATE_SCHEMA,
    TRUNCATED_SCHEMA,
    HttpTexts,
    Listing,
    Schema,
    described_call,
    described_page,
)
from weir.embedding.texts import TOO_LONG, Encoded, Encodes, Text
from weir.errors import (
    CapacityError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    RequestError,
    TooLarge,
    Unauthorized,
    Unsupported,
    WeirError,
    brief,
)  # fmt: skip
from weir.frontends.http.asgi import AsgiCall, Endpoint
from weir.protocols.response import Headers, HttpResponse, encode_safely, error_headers, error_value
from weir.protocols.status import http_code

JSON_HEADER = (b"content-type", b"application/json")


def of_input(error: BaseException) -> BaseException:
    """Return what is wrong with a text as what is wrong with `input`: an encoder knows texts, whatever the field is called."""
    if type(error) is InvalidRequest and error.message.startswith("texts["):
        details = error.details if isinstance(error.details, dict) else {}
        return InvalidRequest("input" + error.message.removeprefix("texts"), details={**details, "param": "input"})
    return error


def wrong(message: str, param: str | None = None) -> InvalidRequest:
    """Return the error about the field `param`."""
    return InvalidRequest(message, details={"param": param})


def error_answer(error: BaseException, *, development: bool = False) -> HttpResponse:
    """Return the answer for `error` in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`."""
    details = error.details if isinstance(error, WeirError) and isinstance(error.details, dict) else {}
    value = error_value(error, development=development)
    document = {
        "message": value["message"], "type": _type_of(error), "param": details.get("param"), "code": _code_of(error, details),
    }  # fmt: skip
    if isinstance(error, ModelNotFound):
        document["param"] = "model"
    return HttpResponse(http_code(error), error_headers(error), encode_safely({"error": document}))


def no_such_path(path: str, there_are: str) -> HttpResponse:
    """Return the answer for a path that is not there."""
    document = {
        "message": f"{path}: there is no such path; there are {there_are}", "type": "invalid_request_error", "param": None,
        "code": "unknown_url",
    }  # fmt: skip
    return HttpResponse(404, [JSON_HEADER], encode_safely({"error": document}))


def _type_of(error: BaseException) -> str:
    if isinstance(error, Overloaded):
        return "requests"
    return "invalid_request_error" if isinstance(error, RequestError) else "server_error"


def _code_of(error: BaseException, details: Mapping[str, Any]) -> str | None:
    if TOO_LONG in details:
        return "context_length_exceeded"
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)


# OpenAI's own words where it has any; the others say what our error is called.
_CODES: dict[type[BaseException], str] = {
    ModelNotFound: "model_not_found",
    MethodNotAllowed: "method_not_allowed",
    Overloaded: "rate_limit_exceeded",
    Unauthorized: "invalid_api_key",
    TooLarge: "request_too_large",
    Unsupported: "unsupported",
    CapacityError: "service_unavailable",
    TimeoutError: "timeout",
}


NAME = "openai"
FIELDS = ("input", "model", "encoding_format", "dimensions", "user", "truncate", "prompt")
# What OpenAI's clients, or programs that are made for several servers, may add, and what changes no vector.
IGNORED = ("safety_identifier", "prompt_cache_key", "metadata", "store", "service_tier")
FORMATS = ("float", "base64")

_PATHS = {"embeddings": "POST", "models": "GET"}
_LONGEST_USER = 512  # characters: the latest users are remembered
_MOST_TOKENS = 1 << 31  # the first number that is no token id


class OpenAI:
    """The endpoints of OpenAI: vectors, and the list of the models."""

    def __init__(self, context: EmbeddingContext) -> None:
        self._context = context
        self._since = int(time.time())

    def routes(self) -> list[Route]:
        """Return the routes."""
        embeddings = HttpTexts(OPENAI, self._context)
        endpoint = partial(Endpoint, settings=self._context.http, refuse=embeddings.refusal)
        return [
            Route(OPENAI.path, endpoint(embeddings), methods=["POST"]),
            Route("/v1/models", endpoint(self.list_models), methods=["GET"]),
            Route("/v1/models/{model:path}", endpoint(self.show_model), methods=["GET"]),
            Route("/v1/{path:path}", endpoint(self.refuse_path)),  # last: whatever the others do not take
        ]

    async def list_models(self, call: AsgiCall) -> HttpResponse:
        """List the models."""
        listed = [self._described(encoder) for encoder in self._context.encoders.values()]
        return HttpResponse(200, [JSON_HEADER], encode_safely({"object": "list", "data": listed}))

    async def show_model(self, call: AsgiCall) -> HttpResponse:
        """Describe one model."""
        return HttpResponse(
            200, [JSON_HEADER], encode_safely(self._described(self._context.encoder(call.path["model"])))
        )

    async def refuse_path(self, call: AsgiCall) -> HttpResponse:
        """Refuse a path that is not there, or a method that does not belong."""
        path = call.path["path"]
        name = "models" if path.startswith("models/") else path
        if name in _PATHS:
            raise MethodNotAllowed(f"/v1/{path}: takes {_PATHS[name]} only", details={"allow": [_PATHS[name]]})
        there_are = ", ".join(f"{method} /v1/{name}" for name, method in _PATHS.items())
        self._context.counts.refused("", NAME, 404)
        return no_such_path(f"/v1/{path}", there_are)

    def _described(self, encoder: Encodes) -> dict[str, Any]:
        return {
            "id": encoder.name, "object": "model", "created": self._since, "owned_by": "weir",
            "dimensions": encoder.dimensions, "max_length": encoder.max_length,
        }  # fmt: skip


class OpenAIProtocol:
    """How OpenAI writes requests for vectors, see TextProtocol."""

    name = NAME
    path = "/v1/embeddings"

    def read(self, exchange: TextExchange, headers: Headers, body: bytes) -> None:
        """Read the body. The details of what is wrong name the field (`param`)."""
        document = read_body(body)
        exchange.texts = _read_input(document["input"], exchange.context)
        model = _read(document, "model", str, "")
        exchange.form = _read_format(document)
        dimensions = _read_dimensions(document)
        exchange.client = _read_user(document)
        truncate, prompt = _read(document, "truncate", bool, None), _read(document, "prompt", str, None)
        exchange.options = TextOptions(dimensions, truncate, prompt)
        exchange.encoder = encoder = exchange.context.encoder(model)
        if dimensions is not None and dimensions > encoder.dimensions:
            rule = f"must be at most {encoder.dimensions}, as many as vectors of {encoder.name!r} have"
            raise wrong(f"dimensions={dimensions}: {rule}", "dimensions")

    def write(self, exchange: TextExchange, encoded: Encoded) -> Listing:
        """Return the vectors, in the `encoding_format` that was asked for."""
        if encoded.vectors.ndim != 2:
            raise Unsupported(
                f"model {exchange.model!r} gives a vector for each token of a text: POST /encode has them"
            )
        return _written(exchange.model, exchange.form, encoded)

    def error_answer(self, error: BaseException, identity: Any = None, *, development: bool = False) -> HttpResponse:
        """Return the answer for `error` in OpenAI's shape."""
        return error_answer(of_input(error), development=development)


OPENAI = OpenAIProtocol()


def _written(model: str, encoding_format: str, encoded: Encoded) -> Listing:
    vectors, tokens = encoded.vectors, sum(encoded.counts)
    written = _as_base64 if encoding_format == "base64" else as_json

    def items(start: int, stop: int) -> list[Any]:
        found = zip(range(start, stop), written(vectors[start:stop]), strict=True)
        return [{"object": "embedding", "index": place, "embedding": vector} for place, vector in found]

    lead: dict[str, Any] = {
        "object": "list", "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}
    }  # fmt: skip
    if cut := truncated_places(encoded):
        lead["truncated"] = cut
    return Listing(lead, "data", len(vectors), vectors.shape[1], items)


def _as_base64(vectors: NDArray[Any]) -> list[str]:
    return [b64encode(vector).decode() for vector in vectors.astype("<f4", order="C", copy=False)]


def read_body(body: bytes) -> dict[str, Any]:
    """Return the object that a body is, whose fields are known and which has `input`. Raises InvalidRequest whose details name the field (`param`)."""
    document = read_json(body)
    if not isinstance(document, dict):
        raise wrong("body: must be an object as JSON")
    for name, value in document.items():
        if name not in FIELDS and name not in IGNORED and value is not None:
            raise wrong(f"{name[:80]!r}: there is no such field; there are {', '.join(FIELDS)}", name[:80])
    if "input" not in document:
        raise wrong(
            "input: is missing, must be a text, a list of texts, a list of token ids, or a list of such", "input"
        )
    return document


def _read_input(value: Any, context: EmbeddingContext) -> list[Text]:
    try:
        if isinstance(value, str):
            return [check_text(value, "input")]
        if not isinstance(value, list):
            raise InvalidRequest(f"input={brief(value)}: must be a text or a list")
        if value and type(value[0]) is int:
            return [_token_ids(value, "input")]
        context.check_count(len(value), "input")
        return [
            _token_ids(each, f"input[{place}]") if isinstance(each, list) else check_text(each, f"input[{place}]")
            for place, each in enumerate(value)
        ]
    except InvalidRequest as error:
        raise wrong(error.message, "input") from None


def _token_ids(value: list[Any], where: str) -> list[int]:
    if not value:
        raise InvalidRequest(f"{where}: must not be empty")
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token < _MOST_TOKENS:
            raise InvalidRequest(f"{where}[{place}]: must be a token id, is {brief(token, 40)}")
    return value


def _read_format(document: dict[str, Any]) -> str:
    value = _read(document, "encoding_format", str, "") or FORMATS[0]
    if value not in FORMATS:
        raise wrong(f"encoding_format={brief(value)}: must be one of {', '.join(FORMATS)}", "encoding_format")
    return str(value)


def _read_user(document: dict[str, Any]) -> str:
    value = _read(document, "user", str, "")
    if len(value) > _LONGEST_USER:
        raise wrong(f"user: has {len(value)} characters, must have at most {_LONGEST_USER}", "user")
    return str(value)


def _read_dimensions(document: dict[str, Any]) -> int | None:
    value = _read(document, "dimensions", int, None)
    if value is not None and value < 1:
        raise wrong(f"dimensions={value}: must be 1 or more", "dimensions")
    return None if value is None else int(value)


def _read(document: dict[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    try:
        return read_field(document, name, kind, default)
    except InvalidRequest as error:
        raise wrong(error.message, name) from None


_EMBEDDINGS: Schema = {
    "type": "object",
    "required": ["input"],
    "additionalProperties": False,
    "properties": {
        "input": {"oneOf": [
            TEXT_SCHEMA, {"type": "array", "items": TEXT_SCHEMA, "minItems": 1}, IDS_SCHEMA, {"type": "array", "items": IDS_SCHEMA, "minItems": 1},
        ]},
        "model": {"type": ["string", "null"]},
        "encoding_format": {"type": ["string", "null"], "enum": ["float", "base64", None]},
        "dimensions": DIMENSIONS_SCHEMA,
        "user": {"type": ["string", "null"]},
        "truncate": TRUNCATE_SCHEMA,
        "prompt": PROMPT_SCHEMA,
    },
    "examples": [{"input": ["First do it", "then do it right"]}],
}  # fmt: skip
_EMBEDDED: Schema = {
    "type": "object",
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {
            "type": "object",
            "properties": {
                "object": {"const": "embedding"}, "index": {"type": "integer"},
                "embedding": {"oneOf": [
                    {"type": "array", "items": {"type": "number"}},
                    {"type": "string", "description": "base64 of float32, little-endian"},
                ]},
            },
        }},
        "model": {"type": "string"},
        "usage": {
            "type": "object",
            "properties": {"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}},
        },
        "truncated": TRUNCATED_SCHEMA,
    },
}  # fmt: skip
_OPENAI_ERROR: Schema = {
    "type": "object",
    "properties": {"error": {
        "type": "object",
        "properties": {
            "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "null"]},
        },
    }},
}  # fmt: skip
_MODEL: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"}, "object": {"const": "model"}, "created": {"type": "integer"},
        "owned_by": {"type": "string"}, "dimensions": {"type": "integer"}, "max_length": {"type": "integer"},
    },
}  # fmt: skip


def openai_paths() -> Mapping[str, Any]:
    """Return the paths of OpenAI's endpoints, described for OpenAPI."""
    models = {"type": "object", "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}}}
    place = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/embeddings": {
            "post": described_call(
                "post_v1_embeddings", "Encode texts, as OpenAI does", _EMBEDDINGS, _EMBEDDED, _OPENAI_ERROR
            )
        },
        "/v1/models": {"get": described_page("get_v1_models", "List the models of texts", models, _OPENAI_ERROR)},
        "/v1/models/{model}": {
            "get": described_page("get_v1_models_model", "Describe a model of texts", _MODEL, _OPENAI_ERROR)
            | {"parameters": [place]}
        },
    }
