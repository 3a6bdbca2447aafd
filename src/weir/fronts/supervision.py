"""The processes of the fronts: how they start, how one that has ended is replaced, and what a server shows of them."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weir.errors import SettingsError
from weir.frontends.dashboard import use_of
from weir.fronts.dispatcher import ConnectedFront
from weir.fronts.messages import Drain, GiveBack, ModelTable, Refuse
from weir.fronts.passing import socket_pair
from weir.wire.frames import Start
from weir.workers.cpus import unpinned
from weir.workers.process.launch import Process, Template, python_path

_log = logging.getLogger("weir")

_MODULE = "weir.fronts.entry"
_SHORT_LIFE = 1.0  # seconds: a front that has lived no longer is replaced only after as many
_TRIES = 3  # starts of one front at the start of the server
_PATIENCE = 10  # seconds without a message after which a front hangs; it sends one each second
_END_TIME = 2.0  # seconds in which a killed process ends
_REPORT_TIME = 1.0  # seconds after the end of a drain in which a front reports it

# Makes the dispatcher's side of a front: of its link, its socket for connections, and what is called when it has ended.
MakeFront = Callable[[socket.socket, socket.socket, Callable[[str], None]], ConnectedFront]


class RunningFront(NamedTuple):
    """A front that runs."""

    process: Process
    front: ConnectedFront
    since: float


class StartedFront(NamedTuple):
    """The process of a front, and the dispatcher's ends of its link and of its socket for connections."""

    process: Process
    link: socket.socket
    connections: socket.socket


class FrontView(NamedTuple):
    """A front as it is shown: its number, its process, how many of its requests wait or run, for how many seconds it has sent nothing, and how often it was
    started."""

    number: int
    pid: int
    requests: int
    silent: int
    starts: int


class FrontProcesses:
    """Forks the processes of fronts: one for each element of `listening`, the sockets on which it listens, one for each address.

    `config` is a FrontConfig, and `figures` the descriptor of the account's memory.
    """

    def __init__(self, config: Any, figures: int, listening: Sequence[Sequence[socket.socket]]) -> None:
        self.listening = listening
        self._config = config
        self._figures = figures
        self._template: Template | None = None
        self._starting = asyncio.Lock()

    async def start(self, index: int) -> StartedFront | None:
        """Start a front; return None if that is not possible now."""
        link, its_link = socket.socketpair()
        connections, its_connections = socket_pair()
        with its_link, its_connections:
            descriptors = [each.fileno() for each in (its_link, its_connections)] + [self._figures]
            process = await self._fork(index, [*descriptors, *[each.fileno() for each in self.listening[index]]])
        if process is None:
            link.close()
            connections.close()
            return None
        return StartedFront(process, link, connections)

    async def _fork(self, index: int, descriptors: Sequence[int]) -> Process | None:
        async with self._starting:
            template = self._template
            if template is None:
                template = self._template = Template(_MODULE)
                environment = {**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))}
                start = Start("", {"name": "fronts", "config": self._config})
                if not await template.start(start, environment, 0, unpinned()):
                    self._template = None
                    return None
            done: asyncio.Future[Process | OSError | None] = asyncio.get_running_loop().create_future()
            template.fork({"index": index + 1}, descriptors, done.set_result)
            started = await done
        if started is None:  # the template has ended, and its fronts with it
            self._template = None
        if isinstance(started, OSError):
            _log.warning("the system refuses a process for front %d: %s", index, started)
            return None
        return started

    def kill(self, process: Process) -> None:
        """Kill the process of a front, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Start none any more."""
        template, self._template = self._template, None
        if template is not None:
            template.close()
            await template.closed


