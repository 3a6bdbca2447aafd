"""Sorted tables of keys and values in LevelDB's file format, and protocol buffers without their schema: as far as TensorFlow's files need them.

A table ends in a footer of 48 bytes: the places of two blocks as varints, padding, and a magic number. The second block is the index: its
values are the places of the blocks with the entries. Behind each block stand a byte for its compression and a checksum. In a block, an entry is
three varints (bytes of the key shared with the one before, other bytes of the key, bytes of the value), then key and value; the block ends in
a list of places where keys are whole, and their number.
(LevelDB, doc/table_format.md; TensorFlow, core/lib/io/format.h)
"""

from weir.embedding.tokens.files import Malformed, read_varint

FOOTER = 48
MOST_BYTES = 64 << 20  # of all keys and values: an index of thousands of variables has a megabyte
MAGIC = bytes.fromhex("57fb808b247547db")


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
        shared, place = read_varint(block, place)
        own, place = read_varint(block, place)
        length, place = read_varint(block, place)
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
    start, place = read_varint(data, place)
    size, place = read_varint(data, place)
    return start, size, place
