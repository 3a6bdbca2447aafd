"""Asynchronous clients in several event loops: one after the other, and at once."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from tests.client import kit
from tests.client.models import item

ASYNC = [name for name in kit.REMOTE if name.endswith("-async")]


@pytest.fixture(scope="module")
def server() -> Iterator[kit.Running]:
    with kit.serving() as running:
        yield running


async def ask(client: Any) -> None:
    """Make a call of each kind, two of them at once."""
    answers = await asyncio.gather(*[client.infer("scale", {"x": np.ones((1, 2), np.float32)}) for _ in range(2)])
    assert [answer["y"].tolist() for answer in answers] == [[[2.0, 2.0]]] * 2
    assert len([part async for part in client.stream("count", item(2))]) == 2
    assert await client.model_ready("scale")


@pytest.mark.parametrize("name", ASYNC)
def test_a_client_serves_one_loop_after_the_other(name: str, server: kit.Running) -> None:
    client = kit.MAKE[name](server)
    for _ in range(4):
        asyncio.run(ask(client))

    async def use_and_close() -> None:
        async with client:
            await ask(client)

    asyncio.run(use_and_close())
    asyncio.run(client.close())


@pytest.mark.parametrize("name", ASYNC)
def test_a_client_serves_two_loops_at_once(name: str, server: kit.Running) -> None:
    client, both = kit.MAKE[name](server), Barrier(2)

    async def use() -> None:
        for _ in range(5):
            both.wait(60)
            await ask(client)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(asyncio.run, use()) for _ in range(2)]:
            done.result()
