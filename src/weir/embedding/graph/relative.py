"""MPNet's attention looks at how far two tokens are apart: a number for each head and each bucket of distances."""

import numpy as np
from numpy.typing import NDArray

FARTHEST = 128  # distances from here on share the last bucket, as in T5


def distance_table(bias: NDArray[np.floating], max_length: int) -> NDArray[np.float32]:
    """Return what each head adds for a key at the distance d from its query, in the row d + max_length - 1.

    `bias` is [buckets, heads]; the answer is [2 · max_length - 1, heads]. Source: Raffel et al. 2020 (T5), section 2.1, in both
    directions: half of the buckets are for keys that come later; half of each half are for one distance each, the rest grow with the logarithm.
    """
    distance = np.arange(1 - max_length, max_length)
    later = len(bias) // 2
    exact = later // 2
    size = np.abs(distance).astype(np.float32)
    # In float32, as in the original: what falls on the edge of a bucket must fall on the same side.
    grown = (
        np.log(np.maximum(size, 1) / np.float32(exact))
        / np.float32(np.log(FARTHEST / exact))
        * np.float32(later - exact)
    )
    far = np.minimum(exact + grown.astype(np.int64), later - 1)
    bucket = np.where(size < exact, np.abs(distance), far) + later * (distance > 0)
    table: NDArray[np.float32] = np.asarray(bias, dtype=np.float32)[bucket]
    return table
