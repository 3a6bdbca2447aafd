"""Content types: what a request's body is, and in which of a model's types the answer goes out."""

from collections.abc import Sequence

from weir.errors import UnsupportedMediaType
from weir.messages import JSON, MSGPACK, OCTETS
from weir.model import Model, is_tensor_model, overrides

MAX_WISHES = 64  # of one header: each takes microseconds, and a head has room for thousands

# What clients say without meaning it: nothing, anything, and what curl -d sends.
_READ_AS_JSON = frozenset(("", "*/*", "application/x-www-form-urlencoded", "text/json", JSON))
_READ_AS_MSGPACK = frozenset(("application/x-msgpack", "application/vnd.msgpack", MSGPACK))


def read_types(model: type[Model], batch: bool) -> list[str]:
    """Return the content types that `model` reads; for a list of items only those that can hold a list."""
    if batch or is_tensor_model(model):
        return [JSON, MSGPACK]
    return list(dict.fromkeys((JSON, MSGPACK, OCTETS, *map(str.lower, model.content_types))))


def media_of(content_type: str) -> str:
    """Return a content type without its parameters."""
    return content_type.partition(";")[0]


def write_types(model: type[Model], batch: bool, content_type: str) -> list[str]:
    """Return the content types of answers, the preferred one first.

    That is the request's own if an answer can surely be written in it, else JSON. Bytes can be an answer of every
    model that returns them, but only one that says so (`Output = bytes`) gives them unasked.
    """
    offered = read_types(model, batch)
    content_type = media_of(content_type)
    if content_type == OCTETS:
        same = model.Output is bytes
    else:
        same = content_type in (JSON, MSGPACK) or overrides(model, "encode")
    preferred = content_type if same else JSON
    return [preferred, *(each for each in offered if each != preferred)]


def content_type_of(value: str, model: type[Model], batch: bool) -> str:
    """Return the canonical form of a Content-Type header's `value` ("" when there is none).

    A multipart type keeps its parameters: the model's `decode` needs the boundary. Raises UnsupportedMediaType naming the value and the types that the model reads.
    """
    media, _, parameters = value.partition(";")
    media = media.strip().lower()
    offered = read_types(model, batch)
    if media in offered:
        return f"{media}; {parameters.strip()}" if media.startswith("multipart/") and parameters.strip() else media
    if media in _READ_AS_JSON or media.endswith("+json"):
        return JSON
    if media in _READ_AS_MSGPACK:
        return MSGPACK
    raise UnsupportedMediaType(f"Content-Type {value!r}: must be one of {', '.join(offered)}")


def accept_of(value: str, offered: Sequence[str]) -> str:
    """Return the one of `offered` that an Accept header's `value` wants most; the first if it has no wish.

    Raises UnsupportedMediaType naming the value and what is offered.
    """
    if value in ("", "*/*"):
        return offered[0]
    wishes = _wishes(value)
    best, best_weight = "", 0.0
    for candidate in offered:
        weight = _weight(candidate, wishes)
        if weight > best_weight:
            best, best_weight = candidate, weight
    if not best:
        raise UnsupportedMediaType(f"Accept {value!r}: answers are written as {', '.join(offered)}")
    return best


def weighted(value: str) -> dict[str, float]:
    """Read a header like `gzip, zstd;q=0.5` into lower-case names and their weights, 1 unless said otherwise.

    A weight that is no number counts as 0. What stands behind the first MAX_WISHES is not looked at.
    """
    wishes: dict[str, float] = {}
    for part in value.split(",", MAX_WISHES)[:MAX_WISHES]:
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        if name:
            weights = [parameter[2:] for parameter in parameters if parameter.startswith("q=")]
            wishes[name] = _number(weights[0]) if weights else 1.0
    return wishes


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _wishes(value: str) -> dict[str, float]:
    wishes = weighted(value)
    for alias in _READ_AS_MSGPACK & wishes.keys():
        wishes.setdefault(MSGPACK, wishes[alias])
    return wishes


def _weight(candidate: str, wishes: dict[str, float]) -> float:
    family = candidate.partition("/")[0] + "/*"
    for name in (candidate, family, "*/*"):  # the most specific wish counts
        if name in wishes:
            return wishes[name]
    return 0.0
