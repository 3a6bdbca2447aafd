"""A content type of the model's own: portable greymaps (PGM) in, one number out.

    weir serve examples.brightness:Brightness
    printf 'P5 2 1 255\\n\\377\\001' | curl -H 'Content-Type: image/x-portable-graymap' --data-binary @- \\
        localhost:8000/infer/brightness
"""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import weir

PGM = "image/x-portable-graymap"


class Brightness(weir.Model):
    """The mean of a picture's grey levels, from 0 to 1. Pictures are decoded in the worker."""

    content_types: ClassVar[list[str]] = [PGM]

    def decode(self, body: bytes, content_type: str) -> NDArray[np.uint8]:
        """Read a binary greymap. A picture that cannot be read is its sender's mistake, and nobody else's."""
        try:
            magic, width, height, most, pixels = body.split(maxsplit=4)
            shape = int(height), int(width)
        except ValueError:
            raise weir.InvalidRequest("not a PGM picture: its head is not `P5 width height 255`") from None
        if magic != b"P5" or most != b"255" or len(pixels) != shape[0] * shape[1]:
            raise weir.InvalidRequest(f"not an 8-bit PGM picture of {shape[1]} x {shape[0]} pixels")
        return np.frombuffer(pixels, dtype=np.uint8).reshape(shape)

    def predict(self, batch: list[Any]) -> list[float]:
        return [float(picture.mean()) / 255 for picture in batch]
