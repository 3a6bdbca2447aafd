"""Values as JSON, msgpack or plain bytes: encoded, decoded, and split into the items of a list.

JSON is stricter than its readers: what is no number, or half a character, is refused by its place rather than passed on.
"""

import gc
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from weir.errors import InvalidRequest, TooLarge
from weir.messages import JSON, MSGPACK

# Tokens that are read to find where the half is; where there are more, its byte is named instead.
MAX_TOKENS = 50_000
MAX_HALVES = 10_000  # of one body that are put up with
_MAX_DEPTH = 1024  # JSON nested more deeply is refused for that
_LONGEST_NAME = 80  # characters of a key in the place
_LONGEST_PLACE = 200  # characters

# Everything up to the first escape that is half of a pair. Backslashes stand in texts only, and each takes what follows it along.
_UP_TO_HALF = re.compile(
    rb"(?:[^\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\(?!u[dD][89a-fA-F]).)*+"
    rb"(?=\\u[dD][89a-fA-F][0-9a-fA-F]{2})",
    re.DOTALL,
)
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},:]', re.DOTALL)
_NUL = rb"\u0000"
_NO_TOKEN = "\ufffd"  # the character that stands for what is none
_Level = list[int | str]  # one open list or object: the index or the key that is being read


class Half(NamedTuple):
    """A text that is no Unicode: `where` it stands ("" for all of the body), and what is wrong with it."""

    where: str
    rule: str

    def __str__(self) -> str:
        return f"{self.where if self.where and self.where[0] != '[' else 'body' + self.where}: {self.rule}"


def find_half(body: bytes | bytearray | memoryview) -> Half | None:
    """Return the first; None if there is none, or if something else is wrong before it or with its text.

    Takes no memory but a copy of `body` and, where the text is long, of that text; the time is linear.
    """
    text = bytes(body)
    found = _UP_TO_HALF.match(text)
    if found is None:
        return None
    half = found.end()
    levels: list[_Level] = []
    is_key = False
    for count, token in enumerate(_TOKEN.finditer(text)):
        if token.start() > half or len(levels) > _MAX_DEPTH:
            return None
        if token.end() > half:
            return _named(text[token.start() + 1 : half], levels[:-1] if is_key else levels)
        if count == MAX_TOKENS:
            return Half("", f"is not valid Unicode: byte {half} begins half of a surrogate pair")
        is_key = _read(token[0], levels, is_key)
    return None


def without_halves(body: bytes | bytearray | memoryview) -> bytes | None:
    """Return `body`, which is JSON, with a NUL in the place of each half; None if it has none, or more than MAX_HALVES.

    Both escapes have six bytes, so everything stays where it is. The time is linear.
    """
    made, place = bytearray(body), 0
    text = bytes(body)
    for _ in range(MAX_HALVES):
        found = _UP_TO_HALF.match(text, place)
        if found is None:
            return bytes(made) if place else None
        place = found.end() + len(_NUL)
        made[found.end() : place] = _NUL
    return None


def without_nul(text: str) -> str:
    """Return `text` as bert-as-service reads it: without NULs. One that has nothing else becomes a space, which is no token."""
    return (text.replace("\0", "") or " ") if "\0" in text else text


def words_without_nul(words: list[Any]) -> list[Any]:
    """Return `words`, each of which is a token as it is, as bert-as-service reads them: one with a NUL is no known token."""
    return [_NO_TOKEN if isinstance(word, str) and "\0" in word else word for word in words]


def _read(token: bytes, levels: list[_Level], is_key: bool) -> bool:
    """Take one token into account; tell whether the next text is a key."""
    if token == b"[":
        levels.append([0])
    elif token == b"{":
        levels.append([""])
        return True
    elif token in (b"]", b"}"):
        if levels:
            levels.pop()
    elif token == b"," and levels:
        place = levels[-1][0]
        if isinstance(place, str):
            return True
        levels[-1][0] = place + 1
    elif is_key and levels:
        levels[-1][0] = _readable(token[1:-1][: 6 * _LONGEST_NAME])[:_LONGEST_NAME]  # \\u0041 is six bytes
    return False


def _named(before: bytes, levels: list[_Level]) -> Half:
    """Return the half in a text that begins with `before`."""
    where = ""
    for (place,) in levels:
        where += f"[{place}]" if isinstance(place, int) else f".{place}" if where else place
        if len(where) > _LONGEST_PLACE:
            where = where[:_LONGEST_PLACE] + "..."
            break
    return Half(where, f"is not valid Unicode: character {len(_readable(before))} is half of a surrogate pair")


