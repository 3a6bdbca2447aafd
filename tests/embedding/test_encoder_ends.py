"""encoder.py at random: whoever asks, leaves, comes too late or asks for what cannot be, each request has its end and nothing stays behind."""

import asyncio
import time
from random import Random
from typing import Any

import pytest
from tests.embedding.test_encoder import of, serving, waiting
from tests.embedding.text_models import Summing, Words, vector_of
from tests.embedding.tokens.test_threads import Held

from weir.embedding.encoder import Encoder
from weir.embedding.texts import Tokens
from weir.embedding.tokens.threads import BRIEF_CHARACTERS
from weir.errors import DeadlineExceeded, InvalidRequest, ModelError, Overloaded

PATIENCE = 20.0  # seconds that are far more than anything here takes


class Slow(Summing):
    """Takes so long that deadlines pass, and raises at texts that begin with the word `worse`."""

    def predict(self, batch: list[Tokens]) -> list[Any]:
        """Compute vectors."""
        time.sleep(0.0005)
        if any(item[0][:4] == sum(map(ord, "worse")).to_bytes(4, "little") for item in batch):
            raise ValueError("worse")
        return super().predict(batch)


def assert_at_rest(encoder: Encoder) -> None:
    """Nothing waits, nothing is counted that is not there."""
    batcher = encoder._service._driver.batcher
    assert (batcher.is_empty, batcher.waiting_rows, batcher.unsettled()) == (True, 0, [])
    assert (encoder._held, encoder._in_queue, len(encoder._shares)) == (0, 0, 0)
    assert (encoder._accepted._count, encoder._shares._shares) == (0, {})
    assert encoder._shares.now >= 0
    assert (encoder._shares._tags, dict(encoder._shares._ended)) == ([], {})


async def one(encoder: Encoder, chance: Random, ends: list[str]) -> None:
    """Ask for something, at any time, in any way."""
    count = chance.choice([1, 1, 2, 5, 16, 17, 40, 130, 300])
    texts = [f"{chance.choice('abcdefgh')} " * chance.randint(1, 5) + str(chance.randrange(500)) for _ in range(count)]
    if chance.random() < 0.15:
        texts[chance.randrange(count)] = chance.choice(["", "bad day", "worse day"])
    await asyncio.sleep(chance.random() * 0.03)
    asked = asyncio.ensure_future(
        of(
            encoder, texts, client=chance.choice(["", "one", "two"]), priority=chance.choice([0, 0, 0, 1]),
            timeout=chance.choice([0.001, 0.005, 0.02, 0.1, PATIENCE]), truncate=chance.choice([None, True, False]),
        )
    )  # fmt: skip
    if chance.random() < 0.3:
        await asyncio.sleep(chance.random() * 0.02)
        asked.cancel()
    try:
        async with asyncio.timeout(2 * PATIENCE):
            encoded = await asked
    except asyncio.CancelledError:
        ends.append("left")
    except (InvalidRequest, DeadlineExceeded, ModelError, Overloaded) as error:
        ends.append(type(error).__name__)
    else:
        assert encoded.vectors.tolist() == [vector_of(text) for text in texts]
        ends.append("answered")


@pytest.mark.parametrize("seed", range(12))
def test_each_has_its_end_and_nothing_stays(seed: int) -> None:
    async def main() -> None:
        chance, ends = Random(seed), list[str]()
        settings: dict[str, Any] = chance.choice(
            [{}, {"max_queue_size": 40}, {"policy": "full", "max_queue_delay": 0.003}, {"executor": "thread"}]
        )
        options = {"threads": chance.choice([0, 1, 2, 3]), "split": chance.choice([False, True])}
        if seed % 3 == 0:
            options["max_held"] = 400
        async with serving(Slow, options=options, **settings) as encoder:
            await asyncio.gather(*[one(encoder, chance, ends) for _ in range(60)])
            assert len(ends) == 60
            await encoder._service.drain()  # what is still computed for those who have left
            await asyncio.sleep(0)
            assert_at_rest(encoder)

    asyncio.run(main())


@pytest.mark.parametrize("end", ["leaves", "is too late", "has a wrong text"])
def test_a_request_goes_on_when_the_one_before_it_of_the_same_caller_ends(end: str) -> None:
    async def main() -> None:
        words = Held("held")
        async with serving(words=words, options={"threads": 3}) as encoder:
            wrong = [""] if end == "has a wrong text" else []
            before = ["held", *wrong, *map(str, range(100))]  # so many that threads read them
            first = asyncio.ensure_future(
                of(encoder, before, client="c", timeout=0.05 if end == "is too late" else PATIENCE)
            )
            await asyncio.to_thread(words.reads["held"].wait)
            rounds = len(words.rounds)
            second = asyncio.ensure_future(of(encoder, [*map(str, range(100))], client="c"))
            while len(words.rounds) == rounds:  # noqa: ASYNC110 - a thread reads it, and tells nobody
                await asyncio.sleep(0)
            for _ in range(10):
                await asyncio.sleep(0)
            if end == "leaves":
                first.cancel()
            elif end == "has a wrong text":
                words.gates["held"].set()
            await asyncio.wait([first])
            assert len((await asyncio.wait_for(second, PATIENCE)).counts) == 100
            words.gates["held"].set()

    asyncio.run(main())


def test_what_the_line_calls_too_late_after_it_was_withdrawn_is_counted_once() -> None:
    """What cannot make it any more is left out of a batch first and told a moment later."""

    async def main() -> None:
        async with serving(policy="full", max_queue_delay=PATIENCE, max_batch_size=64) as encoder:
            asked = asyncio.ensure_future(of(encoder, [*map(str, range(20))]))
            await waiting(encoder, 20)
            left_out: list[Any] = encoder._service._driver.batcher.unsettled()
            asked.cancel()
            await asyncio.wait([asked])
            for request in left_out:
                request.fail(DeadlineExceeded("too late"))
            assert_at_rest(encoder)

    asyncio.run(main())


class Shapeless(Summing):
    """Gives the second text a vector of another length."""

    def predict(self, batch: list[Tokens]) -> list[Any]:
        """Compute vectors."""
        return [vector[: 3 if vector[1] == ord("b") else 4] for vector in super().predict(batch)]


def test_vectors_that_do_not_fit_together_are_an_error() -> None:
    async def main() -> None:
        async with serving(Shapeless) as encoder:
            with pytest.raises(ModelError, match=r"texts\[1\]: the vectors could not be put together: ValueError"):
                await asyncio.wait_for(of(encoder, ["a", "b", "c"]), PATIENCE)
            assert_at_rest(encoder)

    asyncio.run(main())


@pytest.mark.parametrize("urgent", [True, False])
def test_what_is_not_even_read_in_time_is_too_late(urgent: bool) -> None:
    async def main() -> None:
        words = Words()
        words.gate.clear()
        async with serving(words=words) as encoder:
            text = "a" * (BRIEF_CHARACTERS + 1) if urgent else "a " * 20_000
            with pytest.raises(DeadlineExceeded):
                await asyncio.wait_for(of(encoder, [text], timeout=0.01), PATIENCE)
            assert_at_rest(encoder)
            words.gate.set()
            assert (await of(encoder, ["a"])).counts == [1]

    asyncio.run(main())
