"""Shared memory of a simulated server: real arenas in memory without a name, whose size, and when they have no room, is drawn.

What travels between the server and its workers are real frames then: large payloads and results are read where they lie. A place that is freed is
overwritten at once, so that whoever still reads it has another answer.
"""

import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weir.messages import Batch, Events
from weir.model import Model, is_tensor_model
from weir.wire.frames import FrameParser, encode_batch, encode_events
from weir.workers import arena
from weir.workers.run.runner import Runner
from weir.workers.run.tensors import lease

if TYPE_CHECKING:
    from tests.simulated.plans import Plan

SIZES = (100_000, 400_000, 1_000_000, 4_000_000)  # bytes; the largest bodies have 300,000
WAITS = 2.0  # seconds until a front that wants a place for a body has one, or knows that there is none
_FREED = b"\xdd"


@dataclass(frozen=True)
class ArenaPlan:
    """The arenas of each model: their size in bytes, the share of places that the system refuses, and of descriptors that are lost on their way to a front."""

    size: int
    refused: float
    lost: float


def draw_arenas(plan: "Plan") -> ArenaPlan | None:
    """Return the arenas of the models of `plan`; None if it has none."""
    draw = random.Random(f"{plan.seed} arenas")
    if draw.random() >= (0.6 if plan.fronts else 0.15):
        return None
    return ArenaPlan(draw.choice(SIZES), draw.choice((0.0, 0.0, 0.1, 0.5)), draw.choice((0.0, 0.0, 0.3)))


class SimulatedArena(arena.Arena):
    """A real one, which is overwritten where it is freed. The system refuses some places, as where it has no memory left (ENOSPC)."""

    def __init__(self, plan: ArenaPlan, draw: random.Random) -> None:
        super().__init__(arena.create_memory("weir-simulated", plan.size), plan.size)
        self._draw, self._refused = draw, plan.refused

    def reserve(self, size_bytes: int) -> arena.SharedBlock | None:
        """See Arena."""
        if self._refused and self._draw.random() < self._refused:
            return None
        return super().reserve(size_bytes)

    def free(self, offset: int, size_bytes: int) -> None:
        """See Arena."""
        super().free(offset, size_bytes)
        if not self._closed:
            self._mapping.view(offset, size_bytes)[:] = _FREED * size_bytes

    @property
    def taken(self) -> int:
        """How many places are not free."""
        return len(self._allocator)


class WorkerMemory:
    """What one worker shares with the server in one life: the arena of requests, and that of its results."""

    def __init__(self, arenas: "Arenas", model: type[Model], runner: Runner) -> None:
        requests = arenas.requests
        fetch = arena.PayloadFetch(arena.Mapping(requests.fd, requests.size_bytes, writable=False))
        fetch.lends = runner.borrows
        self._requests = FrameParser(fetch)
        self._own = SimulatedArena(arenas.plan, arenas.draw)
        self.results = arena.Results(self._own.fd, arenas.plan.size)
        self._lends = is_tensor_model(model)
        self._events = FrameParser(arena.ResultFetch(self.results, lease if self._lends else None))
        self._places = arena.ResultPlaces(self._own)
        self._arena = requests
        self._flights: dict[int, tuple[bytearray, arena.BatchPlaces]] = {}

    def send(self, batch: Batch) -> None:
        """At the server: send `batch`, and what the worker may use again."""
        self._take_back()
        places = arena.BatchPlaces(self._arena)
        self._flights[batch.batch_id] = encode_batch(batch, places), places

    def _take_back(self) -> None:
        for ref in self.results.take_freed():
            self._places.take_back(ref)

    def read(self, batch: Batch) -> Batch:
        """At the worker: return the batch that was sent, as it lies in memory now."""
        (sent,) = self._requests.feed(self._flights[batch.batch_id][0])
        assert isinstance(sent, Batch)
        arena.own_values(sent)
        return sent

    def write(self, events: Events) -> bytearray:
        """At the worker: return the frame with `events`."""
        return encode_events(events, self._places)

    def receive(self, frame: bytearray, batch: Batch) -> Events:
        """At the server: return the events in `frame`, which are of `batch`."""
        (events,) = self._events.feed(frame)
        assert isinstance(events, Events)
        if self.results.held_bytes:
            arena.as_values(events, batch.accepts, lent=self._lends)
        if events.final:
            self._flights.pop(batch.batch_id)[1].release()
        return events

    def close(self) -> None:
        """The worker has ended."""
        for _, places in self._flights.values():
            places.release()
        self._flights.clear()
        self.results.close()
        self._own.close()


class Arenas:
    """All arenas of one executor, from its start on."""

    def __init__(self, plan: ArenaPlan, draw: random.Random) -> None:
        self.plan, self.draw = plan, draw
        self.requests = SimulatedArena(plan, draw)
        self._results: list[arena.Results] = []

    def of_worker(self, model: type[Model], runner: Runner) -> WorkerMemory:
        """Return what a worker shares that has just started."""
        memory = WorkerMemory(self, model, runner)
        self._results.append(memory.results)
        return memory

    def gauges(self) -> dict[str, Any]:
        """Return what the executor has of memory."""
        return {"arena_bytes": self.requests.size_bytes, "arena_free_bytes": self.requests.free_bytes}

    def left(self) -> dict[str, int]:
        """Return what is still taken of them when all is at rest."""
        return {
            "places in an arena": self.requests.taken,
            "bytes of results": sum(results.held_bytes for results in self._results),
        }

    def close(self) -> None:
        """Give the memory back: the simulation is over."""
        self.requests.close()


def close_received(come: dict[int, tuple[int, int]]) -> None:
    """Close the descriptors that a process had received and not used, as its end does."""
    for descriptor, _ in come.values():
        os.close(descriptor)
    come.clear()
