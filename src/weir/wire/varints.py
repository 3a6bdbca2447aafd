"""Protobuf's variable-length whole numbers: seven bits a byte, least significant first."""


def write_varint(value: int) -> bytes:
    """Return `value`, which is not negative."""
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number at `at`, and the place after it. Raises IndexError where it is cut off, ValueError if too long."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