def _readable(content: bytes) -> str:
    """Return the content of a text in JSON, as far as it can be read."""
    raw = content.decode(errors="replace")
    try:
        text: str = json.loads(f'"{raw}"', strict=False)
    except ValueError:
        return raw
    return text


# What msgspec raises when it reads something wrong, and when it is given something that it cannot write.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
UNWRITABLE = (TypeError, ValueError, OverflowError, RecursionError)


def writable(value: Any) -> Any:
    """Return what to write for a `value` that is of no type of JSON's or msgpack's; TypeError if there is nothing."""
    tolist = getattr(value, "tolist", None)  # numpy, torch, jax, array
    if callable(tolist):
        return tolist()
    dump = getattr(value, "model_dump", None)  # pydantic, which is not imported for those who do not use it
    if callable(dump):
        return dump(mode="json", by_alias=True)
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} has no form in JSON or msgpack")


# msgspec takes ten microseconds for a float such as -1e308 or 4.9e-324: a megabyte of them holds the interpreter for more than a
# second. Python's own reading takes a quarter of one for any; so bodies that have such exponents are read with that.
_SLOW_FLOAT = re.compile(rb"[eE][-+]?[0-9]{2}")
# Bytes of a body that needs none of the checks of what its reading may cost: nothing in it can be many.
SMALL_BODY = 4096


def read_float(text: str) -> float:
    """Return the float that JSON has in `text`; ValueError for one beyond all floats."""
    value = float(text)
    if value in (math.inf, -math.inf):
        raise ValueError("Number out of range")
    return value


_decode_json = msgspec.json.Decoder().decode
_decode_slowly = msgspec.json.Decoder(float_hook=read_float).decode


def has_slow_floats(body: bytes | bytearray | memoryview) -> bool:
    """Tell whether msgspec may take long for the floats in `body`."""
    return len(body) > SMALL_BODY and _SLOW_FLOAT.search(body) is not None


def decode_json(body: bytes | bytearray | memoryview) -> Any:
    """Return the value in `body`. Raises UNREADABLE, also for a float beyond all floats, and TooLarge for too many lists and objects,
    or names."""
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

# Lists and objects of a body: each takes at least 64 bytes, and an object 200, however few it has in the body, and as long as dozens of its
# numbers. So many may be in any body, and one more for each so many bytes: enough for rows of three short numbers.
ANY_CONTAINERS = 1 << 18
_BYTES_OF_CONTAINER = 16

# Names in the objects of a body that the server decodes. One takes up to a microsecond and seven bytes of the body, for the table of a large
# object does not fit into the processor's caches; so names count that are different from those nearby. Those of small objects of msgpack, which
# has a form for up to 15, do not count: each has a small table of its own.
ANY_NAMES = 1 << 16
_BYTES_OF_NAME = 64

_PIECE = 64 << 10  # bytes that are looked at together, before another thread may have its turn
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_WHOLE_TEXTS = re.compile(rb'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_NAME_OR_TEXT = re.compile(rb'"((?:[^"\\]++|\\.)*+)"[ \t\r\n]*+:|"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_CONTAINER = re.compile(rb"[\x80-\x9f]|[\xdc\xde]..|[\xdd\xdf].{4}", re.DOTALL)
_CONTAINER_BYTES = bytes((*range(0x80, 0xA0), *range(0xDC, 0xE0)))
_MSGPACK = re.compile(  # containers in a row; other values in a row without a length in bytes of their own; one that has it
    rb"((?:[\x80-\x9f]|[\xdc\xde]..|[\xdd\xdf].{4})++)"
    rb"|(?:[\x00-\x7f\xc0-\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1\xd4]..|\xd5...|[\xca\xce\xd2].{4}|\xd6.{5}|[\xcb\xcf\xd3].{8}|\xd7.{9}|\xd8.{17}|"
    + b"|".join(b"%b.{%d}" % (re.escape(bytes([0xA0 + size])), size) for size in range(32))
    + rb")++|[\xc4-\xc6\xc7-\xc9\xd9-\xdb]",
    re.DOTALL,
)
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_OBJECTS = (0xDE, 0xDF)
_EXTENSIONS = (0xC7, 0xC8, 0xC9)  # have a byte more, for their type


