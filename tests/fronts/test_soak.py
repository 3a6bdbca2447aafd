"""Ten minutes of load while fronts and workers are killed, and 100,000 connections: no wrong response, and memory and descriptors as at the start."""

import os
import random
import time
from contextlib import suppress

import psutil
import pytest
from tests.fronts.kit import ENCRYPTED, MOST_GROWTH, SQUARE, Caller, Callers, admitted, figures, fronts_of, workers_of
from tests.served import Served, until

CONNECTIONS = int(os.environ.get("SOAK_CONNECTIONS", "100000"))
SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("more", [(), ENCRYPTED], ids=["plain", "TLS"])
def test_kills_of_fronts_and_workers_leave_nothing_behind(more: tuple[str, ...]) -> None:
    with Served(SQUARE, "--fronts", 3, "--log-level", "error", *more) as served:
        served.until_ready()
        dispatcher = psutil.Process(served.process.pid)

        def is_right(caller: Caller, number: int) -> bool | None:
            path = "/infer/square/batch" if number % 20 == 0 else "/infer/square"  # the first is handed over or relayed
            body = b"[%d]" % number if number % 20 == 0 else b"%d" % number
            status, answered = caller.ask(path, body)
            return b"%d" % number**2 in answered if status == 200 else None

        def kill_for(seconds: float, callers: Callers) -> None:
            chance, end = random.Random(1), time.monotonic() + seconds
            while time.monotonic() < end:
                with suppress(psutil.Error, IndexError):  # it has ended meanwhile, or there is none
                    chance.choice(fronts_of(served) if chance.random() < 0.7 else workers_of(served)).kill()
                callers.until_more(500)

        def rest() -> tuple[int, int]:
            until(lambda: len(fronts_of(served)) == 3 and admitted(served))
            return figures(dispatcher)

        with Callers(served, 8, is_right) as callers:
            kill_for(SECONDS / 20, callers)  # the first kills load code and fill caches
        descriptors, memory = rest()
        with Callers(served, 8, is_right) as callers:
            kill_for(SECONDS, callers)
        assert not callers.wrong
        print(f"{sum(callers.answered)} answered; before {descriptors} descriptors, {memory} bytes; after {rest()}")
        until(lambda: rest()[0] <= descriptors)
        assert rest()[1] <= memory + MOST_GROWTH
