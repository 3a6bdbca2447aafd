"""Content codings: zstd, gzip and deflate, both ways. Decompression never makes more than the limit."""

import gzip
import zlib
from collections.abc import Sequence

import zstandard

from weir.errors import InvalidRequest, TooLarge, UnsupportedMediaType
from weir.protocols.content_negotiation import weighted

CODINGS = ("zstd", "gzip", "deflate")  # the better one first
_WINDOWS = {"gzip": 31, "deflate": 15}  # how zlib is told which of its formats it is
_MAX_WINDOW = 8 << 20  # what RFC 9659 lets a server expect of zstd over HTTP
# A body may have several members, or frames. Each costs microseconds, however little is in it: of 64 KiB each, as bgzip writes
# them, so many are 640 MB.
MAX_MEMBERS = 10_000
_FIRST_PIECE, _LARGEST_PIECE = (
    512,
    256 << 10,
)  # bytes given to zlib at once: what follows a member in its piece is copied


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