def refuse_containers(body: bytes | bytearray | memoryview, content_type: str) -> None:
    """Raise TooLarge if `body`, JSON or msgpack, has more lists and objects than one of its size may have, before it is decoded."""
    most = ANY_CONTAINERS + len(body) // _BYTES_OF_CONTAINER
    if len(body) <= most:
        return
    count = (_json_containers if content_type == JSON else _msgpack_containers)(bytes(body), most)
    if count > most:
        raise TooLarge(
            f"body: has more than {most} lists and objects, which a body of {len(body)} bytes may have; send tensors as binary data"
        )


def refuse_names(body: bytes | bytearray | memoryview, content_type: str) -> None:
    """Raise TooLarge if the objects of `body`, JSON or msgpack, have more different names than one of its size may have, before it is decoded:
    for bodies that are decoded where others wait for it. A name that comes again within _PIECE bytes counts once."""
    most = ANY_NAMES + len(body) // _BYTES_OF_NAME
    if len(body) <= 2 * most:  # a name and its value take two bytes
        return
    if (_json_names if content_type == JSON else _msgpack_names)(bytes(body), most) > most:
        raise TooLarge(
            f"body: has more than {most} different names in its objects, which a body of {len(body)} bytes may have; send lists instead"
        )


def _json_names(body: bytes, most: int) -> int:
    """Return how many there are, or, if they are not more than `most`, perhaps more."""
    count = body.count(b":")
    if count <= most:
        return count
    count = 0
    for piece in _whole_texts(body):
        count += len(set(_NAME_OR_TEXT.findall(piece)) - {b""})  # which stands for texts that are no names
        if count > most:
            break
    return count


def _msgpack_names(body: bytes, most: int) -> int:
    """Return how many objects of more than 15 have, those included that come again."""
    if b"\xde" not in body and b"\xdf" not in body:
        return 0
    count = 0
    for heads in _msgpack_heads(body):
        count += sum([int.from_bytes(head[1:], "big") for head in heads if head[0] in _OBJECTS])
        if count > most:
            break
    return count


def _json_containers(body: bytes, most: int) -> int:
    """Return how many there are, or, if they are not more than `most`, perhaps more: those in texts count too."""
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
    """Yield the pieces of a body as JSON, none of which ends within a text. What is cut off ends them: decoding finds it too."""
    place = 0
    while place < len(body):
        found = _WHOLE_TEXTS.match(body, place, place + _PIECE)
        if not (found and found[0]) and not (
            found := _TEXT.match(body, place)
        ):  # of a text that is longer than a piece
            return
        yield found[0]
        place = found.end()


def _msgpack_containers(body: bytes, most: int) -> int:
    """Return the same."""
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
    """Yield what the lists and objects of a body as msgpack begin with, some at a time. What is cut off, or is none, ends them: decoding
    finds it too."""
    place = 0
    while found := _MSGPACK.match(body, place, place + _PIECE):
        start, place = place, found.end()
        if found[1] is not None:
            yield _CONTAINER.findall(found[1])
        elif size := _LENGTH_BYTES.get(body[start]):
            place += size + int.from_bytes(body[place : place + size], "big") + (body[start] in _EXTENSIONS)


# The bare functions, for those who handle UNREADABLE and UNWRITABLE themselves, once for many.
DECODE: dict[str, Callable[[Any], Any]] = {
    JSON: _read_json,
    MSGPACK: _read_msgpack,
}
ENCODE: dict[str, Callable[[Any], bytes]] = {
    JSON: msgspec.json.Encoder(enc_hook=writable).encode,
    MSGPACK: msgspec.msgpack.Encoder(enc_hook=writable).encode,
}
_DECODE_LIST: dict[str, Callable[[Any], list[msgspec.Raw]]] = {
    JSON: msgspec.json.Decoder(list[msgspec.Raw]).decode,
    MSGPACK: msgspec.msgpack.Decoder(list[msgspec.Raw]).decode,
}


_BETWEEN = b" \t\r\n,"  # elements of a list as JSON

# Bytes of a body from which it is worth while.
_LARGE = 64 << 10


def uncollected(size: int) -> AbstractContextManager[None]:
    """Keep the garbage collector out while a body of `size` bytes is decoded: it would walk through all that has been decoded again
    and again, which takes four times as long as decoding lists of lists. Nothing of what is decoded is garbage."""
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
    """Return the value in `body`, which is JSON or msgpack. Raises InvalidRequest, whatever is wrong with it, and TooLarge for too many
    lists and objects, or names."""
    refuse_names(body, content_type)
    try:
        with uncollected(len(body)):
            return DECODE[content_type](body)
    except UNREADABLE as error:
        raise unreadable(error, content_type, body) from None


