"""What the calls of the Open Inference Protocol read and answer: JSON documents."""

from typing import Any, TypeVar

from weir.errors import InvalidRequest, brief
from weir.protocols.kserve.replies import JSON_TYPE
from weir.protocols.response import HttpResponse, encode_safely


def document(value: Any) -> HttpResponse:
    """Return the answer that is this JSON document."""
    return HttpResponse(200, [JSON_TYPE, (b"cache-control", b"no-store")], encode_safely(value))


T = TypeVar("T", str, int, bool)


def text_of(said: dict[str, Any], name: str) -> str:
    """Return the text `name` of a document. Raises InvalidRequest."""
    return _of_type(said, name, str, "a text")


def count_of(said: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return the integer `name` of a document; `default` if it is not there, or null. Raises InvalidRequest."""
    if default is not None and said.get(name) is None:
        return default
    return _of_type(said, name, int, "an integer")


def flag_of(said: dict[str, Any], name: str) -> bool:
    """Return the truth value `name` of a document; False if it is not there, or null. Raises InvalidRequest."""
    return False if said.get(name) is None else _of_type(said, name, bool, "true or false")


def _of_type(said: dict[str, Any], name: str, kind: type[T], rule: str) -> T:
    if name not in said:
        raise InvalidRequest(f"{name}: is missing, must be {rule}")
    value = said[name]
    if type(value) is not kind:
        raise InvalidRequest(f"{name}={brief(value)}: must be {rule}")
    return value
