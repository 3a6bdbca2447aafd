"""Validates items and outputs against declared types, makes the JSON schemas of types, and reads documents as Weir's own types.

pydantic checks its own types and is imported only for them; msgspec checks all others. Both report errors as a list of
`{"loc": [...], "msg": ..., "type": ...}`. For one of Weir's own documents, `read_document` makes a text that names field, value and rule.
"""

import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Protocol, TypeVar
from uuid import UUID

import msgspec

from weir.errors import InvalidRequest, RequestError, SettingsError, TooLarge, ValidationFailed, brief
from weir.messages import JSON, MSGPACK
from weir.wire.values import (
    ANY_CONTAINERS,
    DECODE,
    ENCODE,
    UNREADABLE,
    UNWRITABLE,
    PydanticForms,
    mentions,
    refuse_containers,
    unreadable,
    writable,
)

# Where the components of an OpenAPI document are.
REF_TEMPLATE = "#/components/schemas/{}"

# A response shows at most this many errors, and this many bytes of each input, even for a long list of wrong elements.
MAX_ERRORS = 100
# pydantic lists all errors or none, with a kilobyte for each. Those of a body of 16 MB would exhaust the worker's memory.
MAX_LISTED = 10_000
MAX_INPUT_BYTES = 1000
_LONGEST_NAME = 80  # characters of the name of an unknown field

_PLAIN = (type(None), bool, int, float, str, bytes)

T = TypeVar("T")


