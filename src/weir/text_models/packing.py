"""The forms of vectors in responses: numbers, their bytes as base64, or integers of 8 bits or of one bit for each number.

A vector that is to have fewer dimensions has been cut, and scaled to its length again, before it is packed.
"""

from base64 import b64encode
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import numpy
import orjson
from msgspec import Meta
from numpy.typing import NDArray

from weir.errors import InvalidRequest, SettingsError, brief, reason_of
from weir.wire.schema import any_of


class Packing(StrEnum):
    """How the numbers of a vector are written."""

    FLOAT = "float"
    BASE64 = "base64"  # the bytes of float32, little-endian
    INT8 = "int8"  # scaled so that the largest number of the vector is 127 or -127: cosines stay what they are, up to rounding
    UINT8 = "uint8"  # the same, plus 128
    BINARY = "binary"  # a bit for each number, 1 if it is above 0; eight of them are an integer from -128
    UBINARY = "ubinary"  # eight of them are an integer from 0


PACKINGS = tuple(Packing)

# A vector in any of these forms, as OpenAPI describes it.
PackedVector = Annotated[
    Any,
    any_of(
        list[float],
        Annotated[list[int], Meta(description="int8, uint8, binary, ubinary")],
        Annotated[str, Meta(description="base64 of float32, little-endian")],
    ),
]


def packing_named(name: str | None, field: str, known: Sequence[Packing] = PACKINGS) -> Packing:
    """Return the packing called `name`, floats for None. Raises InvalidRequest naming the `field` and the names in `known`."""
    if name is None:
        return Packing.FLOAT
    if name not in known:
        raise InvalidRequest(f"must be one of {', '.join(known)}").of(field, brief(name))
    return Packing(name)


def packed(vectors: NDArray[Any], packing: Packing = Packing.FLOAT, ranges: NDArray[Any] | None = None) -> list[Any]:
    """Return each vector as a value that msgspec writes as JSON. For `ranges` see `quantized`.

    Each float has the fewest digits from which a reader, also of doubles, gets the same float32; a number that is not finite becomes null. The
    vectors are written one by one, so that other threads can run in between.
    """
    if packing is Packing.BASE64:
        return [b64encode(vector).decode() for vector in vectors.astype("<f4", order="C", copy=False)]
    array = numpy.ascontiguousarray(vectors, numpy.float32)
    if packing is not Packing.FLOAT:
        array = quantized(array, packing, ranges)
    return [msgspec.Raw(written_numbers(vector)) for vector in array]


def written_numbers(vector: NDArray[Any]) -> bytes:
    """Return one contiguous vector, float32 or integers, as JSON; see `packed`."""
    return orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)


def quantized(vectors: NDArray[Any], packing: Packing, ranges: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return the vectors [..., dimensions] as integers: int8 or uint8 of the same shape, or eight dimensions in one for the binary packings.

    The last bits are 0 if the number of dimensions is not divisible by 8. Each vector is packed by itself, so that its numbers do not depend on others.
    With `ranges`, the least and the greatest number of each dimension [2, dimensions or more], int8 and uint8 are those of sentence-transformers: 256
    equal steps between the two.
    """
    if packing in (Packing.BINARY, Packing.UBINARY):
        bits: NDArray[Any] = numpy.packbits(vectors > 0, axis=-1)
        return bits if packing is Packing.UBINARY else (bits.astype(numpy.int16) - 128).astype(numpy.int8)
    if ranges is not None:
        starts, ends = ranges[:, : vectors.shape[-1]]
        steps = (ends - starts) / numpy.float32(255)
        places = numpy.clip(numpy.floor((vectors - starts) / numpy.where(steps == 0, 1, steps)), 0, 255)
        stepped: NDArray[Any] = (
            places.astype(numpy.uint8) if packing is Packing.UINT8 else (places - 128).astype(numpy.int8)
        )
        return stepped
    finite = numpy.nan_to_num(vectors, posinf=0.0, neginf=0.0)
    largest = numpy.abs(finite).max(axis=-1, keepdims=True)
    levels: NDArray[Any] = numpy.rint(finite / numpy.maximum(largest, 1e-30) * 127)
    return (levels + 128).astype(numpy.uint8) if packing is Packing.UINT8 else levels.astype(numpy.int8)


def read_ranges(path: Path, dimensions: int) -> NDArray[Any]:
    """Return the least and the greatest number of each dimension, float32 [2, dimensions], of a .npy file with both, or with vectors to take them from.

    Raises SettingsError naming the file and the rule.
    """
    try:
        found = numpy.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SettingsError(f"ranges={str(path)!r}: cannot be read: {reason_of(error)}") from None
    if not (
        isinstance(found, numpy.ndarray)
        and found.ndim == 2
        and len(found) >= 2
        and found.shape[1] == dimensions
        and found.dtype.kind == "f"
    ):
        shape = list(getattr(found, "shape", []))
        raise SettingsError(
            f"ranges={str(path)!r}: has the shape {shape}: must be floats [2, {dimensions}], or vectors [any, {dimensions}]"
        )
    ranges: NDArray[Any] = found if len(found) == 2 else numpy.stack([found.min(axis=0), found.max(axis=0)])
    if not numpy.isfinite(ranges).all() or (ranges[0] > ranges[1]).any():
        raise SettingsError(
            f"ranges={str(path)!r}: must have finite numbers, the least of each dimension before the greatest"
        )
    return ranges.astype(numpy.float32)


def similarities(vector: NDArray[Any], others: NDArray[Any], function: str) -> NDArray[Any]:
    """Return how similar each of `others` [n, dimensions] is to `vector` by a function of sentence-transformers: cosine, dot, euclidean or manhattan.

    A distance is negative, so that what is nearer is more similar.
    """
    if function == "cosine":
        vector, others = unit_vectors(vector), unit_vectors(others)
    found: NDArray[Any] = others @ vector
    if function in ("euclidean", "manhattan"):
        found = -numpy.linalg.norm(others - vector, ord=2 if function == "euclidean" else 1, axis=-1)
    return found


def unit_vectors(vectors: NDArray[Any]) -> NDArray[Any]:
    """Return the vectors [..., dimensions] scaled to length 1. A vector of zeros stays what it is."""
    lengths = numpy.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: NDArray[Any] = (vectors / numpy.maximum(lengths, 1e-12)).astype(numpy.float32, copy=False)
    return scaled


class SparseVector(TypedDict):
    """Terms: ids of words of the vocabulary, and their weights."""

    indices: list[int]
    values: list[float]


def sparse_vector(found: NDArray[Any]) -> SparseVector:
    """Return terms [terms, 2] as a document."""
    return {"indices": found[:, 0].astype(int).tolist(), "values": found[:, 1].tolist()}
