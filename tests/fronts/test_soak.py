"""Ten minutes of load while fronts and workers are killed: no wrong response, and memory and descriptors as at the start."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
from tests.fronts.kit import SQUARE, Caller, fronts_of
from tests.served import Served, until

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
MOST_GROWTH = 8 << 20  # bytes by which the dispatcher may be larger at the end


def workers_of(served: Served) -> list[psutil.Process]:
    """Return the processes of the server that are no fronts and have no children: workers, and templates that wait."""
    fronts = {front.pid for front in fronts_of(served)}
    found = []
    for each in served.children():
        with suppress(psutil.Error):
            if each.pid not in fronts and "fronts.entry" not in " ".join(each.cmdline()) and not each.children():
                found.append(each)
    return found


def admitted(served: Served) -> bool:
    """Return whether a new connection gets its answer."""
    with suppress(ConnectionError), Caller(served.url) as caller:
        return caller.call("/infer/square", b"2")[0] == 200
    return False


def figures(dispatcher: psutil.Process) -> tuple[int, int]:
    """Return how many descriptors it has, and its own memory in bytes."""
    return dispatcher.num_fds(), dispatcher.memory_full_info().uss


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_kills_of_fronts_and_workers_leave_nothing_behind() -> None:
    with Served(SQUARE, "--fronts", 3, "--log-level", "error") as served:
        served.until_ready()
        dispatcher, over, wrong = psutil.Process(served.process.pid), threading.Event(), list[object]()
        answered = [0] * 8

        def ask(caller_number: int) -> None:
            number = 1000 * caller_number
            while not over.is_set():
                with suppress(ConnectionError), Caller(served.url) as caller:
                    for _ in range(50):
                        number += 1
                        status, body = caller.call("/infer/square", b"%d" % number)
                        if status == 0:
                            break
                        if status == 200 and body != b"%d" % number**2:
                            wrong.append((number, status, body))
                        answered[caller_number] += status == 200

        def kill_for(seconds: float) -> None:
            chance, end = random.Random(1), time.monotonic() + seconds
            while time.monotonic() < end:
                seen = sum(answered)
                with suppress(psutil.Error, IndexError):  # it has ended meanwhile, or there is none
                    chance.choice(fronts_of(served) if chance.random() < 0.7 else workers_of(served)).kill()
                until(lambda seen=seen: sum(answered) > seen + 500)  # type: ignore[misc]  # bound at once

        def rest() -> tuple[int, int]:
            until(lambda: len(fronts_of(served)) == 3 and admitted(served))
            return figures(dispatcher)

        with ThreadPoolExecutor(len(answered)) as pool:
            asking = [pool.submit(ask, number) for number in range(len(answered))]
            try:
                kill_for(SECONDS / 20)  # the first kills load code and fill caches
                over.set()
                for each in asking:
                    each.result()
                descriptors, memory = rest()
                over.clear()
                asking = [pool.submit(ask, number) for number in range(len(answered))]
                kill_for(SECONDS)
            finally:
                over.set()
            for each in asking:
                each.result()
        assert not wrong
        print(f"{sum(answered)} answered; before {descriptors} descriptors, {memory} bytes; after {rest()}")
        until(lambda: rest()[0] <= descriptors)
        assert rest()[1] <= memory + MOST_GROWTH
