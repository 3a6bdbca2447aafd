"""Images as callers send them: what their headers state, and the limits that are checked before a pixel is decoded.

__init__.py     the limits, the headers of the formats that are read, and images written as base64
preparation.py  from an encoded image to the numbers that a vision tower reads
fetching.py     images at URLs, from the hosts that the server's settings allow

A server reads headers here without Pillow; only the workers decode.
"""

import binascii
from collections.abc import Callable
from dataclasses import dataclass
from struct import error as TooShort
from struct import unpack_from
from typing import NamedTuple

from weir.config import AT_LEAST_ONE, Checked, setting
from weir.errors import InvalidRequest

FORMATS = "PNG, JPEG, WebP, GIF, BMP and TIFF"
_MOST_PIXELS = 89_478_485  # from here on, Pillow takes a header for an attack
_LEAST_WIDTH = 8  # pixels as which a row counts at least: a decoder has pointers to each
_MOST_SEGMENTS = 1_000  # of a JPEG before its pixels; cameras write a few dozen
_CHUNK_BYTES = 1_024  # of a PNG for each chunk that it may have beyond so many; pixels mostly come in chunks of 8 KiB
_MOST_SCANS = 32  # of a progressive JPEG; encoders write about ten, and each is a pass over all pixels
_PLAIN_BMP = (0, 3, 6)  # Pillow unpacks run lengths in Python, a pixel at a time
_TIFF_PACKINGS = {1: "none", 5: "LZW", 8: "deflate", 32773: "PackBits", 32946: "deflate"}


class Picture(NamedTuple):
    """An image file as a caller sent it. In a request it may stand wherever a text may stand."""

    data: bytes


@dataclass(frozen=True)
class ImageLimits(Checked):
    """The limits of images, and the hosts that images are fetched from."""

    max_image_pixels: int = setting(
        64_000_000,
        "maximum number of pixels of an image, for each of which a worker may need 16 bytes while it decodes",
        rule=(lambda value: 1 <= value <= _MOST_PIXELS, f"must be from 1 to {_MOST_PIXELS}"),
        affects_speed=False,
    )
    max_image_bytes: int = setting(
        32 << 20, "maximum size of an image file in bytes", rule=AT_LEAST_ONE, affects_speed=False
    )
    allow_url: list[str] = setting(
        [],
        "host that images at URLs may be fetched from: HOST, *.HOST, HOST:PORT, or * for all; private addresses only if they are given themselves (default: no URL is fetched)",
        metavar="HOST",
        affects_speed=False,
    )


class Header(NamedTuple):
    """The format of an image, by Pillow's name, and its width and height in pixels, as its header states them."""

    format: str
    width: int
    height: int

    @property
    def pixels(self) -> int:
        """The number of pixels by which memory and work are bounded."""
        return max(self.width, _LEAST_WIDTH) * self.height


def look(data: bytes, limits: ImageLimits) -> Header:
    """Return what the header of an image file states, without decoding a pixel.

    Raises InvalidRequest for other formats, for a header that is cut off, and for an image beyond `limits` or of a kind that takes
    far more work than its size suggests.
    """
    check_bytes(len(data), limits)
    name, read = _reader(data)
    try:
        width, height = read(data)
    except TooShort:
        raise InvalidRequest(f"its {name} header is cut off") from None
    if width * height <= 0:
        raise InvalidRequest(f"a {name} without pixels ({width} × {height})")
    check_pixels(header := Header(name, width, height), limits)
    return header


def _reader(data: bytes) -> tuple[str, Callable[[bytes], tuple[int, int]]]:
    """Return the format of an image file, and what reads its width and height. Raises InvalidRequest for other formats."""
    for name, start, offset, read in _READERS:
        if data[offset : offset + len(start)] == start:
            return name, read
    raise InvalidRequest(f"is no image in a format that is read: {FORMATS}")


def check_type(stated: str) -> None:
    """Raise InvalidRequest if the media type that a sender has `stated` is none of an image. Which image it is says the content: many clients state one type
    for all."""
    media = stated.partition(";")[0].strip()
    kind, _, subtype = media.lower().partition("/")
    if kind not in ("image", "") and subtype != "octet-stream":
        raise InvalidRequest(f"states the type {media!r:.80}: must be an image")


def check_pixels(header: Header, limits: ImageLimits) -> None:
    """Raise InvalidRequest if an image with this header is beyond `limits`."""
    if header.pixels > limits.max_image_pixels:
        most = (
            f"{limits.max_image_pixels / 1e6:g} M (max_image_pixels), of which a row counts as {_LEAST_WIDTH} at least"
        )
        raise InvalidRequest(f"{header.width:,} × {header.height:,} pixels; at most {most}")


def check_bytes(size: int, limits: ImageLimits) -> None:
    """Raise InvalidRequest if a file of `size` bytes is beyond `limits`."""
    if size > limits.max_image_bytes:
        raise InvalidRequest(f"{size:,} bytes; at most {limits.max_image_bytes:,} (max_image_bytes)")


