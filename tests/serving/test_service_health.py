from typing import Any

import numpy
from tests.rings import subcases

from weir.serving.service import same

NAN = float("nan")


@subcases(
    ("answer", "expected"),
    [
        (1, 1),
        ("a", "a"),
        (b"a", b"a"),
        (None, None),
        (1.00000001, 1.0),
        (1, 1.0),
        (NAN, NAN),
        ([1.0, [2.0000001]], [1.0, [2.0]]),
        (numpy.array([1.0, 2.0], "float32"), [1.0, 2.0]),
        ([1.0, 2.0], numpy.array([1.0, 2.0])),
        (numpy.float32(0.1), 0.1),
        ({"a": [1.0], "b": None}, {"a": [1.0], "b": None}),
        ((1, 2), [1, 2]),
    ],
)
def test_equal_answers_are_the_same(answer: Any, expected: Any) -> None:
    assert same(answer, expected)


@subcases(
    ("answer", "expected"),
    [
        (1, 2),
        (1.1, 1.0),
        ("a", b"a"),
        ("ab", ["a", "b"]),
        ([1.0], [1.0, 2.0]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ([1], {"a": 1}),
        (None, 0.0),
        (1.0, NAN),
        (numpy.array([1.0, 3.0]), [1.0, 2.0]),
        ("1.0", 1.0),
    ],
)
def test_different_answers_are_not(answer: Any, expected: Any) -> None:
    assert not same(answer, expected)
