"""Content types and compression: what the headers of a request declare, and what its response may use."""

import gzip
import sys
import zlib
from collections.abc import Sequence
from typing import Protocol

from weir.errors import InvalidRequest, TooLarge, UnsupportedMediaType
from weir.messages import JSON, MSGPACK, OCTETS
from weir.model import Model, is_tensor_model, overrides

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_PREFERENCES = 64  # read of one header: each takes microseconds, and a head has room for thousands

# Content types that clients send by default although the body is JSON: none, any, and that of curl -d.
_READ_AS_JSON = frozenset(("", "*/*", "application/x-www-form-urlencoded", "text/json", JSON))
_READ_AS_MSGPACK = frozenset(("application/x-msgpack", "application/vnd.msgpack", MSGPACK))


def is_msgpack(content_type: str) -> bool:
    """Return whether a Content-Type is one of msgpack."""
    return media_of(content_type).strip().lower() in _READ_AS_MSGPACK


def read_types(model: type[Model], batch: bool) -> list[str]:
    """Return the content types that `model` reads; with `batch` only those that can hold a list of items."""
    if batch or is_tensor_model(model):
        return [JSON, MSGPACK]
    return list(dict.fromkeys((JSON, MSGPACK, OCTETS, *map(str.lower, model.content_types))))


def media_of(content_type: str) -> str:
    """Return a content type without its parameters."""
    return content_type.partition(";")[0]


def write_types(model: type[Model], batch: bool, content_type: str) -> list[str]:
    """Return the content types of responses, the preferred one first.

    The preferred type is that of the request if every output can be written in it, else JSON. Every model that returns bytes can respond with octets, but
    only a model that declares `Output = bytes` does so by default.
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
    """Return the canonical form of the `value` of a Content-Type header ("": no header).

    A multipart type keeps its parameters, because the model's `decode` needs the boundary. Raises UnsupportedMediaType naming the value and the types that
    the model reads.
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
    """Return the type of `offered` that the `value` of an Accept header prefers (RFC 9110, section 12.5.1); of equal ones the first.

    Raises UnsupportedMediaType naming the value and the offered types.
    """
    if value in ("", "*/*"):
        return offered[0]
    preferences = _preferences(value)
    best, best_weight = "", 0.0
    for candidate in offered:
        weight = _weight(candidate, preferences)
        if weight > best_weight:
            best, best_weight = candidate, weight
    if not best:
        raise UnsupportedMediaType(f"Accept {value!r}: responses are written as {', '.join(offered)}")
    return best


def weighted(value: str) -> dict[str, float]:
    """Return the names in a header like `gzip, zstd;q=0.5`, in lower case, with their weights, which are 1 by default.

    A weight that is not a number counts as 0. Names after the first MAX_PREFERENCES are ignored.
    """
    preferences: dict[str, float] = {}
    for part in value.split(",", MAX_PREFERENCES)[:MAX_PREFERENCES]:
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        if name:
            weights = [parameter[2:] for parameter in parameters if parameter.startswith("q=")]
            preferences[name] = _number(weights[0]) if weights else 1.0
    return preferences


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _preferences(value: str) -> dict[str, float]:
    preferences = weighted(value)
    for alias in _READ_AS_MSGPACK & preferences.keys():
        preferences.setdefault(MSGPACK, preferences[alias])
    return preferences


def _weight(candidate: str, preferences: dict[str, float]) -> float:
    family = candidate.partition("/")[0] + "/*"
    for name in (candidate, family, "*/*"):  # the most specific preference counts
        if name in preferences:
            return preferences[name]
    return 0.0


CODINGS = ("zstd", "gzip", "deflate")  # the best one first
_WINDOWS = {"gzip": 31, "deflate": 15}  # `wbits` of zlib, which selects the format
_MAX_WINDOW_LOG = 23  # 8 MiB: the largest zstd window over HTTP (RFC 9659, section 3)
# A gzip body may have several members, and a zstd body several frames. Each costs microseconds, however small it is. bgzip writes members
# of 64 KiB, so that this limit allows it 640 MB.
MAX_MEMBERS = 10_000
# Bytes given to the library at once. The pieces begin small, because it copies the bytes that follow a member in its piece.
_FIRST_PIECE, _LARGEST_PIECE = 512, 256 << 10


def coding_of(value: str) -> str:
    """Return the canonical form of the `value` of a Content-Encoding header; "" for no coding.

    Raises UnsupportedMediaType naming the value and the codings that are read.
    """
    coding = value.strip().lower()
    if coding in ("", "identity"):
        return ""
    if coding == "x-gzip":
        return "gzip"
    if coding not in CODINGS:
        raise UnsupportedMediaType(f"Content-Encoding {value!r}: must be one of {', '.join(CODINGS)}, identity")
    return coding


def accepted_coding(value: str, offered: Sequence[str] = CODINGS) -> str:
    """Return the coding of `offered` that the `value` of an Accept-Encoding header prefers; "" if it allows none."""
    preferences = weighted(value)
    everything = preferences.get("*", 0.0)
    best = max(offered, key=lambda coding: preferences.get(coding, everything))
    return best if preferences.get(best, everything) > 0 else ""


def compress(data: bytes, coding: str) -> bytes:
    """Return `data` compressed with `coding`, one of CODINGS."""
    if coding == "zstd":
        return zstd.compress(data, level=1)
    if coding == "deflate":
        return zlib.compress(data, level=1)
    return gzip.compress(data, compresslevel=1, mtime=0)


def decompress(data: bytes, coding: str, max_size: int) -> bytes:
    """Return `data`, which is compressed with `coding`, decompressed.

    Raises TooLarge as soon as the result has more than `max_size` bytes, and InvalidRequest if `data` is damaged or cut short.
    """
    try:
        plain = _decompress(data, max_size + 1, coding)
    except (zlib.error, zstd.ZstdError, _Damaged) as error:
        raise InvalidRequest(f"body: is not {coding}, as Content-Encoding says ({error})") from error
    if len(plain) > max_size:
        raise TooLarge(f"body: must be at most {max_size} bytes after decompression (max_body_size)")
    return plain


class _Damaged(Exception):
    pass


class _Member(Protocol):
    """What reads one member of a gzip body, or one frame of a zstd body."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: memoryview, max_length: int, /) -> bytes: ...


def _member(coding: str) -> _Member:
    if coding == "zstd":
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})
    return zlib.decompressobj(wbits=_WINDOWS[coding])


def _decompress(data: bytes, limit: int, coding: str) -> bytes:
    """Return the first `limit` bytes, or all if there are fewer."""
    parts: list[bytes] = []
    rest, room, members = memoryview(data), limit, 0
    while rest and room > 0:
        members += 1
        if members > MAX_MEMBERS:
            raise _Damaged(f"more than {MAX_MEMBERS} {'frames' if coding == 'zstd' else 'members'}")
        member = _member(coding)
        size = _FIRST_PIECE
        while rest and room > 0 and not member.eof:
            piece = rest[:size]
            parts.append(member.decompress(piece, room))
            room -= len(parts[-1])
            rest = rest[len(piece) - len(member.unused_data) :]
            size = min(2 * size, _LARGEST_PIECE)
        if room > 0 and not member.eof:
            raise _Damaged("cut short")
    return b"".join(parts)
