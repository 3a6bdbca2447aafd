"""A front that hangs, or ends before it listens, is replaced by one: the connections that the kernel gives it are served."""

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
from tests.frontends.http.fast.kit import Square, squared
from tests.frontends.http.servers import running_fronts
from tests.served import still_running
from tests.waiting import until

from weir.catalog.registry import Registry
from weir.fronts import server as fronts_server
from weir.fronts.server import FrontProcesses, FrontsServer, StartedFront
from weir.protocols import HttpSettings
from weir.serving.service import Service
from weir.testing import FakeExecutor


@asynccontextmanager
async def serving(fronts: int) -> AsyncIterator[FrontsServer]:
    """Serve with so many fronts."""
    service = Service(Square, executor=FakeExecutor(squared))
    async with service, running_fronts(Registry([service]), HttpSettings(port=0), count=fronts) as server:
        yield server


async def test_a_front_that_hangs_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fronts_server, "_PATIENCE", 2)
    async with serving(2) as server:
        hangs, works = [each.pid for each in server.fronts]
        os.kill(hangs, signal.SIGSTOP)
        running: Any = server._fronts
        while hangs in [each.pid for each in server.fronts]:
            await until(lambda: not running._running[1].front.silent)
            server.sweep()
        await until(lambda: len(server.fronts) == 2)
        assert works in [each.pid for each in server.fronts]
        assert not await asyncio.to_thread(still_running, [psutil.Process(hangs)] if psutil.pid_exists(hangs) else [])
    assert "it has not reported for 2 s" in caplog.text


async def test_a_front_is_replaced_once_there_are_descriptors_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then, the kernel gives no connection to what it listened on."""
    monkeypatch.setattr(fronts_server, "_SHORT_LIFE", 0.001)
    refusals: list[OSError] = []

    def refuse() -> Any:
        refusals.append(OSError(errno.EMFILE, "Too many open files"))
        raise refusals[-1]

    async with serving(2) as server:
        with monkeypatch.context() as patched:
            patched.setattr(fronts_server, "socket_pair", refuse)
            os.kill(server.fronts[0].pid, signal.SIGKILL)
            await until(lambda: len(refusals) >= 3)
            assert await asyncio.to_thread(ask, server.address, 40) == [200] * 40
        await until(lambda: len(server.fronts) == 2)
    assert "front 0 cannot start now, and is tried again: [Errno 24] Too many open files" in caplog.text


def ask(url: str, times: int) -> list[int]:
    """Return the statuses of so many requests, each on a connection of its own."""
    return [urlopen(f"{url}/health/live", timeout=60.0).status for _ in range(times)]


@pytest.mark.parametrize("early", [1, 2], ids=["at the start of the server", "as a replacement"])
async def test_a_front_that_ends_before_it_listens_is_replaced_once(
    monkeypatch: pytest.MonkeyPatch, early: int
) -> None:
    """It is the first or the second that is started."""
    pids: list[int] = []
    start = FrontProcesses.start

    async def started(self: FrontProcesses, index: int) -> StartedFront | None:
        made = await start(self, index)
        assert made is not None
        pids.append(made.process.pid)
        if len(pids) == early:
            os.kill(made.process.pid, signal.SIGKILL)
        return made

    monkeypatch.setattr(FrontProcesses, "start", started)
    monkeypatch.setattr(fronts_server, "_SHORT_LIFE", 0.0)
    async with serving(1) as server:
        if early == 2:
            os.kill(pids[0], signal.SIGKILL)
        running: Any = server._fronts
        await until(
            lambda: len(pids) > early and all(each.front.listening.done() for each in running._running.values())
        )
    assert len(pids) == early + 1
