"""Values as JSON and msgpack: encodes and decodes them, splits lists into items, and refuses bodies that would cost too much.

Values of pydantic's types are written in the form that their declared type says, with its aliases and serializers, but by the one encoder here, so bytes,
dates and numpy's values are written alike in all responses. pydantic is not imported: it is loaded already where a user's type is pydantic's.

JSON is read strictly (RFC 8259): NaN, infinities and half of a surrogate pair are refused, and the error names their place.
"""

import gc
import json
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import msgspec

from weir.errors import InvalidRequest, TooLarge
from weir.messages import JSON, MSGPACK

# The mode of pydantic's serializers in which bytes stay bytes; they can read it. In "json" they must be UTF-8.
MODE = "weir"

Leaf = Callable[[Any], Any]


class PydanticForms:
    """The forms of the values of one type, which has this `serializer` and core schema. `leaf` writes values that pydantic does not know."""

    def __init__(self, serializer: Any, core_schema: Any, leaf: Leaf) -> None:
        self._serializer = serializer
        self._leaf = leaf
        self._has_own_json = _has_own_json(core_schema)

    def form(self, value: Any, *, as_json: bool) -> Any:
        """Return what is written of `value`. Raises ValueError if a serializer does."""
        if as_json and self._has_own_json:
            return self._serializer.to_python(value, mode="json", by_alias=True, warnings=False, fallback=self._leaf)
        return self._serializer.to_python(value, mode=MODE, by_alias=True, warnings=False)


def forms_of(value: Any, leaf: Leaf) -> PydanticForms | None:
    """Return the forms of a `value` whose type nobody has declared: those of its class. None if it is not of pydantic."""
    kind: Any = type(value)
    return _forms_of_class(kind, leaf) if hasattr(kind, "__pydantic_core_schema__") else None


@lru_cache(maxsize=256)
def _forms_of_class(kind: Any, leaf: Leaf) -> PydanticForms:
    return PydanticForms(kind.__pydantic_serializer__, kind.__pydantic_core_schema__, leaf)


def leaf_of(value: Any) -> Any:
    """Return what is written of a value such as pydantic's SecretStr, Url or iterator; `value` itself if it is none of pydantic's."""
    if type(value).__module__.partition(".")[0] not in ("pydantic", "pydantic_core"):
        return value
    return sys.modules["pydantic_core"].to_jsonable_python(value, by_alias=True)


def _has_own_json(schema: Any) -> bool:
    """Return whether the type says how it is written as JSON only: by a serializer, or in its configuration."""
    if isinstance(schema, Mapping):
        if str(schema.get("when_used")).startswith("json") and str(schema.get("type")).startswith("function"):
            return True
        return any(str(key).startswith("ser_json_") or _has_own_json(part) for key, part in schema.items())
    return isinstance(schema, (list, tuple)) and any(map(_has_own_json, schema))


def mentions(schema: Any, key: str) -> bool:
    """Return whether a core schema has `key` anywhere."""
    if isinstance(schema, Mapping):
        return key in schema or any(mentions(part, key) for part in schema.values())
    return isinstance(schema, (list, tuple)) and any(mentions(part, key) for part in schema)


# A "half" is an escape of half of a surrogate pair without the other half, which is not a Unicode character (RFC 8259, section 8.2).

MAX_HALVES = 10_000  # of one body that `without_halves` replaces

# A half is the first of a pair without the second behind it, or the second without the first. This holds without escaped backslashes, see `_halves`.
# Before Python 3.11.5, what is matched in a possessive group must not try one way and then another (CPython issue 106052).
_FIRST, _SECOND = (rb"\\u[dD][%b][0-9a-fA-F]{2}" % digits for digits in (b"89abAB", b"c-fC-F"))
_HALF = re.compile(b"%b(?!%b)|(?<!%b)%b" % (_FIRST, _SECOND, _FIRST, _SECOND))
_NUL = rb"\u0000"
_NO_TOKEN = "\ufffd"  # the replacement character


def _halves(body: bytes | bytearray | memoryview) -> Iterator[re.Match[bytes]]:
    """Yield the halves in `body`. Backslashes occur in texts only; where one is escaped, spaces stand for both."""
    return _HALF.finditer(bytes(body).replace(rb"\\", b"  "))


