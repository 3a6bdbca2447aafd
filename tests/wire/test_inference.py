import numpy
import pytest
from tests.rings import subcases

from weir.errors import InvalidRequest
from weir.model import Tensor
from weir.wire.inference import ArenaArrays, TensorValue, bind

DECLARED = [Tensor("a", "INT32", [-1, 2]), Tensor("b", "BF16", [-1])]
A = TensorValue("a", "INT32", numpy.zeros((3, 2), numpy.int32))
B = TensorValue("b", "BF16", numpy.zeros(3, "<u2"))


class Place:
    view = memoryview(bytearray(8))

    def __init__(self) -> None:
        self.shares = 1

    def retain(self) -> None:
        self.shares += 1

    def release(self) -> None:
        self.shares -= 1


def test_arrays_come_in_the_order_declared() -> None:
    arrays = bind([B, A], DECLARED)
    assert list(arrays) == ["a", "b"]
    assert arrays["a"] is A.array


@subcases(
    ("inputs", "words"),
    [
        ([A, A], "tensor 'a': is there twice"),
        ([A, B, TensorValue("c", "INT32", A.array)], "tensor 'c': not one of 'a', 'b'"),
        ([A, TensorValue("b", "UINT16", B.array)], "tensor 'b': has datatype 'UINT16', must be BF16"),
    ],
)
def test_what_is_wrong_is_named(inputs: list[TensorValue], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bind(inputs, DECLARED)
    assert words in caught.value.message


def test_arrays_in_a_block_share_its_fate_and_travel_without_it() -> None:
    place = Place()
    arrays = ArenaArrays({"a": A.array}, place)
    arrays.retain()
    assert place.shares == 2 and arrays.view is place.view
    arrays.release()
    arrays.release()
    assert place.shares == 0
    plain = arrays.as_plain()
    assert type(plain) is dict and plain["a"] is A.array
