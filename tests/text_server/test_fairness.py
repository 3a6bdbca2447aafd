"""Several callers of one model: nobody takes more than a share, and nobody waits behind another's large request."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy
import pytest
from benchmarks import sharing
from tests.rings import spread
from tests.text_server.text_models import DIMENSIONS, Summing, Words

from weir import Service
from weir.testing import FakeClock, FakeExecutor
from weir.text_models.texts import Tokens
from weir.text_server.encoder import Encoder, TextShape
from weir.text_server.texts import Encoded, TextQuery
from weir.text_server.tokenizing import TokenizerThreads

ROWS = 16
SETTLED = 30  # turns of the loop in which all that follows from something has happened


def answers(batch: list[Tokens]) -> list[Any]:
    """Answer as Summing does."""
    return Summing().predict(batch)


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
        for _ in range(SETTLED):
            await asyncio.sleep(0)

    async def batch(self) -> None:
        """Let one batch run to its end."""
        await self.settle()
        while not self.executor.pending and not all(asked.done() for asked in self.waiting):
            await self.settle()  # a thread looks through the texts of a large request
        self.clock.advance(0.1)
        for tokens in self.executor.pending[0][1].payloads:
            self.texts[chr(int(numpy.frombuffer(tokens.ids, "<i4")[0]))] += 1
        self.executor.answer_next(answers)
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


def run(scene: Callable[[], Awaitable[None]]) -> None:
    """Run a scene."""

    async def main() -> None:
        await scene()

    asyncio.run(main())


@pytest.mark.parametrize("places", [1, 2])
def test_a_client_with_one_sentence_waits_three_batches_at_most_whatever_another_sends(places: int) -> None:
    async def scene() -> None:
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

    run(scene)


def test_many_small_clients_wait_for_the_running_batch_and_their_own() -> None:
    async def scene() -> None:
        async with bench() as served:
            served.send("a", 3000)
            await served.batch()
            asked: list[tuple[int, asyncio.Future[Encoded]]] = []
            waits = []
            for turn in range(60):
                asked.append((turn, served.send(chr(ord("b") + turn % 5), 1)))
                await served.batch()
                waits += [1 + turn - sent for sent, each in asked if each.done()]
                asked = [(sent, each) for sent, each in asked if not each.done()]
            # The running batch and the next; one more where a text of another caller who has had as little goes first, and is unlike in length.
            assert max(waits) == 3
            assert waits.count(2) > 0.9 * len(waits)
            assert served.texts["a"] > 180

    run(scene)


def test_small_requests_of_one_caller_do_not_crowd_out_those_of_another() -> None:
    async def scene() -> None:
        async with bench() as served:
            for _ in range(400):
                served.send("a", 1)
            await served.batch()
            asked, batches = served.send("b", 1), 0
            while not asked.done():
                await served.batch()
                batches += 1
            assert batches <= 3

    run(scene)


def test_two_callers_with_large_requests_get_as_much() -> None:
    async def scene() -> None:
        async with bench() as served:
            asked = {client: served.send(client, 900) for client in "ab"}
            for turn in range(240):
                await served.batch()
                if turn == 40:
                    served.texts.clear()
                for client in "ab":
                    if asked[client].done():
                        asked[client] = served.send(client, 900)
            assert served.texts["a"] / served.texts["b"] == pytest.approx(1.0, abs=0.1)

    run(scene)


def test_a_large_request_goes_on_among_small_ones() -> None:
    async def scene() -> None:
        async with bench() as served:
            large = served.send("l", 40)
            for turn in range(60):
                for number in range(ROWS):
                    served.send(chr(ord("A") + (turn * ROWS + number) % 26), 1)
                await served.batch()
                if large.done():
                    break
            assert large.done()
            assert served.texts["l"] == 40
            assert sum(served.texts.values()) > 120

    run(scene)


def test_what_a_large_request_has_in_the_line_is_bounded() -> None:
    async def scene() -> None:
        async with bench() as served:
            served.send("a", 20_000)
            for _ in range(10):
                await served.batch()
                assert served.encoder._service.control.state()["waiting"] <= served.encoder.window == 256

    run(scene)


@pytest.mark.parametrize("size", spread([17, 15, 20]))
def test_there_is_no_step_in_how_long_requests_take(size: int) -> None:
    seen = sharing.beside(size)
    assert 0.85 < seen["p50"] / seen["p50 of 16"] / (size / sharing.REFERENCE) < 1.12
    assert seen["max"] < 3 * seen["p50"]


def test_clients_get_as_much_whatever_the_size_of_their_requests() -> None:
    server, sizes = sharing.Virtual(), (1, 8, 16, 17, 64, 1024)
    asyncio.run(server.run(sizes, 60.0, named=True))
    assert max(server.answered.values()) < 1.1 * min(server.answered.values())


def test_nobody_starves_where_clients_of_all_sizes_want_more_than_there_is() -> None:
    server, sizes = sharing.Virtual(), [1, 5, 16, 17, 20, 40, 64] * 9
    asyncio.run(server.run(sizes, 60.0, named=False, within=sharing.TIMEOUT))
    assert (server.late, {each.size for each in server.requests}) == (0, set(sizes))


def test_equal_shares_are_measured_as_equal_though_answers_come_in_bunches() -> None:
    # Each client gets 100 texts a second, and the requests that it has under way end within a millisecond of each other.
    found = {}
    for size in sharing.LIVE_EQUALS:
        ahead = max(2, sharing.LIVE_UNDER_WAY // size)
        bunch = ahead * size / 100.0
        found[size] = [
            number * bunch + each * 1e-3 / ahead for number in range(1, int(400 / bunch) + 1) for each in range(ahead)
        ]
    assert sharing.steady_rates(found) == pytest.approx(dict.fromkeys(sharing.LIVE_EQUALS, 100.0), rel=1e-6)
    found[4096] = found[4096][:3]
    with pytest.raises(ValueError, match="a round of requests of"):
        sharing.steady_rates(found)