def half_in(body: bytes | bytearray | memoryview) -> str | None:
    """Return an error text for the first half in `body`, which is not JSON for that reason or another; None if it has none. The time is linear."""
    found = next(_halves(body), None)
    return found and f"is not valid Unicode: byte {found.start()} begins half of a surrogate pair"


def without_halves(body: bytes | bytearray | memoryview) -> bytes | None:
    """Return `body`, which is JSON, with each half replaced by an escaped NUL; None if it has no half, or more than MAX_HALVES.

    Both escapes have six bytes, so offsets do not change. The time is linear.
    """
    made, halves = bytearray(body), 0
    for halves, found in enumerate(_halves(body), 1):
        if halves == MAX_HALVES:
            return None
        made[found.start() : found.end()] = _NUL
    return bytes(made) if halves else None


def without_nul(text: str) -> str:
    """Return `text` as bert-as-service reads it: without NULs. A text of NULs only becomes a space, which has no tokens."""
    return (text.replace("\0", "") or " ") if "\0" in text else text


def words_without_nul(words: list[Any]) -> list[Any]:
    """Return `words`, each of which is one token, as bert-as-service reads them: a word with a NUL is an unknown token."""
    return [_NO_TOKEN if isinstance(word, str) and "\0" in word else word for word in words]


# What msgspec raises for input that it cannot read, and for values that it cannot write.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
UNWRITABLE = (TypeError, ValueError, OverflowError, RecursionError)


def writable(value: Any) -> Any:
    """Return a writable form of a `value` whose type JSON and msgpack do not have. Raises TypeError if there is none."""
    return _writable(value, as_json=False)


def writable_as_json(value: Any) -> Any:
    """Do what `writable` does, for JSON only."""
    return _writable(value, as_json=True)


def _writable(value: Any, *, as_json: bool) -> Any:
    tolist = getattr(value, "tolist", None)  # numpy, torch, jax, array
    if callable(tolist):
        return _listed(value, tolist)
    forms = forms_of(value, writable)
    if forms is not None:
        return forms.form(value, as_json=as_json)
    leaf = leaf_of(value)
    if leaf is not value:
        return leaf
    if isinstance(value, deque):
        return list(value)
    if isinstance(value, re.Pattern):
        return value.pattern
    raise _formless(value)


def _formless(value: Any) -> TypeError:
    return TypeError(f"{type(value).__module__}.{type(value).__qualname__} has no form in JSON or msgpack")


def _listed(value: Any, tolist: Callable[[], Any]) -> Any:
    """Return an array as lists, and one of its elements as a value of Python's."""
    kind = value.dtype.kind if type(value).__module__ == "numpy" else ""
    if kind == "M":
        return _instants(value)
    if kind == "m":
        return _durations(value)
    plain = tolist()
    if type(plain) is not type(value):
        return plain
    if kind != "f":  # complex numbers of more than 128 bits
        raise _formless(value)
    return float(value)  # numpy.longdouble, which Python does not have


def _instants(value: Any) -> Any:
    """Return numpy's datetime64 as texts, whatever their unit: Python has none for nanoseconds. NaT is None."""
    import numpy  # not at the top: workers of models without tensors do not load it

    texts: Any = numpy.where(numpy.isnat(value), numpy.array(None), numpy.datetime_as_string(value))
    return texts.tolist()


def _durations(value: Any) -> Any:
    """Return numpy's timedelta64 as Python's. NaT is None. Raises TypeError for what Python cannot express: months, and parts of microseconds."""
    if value.dtype.str[3:] in ("[M]", "[Y]"):
        raise _formless(value)
    exact = value.astype("timedelta64[us]")
    if not ((exact == value) | (value != value)).all():
        raise TypeError(
            f"a duration of unit {value.dtype} has no exact form in JSON or msgpack: it has parts of microseconds"
        )
    return exact.tolist()


# msgspec takes ten microseconds for a float such as -1e308 or 4.9e-324, so a megabyte of them blocks the interpreter for more than a second.
# Python's own conversion takes 0.25 microseconds for any float. So a body with such exponents is read with that.
# It has a pattern for each letter, because re finds a letter ten times faster than one of a set.
_SLOW_FLOATS = [re.compile(letter + rb"[-+]?[0-9]{2}") for letter in (b"e", b"E")]
# A body of at most this many bytes is too short to be expensive, so its cost is not checked.
SMALL_BODY = 4096


def read_float(text: str) -> float:
    """Return the float in the JSON `text`. Raises ValueError for a number beyond the range of floats."""
    value = float(text)
    if value in (math.inf, -math.inf):
        raise ValueError("Number out of range")
    return value


