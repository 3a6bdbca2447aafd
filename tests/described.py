"""Holds what a server reads and answers to its OpenAPI document."""

from typing import Any

import httpx
from openapi_schema_validator import OAS31Validator


def faults(document: dict[str, Any], schema: dict[str, Any], value: Any) -> list[str]:
    """Return what is wrong with `value` by a schema of `document`. A field that the schema does not name is wrong too."""
    closed = _closed({**schema, "components": document["components"]})
    return [f"{error.json_path}: {error.message}" for error in OAS31Validator(closed).iter_errors(value)]


def body_faults(document: dict[str, Any], path: str, body: Any, method: str = "post") -> list[str]:
    """Return what is wrong with the body of a call at `path`."""
    content = document["paths"][path][method]["requestBody"]["content"]
    return faults(document, content["application/json"]["schema"], body)


def answer_faults(document: dict[str, Any], path: str, answer: httpx.Response) -> list[str]:
    """Return what is wrong with an answer of the operation at `path`."""
    responses = document["paths"][path][answer.request.method.lower()]["responses"]
    described = responses.get(str(answer.status_code)) or responses["default"]
    return faults(document, described["content"]["application/json"]["schema"], answer.json())


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(each) for key, each in schema.items()}
    return {"additionalProperties": False, **closed} if "properties" in closed and "type" in closed else closed
