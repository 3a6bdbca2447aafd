"""Sorted tables of keys and values in LevelDB's file format, and protocol buffers without their schema: as far as TensorFlow's files need them.

A table ends in a footer of 48 bytes: the places of two blocks as varints, padding, and a magic number. The second block is the index: its
values are the places of the blocks with the entries. Behind each block stand a byte for its compression and a checksum. In a block, an entry is
three varints (bytes of the key shared with the one before, other bytes of the key, bytes of the value), then key and value; the block ends in
a list of places where keys are whole, and their number.
(LevelDB, doc/table_format.md; TensorFlow, core/lib/io/format.h)
"""

from collections.abc import Iterator

FOOTER = 48
MOST_BYTES = 64 << 20  # of all keys and values: an index of thousands of variables has a megabyte
MAGIC = bytes.fromhex("57fb808b247547db")
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # how a field of a protocol buffer is written


class Malformed(ValueError):
    """These bytes are not what they should be."""


def read_table(data: bytes) -> dict[bytes, bytes]:
    """Return all keys and values of a table. Raises Malformed."""
    if len(data) < FOOTER or data[-8:] != MAGIC:
        raise Malformed("it does not end as a table does")
    _, _, place = _handle(data[-FOOTER:], 0)
    start, size, _ = _handle(data[-FOOTER:], place)
    entries: dict[bytes, bytes] = {}
    room = MOST_BYTES
    for value in _block(data, start, size, room).values():
        start, size, _ = _handle(value, 0)
        found = _block(data, start, size, room)
        # Blocks may be named twice, and short entries stand for long keys.
        room -= sum(len(key) + len(one) for key, one in found.items())
        entries |= found
    return entries


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a protocol buffer. Raises Malformed."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, kind = tag >> 3, tag & 7
        value: int | bytes
        if kind == VARINT:
            value, place = _varint(message, place)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
            value, place = int.from_bytes(message[place : place + size], "little"), place + size
        elif kind == BYTES:
            size, place = _varint(message, place)
            value, place = message[place : place + size], place + size
        else:
            raise Malformed(f"a field is of the kind {kind}, which there is not")
        if place > len(message):
            raise Malformed("a field is cut off")
        yield number, value


def _block(data: bytes, start: int, size: int, room: int) -> dict[bytes, bytes]:
    block = data[start : start + size]
    if len(block) < max(size, 4) or start + size >= len(data):
        raise Malformed("a block is cut off")
    if data[start + size]:
        raise Malformed("a block is compressed, which TensorFlow does not do to checkpoints")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")
    entries: dict[bytes, bytes] = {}
    key, place = b"", 0
    while place < end:
        shared, place = _varint(block, place)
        own, place = _varint(block, place)
        length, place = _varint(block, place)
        if shared > len(key) or place + own + length > end:
            raise Malformed("an entry is cut off")
        room -= shared + own + length
        if room < 0:
            raise Malformed(f"its entries take more than {MOST_BYTES >> 20} MiB")
        key = key[:shared] + block[place : place + own]
        entries[key] = block[place + own : place + own + length]
        place += own + length
    return entries


def _handle(data: bytes, place: int) -> tuple[int, int, int]:
    start, place = _varint(data, place)
    size, place = _varint(data, place)
    return start, size, place


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a number in groups of seven bits, lowest first, and the place behind it."""
    number = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
    raise Malformed("a number is cut off")
