"""encoder.py over real services: vectors in order, large requests in pieces, errors that name the text."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any

import numpy
import pytest
from tests.text_server.hashing import HashingEncoder
from tests.text_server.test_tokenizing import Held
from tests.text_server.text_models import DIMENSIONS, PerToken, Summing, Words, vector_of
from tests.waiting import turns, until

from weir import Service
from weir.errors import DeadlineExceeded, Draining, InvalidRequest, ModelError, ModelNotReady, Overloaded, TooLarge
from weir.images import ImageLimits, Picture
from weir.messages import Dispatch, Request
from weir.model import Model
from weir.protocols import HttpSettings
from weir.protocols.account import CLAIM, Account, Claim
from weir.telemetry.recorder import SilentObserver
from weir.testing import FakeClock, FakeExecutor
from weir.text_models import Pooling
from weir.text_models.runtime import release_free_memory
from weir.text_models.texts import EncodedImage, Tokens
from weir.text_server import encoder as encoder_module
from weir.text_server.encoder import Encoder, TextShape
from weir.text_server.exchange import EmbeddingContext, TextExchange, TextWork
from weir.text_server.metrics import TextCounts
from weir.text_server.pictures import PictureUrl
from weir.text_server.requests import EncodeRequest, OneText, TextPiece, max_pooled_places
from weir.text_server.texts import Encoded, Encodes, TextOptions, TextQuery, texts_bytes
from weir.text_server.tokenizing import INLINE_CHARACTERS, TokenizerThreads


class Heard(SilentObserver):
    """Remembers batches, and requests that had their end."""

    def __init__(self) -> None:
        self.cuts: list[Dispatch] = []
        self.ends: list[tuple[Request, Any]] = []

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        self.cuts.append(dispatch)

    def answered(self, model: str, requests: Sequence[Request], error: Any, now: float) -> None:
        self.ends += [(request, error) for request in requests]


PATIENCE = 20.0  # seconds that are far more than anything here takes


def let_pass(seconds: float) -> None:
    """Have what waits for the loop's clock find it so much later."""
    loop: Any = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


@asynccontextmanager
async def serving(
    model: type[Model] = Summing, words: Words | None = None, options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Encoder]:
    """Serve a model inline, with its encoder."""
    chosen: dict[str, Any] = {"executor": "inline", "max_batch_size": 8} | settings
    async with Service(model, **chosen) as service:
        more: dict[str, Any] = dict(options or {})
        shape = TextShape(DIMENSIONS, 6, **{name: more.pop(name) for name in TextShape._fields if name in more})
        tokenizer = TokenizerThreads(words or Words(), more.pop("threads", 1), more.pop("look", None))
        encoder = Encoder(service, tokenizer, shape, **more)
        try:
            yield encoder
        finally:
            encoder.close()


async def waiting(encoder: Encoder, count: int) -> None:
    """Return when so many texts wait in the queue."""
    for _ in range(100_000):
        if encoder._service.control.state()["waiting"] == count:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"never so many as {count} texts in the line")


def service_of(encoder: Encoder) -> Service:
    service = encoder._service
    assert isinstance(service, Service)
    return service


def numbered(count: int) -> list[str]:
    return [*map(str, range(count))]


async def served_by(executor: FakeExecutor, asked: "asyncio.Future[Any]", *, clock: FakeClock | None = None) -> int:
    """Have `executor` compute, a second for each batch by `clock`, until `asked` has ended; return how many batches there were."""
    batches = 0
    while not asked.done():
        await asyncio.sleep(0)
        if executor.pending:
            batches += 1
            if clock is not None:
                clock.advance(1.0)
            executor.respond_next(Summing().predict)
    return batches


def query_of(**stated: Any) -> TextQuery:
    """Return a query with these fields and options."""
    options = {name: stated.pop(name) for name in TextOptions._fields if name in stated}
    return TextQuery("test", TextOptions(**options), **stated)


def of(encoder: Encodes, texts: Any, **stated: Any) -> Any:
    """Encode."""
    return encoder.encode(texts, query_of(**stated))


