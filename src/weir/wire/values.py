"""JSON and msgpack: bodies to values, values to bodies, and lists of items without decoding them.

What JSON has no word for: NaN and infinities are written as null, and refused when read, as is a number that a float
cannot hold; msgpack carries them. Bytes in JSON are base64. Numpy's scalars and arrays, and anything else with `tolist`, are
written as numbers and lists; pydantic models as objects.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from weir.errors import InvalidRequest
from weir.messages import JSON, MSGPACK
from weir.wire.surrogates import find_half

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


# The bare functions, for those who handle UNREADABLE and UNWRITABLE themselves, once for many.
DECODE: dict[str, Callable[[Any], Any]] = {
    JSON: msgspec.json.Decoder().decode,
    MSGPACK: msgspec.msgpack.Decoder().decode,
}
ENCODE: dict[str, Callable[[Any], bytes]] = {
    JSON: msgspec.json.Encoder(enc_hook=writable).encode,
    MSGPACK: msgspec.msgpack.Encoder(enc_hook=writable).encode,
}
_DECODE_LIST: dict[str, Callable[[Any], list[msgspec.Raw]]] = {
    JSON: msgspec.json.Decoder(list[msgspec.Raw]).decode,
    MSGPACK: msgspec.msgpack.Decoder(list[msgspec.Raw]).decode,
}


# Bytes of a body from which it is worth while.
_LARGE = 64 << 10


@contextmanager
def uncollected(size: int) -> Iterator[None]:
    """Keep the garbage collector out while a body of `size` bytes is decoded: it would walk through all that has been decoded again
    and again, which takes four times as long as decoding lists of lists. Nothing of what is decoded is garbage."""
    switched = size > _LARGE and gc.isenabled()
    if switched:
        gc.disable()
    try:
        yield
    finally:
        if switched:
            gc.enable()


def decode(body: bytes | memoryview, content_type: str) -> Any:
    """Return the value in `body`, which is JSON or msgpack. Raises InvalidRequest, whatever is wrong with it."""
    try:
        with uncollected(len(body)):
            return DECODE[content_type](body)
    except UNREADABLE as error:
        raise unreadable(error, content_type, body) from None


def split(body: bytes | memoryview, content_type: str) -> list[bytes]:
    """Return the elements of the list in `body`, each still encoded. Raises InvalidRequest if it is no list."""
    try:
        return list(map(bytes, _DECODE_LIST[content_type](body)))
    except UNREADABLE as error:
        raise unreadable(error, content_type, body) from None


def encode(value: Any, content_type: str) -> bytes:
    """Return `value` as JSON or msgpack. Raises one of UNWRITABLE if it cannot be said there, or contains itself."""
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
