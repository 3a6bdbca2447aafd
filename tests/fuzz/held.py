"""Holds far more connections than a server with two fronts may have, on paths that a front answers and on those that it hands over, while its fronts are
killed. Each process may open 256 files. The storm does this at its end.
"""

import random
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from tests.fronts.kit import SQUARE, Caller, connections_of, fronts_of, limit_descriptors
from tests.served import Served, until

from weir.protocols.account import RESERVED

LIMIT = 50  # connections
HELD = 600  # that each round tries to hold
PATIENCE = 30.0  # seconds until the server must be as it was
HEADS = (
    b"GET /infer HTTP/1.1\r\nHost: t\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: t\r\n\r\n",
    b"POST /infer/square HTTP/1.1\r\nHost: t\r\nContent-Length: 9\r\n\r\n",
    b"GET /health/live HT",
    b"",
)


def hold(seconds: float, seed: int, found: Callable[[str, str], None]) -> None:
    """Do this for so long; `found` is called with what is wrong, and how."""
    chance, end = random.Random(seed), time.monotonic() + seconds
    with Served(SQUARE, "--fronts", 2, "--max-connections", LIMIT) as served:
        served.until_ready()
        limit_descriptors(served)
        while time.monotonic() < end:
            _round(served, chance, found)


def _round(served: Served, chance: random.Random, found: Callable[[str, str], None]) -> None:
    with ExitStack() as stack:
        heads = chance.choice((HEADS, HEADS[:1]))
        for _ in range(HELD):
            client = stack.enter_context(socket.create_connection(_address(served), PATIENCE))
            with suppress(OSError):
                client.sendall(chance.choice(heads))
        most = LIMIT + 3 * RESERVED  # of three processes
        if (count := connections_of(served)) > most:
            found("more connections than the limit and the reserve", f"{count}, and {most} are allowed")
        _check("health is out of reach at the limit", lambda: _healthy(served), found)
        for front in chance.sample(fronts_of(served), chance.choice((0, 1, 1, 2))):
            front.kill()
    _check("a front is not replaced", lambda: len(fronts_of(served)) == 2, found)
    _check("connections that nobody accepts", lambda: all(_healthy(served) for _ in range(20)), found)


def _address(served: Served) -> tuple[str, int]:
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def _healthy(served: Served) -> bool:
    with suppress(OSError), Caller(served.url) as caller:
        caller.socket.settimeout(5.0)
        return caller.call("/health/live", method="GET")[0] == 200
    return False


def _check(what: str, holds: Callable[[], bool], found: Callable[[str, str], None]) -> None:
    try:
        until(holds, PATIENCE)
    except AssertionError as error:
        found(what, str(error))
