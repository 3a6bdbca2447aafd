import pytest

from weir.wire.kserve_grpc import read_varint, write_varint


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 16383, 16384, (1 << 32) - 1, (1 << 64) - 1])
def test_written_and_read_again(value: int) -> None:
    written = b"_" + write_varint(value) + b"_"
    assert read_varint(memoryview(written), 1) == (value, len(written) - 1)


def test_one_that_is_cut_off() -> None:
    with pytest.raises(IndexError):
        read_varint(memoryview(b"\x80\x80"), 0)


def test_one_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="more than 64 bits"):
        read_varint(memoryview(b"\x80" * 11 + b"\x01"), 0)
