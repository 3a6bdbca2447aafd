"""A server on a WebSocket that is not well."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from websockets.asyncio.server import ServerConnection, serve

from weir.bench import HttpOptions, make_target
from weir.bench.run import LoadSettings, Outcome, make_load, make_outcome, run_round
from weir.errors import SettingsError

pytestmark = pytest.mark.usefixtures("nothing_is_left_by_module")

DATA = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]})
# Does what it wants with a message, of which it is told how many came before.
Behaviour = Callable[[ServerConnection, int, dict[str, Any]], Awaitable[None]]


@asynccontextmanager
async def server(behave: Behaviour) -> AsyncIterator[str]:
    async def converse(socket: ServerConnection) -> None:
        number = 0
        async for message in socket:
            await behave(socket, number, json.loads(message))
            number += 1

    async with serve(converse, "localhost", 0) as running:
        yield f"ws://localhost:{running.sockets[0].getsockname()[1]}/it"


def measure(behave: Behaviour, timeout: float = 5.0) -> Outcome:
    """Ask 39 times within 0.2 s, on one connection; what answers first is only looked at."""

    async def run() -> Outcome:
        async with server(behave) as url:
            target = make_target(url, DATA, HttpOptions(timeout=timeout, channels=1))
            load = make_load(LoadSettings("constant", rate=200.0, duration=0.2, warm_up=0.0), 1)
            try:
                await target.open()
                made = await run_round(target, load, 0)
            finally:
                await target.close()
            return make_outcome(url, load, [made], target.connections, target.held)

    return uvloop.run(run())


async def answer(socket: ServerConnection, asked: dict[str, Any]) -> None:
    await socket.send(json.dumps({"model_name": "it", "id": asked["id"], "outputs": []}))


def test_answers_are_distinguished_by_id() -> None:
    held: list[dict[str, Any]] = []

    async def backwards(socket: ServerConnection, number: int, asked: dict[str, Any]) -> None:
        held.append(asked)
        if number in (0, 20, 39):
            while held:
                await answer(socket, held.pop())

    outcome = measure(backwards)
    assert outcome.answered == outcome.requests == 39


def test_what_is_never_answered_is_given_up_and_withdrawn() -> None:
    withdrawn: list[str] = []

    async def be_silent(socket: ServerConnection, number: int, asked: dict[str, Any]) -> None:
        if number == 0:
            await answer(socket, asked)
        elif "cancel" in asked:
            withdrawn.append(asked["cancel"])

    outcome = measure(be_silent, timeout=1.0)  # which the one answer keeps on a busy machine
    assert outcome.timeouts == outcome.requests == 39 and not outcome.answered
    assert withdrawn and set(withdrawn) <= {f"weir-bench-{index:010d}" for index in range(40)}


def test_a_connection_that_is_lost_ends_what_is_under_way_and_what_comes() -> None:
    async def leave(socket: ServerConnection, number: int, asked: dict[str, Any]) -> None:
        if number < 10:
            await answer(socket, asked)
        else:
            await socket.close()

    outcome = measure(leave)
    assert outcome.errors == {"connection closed": outcome.requests - 9} and outcome.answered == 9


def test_a_server_that_closes_at_once_is_no_target() -> None:
    async def leave(socket: ServerConnection, number: int, asked: dict[str, Any]) -> None:
        await socket.close()

    with pytest.raises(SettingsError, match="no response"):
        measure(leave)