_decode_json = msgspec.json.Decoder().decode
_decode_slowly = msgspec.json.Decoder(float_hook=read_float).decode


def has_slow_floats(body: bytes | bytearray | memoryview) -> bool:
    """Return whether `body` may contain floats that msgspec reads slowly."""
    return len(body) > SMALL_BODY and any(each.search(body) for each in _SLOW_FLOATS)


def decode_json(body: bytes | bytearray | memoryview) -> Any:
    """Return the value in a JSON `body`. Raises one of UNREADABLE, also for a number beyond the range of floats, and TooLarge for too many lists, objects or
    names."""
    refuse_names(body, JSON)
    return _read_json(body)


def _read_json(body: bytes | bytearray | memoryview) -> Any:
    if len(body) <= SMALL_BODY:
        return _decode_json(body)
    refuse_containers(body, JSON)
    return (_decode_slowly if has_slow_floats(body) else _decode_json)(body)


def _read_msgpack(body: bytes | bytearray | memoryview) -> Any:
    if len(body) > SMALL_BODY:
        refuse_containers(body, MSGPACK)
    return _plain_msgpack(body)


_plain_msgpack = msgspec.msgpack.Decoder().decode

# Limit of lists and objects in a body. A list takes at least 64 bytes of memory and an object 200, even if it has two bytes in the body, and as
# much time as dozens of numbers. Any body may have ANY_CONTAINERS, and one more for each 16 bytes: enough for rows of three short numbers.
ANY_CONTAINERS = 1 << 18
_BYTES_OF_CONTAINER = 16

# Limit of names in the objects of a body that the server decodes. A name has at least seven bytes in the body and takes up to a microsecond, because
# the hash table of a large object does not fit into the processor's caches. So only names that differ from names nearby count. Names in msgpack's
# short form for objects of up to 15 names do not count, because each such object has a small table.
ANY_NAMES = 1 << 16
_BYTES_OF_NAME = 64

