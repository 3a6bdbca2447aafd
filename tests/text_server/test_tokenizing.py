"""threads.py: texts are tokenized in threads, together with those that arrive meanwhile."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.rings import subcases
from tests.text_server.text_models import Words

from weir.errors import Draining, InvalidRequest, ModelError
from weir.text_models.texts import Text, Tokenized, TokenRule
from weir.text_server import tokenizing
from weir.text_server.tokenizing import CHUNK, TokenizeRequest, TokenizerThreads


def read(
    readers: TokenizerThreads,
    texts: list[Any],
    urgent: bool = True,
    then: Callable[[], object] = lambda: None,
    **how: Any,
) -> "asyncio.Future[Any]":
    """Have texts read, as if they had so many characters, and call `then` at their end."""
    future = asyncio.get_running_loop().create_future()

    def done(results: Sequence[Any]) -> None:
        future.set_result(results)
        then()

    characters = how.get("characters", tokenizing.URGENT_CHARACTERS) if urgent else inf
    readers.add(TokenizeRequest(texts, TokenRule(how.get("max_length", 9)), done), characters)
    return future


@contextmanager
def reading(words: Words, threads: int, *more: Any) -> Iterator[TokenizerThreads]:
    readers = TokenizerThreads(words, threads, *more)
    readers.start()
    try:
        yield readers
    finally:
        readers.close()


async def wait_for(words: Words) -> None:
    """Return when a thread has begun."""
    await asyncio.to_thread(words.began.wait)
    words.began.clear()


async def test_what_comes_while_a_thread_is_busy_goes_together() -> None:
    words = Words()
    readers = TokenizerThreads(words, 2)
    readers.start()
    readers.start()
    words.gate.clear()
    first = read(readers, ["a"])
    await wait_for(words)
    others = [read(readers, [f"text {number}", "b"]) for number in range(40)]
    other_length = read(readers, ["a b c"], max_length=1)
    words.gate.set()
    assert [each.truncated for each in await first] == [False]
    assert [len(await other) for other in others] == [2] * 40
    assert [each.truncated for each in await other_length] == [True]
    await asyncio.sleep(0)
    assert words.rounds[:2] == [1, CHUNK]
    assert sum(words.rounds) == 82
    readers.close()
    readers.close()


async def test_what_is_urgent_does_not_wait_for_what_is_not() -> None:
    words = Words()
    with reading(words, 2) as readers:
        words.gate.clear()
        bulk = [read(readers, ["x"] * CHUNK, urgent=False) for _ in range(9)]
        await wait_for(words)
        urgent = read(readers, ["now"])
        await wait_for(words)  # another thread has it already
        assert words.rounds == []
        words.gate.set()
        await asyncio.gather(urgent, *bulk)


class Where(Words):
    """A tokenizer that notes which threads read."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    def encode(self, texts: Sequence[Text], rule: TokenRule) -> list[Tokenized | InvalidRequest]:
        self.threads.append(threading.current_thread().name)
        return super().encode(texts, rule)


async def test_the_loop_reads_what_is_brief_for_a_small_share_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    words = Where()

    def monotonic() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr("weir.text_server.tokenizing.time", SimpleNamespace(monotonic=monotonic))
    with reading(words, 2) as readers:
        own = threading.current_thread().name
        for _ in range(30):
            await read(readers, ["a"], characters=tokenizing.INLINE_CHARACTERS)
        assert words.threads[0] == own
        assert 1 < words.threads.count(own) < 6
        await read(readers, ["a"], characters=tokenizing.INLINE_CHARACTERS + 1)
        assert words.threads[-1] == "weir-read-0"


