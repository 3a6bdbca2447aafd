"""Damaged requests come to the same ends in the simulation as at a real server: what the simulation leaves out decides none of them."""

import asyncio
import json
import random
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from tests.served import Served
from tests.simulated.asking import ERROR_HEADER, Mix
from tests.simulated.channels import ChannelClient
from tests.simulated.fuzzing import FIRST_NUMBER, damaged, valid
from tests.simulated.plans import Plan
from tests.simulated.streams import Incoming
from tests.simulated.themes import Theme
from tests.simulated.workers import WorkerPlan
from tests.simulated.world import World, simulate

CASES, MORE = 150, 3000
TOGETHER = 20  # connections to the real server
SECONDS = 2.0  # of virtual time in which a case comes to its end
PATIENCE = 60.0  # seconds that a real server has for it
STILL = 0.3  # seconds in which nothing more may come
TARGETS = [f"tests.simulated.models:{name}" for name in ("Items", "Tensors", "Streams")]
DEADLINES = (b"x-request-timeout", b'"timeout"')
_SWITCHING = 101


class Outcome:
    """What came back on one connection: the status of each response with its error, and whether the server closed the connection."""

    def __init__(self) -> None:
        self.responses: list[tuple[int, str]] = []
        self.closed = False
        self.incoming = Incoming(self)

    def came(self, incoming: Incoming) -> None:
        """A piece of a stream has come."""

    def answered(self, incoming: Incoming, status: int) -> None:
        """A response is complete."""
        self.responses.append((status, _error_of(incoming) if status >= 400 else ""))
        incoming.open = status != _SWITCHING  # what follows is no HTTP

    def lost(self, incoming: Incoming) -> None:
        """The connection has gone."""
        self.closed = True

    def seen(self) -> tuple[tuple[tuple[int, str], ...], bool]:
        """Return what can be compared. Whether a WebSocket is closed depends on its messages, which are not read here."""
        switched = bool(self.responses) and self.responses[-1][0] == _SWITCHING
        return tuple(self.responses), self.closed and not switched


def _error_of(incoming: Incoming) -> str:
    try:
        error = json.loads(bytes(incoming.body))["error"]
    except (ValueError, KeyError, TypeError):
        return ""
    return str(error["type"]) if isinstance(error, dict) else incoming.headers.get(ERROR_HEADER, "")


def cases(number: int) -> list[bytes]:
    """Return damaged requests. None has a deadline: whether a real server keeps it depends on what else the machine does."""
    draw, found = random.Random("damaged"), list[bytes]()
    for n in count(FIRST_NUMBER, 200):
        data = damaged(draw, *[valid(draw, each, streams=True) for each in (n, n + 100)])
        if not any(text in data.lower() for text in DEADLINES):
            found.append(data)
        if len(found) == number:
            break
    return found


class Sample(ChannelClient):
    """Sends each case on a connection of its own, and notes what comes back."""

    def __init__(self, world: World) -> None:
        super().__init__(world, 0)
        self.left = cases(world.plan.turns)
        self.outcomes: list[Outcome] = []

    def turn(self) -> None:
        """See ChannelClient."""
        data = self.left.pop(0)
        outcome = Outcome()
        self.outcomes.append(outcome)
        transport: Any = self.site.connect(outcome.incoming, None)
        self.asked += 1
        transport.send(data)
        self.later(SECONDS, self._over, outcome, transport)

    def _over(self, outcome: Outcome, transport: Any) -> None:
        seen = outcome.seen()  # before the client itself ends it
        outcome.incoming.open = False
        transport.reset()
        outcome.responses, outcome.closed = list(seen[0]), seen[1]
        self.end(0.0)


class Sampled(World):
    """A server whose only client has the sample."""

    found: list[Outcome]

    def make_clients(self) -> list[Any]:
        """See World."""
        sample = Sample(self)
        type(self).found = sample.outcomes
        return [sample]


def simulated(number: int) -> list[Any]:
    """Return what becomes of each case in the simulation."""
    workers = WorkerPlan(workers=1, places=1, base=0.005, per_row=0.0001, spread=0.0, start=0.0, hang_limit=5.0, failing_starts=0.0)  # fmt: skip
    service = {"max_batch_size": 64, "max_queue_size": 1024, "timeout": 30.0, "policy": "greedy", "drain_timeout": 60.0}
    names = ("items", "tensors", "streams")
    theme = Theme((), Mix(), (), ())
    plan = Plan(
        0, theme, {}, {name: dict(service) for name in names}, dict.fromkeys(names, workers), [], [], number, 1.0, 0.0, 0.0, 30.0, None, False, 1000.0,
    )  # fmt: skip
    result = simulate(plan, Sampled)
    assert not result.fault
    return [outcome.seen() for outcome in Sampled.found]


async def _real(port: int, data: bytes, wanted: Any) -> Any:
    """Return what becomes of a case at a real server: when it is what is wanted, and nothing more has come for a while."""
    outcome, comes = Outcome(), asyncio.Event()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def read() -> None:
        with suppress(ConnectionError):
            while got := await reader.read(65536):
                outcome.incoming.received(got)
                if outcome.seen() == wanted:
                    comes.set()
        outcome.incoming.closed()
        comes.set()

    writer.write(data)
    reading = asyncio.ensure_future(read())
    if outcome.seen() != wanted:
        with suppress(TimeoutError):
            await asyncio.wait_for(comes.wait(), PATIENCE)
    await asyncio.wait([reading], timeout=STILL)
    seen = outcome.seen()
    reading.cancel()
    writer.transport.abort()
    return seen


@pytest.mark.parametrize("number", [CASES, pytest.param(MORE, marks=pytest.mark.soak)])
def test_damaged_requests_end_as_at_a_real_server(number: int) -> None:
    wanted, sent = simulated(number), cases(number)
    assert len(wanted) == number
    assert {status for responses, _ in wanted for status, _ in responses} >= {101, 200, 400, 404}

    async def main(port: int) -> list[Any]:
        room = asyncio.Semaphore(TOGETHER)

        async def one(case: bytes, outcome: Any) -> Any:
            async with room:
                return await _real(port, case, outcome)

        return await asyncio.gather(*map(one, sent, wanted))

    with Served(*TARGETS) as server:
        server.until_ready()
        found = asyncio.run(main(int(server.url.rpartition(":")[2])))
    other = [
        f"{data!r}: simulated {each}, real {real}"
        for data, each, real in zip(sent, wanted, found, strict=True)
        if each != real
    ]
    assert other == []