_PIECE = 64 << 10  # bytes that one search examines; other threads may run in between
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_TEXTS = re.compile(rb'(?:[^"]++|(")(?:[^"\\]++|\\.)*+("|\\?+\Z))*+', re.DOTALL)  # the last of them may be cut off
_NAME_OR_TEXT = re.compile(rb'"((?:[^"\\]++|\\.)*+)"[ \t\r\n]*+:|"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_CONTAINER = re.compile(rb"[\x80-\x9f]|[\xdc\xde]..|[\xdd\xdf].{4}", re.DOTALL)
_CONTAINER_BYTES = bytes((*range(0x80, 0xA0), *range(0xDC, 0xE0)))
_MSGPACK = re.compile(  # several containers; many numbers of one length; several other values of a fixed length; or the first byte of a value that states its length
    rb"((?:[\x80-\x9f]|[\xdc\xde]..|[\xdd\xdf].{4})++)"
    rb"|((?:[\xcb\xcf\xd3].{8}){8,}+|(?:[\xca\xce\xd2].{4}){8,}+)"
    rb"|(?:[\x00-\x7f\xc0-\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1\xd4]..|\xd5...|[\xca\xce\xd2].{4}|\xd6.{5}|[\xcb\xcf\xd3].{8}|\xd7.{9}|\xd8.{17}|"
    + b"|".join(b"%b.{%d}" % (re.escape(bytes([0xA0 + size])), size) for size in range(32))
    + rb")++|[\xc4-\xc6\xc7-\xc9\xd9-\xdb]",
    re.DOTALL,
)
_LONG_NUMBERS = b"\xcb\xcf\xd3"
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_OBJECTS = (0xDE, 0xDF)
_EXTENSIONS = (0xC7, 0xC8, 0xC9)  # have one more byte, for their type


def refuse_containers(body: bytes | bytearray | memoryview, content_type: str) -> None:
    """Raise TooLarge if `body`, JSON or msgpack that is not decoded yet, has more lists and objects than a body of its size may have."""
    most = ANY_CONTAINERS + len(body) // _BYTES_OF_CONTAINER
    if len(body) <= most:
        return
    count = (_json_containers if content_type == JSON else _msgpack_containers)(bytes(body), most)
    if count > most:
        raise TooLarge(
            f"body: has more than {most} lists and objects, which a body of {len(body)} bytes may have; send tensors as binary data"
        )


def refuse_names(body: bytes | bytearray | memoryview, content_type: str) -> None:
    """Raise TooLarge if the objects of `body`, JSON or msgpack that is not decoded yet, have more different names than a body of its size may have.

    That is for bodies whose decoding blocks others. A name that is repeated within _PIECE bytes counts once.
    """
    most = ANY_NAMES + len(body) // _BYTES_OF_NAME
    if len(body) <= 2 * most:  # a name and its value take two bytes
        return
    if (_json_names if content_type == JSON else _msgpack_names)(bytes(body), most) > most:
        raise TooLarge(
            f"body: has more than {most} different names in its objects, which a body of {len(body)} bytes may have; send lists instead"
        )


def _json_names(body: bytes, most: int) -> int:
    """Return how many names a JSON body has. A result of at most `most` may be too high."""
    count = body.count(b":")
    if count <= most:
        return count
    count = 0
    for piece in _whole_texts(body):
        count += len(set(_NAME_OR_TEXT.findall(piece)) - {b""})  # findall returns b"" for a text that is not a name
        if count > most:
            break
    return count


def _msgpack_names(body: bytes, most: int) -> int:
    """Return how many names the objects with more than 15 names have, repeated names included."""
    if b"\xde" not in body and b"\xdf" not in body:
        return 0
    count = 0
    for heads in _msgpack_heads(body):
        count += sum([int.from_bytes(head[1:], "big") for head in heads if head[0] in _OBJECTS])
        if count > most:
            break
    return count


def _json_containers(body: bytes, most: int) -> int:
    """Return how many lists and objects a JSON body has. A result of at most `most` may be too high, because brackets in texts count too."""
    count = body.count(b"[") + body.count(b"{")
    if count <= most or b'"' not in body:
        return count
    count = 0
    for piece in _whole_texts(body):
        bare = _TEXT.sub(b"", piece)
        count += bare.count(b"[") + bare.count(b"{")
        if count > most:
            break
    return count


def _whole_texts(body: bytes) -> Iterator[bytes]:
    """Yield the pieces of a JSON body. No piece ends inside a text. They end before a text that is cut off, which decoding will refuse."""
    position = 0
    while position < len(body):
        found = _TEXTS.match(body, position, position + _PIECE)
        assert found is not None  # it may match nothing
        end = found.start(1) if found[2] in (b"", b"\\") else found.end()
        if end == position and (found := _TEXT.match(body, position)):  # a text may be longer than a piece
            end = found.end()
        if end == position:
            return
        yield body[position:end]
        position = end


def _msgpack_containers(body: bytes, most: int) -> int:
    """Return how many lists and objects a msgpack body has. A result of at most `most` may be too high."""
    count = len(body) - len(body.translate(None, _CONTAINER_BYTES))
    if count <= most:
        return count
    count = 0
    for heads in _msgpack_heads(body):
        count += len(heads)
        if count > most:
            break
    return count


def _msgpack_heads(body: bytes) -> Iterator[list[bytes]]:
    """Yield the heads of the lists and objects in a msgpack body, some at a time. They end before anything malformed, which decoding will refuse."""
    position = 0
    while found := _MSGPACK.match(body, position, position + _PIECE):
        start, position = position, found.end()
        if found[1] is not None:
            yield _CONTAINER.findall(found[1])
        elif size := _LENGTH_BYTES.get(body[start]):
            position += size + int.from_bytes(body[position : position + size], "big") + (body[start] in _EXTENSIONS)


def values_bytes(body: bytes | bytearray | memoryview, content_type: str) -> int:
    """Return how many bytes of memory the values of a `body` of JSON or msgpack take at most, also while arrays are made of them; 0 for other bodies.

    The characters of texts do not count, except those of msgpack: they are as long as in the body.
    """
    if content_type not in (JSON, MSGPACK):
        return 0
    plain = body if isinstance(body, bytes) else bytes(body)
    return msgpack_bytes(plain) if content_type == MSGPACK else json_bytes(plain)


def json_bytes(body: bytes) -> int:
    """Return how many bytes the values of a JSON `body` take at most: each comma, quote and bracket stands for what a value, half a text and a container take."""
    return objects_bytes(body) + _COMMA_MEMORY * body.count(b",") + _LIST_MEMORY * body.count(b"[")


def objects_bytes(body: bytes) -> int:
    """Return how many bytes the objects and texts in a JSON `body` take at most, if its lists are not decoded."""
    quote = _QUOTE_MEMORY if body.isascii() else _WIDE_QUOTE_MEMORY
    return quote * body.count(b'"') + (_LIST_MEMORY + _NAMES_MEMORY) * body.count(b"{")


# Bytes of memory, as measured at the peak (a test does): of a number in a list, with the number itself and its place in an array; of half a text that becomes
# bytes, too, in ASCII and otherwise.
_COMMA_MEMORY, _QUOTE_MEMORY, _WIDE_QUOTE_MEMORY = 64, 28, 44


def msgpack_bytes(body: bytes) -> int:
    """Return how many bytes the values of a msgpack `body` take at most: an object and its places for each short value, container and text."""
    position = total = 0
    while found := _MSGPACK.match(body, position, position + _PIECE):
        start, position = position, found.end()
        if found[1] is not None:
            heads = _CONTAINER.findall(found[1])
            total += _LIST_MEMORY * len(heads) + _NAMES_MEMORY * sum([head[0] in _WITH_NAMES for head in heads])
        elif found[2] is not None:
            total += _COMMA_MEMORY * ((position - start) // (9 if body[start] in _LONG_NUMBERS else 5))
        elif size := _LENGTH_BYTES.get(body[start]):
            position += size + int.from_bytes(body[position : position + size], "big") + (body[start] in _EXTENSIONS)
            total += position - start + _TEXT_MEMORY
        else:
            total += _SHORT_MEMORY * (position - start)
    return total


# Bytes of memory of a list or an empty object, of the table of names of another, of a text in addition to its characters, and for each byte of short values:
# a number in an array is the dearest.
_LIST_MEMORY, _NAMES_MEMORY, _TEXT_MEMORY, _SHORT_MEMORY = 72, 128, 64, 32
_WITH_NAMES = bytes((*range(0x81, 0x90), 0xDE, 0xDF))

# The bare functions, for callers that handle UNREADABLE and UNWRITABLE themselves.
DECODE: dict[str, Callable[[Any], Any]] = {JSON: _read_json, MSGPACK: _read_msgpack}
# What they call for bodies of up to SMALL_BODY bytes.
DECODE_SMALL: dict[Any, Callable[[Any], Any]] = {_read_json: _decode_json, _read_msgpack: _plain_msgpack}
ENCODE: dict[str, Callable[[Any], bytes]] = {
    JSON: msgspec.json.Encoder(enc_hook=writable_as_json).encode,
    MSGPACK: msgspec.msgpack.Encoder(enc_hook=writable).encode,
}
_DECODE_LIST: dict[str, Callable[[Any], list[msgspec.Raw]]] = {
    JSON: msgspec.json.Decoder(list[msgspec.Raw]).decode,
    MSGPACK: msgspec.msgpack.Decoder(list[msgspec.Raw]).decode,
}


_BETWEEN = b" \t\r\n,"  # bytes between the elements of a JSON list

# For a smaller body, switching the garbage collector off is not worth while.
_LARGE = 64 << 10


def uncollected(size: int) -> AbstractContextManager[None]:
    """Return a context without garbage collection, in which a body of `size` bytes is decoded.

    The collector would visit all decoded values again and again, which takes four times as long as decoding lists of lists. None of them is garbage.
    """
    return _without_collector() if size > _LARGE and gc.isenabled() else _AS_IT_IS


_AS_IT_IS = nullcontext()


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def decode(body: bytes | memoryview, content_type: str) -> Any:
    """Return the value in `body`, which is JSON or msgpack. Raises InvalidRequest for a malformed body, and TooLarge for too many lists, objects or names."""
    refuse_names(body, content_type)
    try:
        with uncollected(len(body)):
            return DECODE[content_type](body)
    except UNREADABLE as error:
        raise unreadable(error, content_type, body) from None


def split(body: bytes | memoryview, content_type: str, most: int | None = None) -> list[bytes] | None:
    """Return the elements of the list in `body`, still encoded; None if there are more than `most`. Raises InvalidRequest if `body` is not a list.

    The number is checked before the elements are made, because those of 16 MB of numbers take half a gigabyte. A JSON element with half of a surrogate pair
    is returned too; decoding that element raises the error.
    """
    try:
        if most is not None and (_is_longer if content_type == JSON else _is_longer_msgpack)(bytes(body), most):
            return None
        with uncollected(len(body)):
            return list(map(bytes, _DECODE_LIST[content_type](body)))
    except UNREADABLE as error:
        made = without_halves(body) if content_type == JSON else None
        if made is None:
            raise unreadable(error, content_type, body) from None
    elements = split(made, content_type, most)
    return None if elements is None else _split_like(body, elements)


def _split_like(body: bytes | memoryview, elements: list[bytes]) -> list[bytes]:
    """Return the elements of the list in `body` at the offsets of `elements`, which are those of the same list without halves."""
    found, position = [], bytes(body).index(b"[") + 1
    for element in elements:
        while body[position] in _BETWEEN:
            position += 1
        found.append(bytes(body[position : position + len(element)]))
        position += len(element)
    return found


def _is_longer(body: bytes, most: int) -> bool:
    """Return whether the JSON list has more than `most` elements of any kind; none of them is made. Raises one of UNREADABLE for a longer list that
    is malformed."""
    if body.count(b",") < most or not body.lstrip().startswith(b"["):
        return False
    import numpy  # not at the top: workers of models without tensors do not load it

    depth = commas = 0
    for piece in _whole_texts(body):
        bare = numpy.frombuffer(_TEXT.sub(b"", piece), numpy.uint8)
        steps = numpy.isin(bare, _OPENING).astype(numpy.int32) - numpy.isin(bare, _CLOSING)
        depths = depth + numpy.cumsum(steps)
        commas += int(numpy.count_nonzero((bare == _COMMA) & (depths == 1)))
        if commas >= most:
            _check_json(body)
            return True
        depth = int(depths[-1]) if len(depths) else depth
    return False


_OPENING, _CLOSING, _COMMA = list(b"[{"), list(b"]}"), ord(",")
_check_json = msgspec.json.Decoder(msgspec.Raw).decode  # which makes no values


def _is_longer_msgpack(body: bytes, most: int) -> bool:
    """Return whether the msgpack list has more than `most` elements: it begins with its length."""
    if body[:1] == b"\xdc" or body[:1] == b"\xdd":
        return int.from_bytes(body[1 : 3 if body[0] == 0xDC else 5], "big") > most
    return body[:1] >= b"\x90" and body[:1] <= b"\x9f" and body[0] & 0xF > most


def encode(value: Any, content_type: str) -> bytes:
    """Return `value` as JSON or msgpack. Raises one of UNWRITABLE if that is not possible."""
    return ENCODE[content_type](value)


def unreadable(error: BaseException, content_type: str, body: bytes | memoryview = b"") -> InvalidRequest:
    """Return the InvalidRequest for `error`, one of UNREADABLE, which reading a body of `content_type` has raised. With the `body`, it names the byte at
    which a text is not Unicode."""
    half = half_in(body) if content_type == JSON else None
    if half is not None:
        return InvalidRequest(f"body: {half}")
    if isinstance(error, RecursionError):
        return InvalidRequest(f"body: must be {content_type}, nested less deeply")
    return InvalidRequest(f"body: must be {content_type} ({error})")


_WORDS = (b"NaN", b"Infinity")
_MAX_BYTES = 1 << 20  # searching a longer body costs too much


def find_nonfinite(body: bytes | bytearray | memoryview) -> str | None:
    """Return an error text for the first NaN or infinity in a tensor of `body`.

    Returns None if there is none, if the body has more than 1 MiB, or if it is malformed in another way too.
    """
    if len(body) > _MAX_BYTES:
        return None
    text = bytes(body)
    if not any(word in text for word in _WORDS):
        return None
    try:
        document = json.loads(text)
        tensors = [tensor for key in ("inputs", "outputs") for tensor in document.get(key) or ()]
        for tensor in tensors:
            number = first_nonfinite(tensor.get("data"))
            if number is not None:
                word = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
                datatype = str(tensor.get("datatype"))
                return f"tensor {tensor.get('name')!r}: has the element {word}, which is none of {datatype} in JSON"
    except (ValueError, TypeError, AttributeError, RecursionError):  # the body is malformed in another way too
        return None
    return None


def first_nonfinite(data: Any) -> float | None:
    """Return the first NaN or infinity in lists and dicts of Python's values; None if there is none."""
    if isinstance(data, float) and not math.isfinite(data):
        return data
    if isinstance(data, (list, dict)):
        for element in data.values() if isinstance(data, dict) else data:
            found = first_nonfinite(element)
            if found is not None:
                return found
    return None