async def test_vectors_come_in_order() -> None:
    heard = Heard()
    async with serving(observers=[heard]) as encoder:
        for count in (1, 2, 16, 17, 700, 2001):
            texts = [" ".join(f"w{number}" for _ in range(1 + number % 5)) for number in range(count)]
            encoded = await of(encoder, texts)
            assert encoded.vectors.dtype == numpy.float32
            assert encoded.vectors.tolist() == [vector_of(text) for text in texts]
            assert encoded.counts == [1 + number % 5 for number in range(count)]
            assert (encoded.truncated, encoded.tokens) == ([False] * count, None)
        assert {request.form.frontend for request, _ in heard.ends} == {"test"}
        assert {cut.padding for cut in heard.cuts} <= {float(each) for each in range(30)}
    assert encoder.window == 256


async def test_texts_that_come_twice_are_computed_once() -> None:
    heard = Heard()
    async with serving(observers=[heard]) as encoder:
        texts: list[Any] = ["a", "b c", "a", ["b", "c"], ("a", "b"), ("a", "b"), ["b", "c"]]
        encoded = await of(encoder, texts, want_tokens=True)
        assert sum(cut.rows for cut in heard.cuts) == 5
        assert encoded.vectors[0].tolist() == encoded.vectors[2].tolist() == vector_of("a")
        assert encoded.counts == [1, 2, 1, 2, 2, 2, 2]
        assert encoded.tokens == [["97"], ["98", "99"], ["97"], ["98", "99"], ["97", "98"], ["97", "98"], ["98", "99"]]
        with pytest.raises(InvalidRequest, match=r"texts\[2\]: bad word"):
            await of(encoder, ["a", "a", "bad", "bad"])


class Alike(Model):
    """Has one vector for everything."""

    def predict(self, batch: list[Any]) -> Any:
        return numpy.ones((len(batch), DIMENSIONS), numpy.float32)


async def test_an_image_costs_its_tokens_and_its_decoding() -> None:
    heard = Heard()
    options = {"look": lambda picture: EncodedImage(picture.data, 50, decoding=977.5)}
    async with serving(Alike, options=options, observers=[heard]) as encoder:
        encoded = await of(encoder, [Picture(b"large"), "a text"])
    assert encoded.counts == [50, 2]
    assert sorted(request.form.cost for request, _ in heard.ends) == [2.0, 1027.5]


async def test_a_stated_timeout_counts_once_for_fetching_and_computing() -> None:
    async def fetch(url: str) -> bytes:
        let_pass(3.0)
        return b"file"

    seen, images = HashingEncoder(), ImageLimits(allow_url=["*"])
    seen.error = InvalidRequest("as an end")
    context = EmbeddingContext({"hashing": seen}, HttpSettings(), 9, TextCounts(), images=images)
    context.fetch = fetch
    for timeout in (5.0, None):
        with pytest.raises(InvalidRequest, match="as an end"):
            await TextExchange(context, "test", timeout=timeout).run(TextWork(seen, [PictureUrl("http://a")], str))
    assert [round(each.query.waited) for each in seen.heard] == [3, 0]
    async with serving() as encoder:
        with pytest.raises(DeadlineExceeded, match=r"timeout=5.0 s, which came with the request: "):
            await of(encoder, ["a"], timeout=5.0, waited=6.0)
        assert (await of(encoder, ["a"], timeout=5.0, waited=1.0)).phases.total >= 1.0


