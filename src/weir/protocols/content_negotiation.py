"""How a body is written and compressed: what the headers of a request declare, and what its answer may be."""

import gzip
import zlib
from collections.abc import Sequence

import zstandard

from weir.errors import InvalidRequest, TooLarge, UnsupportedMediaType
from weir.messages import JSON, MSGPACK, OCTETS
from weir.model import Model, is_tensor_model, overrides

MAX_WISHES = 64  # of one header: each takes microseconds, and a head has room for thousands

# What clients send without meaning it: nothing, anything, and the default of curl -d.
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
    model that returns them, but only one that declares it (`Output = bytes`) gives them unasked.
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
    """Return the one of `offered` that an Accept header's `value` prefers; the first if it prefers none.

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
    """Read a header like `gzip, zstd;q=0.5` into lower-case names and their weights, 1 by default.

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
    for name in (candidate, family, "*/*"):  # the most specific preference counts
        if name in wishes:
            return wishes[name]
    return 0.0


CODINGS = ("zstd", "gzip", "deflate")  # the better one first
_WINDOWS = {"gzip": 31, "deflate": 15}  # zlib's numbers for its formats
_MAX_WINDOW = 8 << 20  # what RFC 9659 lets a server expect of zstd over HTTP
# A body may have several members, or frames. Each costs microseconds, however little is in it: of 64 KiB each, as bgzip writes
# them, so many are 640 MB.
MAX_MEMBERS = 10_000
# Bytes given to zlib at once: what follows a member in its piece is copied.
_FIRST_PIECE, _LARGEST_PIECE = 512, 256 << 10


def coding_of(value: str) -> str:
    """Return the canonical form of a Content-Encoding header's `value`; "" for none.

    Raises UnsupportedMediaType naming the value and the codings there are.
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
    """Return the one of `offered` that an Accept-Encoding header's `value` allows for answers; "" for none."""
    wishes = weighted(value)
    everything = wishes.get("*", 0.0)
    best = max(offered, key=lambda coding: wishes.get(coding, everything))
    return best if wishes.get(best, everything) > 0 else ""


def compress(data: bytes, coding: str) -> bytes:
    """Return `data` in `coding`, which is one of CODINGS."""
    if coding == "zstd":
        return zstandard.ZstdCompressor(level=1).compress(data)
    if coding == "deflate":
        return zlib.compress(data, level=1)
    return gzip.compress(data, compresslevel=1, mtime=0)


def decompress(data: bytes, coding: str, max_size: int) -> bytes:
    """Return `data`, which is in `coding`, as it was, if that has at most `max_size` bytes.

    Raises TooLarge as soon as it has more, and InvalidRequest when it is damaged or cut short.
    """
    try:
        plain = _unzstd(data, max_size + 1) if coding == "zstd" else _inflate(data, max_size + 1, _WINDOWS[coding])
    except (zlib.error, zstandard.ZstdError) as error:
        raise InvalidRequest(f"body: is not {coding}, as Content-Encoding says ({error})") from error
    if len(plain) > max_size:
        raise TooLarge(f"body: must be at most {max_size} bytes after decompression (max_body_size)")
    return plain


def _inflate(data: bytes, limit: int, window: int) -> bytes:
    parts: list[bytes] = []
    rest, room, members = memoryview(data), limit, 0
    while rest and room > 0:
        members += 1
        if members > MAX_MEMBERS:
            raise zlib.error(f"more than {MAX_MEMBERS} members")
        member = zlib.decompressobj(wbits=window)
        size = _FIRST_PIECE
        while rest and room > 0 and not member.eof:
            piece = rest[:size]
            parts.append(member.decompress(piece, room))
            room -= len(parts[-1])
            rest = rest[len(piece) - len(member.unused_data) :]
            size = min(2 * size, _LARGEST_PIECE)
        if room > 0 and not member.eof:
            raise zlib.error("cut short")
    return b"".join(parts)


def _unzstd(data: bytes, limit: int) -> bytes:
    parts: list[bytes] = []
    room, frames = limit, 1
    rest = memoryview(data)
    frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
    while rest and room > 0:
        size = max(64, room >> 15)  # 4 bytes can stand for a block of 128 KiB, and what comes out cannot be bounded
        chunk = rest[:size]
        parts.append(frame.decompress(chunk))
        room -= len(parts[-1])
        rest = rest[len(chunk) - len(frame.unused_data) :]
        if frame.eof and rest:
            frames += 1
            if frames > MAX_MEMBERS:
                raise zstandard.ZstdError(f"more than {MAX_MEMBERS} frames")
            frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
    if room > 0 and not frame.eof:
        raise zstandard.ZstdError("cut short")
    return b"".join(parts)
