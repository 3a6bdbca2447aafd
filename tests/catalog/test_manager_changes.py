import asyncio
from functools import partial

import pytest

from weir import Draining, Overloaded
from weir.catalog.manager import MAX_CHANGES, ChangeQueue


async def test_changes_are_made_in_the_order_in_which_they_were_requested() -> None:
    changes, made = ChangeQueue(), list[int]()

    async def change(number: int) -> int:
        for _ in range(10 - number):
            await asyncio.sleep(0)
        made.append(number)
        return number

    asked = [changes.make(partial(change, number)) for number in range(10)]
    assert await asyncio.gather(*asked) == made == list(range(10))


async def test_a_change_that_fails_stops_nobody() -> None:
    changes = ChangeQueue()

    async def fail() -> None:
        raise ValueError("no")

    async def succeed() -> int:
        return 3

    failing, succeeding = await asyncio.gather(changes.make(fail), changes.make(succeed), return_exceptions=True)
    assert isinstance(failing, ValueError) and succeeding == 3


async def test_the_line_is_bounded_and_ends_with_the_server() -> None:
    changes = ChangeQueue()

    async def for_ever() -> None:
        await asyncio.Event().wait()

    asked = [asyncio.ensure_future(changes.make(for_ever)) for _ in range(MAX_CHANGES)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="pending, which is the maximum"):
        await changes.make(for_ever)
    left = asked.pop()
    left.cancel()
    await asyncio.sleep(0)
    await changes.close()
    for each in asked:
        with pytest.raises(Draining):
            await each
    with pytest.raises(asyncio.CancelledError):
        await left
    with pytest.raises(Draining):
        await changes.make(for_ever)
