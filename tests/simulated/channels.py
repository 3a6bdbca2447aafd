"""The channels of a simulated server besides plain HTTP. Some seeds have clients of them; the number of a client says of which channel it is."""

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from tests.simulated.arenas import WAITS, draw_arenas
from tests.simulated.clients import PAUSES, Client, Site
from tests.simulated.models import KSERVE_STATUS, STATUS

if TYPE_CHECKING:
    from tests.simulated.catalog import Catalog
    from tests.simulated.plans import Plan

FIRST = 1000  # the clients of each channel begin at a multiple of it
STREAMS, MESSAGES, FUZZ, CALLS, TEXTS, CHANGES = 1, 2, 3, 4, 5, 6
OTHERS = {
    "streams": STREAMS,
    "messages": MESSAGES,
    "fuzz": FUZZ,
    "calls": CALLS,
    "texts": TEXTS,
    "changes": CHANGES,
}  # by their names in a theme


class Place(Site, Protocol):
    """What a client of any channel sees of the simulation."""

    plan: "Plan"
    responses: Counter[str]
    catalog: "Catalog | None"

    @property
    def draining(self) -> bool:
        """Whether the server ends."""

    @property
    def crashed(self) -> bool:
        """Whether a worker has died: then any request may have been with it."""

    def listening(self, peer: str) -> Any:
        """Return the core of a gRPC server that listens, to which this client is connected or connects; None if there is none."""

    def hang_up(self, peer: str) -> None:
        """Close the connection of a client of gRPC."""


class Caller(Protocol):
    """A client of any channel."""

    asked: int
    done: bool

    def begin(self) -> None:
        """Start after a while."""

    @property
    def trace(self) -> str:
        """The hash of all that it has received."""


class ChannelClient:
    """Does one thing after the other, until its turns are over. A subclass has `turn`, which calls `end` once."""

    def __init__(self, site: Place, index: int) -> None:
        self.site = site
        self.index = index
        self.draw = random.Random(f"{site.plan.seed} client {index}")
        self.asked = 0
        self.done = False
        self._turns = site.plan.turns
        self._number = index * 1_000_000
        self._hash = hashlib.blake2b(digest_size=16)

    def turn(self) -> None:
        """Begin one turn."""
        raise NotImplementedError

    def leave(self) -> None:
        """The turns are over: close what is open."""

    def begin(self) -> None:
        """Start the first turn after a while."""
        self.end()

    def end(self, seconds: float | None = None) -> None:
        """Start the next turn after a while."""
        self.later(self._gap() if seconds is None else seconds, self._next)

    def _next(self) -> None:
        if not self._turns:
            self.leave()
            self.done = True
            return
        self._turns -= 1
        self.turn()

    def later(self, seconds: float, step: Callable[..., Any], *arguments: Any) -> None:
        """Call `step` after a while."""
        self.site.loop.call_later(seconds, step, *arguments)

    def _gap(self) -> float:
        plan = self.site.plan
        return self.draw.expovariate(1.0 / (plan.quiet if plan.quiet and self.draw.random() < PAUSES else plan.pace))

    def number(self) -> int:
        """Return a number that no other request has."""
        self._number += 100
        return self._number

    def note(self, data: bytes) -> None:
        """Add to the trace what has come, and when."""
        self._hash.update(b"%.6f " % self.site.loop.now + data)

    @property
    def trace(self) -> str:
        """See Caller."""
        return self._hash.hexdigest()

    def broken(self, what: str) -> None:
        """Something is wrong."""
        self.site.broken(f"client {self.index}: {what}")


def fault_of_status(kind: str, status: int, *, kserve: bool) -> str:
    """Return what is wrong with the status of an error; "" if it is right."""
    table = KSERVE_STATUS if kserve else STATUS
    if kind not in table:
        return f"status {status} with an error that no table has: {kind!r}"
    return "" if table[kind] == status else f"{kind} has status {status}, must be {table[kind]}"