class Fronts:
    """The fronts of a server, which are started by `processes`. `table` returns what the fronts must know of the models. `cleared` is called with the index
    of a front that has ended, from 0.
    """

    def __init__(
        self,
        processes: FrontProcesses,
        make: MakeFront,
        table: Callable[[], ModelTable],
        cleared: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = processes
        self._make = make
        self._table = table
        self._cleared = cleared
        self._clock = clock
        self._running: dict[int, RunningFront] = {}
        self._starts: Counter[int] = Counter()
        self._closing = False
        self._refusing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_gone = asyncio.Event()

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """See frontends.http.server.Listening."""
        return () if self._closing else self._processes.listening[0]

    @property
    def views(self) -> list[FrontView]:
        """The fronts that run, in order."""
        return [
            FrontView(index, each.process.pid, each.front.requests, each.front.silent, self._starts[index])
            for index, each in sorted(self._running.items())
        ]

    async def start(self) -> None:
        """Start all fronts; return when all listen. Raises SettingsError if one cannot."""
        await asyncio.gather(*[self._start_patiently(index) for index in range(len(self._processes.listening))])

    async def _start_patiently(self, index: int) -> None:
        for _ in range(_TRIES):
            if await self._start(index):
                return
        raise SettingsError(
            f"fronts={len(self._processes.listening)}: front {index} does not start; what it has written says why"
        )

    async def _start(self, index: int) -> bool:
        """Start a front; return whether it listens."""
        started = await self._processes.start(index)
        if started is None:
            return False
        process, link, connections = started
        if self._closing:
            self._processes.kill(process)
            link.close()
            connections.close()
            return False
        front = self._make(link, connections, partial(self._ended, index))
        self._starts[index] += 1
        self._running[index] = RunningFront(process, front, self._clock())
        front.tell(self._table())
        if self._refusing:
            front.tell(Refuse())
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([front.listening])
        return not front.listening.cancelled()

    def _ended(self, index: int, reason: str) -> None:
        """A front has ended, or has sent what it must not send."""
        running = self._running.pop(index, None)
        if running is None:
            return
        running.front.close()
        self._cleared(index)
        self._processes.kill(running.process)
        running.process.reap(lambda code: None)
        if not self._running:
            self._all_gone.set()
        if self._closing:
            return
        _log.warning("front %d has ended (%s): its connections are lost, and another one starts", index, reason)
        task = asyncio.ensure_future(self._replace(index, self._clock() - running.since))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replace(self, index: int, lived: float) -> None:
        while not self._closing:
            if lived < _SHORT_LIFE:
                await asyncio.sleep(_SHORT_LIFE)
            if await self._start(index):
                return
            lived = 0.0

    def sweep(self) -> None:
        """Replace fronts that hang; called once a second. Seconds in which this process did not run either do not count."""
        for index, running in list(self._running.items()):
            running.front.sweep()
            if running.front.silent > _PATIENCE:
                self._ended(index, f"it has not reported for {_PATIENCE} s")

    def tell_models(self) -> None:
        """Tell all fronts what models there are."""
        table = self._table()
        for running in self._running.values():
            running.front.tell(table)

    def give_back(self, model: int) -> None:
        """Let all fronts give back places in the arena of a model, by its number."""
        for running in self._running.values():
            running.front.tell(GiveBack(model))

    def refuse(self) -> None:
        """Let all fronts refuse new requests."""
        self._refusing = True
        for running in self._running.values():
            running.front.tell(Refuse())

    def close(self) -> None:
        """Accept no more connections here; the fronts still do. Replace no front from now on. Idempotent."""
        self._closing = True
        for sockets in self._processes.listening:
            for each in sockets:
                each.close()

    async def drain(self, seconds: float | None) -> bool:
        """Let all fronts accept no more connections, and send all responses; return whether they did so within `seconds`."""
        self.close()
        fronts = [running.front for running in self._running.values()]
        for front in fronts:
            front.tell(Drain(seconds))
        if not fronts:
            return True
        waiting = [front.drained for front in fronts]
        await asyncio.wait(waiting, timeout=None if seconds is None else seconds + _REPORT_TIME)
        return all(each.done() and not each.cancelled() and each.result() for each in waiting)

    async def stop(self) -> None:
        """End all fronts. Those that have drained still send what they relay, and end by themselves. Idempotent."""
        self.close()
        for task in list(self._tasks):
            task.cancel()
        if self._running and all(each.front.drained.done() for each in self._running.values()):
            await self._gone()
        for running in list(self._running.values()):
            self._processes.kill(running.process)
        await self._gone()
        await self._processes.close()

    async def _gone(self) -> None:
        """Return when no front is left, at the latest after _END_TIME."""
        self._all_gone.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_TIME):
                if self._running:
                    await self._all_gone.wait()


def rows_of(views: Sequence[FrontView], connections: Callable[[int], int]) -> list[dict[str, Any]]:
    """Return the rows of the dashboard for fronts; `connections` returns how many a front has, by its number."""
    return [
        {
            "number": view.number,
            "pid": view.pid,
            "connections": connections(view.number),
            "requests": view.requests,
            "starts": view.starts,
        }
        for view in views
    ]


class FrontMetrics(Collector):
    """Shows each of the fronts that `views` returns; `connections` returns how many a front has, by its number."""

    def __init__(self, views: Callable[[], Sequence[FrontView]], connections: Callable[[int], int]) -> None:
        self._views = views
        self._connections = connections

    def describe(self) -> Iterator[Metric]:
        """Return no metrics: `collect` names them."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        connections = GaugeMetricFamily("weir_front_connections", "Connections that a front has.", labels=["front"])
        requests = GaugeMetricFamily("weir_front_requests", "Its requests that wait or run.", labels=["front"])
        memory = GaugeMetricFamily("weir_front_memory_bytes", "Its resident memory.", labels=["front"])
        cpu = CounterMetricFamily("weir_front_cpu_seconds", "CPU time of its present process.", labels=["front"])
        starts = CounterMetricFamily("weir_front_starts", "Starts of its processes.", labels=["front"])
        for view in self._views():
            labels, use = [str(view.number)], use_of(view.pid)
            connections.add_metric(labels, self._connections(view.number))
            requests.add_metric(labels, view.requests)
            starts.add_metric(labels, view.starts)
            if use is not None:
                memory.add_metric(labels, use.memory_bytes)
                cpu.add_metric(labels, use.cpu)
        yield from (starts, cpu, connections, requests, memory)
