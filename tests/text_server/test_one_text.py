"""A text alone goes through the encoder without a task of its own, and ends as others do."""

import asyncio
from typing import Any

import msgspec
import numpy
import pytest
from tests.text_server.test_encoder import assert_at_rest, of, query_of, served_by, serving
from tests.text_server.text_models import Summing, Words
from tests.waiting import turns

from weir.errors import DeadlineExceeded, Draining, InvalidRequest, WeirError
from weir.messages import JSON
from weir.testing import FakeClock, FakeExecutor
from weir.text_models.model import TextEncoder
from weir.text_server.encoder import Encoder
from weir.text_server.texts import Encoded
from weir.text_server.tokenizing import AT_ONCE_CHARACTERS


class One:
    """A text that an encoder gets alone."""

    def __init__(self, encoder: Encoder, text: Any, **rest: Any) -> None:
        self.found: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        self.withdraw = encoder.encode_one(text, query_of(**rest), self._done)

    def _done(self, found: Encoded | WeirError) -> None:
        if isinstance(found, WeirError):
            self.found.set_exception(found)
        else:
            self.found.set_result(found)


def known_words() -> Words:
    words = Words()
    words.knows_all = True
    return words


class Writing(Summing):
    """A model that writes its vectors as TextEncoder does."""

    content_types = (JSON,)
    encode = TextEncoder.encode


async def test_a_text_alone_gets_what_it_gets_among_others() -> None:
    async with serving(words=known_words(), options={"normalize": True}) as encoder:
        for text, options in (("a b c", {}), ("one " * 9, {}), ("a b", {"dimensions": 2})):
            one = One(encoder, text, **options)
            assert not one.found.done()
            found = await one.found
            (expected, _) = (each := await of(encoder, [text, "b"], **options)).vectors
            assert found.vectors.tolist() == [expected.tolist()]
            assert (found.counts, found.truncated) == (each.counts[:1], each.truncated[:1])
            assert found.dispatch is not None
            assert found.phases.total >= found.phases.queue + found.phases.compute > 0.0
        assert_at_rest(encoder)


async def test_a_worker_writes_the_vector_of_a_text_alone() -> None:
    async with serving(Writing, known_words()) as encoder:
        one = await One(encoder, "a b c", as_json=True).found
        assert one.written is not None
        (expected,) = (await of(encoder, ["a b c"])).vectors
        assert numpy.array_equal(numpy.array(msgspec.json.decode(one.written), numpy.float32), expected)
        assert (one.vectors.shape, one.counts, one.truncated) == ((1, 0), [3], [False])
        for text, options in (("one " * 9, {}), ("a b", {"dimensions": 2})):
            other = await One(encoder, text, as_json=True, **options).found
            assert (other.written, other.vectors.shape[0]) == (None, 1)
        assert_at_rest(encoder)


async def test_what_does_not_go_alone() -> None:
    async with serving() as encoder:
        assert One(encoder, "unknown words").withdraw is None
    async with serving(words=known_words(), options={"split": True}) as encoder:
        assert One(encoder, "may be split").withdraw is None
        assert await One(encoder, "is cut", truncate=True).found
    async with serving(words=known_words(), options={"max_held": 1}) as encoder:
        for text in (["words"], [1, 2], ("a", "pair"), "a" * (AT_ONCE_CHARACTERS + 1)):
            assert One(encoder, text).withdraw is None
        assert One(encoder, "a", timeout=-1.0).withdraw is None
        first = One(encoder, "a")
        assert One(encoder, "too many are held").withdraw is None
        await first.found
        with pytest.raises(InvalidRequest, match=r"texts\[0\].*must not be empty"):
            One(encoder, "")
        with pytest.raises(InvalidRequest, match="must be at most 6"):
            One(encoder, "one two " * 9, truncate=False)
        assert_at_rest(encoder)


async def test_how_a_text_alone_may_end() -> None:
    async with serving(words=known_words()) as encoder:
        with pytest.raises(InvalidRequest, match=r"texts\[0\]: bad word"):
            await One(encoder, "bad").found
        await encoder.drain()
        with pytest.raises(Draining):
            One(encoder, "a")
        assert_at_rest(encoder)
    clock, executor = FakeClock(), FakeExecutor()
    async with serving(words=known_words(), executor=executor, clock=clock) as encoder:
        running = One(encoder, "a", timeout=5.0)
        await asyncio.sleep(0)
        late, left = (One(encoder, text, timeout=5.0) for text in "bc")
        assert left.withdraw is not None
        left.withdraw()
        left.withdraw()
        clock.advance(6.0)
        await turns(5)
        with pytest.raises(DeadlineExceeded, match=r"timeout=5.0 s, which came with the request"):
            await late.found
        with pytest.raises(DeadlineExceeded, match=r"timeout=5.0 s, which came with the request"):
            await running.found
        assert not left.found.done()
        executor.respond_next(lambda payloads: [numpy.zeros(4, numpy.float32)] * len(payloads))
        assert_at_rest(encoder)


async def test_a_text_alone_does_not_wait_for_bulk_work() -> None:
    executor = FakeExecutor()
    settings: dict[str, Any] = {"executor": executor, "max_queue_size": 8}
    async with serving(words=known_words(), options={"threads": 0}, **settings) as encoder:
        job = asyncio.create_task(of(encoder, [f"text {place}" for place in range(12)], priority=-1))
        await turns(10)
        assert encoder._under_way[True] == encoder.window < 12
        assert One(encoder, "a", priority=-1).withdraw is None  # its turn comes after those of the job
        one = One(encoder, "a")
        assert one.withdraw is not None
        await served_by(executor, job)
        assert one.found.done()
        assert_at_rest(encoder)
