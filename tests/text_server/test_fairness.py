"""Several callers of one model: nobody takes more than a share, and nobody waits behind another's large request."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy
import pytest
from benchmarks import sharing
from tests.rings import spread
from tests.text_server.text_models import DIMENSIONS, Summing, Words
from tests.waiting import turns

from weir import Service
from weir.images import Picture
from weir.testing import FakeClock, FakeExecutor
from weir.text_models.model import ImageTower
from weir.text_models.texts import EncodedImage
from weir.text_server.encoder import Encoder, TextShape
from weir.text_server.texts import Encoded, TextQuery
from weir.text_server.tokenizing import TokenizerThreads

ROWS = 16
SETTLED = 30  # turns of the loop in which all that follows from something has happened


class Bench:
    """A model whose batches take a tenth of a second, driven batch by batch in virtual time."""

    def __init__(self, encoder: Encoder, executor: FakeExecutor, clock: FakeClock) -> None:
        self.encoder, self.executor, self.clock = encoder, executor, clock
        self.waiting: set[asyncio.Future[Encoded]] = set()
        self.texts: Counter[str] = Counter()  # that were answered, by client, as the batches say

    def send(self, client: str, count: int) -> "asyncio.Future[Encoded]":
        """Send a request; the first word of each text is its client's letter."""
        texts = [f"{client} {number}" + " more" * (number % 3) for number in range(count)]
        asked = asyncio.ensure_future(self.encoder.encode(texts, TextQuery("test", client=client, timeout=1e6)))
        self.waiting.add(asked)
        return asked

    async def settle(self) -> None:
        """Let all that follows happen."""
        await turns(SETTLED)

    async def batch(self) -> None:
        """Let one batch run to its end."""
        await self.settle()
        while not self.executor.pending and not all(asked.done() for asked in self.waiting):
            await self.settle()  # a thread looks through the texts of a large request
        self.clock.advance(0.1)
        for tokens in self.executor.pending[0][1].payloads:
            self.texts[chr(int(numpy.frombuffer(tokens.ids, "<i4")[0]))] += 1
        self.executor.respond_next(Summing().predict)
        await self.settle()

    async def leave(self) -> None:
        """Let nobody wait any more."""
        for asked in self.waiting:
            asked.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)
        while self.executor.pending:
            await self.batch()


@asynccontextmanager
async def bench(places: int = 1, **options: Any) -> AsyncIterator[Bench]:
    """Serve."""
    clock, executor = FakeClock(), FakeExecutor(places=places)
    async with Service(Summing, executor=executor, clock=clock, max_batch_size=ROWS, max_padding=4.0) as service:
        encoder = Encoder(service, TokenizerThreads(Words(), 0), TextShape(DIMENSIONS, 8), **options)
        made = Bench(encoder, executor, clock)
        yield made
        await made.leave()
        encoder.close()


@pytest.mark.parametrize("places", [1, 2])
async def test_who_has_one_sentence_waits_three_batches_at_most(places: int) -> None:
    async with bench(places) as served:
        waits = []
        for turn in range(20):
            if turn < 4:
                served.send("a", 3000)
            await served.batch()
            sent, asked = served.clock(), served.send("b", 1)
            while not asked.done():
                await served.batch()
            waits.append(served.clock() - sent)
        assert max(waits) <= 0.1 * (1 + places) + 1e-9
        assert served.texts["a"] > 300


class Pictures(Summing):
    """Stands for the tower for images, and has its batches."""

    padded = ImageTower.padded is True
    max_padding, padding_cost = ImageTower.max_padding, ImageTower.padding_cost


@pytest.mark.parametrize("decoding", [0.0, 980.0])
async def test_a_picture_does_not_wait_behind_all_of_another_request(decoding: float) -> None:
    def look(picture: Picture) -> EncodedImage:
        return EncodedImage(picture.data, 10, decoding if picture.data[:1] == b"a" else 0.0)

    executor = FakeExecutor()
    limits: dict[str, Any] = {"max_batch_size": ROWS, "max_batch_cost": 1140.0}
    async with (
        Service(Summing, executor=FakeExecutor()) as texts,
        Service(Pictures, executor=executor, **limits) as tower,
    ):
        encoder = Encoder(texts, TokenizerThreads(Words(), 0, look=look), TextShape(DIMENSIONS, 8), images=tower)
        sent = []
        for client, count in (("a", 150), ("b", 1)):
            pictures = [Picture(b"%b %d" % (client.encode(), number)) for number in range(count)]
            sent.append(asyncio.ensure_future(encoder.encode(pictures, TextQuery("test", client=client, timeout=1e6))))
            await turns(SETTLED)
        while not sent[1].done():
            executor.respond_next(lambda batch: [numpy.zeros(DIMENSIONS, numpy.float32)] * len(batch))
            await turns(SETTLED)
        assert len(executor.batches) <= 4  # what was running, two at most, and its own; the next has begun
        sent[0].cancel()
        await asyncio.gather(*sent, return_exceptions=True)
        while executor.pending:
            executor.respond_next(lambda batch: [numpy.zeros(DIMENSIONS, numpy.float32)] * len(batch))
            await turns(SETTLED)
        encoder.close()


@pytest.mark.parametrize("size", spread([17, 15, 20]))
def test_there_is_no_step_in_how_long_requests_take(size: int) -> None:
    seen = sharing.beside(size)
    assert 0.85 < seen["p50"] / seen["p50 of 16"] / (size / sharing.REFERENCE) < 1.12
    assert seen["max"] < 3 * seen["p50"]


async def test_clients_get_as_much_whatever_the_size_of_their_requests() -> None:
    server, sizes = sharing.Virtual(), (1, 8, 16, 17, 64, 1024)
    await server.run(sizes, 60.0, named=True)
    assert max(server.answered.values()) < 1.1 * min(server.answered.values())


async def test_nobody_starves_where_clients_of_all_sizes_want_more_than_there_is() -> None:
    server, sizes = sharing.Virtual(), [1, 5, 16, 17, 20, 40, 64] * 9
    await server.run(sizes, 60.0, named=False, within=sharing.TIMEOUT)
    assert (server.late, {each.size for each in server.requests}) == (0, set(sizes))
