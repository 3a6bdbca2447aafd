"""JSON as callers send it and read it: what cannot be read is refused, and half of a surrogate pair by the place where it stands;
vectors are written with as many digits as their numbers have."""

from typing import Any

import msgspec
import numpy
import orjson
from numpy.typing import NDArray

from weir.errors import InvalidRequest
from weir.wire.surrogates import find_half, without_halves
from weir.wire.values import decode_json, uncollected


def read_json(body: bytes, *, clean: str = "") -> Any:
    """Return what `body` says. In the field `clean`, if one is named, halves of surrogate pairs are read as NULs.

    Raises InvalidRequest saying what is wrong; its details name the field (`param`) if it is one's.
    """
    try:
        with uncollected(len(body)):
            return decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        half = find_half(body)
        if half is None:
            raise InvalidRequest(f"body: is not JSON ({error})") from error
        param = half.where.partition("[")[0] or None
        if param == clean and (made := without_halves(body)) is not None:
            return read_json(made)
        raise InvalidRequest(str(half), details={"param": param}) from error


def as_json(vectors: NDArray[Any]) -> list[msgspec.Raw]:
    """Return the vector, or vectors, of each text as JSON: of each float32 the fewest digits that are that float32 to who reads it, also
    by way of a double; what is not finite is null. One by one, so that other threads are not kept waiting for all of them."""
    written = numpy.ascontiguousarray(vectors, numpy.float32)
    return [msgspec.Raw(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)) for vector in written]