def split(body: bytes | memoryview, content_type: str, most: int | None = None) -> list[bytes] | None:
    """Return the elements of the list in `body`, each still encoded; None if there are more than `most`, which is found out before
    they are made: those of 16 MB of numbers take half a gigabyte. Raises InvalidRequest if it is no list.

    An element of JSON that has half of a surrogate pair is among them: reading that one raises what is wrong with it.
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
    """Return what stands in `body` where the list that was made of it has these elements."""
    found, place = [], bytes(body).index(b"[") + 1
    for element in elements:
        while body[place] in _BETWEEN:
            place += 1
        found.append(bytes(body[place : place + len(element)]))
        place += len(element)
    return found


# Elements of a list that are looked at together.
_FIELDS = 4096


def _is_longer(body: bytes, most: int) -> bool:
    """Tell whether the list has more than `most` elements, which may be anything."""
    rest = body
    while rest.count(b",") >= most:
        found = msgspec.structs.astuple(_first_elements(min(most, _FIELDS) + 1)(rest))
        if found[-1] is None:
            return False
        if len(found) > most:
            return True
        most -= len(found)
        after = rest[_address(found[-1]) + len(bytes(found[-1])) - _address(rest) :].lstrip()
        rest = b"[" + after[1:] if after.startswith(b",") else b"[]"
    return False


def _is_longer_msgpack(body: bytes, most: int) -> bool:
    """Tell the same of msgpack, where a list begins with its length."""
    if body[:1] == b"\xdc" or body[:1] == b"\xdd":
        return int.from_bytes(body[1 : 3 if body[0] == 0xDC else 5], "big") > most
    return body[:1] >= b"\x90" and body[:1] <= b"\x9f" and body[0] & 0xF > most


@lru_cache(maxsize=64)
def _first_elements(count: int) -> Callable[[bytes], Any]:
    """Return what decodes the first so many elements of a list in JSON, None where it has fewer, and passes over the others."""
    fields = [(f"element_{place}", msgspec.Raw, None) for place in range(count)]
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(msgspec.defstruct("List", fields, array_like=True)).decode
    return decode


def _address(data: Any) -> int:
    """Return where bytes are in memory; a msgspec.Raw lies in what it was decoded from."""
    import numpy  # here, for workers of models without tensors do without it

    address: int = numpy.frombuffer(data, numpy.uint8).__array_interface__["data"][0]
    return address


def encode(value: Any, content_type: str) -> bytes:
    """Return `value` as JSON or msgpack. Raises one of UNWRITABLE if it has no form there, or contains itself."""
    return ENCODE[content_type](value)


def unreadable(error: BaseException, content_type: str, body: bytes | memoryview = b"") -> InvalidRequest:
    """Return the error to answer with when reading a body of `content_type` raised `error`, one of UNREADABLE. With the `body` it names
    a text that is no Unicode."""
    half = find_half(body) if content_type == JSON else None
    if half is not None:
        return InvalidRequest(str(half))
    if isinstance(error, RecursionError):
        return InvalidRequest(f"body: must be {content_type}, nested less deeply")
    return InvalidRequest(f"body: must be {content_type} ({error})")


_WORDS = (b"NaN", b"Infinity")
_MAX_BYTES = 1 << 20  # longer ones cost too much for a hint


def find_nonfinite(body: bytes | bytearray | memoryview) -> str | None:
    """Return the words for the first number in a tensor of `body` that JSON cannot hold; None if there is none, or the body is
    over 1 MiB or malformed in another way too."""
    if len(body) > _MAX_BYTES:
        return None
    text = bytes(body)
    if not any(word in text for word in _WORDS):
        return None
    try:
        document = json.loads(text)
        tensors = [tensor for key in ("inputs", "outputs") for tensor in document.get(key) or ()]
        for tensor in tensors:
            number = _first(tensor.get("data"))
            if number is not None:
                word = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
                datatype = str(tensor.get("datatype"))
                return f"tensor {tensor.get('name')!r}: has the element {word}, which is none of {datatype} in JSON"
    except (ValueError, TypeError, AttributeError, RecursionError):  # it is something else that is wrong as well
        return None
    return None


def _first(data: Any) -> float | None:
    if isinstance(data, float) and not math.isfinite(data):
        return data
    if isinstance(data, list):
        for element in data:
            found = _first(element)
            if found is not None:
                return found
    return None