class Held(Words):
    """A tokenizer that reads what begins with a name only once the gate of that name is open."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.gates = {name: threading.Event() for name in names}
        self.reads = {name: threading.Event() for name in names}

    def encode(self, texts: Sequence[Text], rule: TokenRule) -> list[Tokenized | InvalidRequest]:
        if texts[0] in self.gates:
            self.reads[str(texts[0])].set()
            self.gates[str(texts[0])].wait()
        return super().encode(texts, rule)


class Quick(Words):
    """Tokenizes at once what does not begin with "slow", and fails at "fault"."""

    def at_once(self, texts: Sequence[Text], rule: TokenRule) -> Sequence[Tokenized | InvalidRequest] | None:
        if texts[0] == "fault":
            raise ValueError("a fault")
        return None if str(texts[0]).startswith("slow") else self.encode(texts, rule)


async def test_texts_of_known_words_are_tokenized_before_add_returns() -> None:
    words = Quick()
    with reading(words, 1) as readers:
        found = [read(readers, ["a", "b c"], characters=tokenizing.AT_ONCE_CHARACTERS) for _ in range(3)]

        assert [len(each.result()) for each in found] == [2, 2, 2]
        assert words.rounds == [2, 2, 2]
        slow, many = read(readers, ["slow"]), read(readers, ["a"], characters=tokenizing.AT_ONCE_CHARACTERS + 1)
        fault = read(readers, ["fault"], characters=1)
        assert not (slow.done() or many.done() or fault.done())
        assert [len(await each) for each in (slow, many, fault)] == [1, 1, 1]


async def test_a_thread_woken_for_bulk_reads_it_after_what_is_urgent() -> None:
    words = Held("first", "second")
    with reading(words, 2) as readers:
        first = read(readers, ["first"])
        await asyncio.to_thread(words.reads["first"].wait)
        second = read(readers, ["second"], urgent=False)
        await asyncio.to_thread(words.reads["second"].wait)
        urgent, bulk = read(readers, ["now"]), read(readers, ["later"], urgent=False)
        words.gates["second"].set()  # the thread of the first does not come back
        await asyncio.wait_for(asyncio.gather(second, urgent, bulk), 60)
        words.gates["first"].set()
        await first


class Panic(BaseException):
    """What Rust's panics are: no Exception."""


@subcases("kind", [ValueError, Panic])
async def test_a_tokenizer_that_raises_harms_nobody_else(kind: type[BaseException]) -> None:
    words = Words()
    with reading(words, 2) as readers:
        words.fault = kind("no")
        for urgent in (True, False):
            (error,) = await asyncio.wait_for(read(readers, ["a"], urgent=urgent), 60)
            assert isinstance(error, ModelError)
            assert f"{kind.__name__}('no')" in error.message
        words.fault = None
        assert len(await read(readers, ["a"])) == 1


async def test_only_who_asks_for_what_cannot_be_read_hears_of_it() -> None:
    class Choosy(Words):
        """Raises at one text."""

        def encode(self, texts: Sequence[Text], rule: TokenRule) -> list[Tokenized | InvalidRequest]:
            found = super().encode(texts, rule)
            if "worst" in texts:
                raise Panic("worst")
            return found

    words = Choosy()
    with reading(words, 1) as readers:
        words.gate.clear()
        first = read(readers, ["a"])
        await wait_for(words)
        together = [read(readers, ["b", text]) for text in ("c", "worst", "d")]
        words.gate.set()
        await first
        failed = [[type(each) for each in results] for results in await asyncio.gather(*together)]
        assert failed == [[Tokenized, Tokenized], [ModelError, ModelError], [Tokenized, Tokenized]]


async def test_what_is_unread_at_the_end_hears_of_it() -> None:
    words = Words()
    readers = TokenizerThreads(words, 2)
    readers.start()
    words.gate.clear()
    begun = []
    for urgent in (True, False):
        begun.append(read(readers, ["a"], urgent=urgent))
        await wait_for(words)
    unread: list[asyncio.Future[Any]] = []

    def heard() -> None:
        if all(each.done() for each in unread):
            words.gate.set()  # whoever closes them waits for what has begun

    unread += [read(readers, ["b", "c"], urgent=urgent, then=heard) for urgent in (True, False)]
    readers.close()
    for results in await asyncio.wait_for(asyncio.gather(*unread), 60):
        assert [type(each) for each in results] == [Draining, Draining]
    assert [len(results) for results in await asyncio.wait_for(asyncio.gather(*begun), 60)] == [1, 1]


@pytest.mark.parametrize("threads", [1, 2, 3])
async def test_whatever_comes_in_whatever_order_is_read(threads: int) -> None:
    chance = Random(threads)
    with reading(Words(), threads) as readers:
        for _ in range(60):
            asked = []
            for number in range(chance.randrange(1, 40)):
                asked.append(read(readers, [f"{number}"] * chance.randrange(1, 80), urgent=chance.random() < 0.5))
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.random() * 1e-3)
            await asyncio.wait_for(asyncio.gather(*asked), 60)
    assert not readers._urgent and not readers._bulk


def test_threads_outlive_a_loop_that_is_gone() -> None:
    words = Words()
    readers = TokenizerThreads(words, 1)

    async def main() -> None:
        readers.start()
        words.gate.clear()
        read(readers, ["a"])
        await wait_for(words)

    asyncio.run(main())
    words.gate.set()
    readers.close()