class Schema(Protocol):
    """One declared type."""

    def reader(self, content_type: str) -> Callable[[Any], Any]:
        """Return a function that reads a body, JSON or msgpack, as a value of the type.

        The function raises ValidationFailed, one of UNREADABLE, InvalidRequest (see `refusal`), or what a user's validator raises.
        """

    def check(self, value: Any) -> Any:
        """Return `value` as a value of the type. Raises ValidationFailed."""

    def item(self, value: Any) -> Any:
        """Return `value`, which a caller in this process has given, or which msgpack carried, as a value of the type. Raises ValidationFailed.

        What a JSON document of the same content may have, such as a text for a date, it may have too, also where the type is strict.
        """

    def writer(self, content_type: str) -> Callable[[Any], bytes]:
        """Return a function that writes a value of the type, which `check` has returned, as JSON or msgpack, as the JSON schema says.

        What is written is what the type declares, not what the value's own class has in addition. The function raises one of UNWRITABLE.
        """

    def json_schema(self, *, output: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the JSON schema of the type as it is read, or with `output` as it is written, and the components to which it refers by REF_TEMPLATE."""


def schema_of(declared: Any, name: str) -> Schema:
    """Return the schema of the type `declared`. Raises SettingsError, naming `name`, if neither pydantic nor msgspec can check it."""
    try:
        return _PydanticSchema(declared) if _is_pydantic(declared) else _MsgspecSchema(declared)
    except Exception as error:  # each library has its own, and a user's metaclass may raise anything
        raise SettingsError(
            f"{name}={declared!r}: must be a pydantic model or a type msgspec knows ({error})"
        ) from None


def refusal(error: BaseException, content_type: str, body: Any) -> RequestError | None:
    """Return the error of the request for the `error` that a `reader` has raised for `body`; None if it is an exception of user code."""
    if isinstance(error, (InvalidRequest, TooLarge, ValidationFailed)):
        return error
    if not isinstance(error, UNREADABLE):
        return None
    try:
        DECODE[content_type](body)  # a typed decoder stops at the first wrong type: what follows may not be JSON at all
    except UNREADABLE as malformed:
        return unreadable(malformed, content_type, body)
    return _msgspec_failure(error)


def _is_pydantic(declared: Any) -> bool:
    """Return whether the type, a type inside it, or a rule in its annotation is pydantic's."""
    if hasattr(declared, "__get_pydantic_core_schema__") or hasattr(declared, "__pydantic_core_schema__"):
        return True
    metadata = getattr(declared, "__metadata__", ())
    if any(type(rule).__module__.partition(".")[0] in ("pydantic", "annotated_types") for rule in metadata):
        return True
    return any(map(_is_pydantic, typing.get_args(declared)))


class _MsgspecSchema:
    def __init__(self, declared: Any) -> None:
        self._type = declared
        self._readers: dict[str, Callable[[Any], Any]] = {
            JSON: msgspec.json.Decoder(declared).decode,
            MSGPACK: msgspec.msgpack.Decoder(declared).decode,
        }

    def reader(self, content_type: str) -> Callable[[Any], Any]:
        read = self._readers[content_type]

        def reads(body: bytes | memoryview) -> Any:
            if len(body) > ANY_CONTAINERS:
                refuse_containers(body, content_type)
            return read(body)

        return reads

    def check(self, value: Any) -> Any:
        try:
            checked = msgspec.convert(value, self._type)
        except msgspec.ValidationError as error:
            return self._check_plain(value, error)
        if checked is value and not isinstance(value, _PLAIN):
            self._check_deeply(value)
        return checked

    item = check  # which takes the forms of JSON anyway

    def _check_plain(self, value: Any, error: msgspec.ValidationError) -> Any:
        """Check `value` again with numpy's numbers and arrays converted to Python's. Raises the failure of the first `error`."""
        try:
            plain = msgspec.to_builtins(value, builtin_types=(bytes, bytearray), enc_hook=writable)
            return msgspec.convert(plain, self._type)
        except msgspec.ValidationError:
            raise _msgspec_failure(error) from None
        except UNWRITABLE:
            raise _msgspec_failure(error) from None

    def _check_deeply(self, value: Any) -> None:
        """Validate the content of a struct, which msgspec does not do when the struct is made."""
        try:
            self._readers[MSGPACK](msgspec.msgpack.encode(value))
        except msgspec.ValidationError as error:
            raise _msgspec_failure(error) from None
        except UNWRITABLE:
            return  # it contains values that only the model can read

    def writer(self, content_type: str) -> Callable[[Any], bytes]:
        return ENCODE[content_type]  # `check` has made it a value of exactly the declared type

    def json_schema(self, *, output: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        (schema,), components = json_schemas([self._type])
        return schema, components


def json_schemas(declared: Iterable[Any]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Return the JSON schemas of types that msgspec knows, and the components to which they refer by REF_TEMPLATE."""
    return msgspec.json.schema_components(
        declared, schema_hook=lambda custom: {"title": custom.__name__}, ref_template=REF_TEMPLATE.format("{name}")
    )


def any_of(*declared: Any) -> msgspec.Meta:
    """Return what a JSON schema says of a value that is of one of the types `declared`, to annotate Any with: msgspec has no union of two lists."""
    schemas, components = json_schemas(declared)
    named = {REF_TEMPLATE.format(name): schema for name, schema in components.items()}
    return msgspec.Meta(extra_json_schema={"anyOf": _inlined(schemas, named)})


def _inlined(schema: Any, named: Mapping[str, Any]) -> Any:
    """Return `schema` with what it refers to in place of the references, as msgspec has no components for what Meta says. No type contains itself."""
    if isinstance(schema, Mapping):
        found = named.get(schema.get("$ref", ""))
        return _inlined(found, named) if found else {key: _inlined(value, named) for key, value in schema.items()}
    return [_inlined(each, named) for each in schema] if isinstance(schema, (list, tuple)) else schema


def read_document(document: Any, declared: type[T]) -> T:
    """Return `document`, which was decoded from JSON, as a value of the type `declared`, such as a Struct.

    Raises InvalidRequest naming the wrong field, its value and the rule. `document` may have been changed then.
    """
    try:
        return msgspec.convert(document, declared)
    except msgspec.ValidationError as error:
        raise InvalidRequest(wrong_field(document, declared, error)[1]) from None


def wrong_field(document: Any, declared: Any, error: msgspec.ValidationError) -> tuple[str, str]:
    """Return which field of `document` is wrong, as msgspec's `error` says ("" for the document itself), and a text that names the field, its
    value and the rule. `document` may have been changed then."""
    config = getattr(declared, "__struct_config__", None)
    if config is not None and config.forbid_unknown_fields and isinstance(document, dict):
        known = declared.__struct_encode_fields__
        unknown = [str(name)[:_LONGEST_NAME] for name in document if name not in known]
        if unknown:
            return unknown[0], f"{unknown[0]}: unknown field; available: {', '.join(known)}"
    text, _, path = str(error).partition(" - at ")
    value, names = document, []
    for index, name in _PATH_PARTS.findall(path):
        key = int(index) if index.isdigit() else name or _wrong_key(document, declared, value)
        value = value[key]
        names.append(str(key))
    if (missing := _MISSING.match(text)) is not None:
        names.append(missing[1])
        return names[0], f"{'.'.join(names)}: is missing, {_rule_of_missing(document, declared, value, missing[1])}"
    return (names or [""])[0], f"{'.'.join(names) or 'body'}={brief(value)}: {_rule(text)}"


def _wrong_key(document: Any, declared: Any, mapping: dict[Any, Any]) -> Any:
    """Return the key of the wrong entry, which msgspec does not name: the document is refused if the mapping has this entry only."""
    for key, value in list(mapping.items()):
        mapping.clear()
        mapping[key] = value
        try:
            msgspec.convert(document, declared)
        except msgspec.ValidationError:
            return key
    raise AssertionError("each entry is valid alone but not together. This is a bug in Weir")


def _rule_of_missing(document: Any, declared: Any, parent: dict[str, Any], name: str) -> str:
    """Return the rule for a missing field: the error for a value that no type accepts."""
    parent[name] = object()
    try:
        msgspec.convert(document, declared)
    except msgspec.ValidationError as error:
        return _rule(str(error).partition(" - at ")[0])
    return "must be given"


def _rule(text: str) -> str:
    """Return the rule in msgspec's `text`: "must be an integer or null" for "Expected `int | null`, got `str`". Other texts are kept."""
    expected = text.removeprefix("Expected ").partition(", got ")[0]
    if expected == text:
        return text[:1].lower() + text[1:]
    kinds = re.sub(
        r"`([^`]*)`", lambda found: _listed([_NAMES.get(kind, kind) for kind in found[1].split(" | ")]), expected
    )
    return f"must be {kinds}"


def _listed(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


_PATH_PARTS = re.compile(r"\[(\d+|\.\.\.)\]|\.([^.\[`]+)")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_NAMES = {
    "str": "a text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
}

_KINDS = (
    ("Object missing required field", "missing"),
    ("Object contains unknown field", "unknown_field"),
    ("Expected", "type"),
)


def _msgspec_failure(error: Exception) -> ValidationFailed:
    """Return the ValidationFailed for an error of msgspec, such as "Expected `int`, got `str` - at `$.a[0]`"."""
    text, _, path = str(error).partition(" - at ")
    loc: list[str | int] = [
        int(index) if index.isdigit() else field or index for index, field in _PATH_PARTS.findall(path)
    ]
    kind = next((kind for beginning, kind in _KINDS if text.startswith(beginning)), "value")
    return ValidationFailed(str(error), details=[{"loc": loc, "msg": text, "type": kind}])


class _PydanticSchema:
    def __init__(self, declared: Any) -> None:
        import pydantic  # not at the top: it loads slowly; it is loaded already, because the user's type is pydantic's

        self._adapter: Any = pydantic.TypeAdapter(declared)
        self._error: type[Any] = pydantic.ValidationError
        self._reads_bytes_as_texts = not mentions(self._adapter.core_schema, "val_json_bytes")
        self._forms = PydanticForms(self._adapter.serializer, self._adapter.core_schema, writable)

    def reader(self, content_type: str) -> Callable[[Any], Any]:
        return self._read_json if content_type == JSON else self._read_msgpack

    def _read_json(self, body: bytes | memoryview) -> Any:
        DECODE[JSON](body)  # pydantic's own parser accepts NaN, infinities and numbers that overflow
        try:
            return self._adapter.validate_json(bytes(body))
        except self._error as error:
            raise _pydantic_failure(error) from None

    def _read_msgpack(self, body: bytes | memoryview) -> Any:
        return self.item(DECODE[MSGPACK](body))

    def item(self, value: Any) -> Any:
        try:
            return self._adapter.validate_python(value)
        except self._error as error:
            document = _document_of(value, with_bytes=self._reads_bytes_as_texts)
            if document is None:
                raise _pydantic_failure(error) from None
        try:
            return self._adapter.validate_json(document)
        except self._error as error:
            raise _pydantic_failure(error) from None

    def check(self, value: Any) -> Any:
        try:
            return self._adapter.validate_python(value)
        except self._error as error:
            raise _pydantic_failure(error) from None

    def writer(self, content_type: str) -> Callable[[Any], bytes]:
        encode, form, as_json = ENCODE[content_type], self._forms.form, content_type == JSON
        return lambda value: encode(form(value, as_json=as_json))

    def json_schema(self, *, output: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        mode = "serialization" if output else "validation"
        schema = self._adapter.json_schema(mode=mode, ref_template=REF_TEMPLATE.format("{model}"))
        return schema, schema.pop("$defs", {})


_DOCUMENTS = (dict, list, tuple, str, int, float, bool, type(None))
_TEXTS = (date, time, timedelta, UUID, Decimal, Enum, set, frozenset)  # which JSON has as texts, numbers and lists


def _document_of(value: Any, *, with_bytes: bool) -> bytes | None:
    """Return a JSON document of the content of `value`; None if it has more than JSON can say. Bytes are in it as texts, for `with_bytes` only."""

    def in_json(part: Any) -> Any:
        if isinstance(part, _TEXTS):
            return msgspec.to_builtins(part)
        if isinstance(part, bytes) and with_bytes:
            return part.decode()
        raise TypeError

    if type(value) not in _DOCUMENTS:
        return None
    try:
        return json.dumps(value, default=in_json, allow_nan=False).encode()
    except UNWRITABLE:
        return None


def _pydantic_failure(error: Any) -> ValidationFailed:
    count = error.error_count()
    if count > MAX_LISTED:
        return ValidationFailed(f"item: {count} errors; with more than {MAX_LISTED}, none is listed", details=[])
    errors = error.errors(include_url=False)
    where = ".".join(map(str, errors[0]["loc"])) or "item"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    details = [{key: _json_able(part) for key, part in each.items()} for each in errors[:MAX_ERRORS]]
    return ValidationFailed(f"{where}: {errors[0]['msg']}{more}", details=details)


def _json_able(value: Any) -> Any:
    """Return a part of an error, which may contain the input or an exception, in a form that JSON can represent in few bytes."""
    try:
        encoded = ENCODE[JSON](value)
    except UNWRITABLE:
        if isinstance(value, dict):
            return {str(key): _json_able(each) for key, each in value.items()}
        return (str(value) if isinstance(value, Exception) else repr(value))[:MAX_INPUT_BYTES]
    if len(encoded) <= MAX_INPUT_BYTES:
        return DECODE[JSON](encoded)
    return encoded[:MAX_INPUT_BYTES].decode(errors="replace") + "..."
