"""Work for a caller who may leave."""

import asyncio
from typing import Any

import pytest

from weir.embedding.calling import unless_left
from weir.errors import Cancelled


async def stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("nobody comes here")


async def leaves() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def forever() -> int:
    await asyncio.Event().wait()
    return 1


async def at_once() -> int:
    return 1


def test_who_stays_gets_what_comes_of_it() -> None:
    async def main() -> int:
        return await unless_left(at_once(), stays)

    assert asyncio.run(main()) == 1


def test_who_leaves_has_it_cancelled() -> None:
    async def main() -> None:
        with pytest.raises(Cancelled, match="the caller left"):
            await unless_left(forever(), leaves)
        await asyncio.sleep(0)  # nothing is left of the cancellation

    asyncio.run(main())


def test_who_leaves_when_all_is_done_cancels_nothing() -> None:
    async def main() -> None:
        gone, done = asyncio.Event(), asyncio.Event()

        async def leaves_then() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def until_done() -> bool:
            return await done.wait()

        def both() -> None:
            gone.set()
            done.set()

        asyncio.get_running_loop().call_later(0.0, both)
        assert await unless_left(until_done(), leaves_then)
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(main())


def test_a_server_that_ends_is_no_caller_who_left() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(unless_left(forever(), stays))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