def widen(plan: "Plan", length: float) -> None:
    """Add to a plan of about `length` seconds what its theme has of other channels. Nothing else of the plan depends on it."""
    from tests.simulated.calls import REQUESTS_OF_STREAM
    from tests.simulated.catalog import KINDS, draw_catalog
    from tests.simulated.plans import drawn_faults

    clients = plan.theme.clients
    if "streams" in clients:
        draw = random.Random(f"{plan.seed} channels")
        base = draw.choice((0.002, 0.05, 0.3))
        plan.workers["streams"] = replace(plan.workers["items"], base=base, per_row=base / 10)
        plan.services["streams"] = plan.services["items"] | {
            "max_batch_size": draw.choice((1, 4, 16)),
            "stream_buffer": draw.choice((1, 4, 256)),
        }
        plan.http["stream_keep_alive"] = draw.choice((0.1, 3.0))
    if "messages" in clients:
        draw = random.Random(f"{plan.seed} messages")
        plan.http |= {"websocket_in_flight": draw.choice((1, 4, 64)), "websocket_ping": draw.choice((1.0, 20.0))}
        plan.http["websocket_ping"] = max(plan.http["websocket_ping"], plan.quiet / 100.0)  # hours have enough of them
    if "texts" in clients:
        draw = random.Random(f"{plan.seed} texts")
        base = draw.choice((0.002, 0.05, 0.3))
        plan.workers["texts"] = replace(plan.workers["items"], base=base, per_row=base / 10)
        plan.services["texts"] = plan.services["items"] | {
            "max_batch_size": draw.choice((1, 4, 16)),
            "max_batch_cost": draw.choice((64, 256, 4096)),
            "max_queue_size": draw.choice(
                (8, 8, 64, 1024)
            ),  # where it is short, they wait for their turns to come there
        }
        plan.knows_words = draw.random() < 0.5
    if "calls" in clients:
        plan.stream_requests = random.Random(f"{plan.seed} calls").choice(REQUESTS_OF_STREAM)
    if "changes" in clients:
        plan.catalog = draw_catalog(plan)
        draw = random.Random(f"{plan.seed} changes")
        kinds = [kind for kind in KINDS if draw.random() < 0.6]
        if kinds:
            plan.faults += drawn_faults(draw, kinds, list(plan.catalog.models), (0, 2, 6), length)
            plan.faults.sort(key=lambda each: each.at)
    for name, first in OTHERS.items():
        plan.clients += range(first * FIRST, first * FIRST + clients.get(name, 0))
    draw = random.Random(f"{plan.seed} fronts")
    passed_on = "calls" in clients or "texts" in clients  # of which fronts do most
    if draw.random() < (0.4 if passed_on else 0.25):
        plan.fronts = draw.choice((1, 2, 3))
        plan.faults += drawn_faults(draw, plan.theme.of_fronts, [""], (0, 1, 4), length)
        plan.faults.sort(key=lambda each: each.at)
        if "texts" in clients and draw.random() < 0.25:  # a front may have many more texts than connections
            plan.http["max_connections"] = 6
        if (
            "texts" in clients and not plan.quiet and draw.random() < 0.5
        ):  # what a front has of them must have its end, too
            plan.drains_at = draw.uniform(0.1, min(length, 3.0))
    plan.arenas = draw_arenas(plan)
    if plan.arenas is not None:
        mix = plan.theme.mix
        plan.theme = replace(plan.theme, mix=mix._replace(tensors=mix.tensors / 2.0, filled=max(mix.filled, 0.3)))
        for settings in plan.services.values():
            settings["arena_bytes"] = plan.arenas.size


def make_client(site: Place, index: int) -> Caller:
    """Return the client of this number."""
    from tests.simulated.calls import CallClient
    from tests.simulated.fuzzing import FuzzClient
    from tests.simulated.messages import MessageClient
    from tests.simulated.streams import StreamClient

    plan = site.plan
    if index // FIRST == STREAMS:
        return StreamClient(site, index)
    if index // FIRST == MESSAGES:
        return MessageClient(site, index)
    if index // FIRST == FUZZ:
        return FuzzClient(site, index)
    if index // FIRST == CALLS:
        return CallClient(site, index)
    if index // FIRST == CHANGES:
        from tests.simulated.changing import ChangeClient

        return ChangeClient(site, index)
    kind = Client
    if index // FIRST == TEXTS:
        from tests.simulated.texts import TextClient

        kind = TextClient
    return kind(
        site, index, plan.seed,
        turns=plan.turns, pace=plan.pace, quiet=plan.quiet, faults=plan.wrong, timeout=plan.timeout, theme=plan.theme,
        waits=WAITS if plan.fronts and plan.arenas is not None else 0.0,
    )  # fmt: skip
