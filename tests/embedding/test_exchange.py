"""Vectors as JSON: short, and the same numbers to whoever reads them."""

import json

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from weir.embedding.exchange import as_json

EVERY_KIND = np.array(
    [0.0, -0.0, 1.0, 0.1, 1e-45, 1.1754944e-38, 3.4028235e38, 16777217.0, 1e16, 1e-5, 1 / 3], np.float32
)


def drawn() -> NDArray[np.float32]:
    """Return float32 numbers of every size: their bits are random."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    return bits[np.isfinite(bits)]


@pytest.mark.parametrize("numbers", [EVERY_KIND, drawn()])
@pytest.mark.parametrize("read", [json.loads, msgspec.json.decode])
def test_read_by_way_of_a_double_they_are_the_same_float32(numbers: NDArray[np.float32], read: object) -> None:
    assert callable(read)
    (written,) = as_json(numbers[None])
    found = np.array(read(bytes(written)), np.float64).astype(np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), numbers.view(np.uint32))


def test_no_digit_is_too_many() -> None:
    assert [bytes(each) for each in as_json(np.array([[0.1, 1 / 3], [1.0, -0.25]], np.float32))] == [
        b"[0.1,0.33333334]",
        b"[1.0,-0.25]",
    ]


def test_a_text_may_have_several_vectors() -> None:
    assert bytes(as_json(np.array([[[0.5], [2.0]]], np.float32))[0]) == b"[[0.5],[2.0]]"


def test_vectors_may_lie_anyhow_and_be_of_another_type() -> None:
    numbers = np.arange(12, dtype=np.float64).reshape(3, 4)
    assert [json.loads(bytes(each)) for each in as_json(numbers.T[:, ::2])] == numbers.T[:, ::2].tolist()


def test_what_is_not_finite_is_null() -> None:
    assert bytes(as_json(np.array([[np.nan, np.inf, 1.0]], np.float32))[0]) == b"[null,null,1.0]"
