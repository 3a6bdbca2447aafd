"""The image model, and the streaming model of videos, which asks it."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
from examples.video.fetching import Rules, fetch
from examples.video.frames import Frame, frames

import weir

SIZE = 64


class Colours(weir.Model):
    """Says how red, green and blue a picture is, on average. Writes a line for each batch into `ledger`, if it has one."""

    inputs = (weir.Tensor("image", "UINT8", [-1, SIZE, SIZE, 3]),)
    outputs = (weir.Tensor("mean", "FP32", [-1, 3]),)
    policy = "full:8"
    max_queue_delay = 0.02

    def __init__(self, ledger: str = "") -> None:
        self._ledger = Path(ledger) if ledger else None

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        mean = batch["image"].mean(axis=(1, 2), dtype=numpy.float32)
        if self._ledger is not None:
            with self._ledger.open("a") as ledger:
                ledger.write("".join("rgb"[channel] for channel in mean.argmax(axis=1)) + "\n")
        return {"mean": mean}


class Images(weir.Service):
    """Serves Colours, to the models of this process too."""

    model = Colours

    async def start(self) -> None:
        self._own_loop = asyncio.get_running_loop()
        await super().start()

    def ask(self, pictures: Sequence[Any]) -> "Future[list[Any]]":
        """Put each picture into the line as a request of its own; from any thread."""

        async def asked() -> list[Any]:
            calls = [self.infer({"image": picture[numpy.newaxis]}) for picture in pictures]
            return [answer["mean"][0].tolist() for answer in await asyncio.gather(*calls)]

        return asyncio.run_coroutine_threadsafe(asked(), self._own_loop)


class Video(weir.Model):
    """Takes the address of a video and gives the colours of each of its frames.

    Each worker, a thread of the server, reads one video, `ahead` frames at a time, and puts them into the line of `images`.
    `hosts` are those that videos may be read from.
    """

    streaming = True
    max_batch_size = 1
    Input = str

    def __init__(self, images: Images, hosts: Sequence[str] = (), ahead: int = 4) -> None:
        self._images = images
        self._rules = Rules(hosts)
        self._ahead = ahead

    def predict(self, batch: list[str]) -> Any:
        (address,) = batch
        with fetch(address, self._rules) as file, closing(frames(file, SIZE)) as coming:
            while some := list(islice(coming, self._ahead)):
                for frame, colours in zip(some, self._images.ask([each.pixels for each in some]).result(), strict=True):
                    yield {0: describe(frame, colours)}


def describe(frame: Frame, colours: list[float]) -> dict[str, Any]:
    """Return what is said of one frame."""
    red, green, blue = (round(value, 1) for value in colours)
    return {"frame": frame.number, "seconds": frame.seconds, "red": red, "green": green, "blue": blue}
