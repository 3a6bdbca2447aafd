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
