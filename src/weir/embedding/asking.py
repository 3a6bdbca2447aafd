"""What the body of POST /encode says, as JSON, as msgpack or as a form."""

from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from weir.embedding.calling import EmbeddingContext, check_text, read_json
from weir.embedding.texts import Text
from weir.errors import InvalidRequest, UnsupportedMediaType, brief
from weir.messages import MSGPACK
from weir.wire.surrogates import without_nul, words_without_nul
from weir.wire.values import DECODE, refuse_names, uncollected

_FORM = "application/x-www-form-urlencoded"
_MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
_JSON = ("", "*/*", "application/json", "text/json")
_PIECE = 64 << 10  # characters
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


class EncodeBody(msgspec.Struct):
    """What was asked. `id` comes back with the answer."""

    id: Any
    texts: list[Text]
    model: str = ""
    dimensions: int | None = None
    truncate: bool | None = None
    show_tokens: bool = False
    prompt: str | None = None
    whole_words: bool = False


def read_document(body: bytes, content_type: str, site: EmbeddingContext) -> dict[str, Any]:
    """Read a body as far as that it is an object, or a form as one. Raises InvalidRequest; UnsupportedMediaType."""
    media = content_type.partition(";")[0].strip().lower()
    if media == _FORM and not body.lstrip().startswith(b"{"):  # curl -d says so of JSON too
        return _read_form(body, site)
    if media in _MSGPACK:
        said = _unpacked(body)
    elif media in _JSON or media == _FORM or media.endswith("+json"):
        said = read_json(body, clean="texts")
    else:
        raise UnsupportedMediaType(
            f"Content-Type {content_type!r}: must be application/json, application/msgpack or {_FORM}"
        )
    if not isinstance(said, dict):
        raise InvalidRequest("body: must be an object with id and texts")
    return said


def read_asked(said: dict[str, Any], site: EmbeddingContext) -> EncodeBody:
    """Return what an object says. Raises InvalidRequest naming the field, or the place of the text, and the rule."""
    for name in said:
        if name not in _FIELDS:
            raise InvalidRequest(f"{str(name)[:80]!r}: there is no such field; there are {', '.join(_FIELDS)}")
    texts, more = _texts(said, site), {name: read_field(said, name, *kind) for name, kind in _MORE.items()}
    return EncodeBody(said.get("id"), texts, **more, whole_words=bool(said.get("is_tokenized")))


# What may be said beside, with its type and what holds where it is not said.
_MORE: dict[str, tuple[type[Any], Any]] = {
    "model": (str, ""), "dimensions": (int, None), "truncate": (bool, None), "show_tokens": (bool, False),
    "prompt": (str, None),
}  # fmt: skip
_FIELDS = ("id", "texts", "is_tokenized", "pairs", *_MORE)
_WORDS = {str: "a text", bool: "true or false", int: "a whole number"}


def _unpacked(body: bytes) -> Any:
    refuse_names(body, MSGPACK)
    try:
        with uncollected(len(body)):
            return DECODE[MSGPACK](body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"body: is not msgpack ({error})") from error


def read_field(said: dict[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    """Return the field of that name, `default` where it is not there or null. Raises InvalidRequest unless it is of that kind."""
    value = said.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise InvalidRequest(f"{name}={brief(value)}: must be {_WORDS[kind]}")
    return value


def _texts(said: dict[str, Any], site: EmbeddingContext) -> list[Text]:
    texts = said.get("texts")
    if not isinstance(texts, list):
        raise InvalidRequest("texts: is missing, must be a list" if texts is None else "texts: must be a list of texts")
    site.check_count(len(texts), "texts")
    tokenized = read_field(said, "is_tokenized", bool, None)
    if read_field(said, "pairs", bool, False):
        return [_pair(text, f"texts[{place}]") for place, text in enumerate(texts)]
    return [read_text(_cleaned(text), f"texts[{place}]", tokenized) for place, text in enumerate(texts)]


def _cleaned(text: Any) -> Any:
    """Return `text`, or words, without the characters that bert-as-service leaves out."""
    if isinstance(text, str):
        return without_nul(text)
    return words_without_nul(text) if isinstance(text, list) and text and isinstance(text[0], str) else text


def read_text(text: Any, where: str, tokenized: bool | None) -> Text:
    """Read one: a list is of words or of token ids, whether `tokenized` is said or not, but then all must be."""
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


def _pair(text: Any, where: str) -> Text:
    if isinstance(text, list) and len(text) == 2:
        return check_text(_cleaned(text[0]), f"{where}[0]"), check_text(_cleaned(text[1]), f"{where}[1]")
    raise InvalidRequest(f"{where}: must be two texts (pairs), is {brief(text)}")


def _read_form(body: bytes, site: EmbeddingContext) -> dict[str, Any]:
    """Read a form: `texts` comes once for each text; words of one text have a space between."""
    try:
        if body.count(b"&") > site.max_texts + 16:
            raise ValueError("too many fields")
        fields = _fields_of(body.decode())
    except (UnicodeDecodeError, ValueError) as error:
        raise InvalidRequest(f"body: is not a form ({error})") from error
    said: dict[str, Any] = {name: values[-1] for name, values in fields.items()}
    for name in ("is_tokenized", "pairs", "truncate", "show_tokens"):
        if name in said:
            said[name] = _truth(said[name], name)
    if "dimensions" in said and said["dimensions"].isdecimal() and len(said["dimensions"]) < 10:
        said["dimensions"] = int(said["dimensions"])
    if "texts" in fields:
        said["texts"] = [text.split() for text in fields["texts"]] if said.get("is_tokenized") else fields["texts"]
    return said


def _fields_of(form: str) -> dict[str, list[str]]:
    """Return the values of each field, in order. ValueError for what is no field."""
    fields: dict[str, list[str]] = {}
    for field in form.split("&"):
        name, equals, value = field.partition("=")
        if not equals:
            raise ValueError(f"bad query field: {brief(field)}")
        fields.setdefault(_unquoted(name), []).append(_unquoted(value))
    return fields


def _unquoted(text: str) -> str:
    """Return what a name or a value says. Of a long one, piece by piece: Python's own way makes a list of all escapes of it."""
    text = text.replace("+", " ")
    parts, at = [], 0
    while at < len(text):
        end = at + _PIECE
        escape = text.find("%", max(at, end - 2), end)
        if escape > 0 and end < len(text):  # an escape is not cut
            end = max(escape, at + 1)
        parts.append(unquote_to_bytes(text[at:end]))
        at = end
    return b"".join(parts).decode(errors="replace")


def _truth(text: str, name: str) -> bool:
    if text.lower() not in _TRUTH:
        raise InvalidRequest(f"{name}={text[:80]!r}: must be true or false")
    return _TRUTH[text.lower()]
