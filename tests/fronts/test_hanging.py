"""A front that hangs is replaced, so that the connections that the kernel gives it are served."""

import asyncio
import logging
import os
import signal

import psutil
import pytest
from tests.frontends.http.fast.kit import Square, squared
from tests.served import still_running

from weir.catalog.registry import Registry
from weir.frontends.http.application import make_app
from weir.fronts.front import FrontConfig
from weir.fronts.server import FrontFigures, FrontsServer
from weir.protocols.access import Access
from weir.protocols.kserve import KserveContext
from weir.protocols.settings import HttpSettings
from weir.serving.service import Service
from weir.testing import FakeExecutor


def test_a_front_that_hangs_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    settings = HttpSettings(port=0)

    async def main() -> None:
        async with Service(Square, executor=FakeExecutor(squared)) as service:
            registry, figures = Registry([service]), FrontFigures(settings, 2)
            context = KserveContext(registry, settings, account=figures.account)
            config = FrontConfig(settings, Access(), False, logging.WARNING, 2)
            app = make_app(registry, settings, context=context)
            server = FrontsServer(registry, app, settings, (), config=config, figures=figures, context=context)
            await server.start()
            try:
                hangs, works = [each.pid for each in server.fronts]
                os.kill(hangs, signal.SIGSTOP)
                while hangs in [each.pid for each in server.fronts]:
                    while server.fronts[-1].silent:  # noqa: ASYNC110 - the other one reports each second
                        await asyncio.sleep(0)
                    server.sweep()
                while len(server.fronts) < 2:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0)
                assert works in [each.pid for each in server.fronts]
                assert not await asyncio.to_thread(
                    still_running, [psutil.Process(hangs)] if psutil.pid_exists(hangs) else []
                )
            finally:
                await server.stop()

    asyncio.run(main())
    assert "it has not reported for 10 s" in caplog.text
