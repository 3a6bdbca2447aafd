"""The OpenAPI description of the HTTP doors of texts."""

from collections.abc import Mapping
from typing import Any

from weir.messages import JSON

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_WORDS: Schema = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_HEADERS = [
    {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
    for name, text, schema in (
        ("X-Request-Timeout", "seconds until the request expires", {"type": "number", "exclusiveMinimum": 0}),
        ("X-Request-Priority", "higher goes first; 0 unless said otherwise", {"type": "integer"}),
        ("X-Client-Id", "whose texts these are, so that nobody takes more than a fair share", {"type": "string", "minLength": 1, "maxLength": 128}),
        ("X-Request-Id", "sent back with the answer", {"type": "string", "maxLength": 256}),
    )
]  # fmt: skip
_DIMENSIONS: Schema = {
    "type": ["integer", "null"], "minimum": 1, "description": "keeps the first numbers of each vector",
}  # fmt: skip
_TRUNCATE: Schema = {
    "type": ["boolean", "null"], "description": "false refuses a text that is longer than the model reads",
}  # fmt: skip
_PROMPT: Schema = {
    "type": ["string", "null"],
    "description": "put before every text: the name of one of the model's prompts, or the text itself, which ends with a space or a colon",
}  # fmt: skip
_TRUNCATED: Schema = {"type": "array", "items": {"type": "integer"}, "description": "places of the texts that were cut"}

_EMBEDDINGS: Schema = {
    "type": "object",
    "required": ["input"],
    "additionalProperties": False,
    "properties": {
        "input": {"oneOf": [
            _TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, _IDS, {"type": "array", "items": _IDS, "minItems": 1},
        ]},
        "model": {"type": ["string", "null"]},
        "encoding_format": {"type": ["string", "null"], "enum": ["float", "base64", None]},
        "dimensions": _DIMENSIONS,
        "user": {"type": ["string", "null"]},
        "truncate": _TRUNCATE,
        "prompt": _PROMPT,
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
        "truncated": _TRUNCATED,
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

_ENCODE: Schema = {
    "type": "object",
    "required": ["texts"],
    "additionalProperties": False,
    "properties": {
        "id": {},
        "texts": {"type": "array", "minItems": 1, "items": {"oneOf": [_TEXT, _WORDS, _IDS]}},
        "is_tokenized": {"type": ["boolean", "null"], "description": "every text is a list of words"},
        "pairs": {"type": ["boolean", "null"], "description": "every text is a list of two that belong together"},
        "model": {"type": ["string", "null"]},
        "dimensions": _DIMENSIONS,
        "truncate": _TRUNCATE,
        "prompt": _PROMPT,
        "show_tokens": {"type": ["boolean", "null"]},
    },
    "examples": [{"id": 1, "texts": ["First do it", "then do it right"]}],
}  # fmt: skip
_RESULT: Schema = {
    "type": "object",
    "properties": {
        "id": {},
        "result": {"type": "array", "description": "for each text a vector, or a list with one for each token"},
        "status": {"const": 200},
        "truncated": _TRUNCATED,
        "tokens": {"type": "array", "items": _WORDS},
    },
}  # fmt: skip
_ENCODE_ERROR: Schema = {
    "type": "object",
    "properties": {
        "id": {}, "type": {"type": "string"}, "description": {"type": "string"}, "status": {"type": "integer"},
        "details": {},
    },
}  # fmt: skip


def text_paths() -> Mapping[str, Any]:
    """Return the paths of the HTTP doors of texts."""
    models = {"type": "object", "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}}}
    place = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/embeddings": {
            "post": _call("post_v1_embeddings", "Encode texts, as OpenAI does", _EMBEDDINGS, _EMBEDDED, _OPENAI_ERROR)
        },
        "/v1/models": {"get": _page("get_v1_models", "List the models of texts", models, _OPENAI_ERROR)},
        "/v1/models/{model}": {
            "get": _page("get_v1_models_model", "Describe a model of texts", _MODEL, _OPENAI_ERROR)
            | {"parameters": [place]}
        },
        "/encode": {
            "post": _call("post_encode", "Encode texts, as bert-as-service does", _ENCODE, _RESULT, _ENCODE_ERROR)
        },
        "/status/server": {
            "get": _page("get_status_server", "Show configuration and counts", {"type": "object"}, _ENCODE_ERROR)
        },
        "/status/client": {
            "get": _page("get_status_client", "Show what clients have asked", {"type": "object"}, _ENCODE_ERROR)
        },
        "/terminate": {
            "post": _page("post_terminate", "Finish what was accepted, and end", {"type": "object"}, _ENCODE_ERROR)
        },
    }


def _page(name: str, summary: str, answer: Schema, error: Schema) -> dict[str, Any]:
    return {
        "operationId": name,
        "tags": ["texts"],
        "summary": summary,
        "responses": {
            "200": {"description": "As said", "content": {JSON: {"schema": answer}}},
            "default": {"description": "What is wrong", "content": {JSON: {"schema": error}}},
        },
    }


def _call(name: str, summary: str, body: Schema, answer: Schema, error: Schema) -> dict[str, Any]:
    return {
        **_page(name, summary, answer, error),
        "parameters": _HEADERS,
        "requestBody": {"required": True, "content": {JSON: {"schema": body}}},
    }