def read_base64(text: str, limits: ImageLimits) -> bytes:
    """Return the bytes of an image that is written as base64, perhaps in lines, or as a data: URL of base64. Raises InvalidRequest."""
    stated = ""
    if text[:5].lower() == "data:":
        head, _, text = text.partition(",")
        if head[-7:].lower() != ";base64":
            raise InvalidRequest("a data: URL must be data:TYPE;base64, and the image in base64")
        stated = head[5:-7]
    check_bytes(len(text) // 4 * 3 - 2, limits)
    try:
        data = binascii.a2b_base64("".join(text.splitlines()), strict_mode=True)
    except ValueError as error:  # also of characters that are not ASCII
        raise InvalidRequest(f"is not base64: {error}") from None
    check_type(stated)
    return data


def _png(data: bytes) -> tuple[int, int]:
    """Read the first chunk, and walk over the others, each of which Pillow handles in Python. (RFC 2083, section 3)"""
    width, height = unpack_from(">II", data, 16)
    at, most = 8, _MOST_SEGMENTS + len(data) // _CHUNK_BYTES
    for _ in range(most):
        if data[at + 4 : at + 8] in (b"IEND", b""):
            return width, height
        at += 12 + unpack_from(">I", data, at)[0]
    raise InvalidRequest(f"a PNG with more than {most:,} chunks")


def _gif(data: bytes) -> tuple[int, int]:
    width, height = unpack_from("<HH", data, 6)
    return width, height


def _bmp(data: bytes) -> tuple[int, int]:
    (size,) = unpack_from("<I", data, 14)
    width, height, packing = (*unpack_from("<HH", data, 18), 0) if size == 12 else unpack_from("<ii4xI", data, 18)
    if packing not in _PLAIN_BMP:
        raise InvalidRequest(f"a BMP of compression {packing}; only those without compression are read")
    return width, abs(height)


def _webp(data: bytes) -> tuple[int, int]:
    """Read the canvas of an extended file, or the frame of a simple one. (RFC 9649, sections 2.5 to 2.7)"""
    kind = data[12:16]
    if kind == b"VP8X":
        canvas = unpack_from("<6B", data, 24)
        width, height = (1 + int.from_bytes(canvas[at : at + 3], "little") for at in (0, 3))
        return width, height
    if kind == b"VP8L":
        (bits,) = unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _tiff(data: bytes) -> tuple[int, int]:
    """Read the first directory. The size is that of a tile if that is larger, as a tile is decoded whole. (TIFF 6.0, sections 2, 8 and 15)"""
    order = "<" if data[:1] == b"I" else ">"
    (directory,) = unpack_from(f"{order}I", data, 4)
    (count,) = unpack_from(f"{order}H", data, directory)
    tags: dict[int, int] = {}
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, kind = unpack_from(f"{order}HH", data, entry)
        if tag in (256, 257, 259, 322, 323):
            tags.setdefault(tag, unpack_from(order + ("H" if kind == 3 else "I"), data, entry + 8)[0])
    if tags.get(259, 1) not in _TIFF_PACKINGS:
        known = ", ".join(dict.fromkeys(_TIFF_PACKINGS.values()))
        raise InvalidRequest(f"a TIFF of compression {tags[259]}; those that are read: {known}")
    return max(tags.get(256, 0), tags.get(322, 0)), max(tags.get(257, 0), tags.get(323, 0))


def _jpeg(data: bytes) -> tuple[int, int]:
    """Walk over the segments up to the pixels, of which the last frame header counts. (ITU-T T.81, annex B)"""
    width = height = parts = at = 0
    is_sequential = False
    for _ in range(_MOST_SEGMENTS):
        at = data.find(b"\xff", at + 2)
        marker = data[at + 1] if 0 <= at < len(data) - 1 else 0xD9
        if marker in (0xD9, 0xDA):  # the end, or the pixels
            break
        if marker == 0xFF:  # fills
            at -= 1
        elif marker > 0x01 and not 0xD0 <= marker <= 0xD8:
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
                height, width, parts = unpack_from(">HHB", data, at + 5)
                is_sequential = marker in (0xC0, 0xC1)
            at += unpack_from(">H", data, at + 2)[0]
    else:
        raise InvalidRequest(f"a JPEG with more than {_MOST_SEGMENTS:,} segments before its pixels")
    # A first scan that has all parts of a sequential frame is the only one that is decoded.
    is_whole = is_sequential and data[at + 4 : at + 5] == bytes((parts,))
    if not is_whole and data.count(b"\xff\xda") > _MOST_SCANS:
        raise InvalidRequest(f"a JPEG with more than {_MOST_SCANS} scans")
    return width, height


# Pillow's name of each format, the bytes that its files have at an offset, and the function that reads width and height.
_READERS: tuple[tuple[str, bytes, int, Callable[[bytes], tuple[int, int]]], ...] = (
    ("PNG", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 0, _png),
    ("JPEG", b"\xff\xd8\xff", 0, _jpeg),
    ("WEBP", b"WEBPVP8", 8, _webp),
    ("GIF", b"GIF8", 0, _gif),
    ("BMP", b"BM", 0, _bmp),
    ("TIFF", b"II*\0", 0, _tiff),
    ("TIFF", b"MM\0*", 0, _tiff),
)
