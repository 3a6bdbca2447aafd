"""Positions in attention: tables by distance and by position that families other than BERT have, computed once for a graph."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from weir.text_models.checkpoint.config import Distances, Rotary

MAX_DISTANCE = 128  # greater distances share the last bucket, as in T5


def distance_table(bias: NDArray[np.floating], max_length: int) -> NDArray[np.float32]:
    """Return the bias that each head of MPNet's attention adds for a key at distance d from its query, for all d from 1 - max_length to max_length - 1.

    The first half of the buckets is for keys before the query and at its place, the second half for keys after it. In each half, the first half of
    the buckets stands for one distance each, and the other buckets for ranges of distances that grow logarithmically. Source: Raffel et al. 2020
    (T5), section 2.1.

    Args:
        bias: [buckets, heads].
        max_length: the most tokens of a text.

    Returns:
        [2 · max_length - 1, heads]; the row d + max_length - 1 is for the distance d.
    """
    distance = np.arange(1 - max_length, max_length)
    later = len(bias) // 2
    exact = later // 2
    size = np.abs(distance).astype(np.float32)
    # In float32, as in the original, so that rounding puts distances at the edge of a bucket into the same bucket.
    grown = (
        np.log(np.maximum(size, 1) / np.float32(exact))
        / np.float32(np.log(MAX_DISTANCE / exact))
        * np.float32(later - exact)
    )
    far = np.minimum(exact + grown.astype(np.int64), later - 1)
    bucket = np.where(size < exact, np.abs(distance), far) + later * (distance > 0)
    table: NDArray[np.float32] = np.asarray(bias, dtype=np.float32)[bucket]
    return table


def alibi_slopes(heads: int) -> NDArray[np.float32]:
    """Return the penalty of each head for a distance of one token.

    For a power of two they are a geometric sequence that ends at 1/256; for other numbers those of the next lower power, followed by every second one of
    the next higher. Source: Press et al. 2022 (ALiBi), section 3, and the code that they published.
    """
    lower = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 / lower * np.arange(1, lower + 1))
    between = 2.0 ** (-4.0 / lower * np.arange(1, 2 * lower + 1))[::2]
    return np.concatenate([slopes, between[: heads - lower]]).astype(np.float32)


def rotary_tables(rotary: "Rotary", size: int, max_length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosine and sine [max_length, size / 2] of the angles by which each pair of numbers of a head is turned at each position.

    Source: Su et al. 2021 (RoFormer), section 3.2; NTK scaling stretches all wavelengths, the longest ones most, as the model code of GTE does.
    """
    places = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies = 1.0 / np.float32(rotary.theta * rotary.stretch) ** places / np.float32(rotary.stretch ** (2 / size))
    angles = np.arange(max_length, dtype=np.float32)[:, None] * frequencies[None].astype(np.float32)
    return np.cos(angles), np.sin(angles)


def distance_rows(distances: "Distances", max_length: int) -> NDArray[np.int64]:
    """Return the row of DeBERTa's embeddings of distances for each distance from query to key, 1 - max_length to max_length - 1.

    Half of the buckets to each side stand for one distance each, the others for ranges that grow logarithmically up to the longest distance.
    Source: He et al. 2021 (DeBERTaV3), and its published code.
    """
    distance = np.arange(1 - max_length, max_length)
    rows = distance
    if distances.buckets:
        exact = distances.buckets // 2
        size = np.where(np.abs(distance) < exact, exact - 1, np.abs(distance)).astype(np.float32)
        grown = (
            np.log(size / np.float32(exact))
            / np.log(np.float32((distances.longest - 1) / exact))
            * np.float32(exact - 1)
        )
        bucket = np.ceil(grown).astype(np.int64) + exact
        rows = np.where(size <= exact, distance, bucket * np.sign(distance))
    return np.clip(rows + distances.span, 0, 2 * distances.span - 1)
