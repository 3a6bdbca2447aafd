"""The same as `simple`, but every number is a text: BYTES tensors in and out."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import weir

Arrays = dict[str, NDArray[Any]]


class SimpleString(weir.Model):
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, of integers written in digits."""

    inputs = (weir.Tensor("INPUT0", "BYTES", (-1, 16)), weir.Tensor("INPUT1", "BYTES", (-1, 16)))
    outputs = (weir.Tensor("OUTPUT0", "BYTES", (-1, 16)), weir.Tensor("OUTPUT1", "BYTES", (-1, 16)))
    examples = ({"INPUT0": [["1"] * 16], "INPUT1": [["2"] * 16]},)

    def predict(self, batch: Arrays) -> Arrays:
        first, second = _numbers(batch["INPUT0"]), _numbers(batch["INPUT1"])
        return {"OUTPUT0": _texts(first + second), "OUTPUT1": _texts(first - second)}


def _numbers(texts: NDArray[Any]) -> NDArray[np.int64]:
    try:
        return np.array([int(text) for text in texts.flat], np.int64).reshape(texts.shape)
    except (ValueError, OverflowError) as error:
        raise weir.InvalidRequest(f"INPUT0 and INPUT1 must be integers of at most 64 bits: {error}") from error


def _texts(numbers: NDArray[np.int64]) -> NDArray[Any]:
    return np.array([str(number).encode() for number in numbers.flat], object).reshape(numbers.shape)
