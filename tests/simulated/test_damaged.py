"""Damaged requests come to the same ends in the simulation as at a real server: what the simulation leaves out decides none of them."""

import asyncio
import random
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from tests.served import Served
from tests.simulated import models
from tests.simulated.asking import Mix
from tests.simulated.channels import ChannelClient, Incoming
from tests.simulated.fuzzing import FIRST_NUMBER, damaged, error_of, valid
from tests.simulated.messages import SWITCHING
from tests.simulated.models import happen
from tests.simulated.plans import Plan
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
SETTINGS = {"max_batch_size": 64, "max_queue_size": 1024, "timeout": 30.0, "policy": "greedy", "drain_timeout": 60.0}
WORKERS = WorkerPlan(workers=1, places=1, base=0.005, per_row=0.0001, spread=0.0, start=0.0)


class Outcome:
    """What came back on one connection: the status of each response with its error, and whether the server closed the connection."""

    def __init__(self) -> None:
        self.responses: list[tuple[int, str | None]] = []
        self.closed = False
        self.incoming = Incoming(self)

    def came(self, incoming: Incoming) -> None:
        """A piece of a stream has come."""

    def answered(self, incoming: Incoming, status: int) -> None:
        """A response is complete."""
        self.responses.append((status, error_of(incoming)[0] if status >= 400 else ""))
        incoming.open = status != SWITCHING  # what follows is no HTTP

    def lost(self, incoming: Incoming) -> None:
        """The connection has gone."""
        self.closed = True

    def seen(self) -> tuple[list[tuple[int, str | None]], bool]:
        """Return what can be compared. Whether a WebSocket is closed depends on its messages, which are not read here."""
        return list(self.responses), self.closed and self.responses[-1:] != [(SWITCHING, "")]


def cases(number: int) -> list[bytes]:
    """Return damaged requests. None has a deadline: whether a real server keeps it depends on what else the machine does."""
    draw, found, numbers = random.Random("damaged"), list[bytes](), count(FIRST_NUMBER, 100)
    while len(found) < number:
        data = damaged(draw, *[valid(draw, next(numbers), streams=True) for _ in range(2)])
        if not any(text in data.lower() for text in DEADLINES):
            found.append(data)
    return found


class Sample(ChannelClient):
    """Sends each case on a connection of its own, and notes what comes back: None if its damage asks the model to hang, which only a simulated one does."""

    hung: list[str]

    def __init__(self, world: World) -> None:
        super().__init__(world, 0)
        self.left = cases(world.plan.turns)
        self.seen: list[Any] = []

    def turn(self) -> None:
        """See ChannelClient."""
        outcome = Outcome()
        transport: Any = self.site.connect(outcome.incoming, None)
        self.asked += 1
        transport.send(self.left.pop(0))
        self.later(SECONDS, self._over, outcome, transport)

    def _over(self, outcome: Outcome, transport: Any) -> None:
        self.seen.append(None if self.hung else outcome.seen())
        self.hung.clear()
        outcome.incoming.open = False
        transport.reset()
        self.end(0.0)


class Sampled(World):
    """A server whose only client has the sample."""

    found: list[Any]

    def make_clients(self) -> list[Any]:
        """See World."""
        sample = Sample(self)
        type(self).found = sample.seen
        return [sample]


@pytest.fixture(params=[CASES, pytest.param(MORE, marks=pytest.mark.soak)])
def simulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what becomes of each of so many cases in the simulation."""

    def noted(do: str) -> None:
        Sample.hung += [do] if do == "hang" else []
        happen(do)

    monkeypatch.setattr(models, "happen", noted)
    monkeypatch.setattr(Sample, "hung", [], raising=False)
    names = ("items", "tensors", "streams")
    services = {name: dict[str, Any](SETTINGS) for name in names}
    theme, workers = Theme((), Mix(), (), ()), dict.fromkeys(names, WORKERS)
    assert not simulate(
        Plan(0, theme, {}, services, workers, [], [], request.param, 1.0, 0.0, 0.0, 30.0), Sampled
    ).fault
    return Sampled.found


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


async def test_damaged_requests_end_as_at_a_real_server(simulated: list[Any]) -> None:
    sent = [(data, end) for data, end in zip(cases(len(simulated)), simulated, strict=True) if end is not None]
    assert len(sent) > 0.99 * len(simulated)
    assert {status for _, (responses, _) in sent for status, _ in responses} >= {101, 200, 400, 404}
    room = asyncio.Semaphore(TOGETHER)
    with Served(*TARGETS) as server:
        port = int(server.until_ready().url.rpartition(":")[2])

        async def one(case: bytes, outcome: Any) -> Any:
            async with room:
                return await _real(port, case, outcome)

        found = await asyncio.gather(*[one(data, end) for data, end in sent])
    ends = zip(sent, found, strict=True)
    assert [f"{data!r}: simulated {end}, real {real}" for (data, end), real in ends if end != real] == []
