"""Weights in eight bits: whole numbers, and a scale for each column of a matrix."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def quantize(weight: NDArray[Any], bits: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return `weight` [in, out] as whole numbers of this many bits, and the scale of each column: their product is the weight again, nearly."""
    highest = 2 ** (bits - 1) - 1
    scale = np.abs(weight).max(axis=0).astype(np.float32) / highest
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    return np.clip(np.rint(weight / scale), -highest, highest).astype(np.int8), scale


def balance(weight: NDArray[Any], reach: NDArray[Any]) -> NDArray[np.float32]:
    """Return by what each input is to be divided, and its column of `weight` [out, in] multiplied, before both are rounded.

    All inputs of a product share one scale, so one that reaches far takes the others' digits; half of that, as powers, is moved into the
    weights. `reach` is how far each input goes. Source: Xiao et al. 2023 (SmoothQuant), equation 4, with α = 1/2.
    """
    widest = np.abs(weight).max(axis=0)
    least = np.finfo(np.float32).tiny
    factors = np.sqrt(np.maximum(reach, least) / np.maximum(widest, least))
    # Only their ratios matter.
    even: NDArray[np.float32] = (factors / np.exp(np.mean(np.log(factors)))).astype(np.float32)
    return even


@cache
def weight_bits() -> int:
    """Return how many bits of a weight this machine's products can take: 8, or 7.

    x86 CPUs without VNNI add two products of an unsigned and a signed byte in 16 bits, and what is larger is cut off: seven bits cannot be.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return 8
    flags = next((line for line in lines if line.startswith("flags")), "")
    return 7 if flags and "vnni" not in flags else 8
