"""The thread of gRPC's core, when the event loop closes while it has the completion queue."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from weir.frontends.grpc import core as tested
from weir.frontends.grpc.core import Core
from weir.protocols.account import Account
from weir.protocols.settings import HttpSettings

LIMIT = 20.0  # seconds after which a thread is taken for one that waits for ever


@contextmanager
def ending(requested: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[asyncio.AbstractEventLoop, Any]]:
    """A server that was told to end, and a loop that does not run but was told of the first event. Such a server has an event for each
    of the calls that were `requested`, and then one more: all calls have ended."""
    monkeypatch.setattr(tested, "_REQUESTED", requested)
    monkeypatch.setattr(tested, "_LOOP_LOOK_EVERY", 0.01)
    loop, told = asyncio.new_event_loop(), threading.Event()
    say = loop.call_soon_threadsafe

    def telling(*said: Any) -> Any:
        handle = say(*said)
        told.set()
        return handle

    loop.call_soon_threadsafe = telling  # type: ignore[method-assign, assignment]

    async def make() -> Any:
        core = Core(
            {}, [], lambda path, call: True, lambda error, call: None, Account(HttpSettings()), max_message_size=1000, patience=1.0
        )  # fmt: skip
        await core.start()
        return core

    core = loop.run_until_complete(make())
    core._ending = True
    core._server.shutdown(core._queue, core._shut)
    assert told.wait(LIMIT)
    yield loop, core
    loop.close()
    core._thread.join(LIMIT)
    ended = not core._thread.is_alive()
    if not ended:  # let it go on, so that no other test hears of it
        core._over = True
        core._given.release()
    assert ended
    core.discard()


def test_the_thread_ends_if_the_loop_is_closed_before_it_hears_of_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    with ending(0, monkeypatch) as (_, core):
        assert not core._over


def test_the_thread_ends_if_the_loop_is_closed_before_its_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "_EVENTS_AT_ONCE", 1)
    with ending(4, monkeypatch) as (loop, core):
        loop.call_soon(loop.stop)
        loop.run_forever()  # one turn: an event of the thread, another of the queue, and the next turn is to come
        assert not core._over
        assert core._given.locked()