async def test_images_have_times_and_limits_and_a_policy_of_their_own() -> None:
    clock, texts, images = FakeClock(), FakeExecutor(), FakeExecutor()

    def look(picture: Picture) -> EncodedImage:
        return EncodedImage(picture.data, 50)

    async with (
        Service(Alike, name="m", executor=texts, clock=clock, max_batch_size=8) as first,
        Service(Alike, name="m", version="images", executor=images, clock=clock, max_batch_size=2, policy="full") as second,
    ):  # fmt: skip
        encoder = Encoder(first, TokenizerThreads(Words(), 0, look), TextShape(DIMENSIONS, 8), images=second)

        async def run(*items: Any, timeout: float = 1e6) -> Encoded:
            """Have a batch of texts take 10 ms, and one of images 10 s."""
            asked = asyncio.ensure_future(of(encoder, items, timeout=timeout))
            while not asked.done():
                await asyncio.sleep(0)
                for executor, seconds in ((texts, 0.01), (images, 10.0)):
                    if executor.pending:
                        clock.advance(seconds)
                        executor.respond_next(Alike().predict)
            found: Encoded = await asked
            return found

        for number in range(4):
            pictures = [Picture(b"%d %d" % (number, each)) for each in range(4)]
            assert (await run(*pictures[:2], "a b", *pictures[2:], "c d", "e")).counts == [50, 50, 2, 50, 50, 2, 1]
        assert (set(texts.sizes), set(images.sizes)) == ({3}, {2})
        times = [service.generation.service_time for service in (first, second)]
        assert [each.expected(2) for each in times] == pytest.approx([0.01, 10.0], rel=0.01)
        assert (await run("a", "b", timeout=0.1)).counts == [1, 1]
        with pytest.raises(DeadlineExceeded, match=r"2 texts like these take 10 s at least"):
            await run(Picture(b"a"), Picture(b"b"), timeout=4.0)
        await second.stop()  # as when only the version for images is unloaded
        encoder.serve(first)
        with pytest.raises(ModelNotReady, match=r"m/images"):
            await run(Picture(b"a"))
        assert (await run("a", "b")).counts == [1, 1]
        encoder.close()


async def test_texts_that_are_too_long() -> None:
    async with serving() as encoder:
        encoded = await of(encoder, ["a b c d e f g h", "a"])
        assert (encoded.counts, encoded.truncated) == ([6, 1], [True, False])
        with pytest.raises(InvalidRequest, match=r"texts\[1\]: 8 tokens: must be at most 6"):
            await of(encoder, ["a", "a b c d e f g h"], truncate=False)
    async with serving(options={"truncate": False}) as encoder:
        with pytest.raises(InvalidRequest, match=r"texts\[0\]"):
            await of(encoder, ["a b c d e f g h"])
        assert (await of(encoder, ["a b c d e f g h"], truncate=True)).truncated == [True]
        short = await of(encoder, ["a b c d", "a"], max_tokens=2)
        assert (short.counts, short.truncated) == ([2, 1], [True, False])


async def test_bad_requests() -> None:
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "texts: must be a list of one text or more"),
        ("text", {}, "texts: must be a list of one text or more, is 'text'"),
        (["a"], {"dimensions": 0}, "dimensions=0: must be 1 to 4"),
        (["a"], {"dimensions": 5}, "dimensions=5: must be 1 to 4"),
        (["a"], {"timeout": 0.0}, "timeout=0.0: must be more than 0"),
        (["a"], {"timeout": float("nan")}, "timeout=nan: must be more than 0"),
        (["a", ""], {}, r"texts\[1\]: '': must not be empty"),
        (["a b"] * 3 + ["w", "bad day"], {}, r"texts\[4\]: bad word"),
        ([*numbered(300), ""], {}, r"texts\[300\]: '': must not be empty"),
    ]
    async with serving() as encoder:
        for texts, options, message in wrong:
            with pytest.raises(InvalidRequest, match=message):
                await of(encoder, texts, **options)
            assert (await of(encoder, ["fine"])).vectors.tolist() == [vector_of("fine")]


async def test_fewer_numbers() -> None:
    async with serving() as encoder:
        assert (await of(encoder, ["a b", "c"], dimensions=2)).vectors.tolist() == [[2.0, 97.0], [1.0, 99.0]]
        assert (await of(encoder, ["a b"], dimensions=4)).vectors.shape == (1, 4)
    async with serving(options={"normalize": True}) as encoder:
        (vector,) = (await of(encoder, ["a b"], dimensions=2)).vectors
        assert numpy.linalg.norm(vector) == pytest.approx(1.0)
        assert vector[0] / vector[1] == pytest.approx(2 / 97)


