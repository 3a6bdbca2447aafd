import numpy

from weir.serving.service import same

NAN = float("nan")


EQUAL = [
    (1, 1), ("a", "a"), (b"a", b"a"), (None, None), (1.00000001, 1.0), (1, 1.0), (NAN, NAN), ([1.0, [2.0000001]], [1.0, [2.0]]),
    (numpy.array([1.0, 2.0], "float32"), [1.0, 2.0]), ([1.0, 2.0], numpy.array([1.0, 2.0])), (numpy.float32(0.1), 0.1),
    ({"a": [1.0], "b": None}, {"a": [1.0], "b": None}), ((1, 2), [1, 2]),
]  # fmt: skip


OTHERS = [
    (1, 2), (1.1, 1.0), ("a", b"a"), ("ab", ["a", "b"]), ([1.0], [1.0, 2.0]), ({"a": 1}, {"a": 1, "b": 2}), ([1], {"a": 1}),
    (None, 0.0), (1.0, NAN), (numpy.array([1.0, 3.0]), [1.0, 2.0]), ("1.0", 1.0),
]  # fmt: skip


def test_which_answers_are_the_same() -> None:
    assert [same(answer, expected) for answer, expected in EQUAL] == [True] * len(EQUAL)
    assert [same(answer, expected) for answer, expected in OTHERS] == [False] * len(OTHERS)
