import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.errors import InvalidRequest
from weir.wire.tensors import pack_elements, unpack_elements


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_there_and_back(elements: list[bytes]) -> None:
    array = numpy.empty(len(elements), object)
    array[:] = elements
    raw = pack_elements(array)
    assert len(raw) == sum(4 + len(element) for element in elements)
    assert unpack_elements(memoryview(raw), len(elements), "x").tolist() == elements


def test_elements_are_in_row_major_order() -> None:
    assert pack_elements(numpy.array([[b"a", b"b"], [b"c", b""]], object)) == b"".join(
        [b"\1\0\0\0a", b"\1\0\0\0b", b"\1\0\0\0c", b"\0\0\0\0"]
    )


@pytest.mark.parametrize(
    ("raw", "count", "words"),
    [
        (b"\1\0\0", 1, "tensor 'x': 3 bytes cannot hold 1 BYTES elements"),
        (b"", 1 << 60, "0 bytes cannot hold 1152921504606846976 BYTES elements"),
        (b"\1\0\0\0", 1, "tensor 'x': element 0 is cut off: 0 of 1 bytes"),
        (b"\xff\xff\xff\xff", 1, "element 0 is cut off: 0 of 4294967295 bytes"),
        (b"\2\0\0\0ab\0\0", 2, "element 1 is cut off: 2 of 4 bytes of its length"),
        (b"\0\0\0\0\0", 1, "has 1 bytes after the last of its 1 elements"),
    ],
)
def test_what_is_cut_off(raw: bytes, count: int, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        unpack_elements(raw, count, "x")
    assert words in caught.value.message
