"""Vectors as JSON: short, and the same numbers to whoever reads them."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.text_models import tiny
from tests.text_models.test_late_interaction import SETTINGS

import weir.embedding
from weir.errors import InvalidRequest, SettingsError
from weir.text_models.packing import Packing, packed, packing_named, quantized, read_ranges, similarities, unit_vectors

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
    (written,) = packed(numbers[None])
    found = np.array(read(bytes(written)), np.float64).astype(np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), numbers.view(np.uint32))


def test_no_digit_is_too_many() -> None:
    for numbers, text in (
        ([0.1, 1 / 3], b"[0.1,0.33333334]"),
        ([1.0, -0.25], b"[1.0,-0.25]"),
        ([[0.5], [2.0]], b"[[0.5],[2.0]]"),  # several vectors of a text
        ([np.nan, np.inf, 1.0], b"[null,null,1.0]"),
    ):
        assert bytes(packed(np.array([numbers], np.float32))[0]) == text
    turned = np.arange(12, dtype=np.float64).reshape(3, 4).T[:, ::2]
    assert [json.loads(bytes(each)) for each in packed(turned)] == turned.tolist()


VECTORS = np.random.default_rng(3).normal(size=(50, 20)).astype(np.float32)


def cosines(vectors: NDArray[Any]) -> NDArray[Any]:
    """Return the cosine of each vector with each."""
    unit = unit_vectors(vectors.astype(np.float32))
    found: NDArray[Any] = unit @ unit.T
    return found


def test_int8_keeps_cosines_and_uint8_is_the_same_above_zero() -> None:
    signed, unsigned = quantized(VECTORS, Packing.INT8), quantized(VECTORS, Packing.UINT8)
    assert [str(each.dtype) for each in (signed, unsigned)] == ["int8", "uint8"]
    np.testing.assert_array_equal(np.abs(signed.astype(int)).max(axis=1), 127)
    np.testing.assert_array_equal(unsigned.astype(int) - 128, signed)
    np.testing.assert_allclose(cosines(signed), cosines(VECTORS), atol=0.01)
    np.testing.assert_array_equal(quantized(VECTORS[:1], Packing.INT8)[0], signed[0])


def test_binary_has_a_bit_for_each_number_above_zero() -> None:
    bits, signed = quantized(VECTORS, Packing.UBINARY), quantized(VECTORS, Packing.BINARY)
    assert bits.shape == (50, 3) and [str(each.dtype) for each in (bits, signed)] == ["uint8", "int8"]
    np.testing.assert_array_equal(np.unpackbits(bits, axis=1)[:, :20], VECTORS > 0)
    np.testing.assert_array_equal(signed.astype(int) + 128, bits)


def test_zeros_and_what_is_not_finite_are_packed_too() -> None:
    odd = np.array([[0.0, 0.0], [np.nan, 1.0], [np.inf, -2.0]], np.float32)
    assert quantized(odd, Packing.INT8).tolist() == [[0, 0], [0, 127], [0, -127]]
    assert unit_vectors(odd[:1]).tolist() == [[0.0, 0.0]]


def test_a_packing_that_there_is_not_is_refused() -> None:
    assert packing_named(None, "encoding_format") is Packing.FLOAT
    rule = "encoding_format='int4': must be one of float, base64, int8, uint8, binary, ubinary"
    with pytest.raises(InvalidRequest, match=rule):
        packing_named("int4", "encoding_format")


def test_similarities_are_those_of_sentence_transformers() -> None:
    vector, others = np.array([3.0, 4.0], np.float32), np.array([[6, 8], [0, 1], [3, 4]], np.float32)
    cases: dict[str, list[float]] = {
        "cosine": [1, 0.8, 1],
        "dot": [50, 4, 25],
        "euclidean": [-5, -(18**0.5), 0],
        "manhattan": [-7, -6, 0],
    }
    for function, expected in cases.items():
        np.testing.assert_allclose(similarities(vector, others, function), expected, rtol=1e-6)


def test_ranges_divide_each_dimension_into_256_steps(tmp_path: Path) -> None:
    vectors = np.array([[-1.0, 0.0, 7.0], [254.0, 0.5, 7.0], [-3.0, 63.9, 9.0]], np.float32)
    np.save(tmp_path / "ranges.npy", np.array([[-1.0, 0.0, 7.0], [254.0, 127.5, 7.0]]))
    ranges = read_ranges(tmp_path / "ranges.npy", 3)
    assert quantized(vectors, Packing.UINT8, ranges).tolist() == [[0, 0, 0], [255, 1, 0], [0, 127, 2]]
    signed = [[-128, -128, -128], [127, -127, -128], [-128, -1, -126]]
    assert quantized(vectors, Packing.INT8, ranges).tolist() == signed
    assert quantized(vectors[:, :2], Packing.UINT8, ranges).tolist() == [[0, 0], [255, 1], [0, 127]]
    assert quantized(vectors, Packing.BINARY, ranges).tolist() == quantized(vectors, Packing.BINARY).tolist()
    np.save(tmp_path / "vectors.npy", vectors)
    least_and_greatest = [vectors.min(axis=0), vectors.max(axis=0)]
    np.testing.assert_array_equal(read_ranges(tmp_path / "vectors.npy", 3), least_and_greatest)


@pytest.mark.parametrize(
    ("array", "rule"),
    [
        (None, "cannot be read"), (np.zeros((2, 4)), r"has the shape \[2, 4\]: must be floats \[2, 3\]"), (np.zeros(3), "has the shape"),
        (np.zeros((2, 3), int), "must be floats"), (np.array([[0, 1, 0], [1, 0, 1.0]]), "the least of each dimension before the greatest"),
        (np.full((4, 3), np.nan), "must have finite numbers"),
    ],
)  # fmt: skip
def test_ranges_that_cannot_be_right_are_refused(array: Any, rule: str, tmp_path: Path) -> None:
    if array is not None:
        np.save(tmp_path / "ranges.npy", array)
    with pytest.raises(SettingsError, match=rule):
        read_ranges(tmp_path / "ranges.npy", 3)


def test_answers_have_the_steps_of_the_ranges(tmp_path: Path) -> None:
    model = tiny.sentence_model(tmp_path / "model")
    ranges = np.stack([np.full(32, -0.4), np.full(32, 0.4)]).astype(np.float32)
    np.save(tmp_path / "ranges.npy", ranges)
    settings: dict[str, Any] = {**SETTINGS, "cache": str(tmp_path / "cache"), "ranges": str(tmp_path / "ranges.npy")}
    with (
        weir.embedding.serve(model, **settings) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        asked = {"input": ["first do it", "it"]}
        floats = http.post("/v1/embeddings", json=asked).json()["data"]
        openai = http.post("/v1/embeddings", json={**asked, "encoding_format": "uint8"}).json()["data"]
        cohere = http.post(
            "/v2/embed", json={"texts": asked["input"], "embedding_types": ["int8"], "input_type": "search_query", "model": "model"}
        ).json()["embeddings"]["int8"]  # fmt: skip
    vectors = np.array([each["embedding"] for each in floats], np.float32)
    assert [each["embedding"] for each in openai] == quantized(vectors, Packing.UINT8, ranges).tolist()
    assert cohere == quantized(vectors, Packing.INT8, ranges).tolist()
