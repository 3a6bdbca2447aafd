"""reading.py: texts become tokens in threads, together with what came meanwhile."""

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.embedding.text_models import Words

from weir.embedding.reading import CHUNK, Readers, Reading
from weir.errors import ModelError


def read(readers: Readers, texts: list[Any], *, urgent: bool = True, max_length: int = 9) -> "asyncio.Future[Any]":
    """Have texts read."""
    future = asyncio.get_running_loop().create_future()

    def done(results: Sequence[Any]) -> None:
        future.set_result(results)

    readers.add(Reading(texts, max_length, True, done), urgent)
    return future


async def wait_for(words: Words) -> None:
    """Return when a thread has begun."""
    await asyncio.to_thread(words.began.wait)
    words.began.clear()


def test_what_comes_while_a_thread_is_busy_goes_together() -> None:
    async def main() -> None:
        words = Words()
        heard: list[tuple[float, float, int]] = []
        readers = Readers(words, 2, lambda *round_: heard.append(round_))
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
        assert sum(count for _, _, count in heard) == 82 == sum(words.rounds)
        assert all(began <= ended for began, ended, _ in heard)
        readers.close()
        readers.close()

    asyncio.run(main())


def test_what_is_urgent_does_not_wait_for_what_is_not() -> None:
    async def main() -> None:
        words = Words()
        readers = Readers(words, 2)
        readers.start()
        words.gate.clear()
        bulk = [read(readers, ["x"] * CHUNK, urgent=False) for _ in range(9)]
        await wait_for(words)
        urgent = read(readers, ["now"])
        await wait_for(words)  # another thread has it already
        assert words.rounds == []
        words.gate.set()
        await asyncio.gather(urgent, *bulk)
        readers.close()

    asyncio.run(main())


def test_one_thread_does_all() -> None:
    async def main() -> None:
        readers = Readers(Words(), 1)
        readers.start()
        results = await asyncio.gather(read(readers, ["a b"]), read(readers, ["c"], urgent=False))
        assert [len(each[0].ids) for each in results] == [8, 4]
        readers.close()

    asyncio.run(main())


def test_a_tokenizer_that_raises_harms_nobody_else() -> None:
    async def main() -> None:
        words = Words()
        readers = Readers(words, 2)
        readers.start()
        words.fault = ValueError("no")
        (error,) = await read(readers, ["a"])
        assert isinstance(error, ModelError)
        assert "ValueError('no')" in error.message
        words.fault = None
        assert len(await read(readers, ["a"])) == 1
        readers.close()

    asyncio.run(main())


def test_threads_outlive_a_loop_that_is_gone() -> None:
    words = Words()
    readers = Readers(words, 1)

    async def main() -> None:
        readers.start()
        words.gate.clear()
        read(readers, ["a"])
        await wait_for(words)

    asyncio.run(main())
    words.gate.set()
    readers.close()
