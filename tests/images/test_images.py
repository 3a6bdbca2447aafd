"""Headers are read without decoding, and what an image may be is checked before."""

import base64
import re
from struct import pack
from typing import Any

import pytest
from tests.images.pictures import KINDS, drawn, written
from tests.rings import subcases

from weir.errors import InvalidRequest, SettingsError
from weir.images import Header, ImageLimits, check_type, look, read_base64

LIMITS = ImageLimits()
PNG = written(drawn(30, 20))
JPEG = written(drawn(30, 20), format="JPEG", progressive=True)
SEGMENT = b"\xff\xe5\0\x02"


def tiff(**tags: int) -> bytes:
    """Return the header of a TIFF of 9 by 9 pixels with further tags, by their numbers."""
    every = {256: 9, 257: 9} | {int(name[1:]): value for name, value in tags.items()}
    entries = b"".join(pack("<HHII", tag, 4, 1, value) for tag, value in every.items())
    return b"II*\0" + pack("<IH", 8, len(every)) + entries


def png(width: int, height: int) -> bytes:
    return PNG[:16] + pack(">II", width, height) + PNG[24:]


def bmp(width: int, packing: int) -> bytes:
    return b"BM" + bytes(12) + pack("<IiiHHI", 40, width, -9, 1, 8, packing)


@subcases(("mode", "format", "options"), KINDS)
def test_a_header_states_the_size(mode: str, format: str, options: dict[str, Any]) -> None:
    data = written(drawn(300, 200), mode, format, **options)
    assert look(data, LIMITS) == Header(format, 300, 200)


def test_fills_and_markers_alone_stand_between_the_segments_of_a_jpeg() -> None:
    assert look(JPEG[:2] + b"\xff\xff\xff\x01junk" + SEGMENT + JPEG[2:], LIMITS) == Header("JPEG", 30, 20)
    assert look(bmp(9, 0)[:14] + pack("<IHH", 12, 7, 9), LIMITS) == Header("BMP", 7, 9)  # the oldest kind


@subcases(
    ("data", "rule"),
    [
        (b"", "is no image in a format that is read: PNG, JPEG, WebP, GIF, BMP and TIFF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "is no image in a format that is read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no image in a format that is read"),
        (PNG[:18], "its PNG header is cut off"),
        (JPEG[:5], "its JPEG header is cut off"),
        (b"RIFF____WEBPVP8X", "its WEBP header is cut off"),
        (tiff()[:20], "its TIFF header is cut off"),
        (JPEG[:2] + b"\xff\xd9", "a JPEG without pixels (0 × 0)"),
        (png(0, 7), "a PNG without pixels (0 × 7)"),
        (bmp(-9, 0), "a BMP without pixels (-9 × 9)"),
        (png(40_000, 40_000), "40,000 × 40,000 pixels; at most 64 M (max_image_pixels)"),
        (
            png(1, 10_000_000),
            "1 × 10,000,000 pixels; at most 64 M (max_image_pixels), of which a row counts as 8 at least",
        ),
        (tiff(_322=1 << 20, _323=1 << 20), "1,048,576 × 1,048,576 pixels; at most 64 M (max_image_pixels)"),
        (tiff(_259=7), "a TIFF of compression 7; those that are read: none, LZW, deflate, PackBits"),
        (bmp(9, 1), "a BMP of compression 1; only those without compression are read"),
        (JPEG[:2] + SEGMENT * 1001 + JPEG[2:], "a JPEG with more than 1,000 segments before its pixels"),
        (PNG[:33] + bytes(12) * 1100 + PNG[33:], "a PNG with more than 1,014 chunks"),
        (JPEG + b"\xff\xda" * 32, "a JPEG with more than 32 scans"),
        (bytes(1 + (32 << 20)), "33,554,433 bytes; at most 33,554,432 (max_image_bytes)"),
    ],
)
def test_what_is_refused_before_it_is_decoded(data: bytes, rule: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(rule)}"):
        look(data, LIMITS)


_LINES = base64.encodebytes(PNG).decode()


@subcases("text", [_LINES, _LINES.replace("\n", "\r\n"), f"DATA:image/png;base64,{base64.b64encode(PNG).decode()}"])
def test_base64_is_read(text: str) -> None:
    assert read_base64(text, LIMITS) == PNG


@subcases(
    ("text", "rule"),
    [
        ("AAA", "is not base64: "),
        ("A AA=", "is not base64: "),
        ("é" * 4, "is not base64: "),
        ("data:image/png,abc", "a data: URL must be data:TYPE;base64, and the image in base64"),
        ("A" * 200, "148 bytes; at most 100 (max_image_bytes)"),
    ],
)
def test_what_is_no_base64(text: str, rule: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(rule)}"):
        read_base64(text, ImageLimits(max_image_bytes=100))


def test_limits_are_checked() -> None:
    with pytest.raises(SettingsError, match="max_image_pixels=100000000: must be from 1 to 89478485"):
        ImageLimits(max_image_pixels=100_000_000)


@subcases("stated", ["", "image/png", "IMAGE/X-PNG; q=1", "image/*", "Application/Octet-Stream", "binary/octet-stream"])
def test_types_that_an_image_may_state(stated: str) -> None:
    check_type(stated)


@subcases("stated", ["text/plain; charset=utf-8", "png"])
def test_types_that_no_image_has(stated: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^states the type '{stated.partition(';')[0]}': must be an image"):
        check_type(stated)
