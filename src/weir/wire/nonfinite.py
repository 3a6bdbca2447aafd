"""Finds the NaN or infinity for which a body is no JSON: some clients write them, as JavaScript would, and wonder."""

import json
import math
from typing import Any

_WORDS = (b"NaN", b"Infinity")
_MAX_BYTES = 1 << 20  # longer ones cost too much for a hint


def find_nonfinite(body: bytes | bytearray | memoryview) -> str | None:
    """Return the words for the first number in a tensor of `body` that JSON cannot say; None if there is none, or the body is
    over 1 MiB or malformed in another way too."""
    if len(body) > _MAX_BYTES:
        return None
    text = bytes(body)
    if not any(word in text for word in _WORDS):
        return None
    try:
        said = json.loads(text)
        tensors = [tensor for key in ("inputs", "outputs") for tensor in said.get(key) or ()]
        for tensor in tensors:
            number = _first(tensor.get("data"))
            if number is not None:
                word = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
                datatype = str(tensor.get("datatype"))
                return f"tensor {tensor.get('name')!r}: has the element {word}, which is none of {datatype} in JSON"
    except (ValueError, TypeError, AttributeError, RecursionError):  # it is something else that is wrong as well
        return None
    return None


def _first(data: Any) -> float | None:
    if isinstance(data, float) and not math.isfinite(data):
        return data
    if isinstance(data, list):
        for element in data:
            found = _first(element)
            if found is not None:
                return found
    return None
