"""A video's frames, one after the other, decoded by PyAV."""

from collections.abc import Generator
from typing import IO, Any, NamedTuple

import av
import numpy

from weir import InvalidRequest

# Containers that hold a video themselves. Playlists would have the library open whatever they name.
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
MAX_PIXELS = 4096 * 2304


class Frame(NamedTuple):
    """One frame: its number, its time in seconds, and `size` by `size` pixels, three bytes each."""

    number: int
    seconds: float
    pixels: numpy.ndarray[Any, Any]


def frames(file: IO[bytes], size: int) -> Generator[Frame, None, None]:
    """Yield the frames of the first video stream in `file`. Raises InvalidRequest for what is no video, or too large."""
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    try:
        with av.open(file, "r", options=options) as container:
            if not container.streams.video:
                raise InvalidRequest("video: has no pictures in it")
            stream = container.streams.video[0]
            if stream.width * stream.height > MAX_PIXELS:
                raise InvalidRequest(f"video: {stream.width} x {stream.height} is more than {MAX_PIXELS} pixels")
            for number, frame in enumerate(container.decode(stream)):
                pixels = frame.reformat(width=size, height=size, format="rgb24").to_ndarray()
                yield Frame(number, frame.time or 0.0, pixels)
    except av.FFmpegError as error:
        raise InvalidRequest(f"video: cannot be decoded ({error.strerror})") from None