LONG = "a b c d e f g h i"  # the model reads six words


async def test_long_texts_may_be_read_in_pieces() -> None:
    heard = Heard()
    async with serving(observers=[heard], options={"split": True}) as encoder:
        encoded = await of(encoder, ["a", LONG, "b"], want_tokens=True)
        first, second = numpy.array(vector_of("a b c d e f")), numpy.array(vector_of("g h i"))
        assert encoded.vectors[1].tolist() == pytest.approx((6 * first + 3 * second) / 9)
        assert encoded.vectors[::2].tolist() == [vector_of("a"), vector_of("b")]
        assert (encoded.counts, encoded.truncated) == ([1, 9, 1], [False] * 3)
        assert encoded.tokens is not None and len(encoded.tokens[1]) == 9
        assert sum(cut.rows for cut in heard.cuts) == 4
        assert (await of(encoder, [f"{LONG} {number}" for number in range(100)])).counts == [10] * 100
        others = await of(encoder, [(LONG, "a"), LONG.split()])  # 5 + 1 and 4 + 1; 6 and 3
        assert (others.counts, others.truncated) == ([11, 9], [False, False])
        assert others.vectors[1].tolist() == encoded.vectors[1].tolist()


async def test_what_is_highest_over_tokens_is_highest_over_pieces() -> None:

    async with serving(options={"split": True, "max_pooled": [True, False, True, False]}) as encoder:
        (vector,) = (await of(encoder, [LONG])).vectors
    first, second = numpy.array(vector_of("a b c d e f")), numpy.array(vector_of("g h i"))
    mean, max_pooled = (6 * first + 3 * second) / 9, numpy.maximum(first, second)
    assert vector.tolist() == pytest.approx([max_pooled[0], mean[1], max_pooled[2], mean[3]])
    poolings = (Pooling.MEAN_MAX, Pooling.CLS, Pooling.HIERARCHICAL)
    assert max_pooled_places(poolings, 8) == [False, False, True, True, False, False, True, True]


async def test_callers_may_say_what_becomes_of_long_texts() -> None:
    async with serving(options={"split": True}) as encoder:
        assert (await of(encoder, [LONG], truncate=True)).truncated == [True]
        with pytest.raises(InvalidRequest, match=r"texts\[0\]: 9 tokens: must be at most 6"):
            await of(encoder, [LONG], truncate=False)
        with pytest.raises(InvalidRequest, match=r"texts\[1\]: whole: must not be divided"):
            await of(encoder, ["a", f"whole {LONG}"])
        with pytest.raises(InvalidRequest, match=r"texts\[0\]: bad word"):
            await of(encoder, ["a b c d e f bad day"])


async def test_vectors_of_pieces_have_length_one_and_those_of_tokens_are_joined() -> None:
    async with serving(options={"split": True, "normalize": True}) as encoder:
        (vector,) = (await of(encoder, [LONG])).vectors
        assert numpy.linalg.norm(vector) == pytest.approx(1.0)
    async with serving(PerToken, options={"split": True}) as encoder:
        encoded = await of(encoder, [LONG, "a"])
        assert encoded.vectors[0, :, 0].tolist() == [float(ord(word)) for word in LONG.split()]
    async with serving(PerToken) as encoder:
        encoded = await of(encoder, ["a b", "c", "a b"])
        assert encoded.vectors.tolist() == [[[97, -97], [98, -98]], [[99, -99], [0, 0]], [[97, -97], [98, -98]]]


async def test_all_texts_have_one_deadline() -> None:
    late = "timeout=.* s, which came with the request: the deadline passed before all texts were computed"
    words = Words()
    words.gate.clear()
    async with serving(words=words) as encoder:
        # Read in pieces, at once, and by itself.
        for texts in (numbered(100), ["a" * (INLINE_CHARACTERS + 1)], ["a " * 20_000]):
            with pytest.raises(DeadlineExceeded, match=late + (": 0 of 100 were" if len(texts) > 1 else "$")):
                await asyncio.wait_for(of(encoder, texts, timeout=0.01), PATIENCE)
            assert_at_rest(encoder)
        words.gate.set()
        with pytest.raises(DeadlineExceeded, match=late):
            await of(encoder, ["a"], timeout=1e-9)  # over by the time that it was read
        assert (await of(encoder, ["a"])).counts == [1]
    async with serving(executor=FakeExecutor(), max_batch_size=500, drain_timeout=0.0) as encoder:
        with pytest.raises(DeadlineExceeded, match=late + ": 0 of 30 were"):
            await of(encoder, numbered(30), timeout=0.05)


@pytest.mark.parametrize("way", ["decode", "tokenize"])
async def test_work_at_texts_has_a_deadline_and_ends_with_it(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, done = threading.Event(), threading.Event(), list[str]()

    def slow(words: Words, value: Any, **options: Any) -> str:
        begun.set()
        goes_on.wait(60.0)
        done.append("one")
        return "one"

    for name in ("decode", "details"):
        monkeypatch.setattr(Words, name, slow)
    async with serving() as encoder:
        asked: asyncio.Future[Any] = asyncio.ensure_future(
            encoder.decode([[1]] * 5, skip_special=True, timeout=PATIENCE)
            if way == "decode"
            else encoder.tokenize(["a"] * 5, special=True, prompt=None, timeout=PATIENCE)
        )
        await asyncio.to_thread(begun.wait)
        let_pass(PATIENCE)
        with pytest.raises(DeadlineExceeded, match=r"timeout=20.0 s, which came with the request: the deadline"):
            await asked
        goes_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert done == ["one"]


@pytest.mark.parametrize("count", [1, 400])
async def test_who_leaves_takes_all_along(count: int) -> None:
    heard = Heard()
    async with serving(observers=[heard], policy="full", max_queue_delay=30.0, max_batch_size=500) as encoder:
        asking = asyncio.ensure_future(of(encoder, numbered(count), client="c"))
        await waiting(encoder, min(count, encoder.window))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert encoder._service.control.state()["waiting"] == 0
        assert {type(error).__name__ for _, error in heard.ends} == {"Cancelled"}
        assert (encoder._held, sum(encoder._under_way.values()), len(encoder._callers)) == (0, 0, 0)


async def test_what_the_line_refuses() -> None:
    async with serving(policy="full", max_queue_delay=30.0, max_batch_size=64, max_queue_size=4) as encoder:
        first = [asyncio.ensure_future(of(encoder, [f"{number}"])) for number in range(4)]
        await waiting(encoder, 4)
        for count in (1, 16, 17, 200):  # whatever its size
            with pytest.raises(Overloaded, match="4 rows wait, max_queue_size=4"):
                await of(encoder, [f"a {number}" for number in range(count)])
        for each in first:
            each.cancel()
        await asyncio.wait(first)
        await service_of(encoder).stop()
        for count in (1, 30):
            with pytest.raises(ModelNotReady, match="stopped"):
                await of(encoder, numbered(count))


async def test_what_waits_here_is_bounded() -> None:
    words = Words()
    words.gate.clear()
    async with serving(words=words, options={"max_held": 100}) as encoder:
        large = asyncio.ensure_future(of(encoder, numbered(150)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="20 texts: 150 wait, at most 100"):
            await of(encoder, numbered(20))
        words.gate.set()
        assert len((await large).counts) == 150
        assert len((await of(encoder, numbered(20))).counts) == 20


async def test_each_text_may_have_an_end_of_its_own() -> None:
    async with serving(options={"split": True}) as encoder:
        wrong = ["bad", "", f"bad {LONG} {LONG}", f"whole {LONG}"]
        mixed = await of(encoder, ["a", *wrong, "b", "bad"], each=True)
        assert mixed.vectors[[0, 5]].tolist() == [vector_of("a"), vector_of("b")]
        errors = [None if error is None else error.message for error in mixed.errors]
        assert errors == [
            None, "bad word", "'': must not be empty", "bad word", "whole: must not be divided", None, "bad word",
        ]  # fmt: skip
        none = await of(encoder, wrong, each=True)
        assert all(none.errors) and none.vectors.shape == (4, 0)
        many = await of(encoder, [f"{'bad' if number % 3 else 'w'} {number}" for number in range(300)], each=True)
        assert [error is not None for error in many.errors] == [number % 3 > 0 for number in range(300)]
        assert (await of(encoder, ["a"], each=True)).errors is None
        with pytest.raises(DeadlineExceeded):
            await of(encoder, ["a b c", "bad"], each=True, timeout=1e-9)
    async with serving(PerToken) as encoder:
        mixed = await of(encoder, ["a b", "", "a"], each=True)
        assert mixed.lengths == [2, 0, 1] and mixed.vectors.shape[:2] == (3, 2) and not mixed.vectors[1].any()


async def test_what_cannot_be_done_in_time_is_refused_as_soon_as_that_is_known() -> None:
    clock, executor = FakeClock(), FakeExecutor()
    async with Service(Summing, executor=executor, clock=clock, max_batch_size=10, timeout=4.0) as service:
        encoder = Encoder(service, TokenizerThreads(Words(), 0), TextShape(DIMENSIONS, 8))

        async def run(texts: int, **options: Any) -> Any:
            asked = asyncio.ensure_future(of(encoder, [f"{number} b" for number in range(texts)], **options))
            return await served_by(executor, asked, clock=clock), asked  # a text takes a tenth of a second

        batches, asked = await run(60, timeout=1e6)
        assert (batches, len((await asked).counts)) == (6, 60)
        batches, asked = await run(1000, timeout=40.0)
        with pytest.raises(DeadlineExceeded, match=r"timeout=40.0 s, .*: cannot be met: 1000 texts like these take"):
            await asked
        assert batches <= 1
        batches, asked = await run(1000)  # 250 s
        assert len((await asked).counts) == 1000
        encoder.close()


async def test_what_was_measured_at_the_start_refuses_before_computing() -> None:
    executor = FakeExecutor()
    async with Service(Summing, executor=executor, clock=FakeClock(), max_batch_size=10) as service:
        # 10 texts of 2 tokens.
        encoder = Encoder(service, TokenizerThreads(Words(), 0), TextShape(DIMENSIONS, 8, tokens_per_second=20.0))
        texts = [f"{number} b" for number in range(1000)]
        with pytest.raises(DeadlineExceeded, match=r"cannot be met: 1000 texts like these take 100 s at least, 40 s"):
            await of(encoder, texts, timeout=40.0)
        assert not executor.pending
        asked = asyncio.ensure_future(of(encoder, texts, timeout=60.0))  # that may be, with luck
        await served_by(executor, asked)
        assert len((await asked).counts) == 1000
        encoder.close()


async def test_texts_that_wait_go_to_the_service_of_their_turn() -> None:
    former, latter = FakeExecutor(), FakeExecutor(Summing().predict)
    settings: dict[str, Any] = {"clock": FakeClock(), "max_batch_size": 8}
    async with (
        Service(Summing, executor=former, **settings) as first,
        Service(Summing, executor=latter, **settings) as second,
    ):
        encoder = Encoder(first, TokenizerThreads(Words(), 0), TextShape(DIMENSIONS, 8))
        asked = asyncio.ensure_future(of(encoder, [f"{number} b" for number in range(1000)]))
        while not former.pending:
            assert not asked.done()
            await asyncio.sleep(0)
        encoder.serve(second)
        await served_by(former, asked)
        assert len((await asked).counts) == 1000
        assert first.statistics.success.count <= encoder.window < second.statistics.success.count < 1000
        encoder.close()


async def test_all_of_a_large_request_goes_through_the_line_before_the_end() -> None:
    words = Words()
    words.gate.clear()
    async with serving(words=words, drain_timeout=0.0) as encoder:
        large = asyncio.ensure_future(of(encoder, numbered(4 * encoder.window)))
        small = asyncio.ensure_future(of(encoder, ["a" * (INLINE_CHARACTERS + 1)]))
        await asyncio.sleep(0)
        assert not await encoder.drain()
        draining = asyncio.ensure_future(encoder.drained())
        await asyncio.sleep(0)
        with pytest.raises(Draining, match="shutting down"):
            await of(encoder, ["late"])
        assert not draining.done()
        words.gate.set()
        await draining
        assert await encoder.drain()
        assert (len((await large).counts), len((await small).counts)) == (4 * encoder.window, 1)


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
    batcher = service_of(encoder).generation.driver.batcher
    assert (batcher.is_empty, batcher.waiting_rows, batcher.unsettled()) == (True, 0, [])
    assert (encoder._held, sum(encoder._under_way.values()), len(encoder._callers)) == (0, 0, 0)
    assert (encoder._open_requests._count, encoder._callers._shares) == (0, {})
    assert encoder._callers.now >= 0
    assert (encoder._callers._tags, dict(encoder._callers._ended)) == ([], {})


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
async def test_each_has_its_end_and_nothing_stays(seed: int) -> None:
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
        await service_of(encoder).drain()  # what is still computed for those who have left
        await asyncio.sleep(0)
        assert_at_rest(encoder)


@pytest.mark.parametrize("end", ["leaves", "is too late", "has a wrong text"])
async def test_a_request_goes_on_when_the_one_before_it_of_the_same_caller_ends(end: str) -> None:
    words = Held("held")
    async with serving(words=words, options={"threads": 3}) as encoder:
        wrong = [""] if end == "has a wrong text" else []
        before = ["held", *wrong, *map(str, range(100))]  # so many that threads read them
        first = asyncio.ensure_future(of(encoder, before, client="c", timeout=PATIENCE))
        await asyncio.to_thread(words.reads["held"].wait)
        rounds = len(words.rounds)
        second = asyncio.ensure_future(of(encoder, numbered(100), client="c"))
        await until(lambda: len(words.rounds) != rounds)
        await turns(10)
        if end == "leaves":
            first.cancel()
        elif end == "has a wrong text":
            words.gates["held"].set()
        else:
            let_pass(PATIENCE)
        await asyncio.wait([first])
        assert len((await asyncio.wait_for(second, PATIENCE)).counts) == 100
        words.gates["held"].set()


async def test_what_is_too_late_after_it_was_withdrawn_is_counted_once() -> None:
    """What cannot make it any more is left out of a batch first and told a moment later."""
    async with serving(policy="full", max_queue_delay=PATIENCE, max_batch_size=64) as encoder:
        asked = asyncio.ensure_future(of(encoder, numbered(20)))
        await waiting(encoder, 20)
        left_out: list[Any] = service_of(encoder).generation.driver.batcher.unsettled()
        asked.cancel()
        await asyncio.wait([asked])
        for request in left_out:
            request.fail(DeadlineExceeded("too late"))
        assert_at_rest(encoder)


class Shapeless(Summing):
    """Gives the second text a vector of another length."""

    def predict(self, batch: list[Tokens]) -> list[Any]:
        """Compute vectors."""
        return [vector[: 3 if vector[1] == ord("b") else 4] for vector in super().predict(batch)]


async def test_vectors_that_do_not_fit_together_are_an_error() -> None:
    async with serving(Shapeless) as encoder:
        with pytest.raises(ModelError, match=r"texts\[1\]: the vectors could not be put together: ValueError"):
            await asyncio.wait_for(of(encoder, ["a", "b", "c"]), PATIENCE)
        assert_at_rest(encoder)


async def test_the_memory_of_a_large_request_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given, loop = asyncio.Event(), asyncio.get_running_loop()

    def noted() -> None:
        release_free_memory()
        loop.call_soon_threadsafe(given.set)

    monkeypatch.setattr(encoder_module, "release_free_memory", noted)
    monkeypatch.setattr(encoder_module, "RELEASE_AFTER", (0.0, 1e6))
    async with serving() as encoder:
        await of(encoder, numbered(2000))
        assert encoder._release_timers == []
        for texts in (numbered(2001), numbered(2001), ["a" * (2 << 20)]):
            given.clear()
            await of(encoder, texts)
            await given.wait()
            assert len(encoder._release_timers) == 2
    assert encoder._release_timers == []


@pytest.mark.parametrize(("count", "threads"), [(1, 1), (16, 0), (40, 1), (500, 2)])
async def test_a_request_leaves_no_garbage_and_nothing_holds_it(count: int, threads: int) -> None:
    async with serving(options={"threads": threads}, padded=True) as encoder:
        await of(encoder, numbered(count))
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for client in ["", "one"] * 5:
                assert len((await of(encoder, numbered(count), client=client, timeout=50.0)).counts) == count
            # The thread of the tokenizer may not have returned yet from its last work.
            await until(lambda: not {EncodeRequest, TextPiece, OneText} & set(map(type, gc.get_objects())))
            gc.collect()
            assert [type(each).__name__ for each in gc.garbage] == []
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


# What the texts and the vectors of a request take is charged before they are there.


QUERY = TextQuery("test")


@contextmanager
def charged(max_waiting_bytes: int) -> Iterator[Claim]:
    """Charge what the block does to the claim."""
    account = Account(HttpSettings(max_waiting_bytes=max_waiting_bytes))
    with account.claim() as claim:
        token = CLAIM.set(claim)
        yield claim
        CLAIM.reset(token)
    assert account.held_bytes == 0


async def test_vectors_of_tokens_are_charged_when_it_is_known_how_many_there_are() -> None:
    async with serving(PerToken, options={"of_tokens": True}) as encoder:
        with charged(DIMENSIONS * 4 * 1000 + texts_bytes(["a b c d"] * 403)) as claim:
            assert (await encoder.encode(["a b c d", "a", "a"], QUERY)).vectors.shape[:2] == (3, 4)
            assert claim.held_bytes == DIMENSIONS * 4 * 3 * 4 + texts_bytes(["a b c d", "a", "a"])
            with pytest.raises(Overloaded, match="max_waiting_bytes"):
                await encoder.encode(["a b c d"] * 400, QUERY)


async def test_vectors_are_charged_before_they_are_computed() -> None:
    async with serving() as encoder:
        with charged(DIMENSIONS * 4 * 1000 + texts_bytes(["same"] * 1000)) as claim:
            assert len((await encoder.encode(["same"] * 900, QUERY)).vectors) == 900
            assert claim.held_bytes == DIMENSIONS * 4 * 900 + texts_bytes(["same"] * 900)
            for count, kind in ((900, Overloaded), (1001, TooLarge)):
                with pytest.raises(kind, match="max_waiting_bytes"):
                    await encoder.encode(["same"] * count, QUERY)


@pytest.mark.parametrize("way", ["encode", "decode", "tokenize"])
async def test_the_texts_themselves_are_charged(way: str) -> None:
    ids = list(range(10_000))
    async with serving() as encoder:
        with charged(1 << 30) as claim:
            if way == "encode":
                with pytest.raises(ModelError):  # this tokenizer reads no ids
                    await encoder.encode([ids], TextQuery("test", TextOptions(truncate=False)))
            elif way == "decode":
                await encoder.decode([ids], skip_special=True)
            else:
                await encoder.tokenize(["x" * 100_000], special=True, prompt=None)
            assert claim.held_bytes >= 400_000


async def test_a_text_that_is_split_is_charged_for_all_its_tokens() -> None:
    async with serving(options={"split": True}) as encoder:
        with charged(1_000_000) as claim:
            await encoder.encode(["a b c"] * 20, QUERY)
            assert 600 < claim.held_bytes < 100_000
            # It is cut, not split.
            await encoder.encode(["a" * 10_000], TextQuery("test", TextOptions(truncate=True)))
            with pytest.raises(TooLarge, match="max_waiting_bytes"):
                await encoder.encode(["a" * 10_000], QUERY)
