"""Several fronts of a simulated server: each has connections of its own, and reaches the dispatcher over a link of bytes. They can be stopped and killed."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.simulated.loop import SimulatedLoop
from tests.simulated.processes import SimulatedProcess, socket_pair
from tests.simulated.transport import Ordered, Peer, SimulatedTransport

from weir.frontends.http.server import Listening
from weir.fronts.account import SharedAccount, SharedFigures
from weir.fronts.fast import FrontContext
from weir.fronts.front import Front, FrontConfig, FrontEnds, FrontServer, Leaving, PassOn, RefusalObserver
from weir.fronts.lending import MemoryReceiver
from weir.fronts.link import Link
from weir.fronts.messages import FrontListens, ModelDescription, Refuse, reader_of_dispatcher
from weir.fronts.outputs import OutputReader
from weir.fronts.relaying import Relays
from weir.fronts.remote import RemoteHandle, RemoteModels, Requests
from weir.fronts.server import FrontsServer, _Passed
from weir.fronts.supervision import Fronts, RunningFront
from weir.protocols.access import Access

START = 0.2  # seconds until a front listens
LATENCIES = (0.0, 0.0001, 0.002)  # seconds of a link
_WAIT, _WAITS = 0.003, 300  # until a front has requests
STOPS = (0.05, 0.5, 3.0, 30.0)  # seconds for which a front is stopped: after ten it is replaced


class _Published(Ordered):
    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self._changed = changed

    def add(self, item: Any) -> None:
        super().add(item)
        self._changed()

    def discard(self, item: Any) -> None:
        super().discard(item)
        self._changed()


class OrderedSharedAccount(SharedAccount):
    """An account of several processes whose connections are swept in their order."""

    def connection_set(self) -> Any:
        """See Account."""
        return _Published(self.publish)


class _Nowhere:
    """Listens at no socket."""

    sockets: Any = ()

    def close(self) -> None:
        pass


class _Server(FrontServer):
    async def _open(self, tls: Any) -> Listening:
        return _Nowhere()


class _Models(RemoteModels):
    """Models whose requests arrive in virtual time."""

    def __init__(self, requests: Requests, fronts: int, memory: MemoryReceiver, clock: Callable[[], float]) -> None:
        super().__init__(requests, fronts, memory)
        self._clock = clock

    def _handle(self, state: ModelDescription) -> RemoteHandle:
        handle = super()._handle(state)
        handle.now = self._clock
        return handle


class _Leaving(Leaving):
    """Passes a connection on without its descriptor."""

    def resume_writing(self) -> None:
        transport: Any = self._transport
        if not transport.is_closing():
            self.connection_lost(None)
            self._sender.send(transport, self._replay)


class _PassOn(PassOn):
    def go_on(self, shared: Any, transport: asyncio.Transport, replay: bytes) -> None:
        shared.tell_observers()
        self._report()
        self._link.flush()
        _Leaving(shared, transport, replay, self._sender).start()


class _Sender:
    """Passes connections on to the dispatcher, where they arrive in the next round of the loop."""

    busy = False

    def __init__(self, loop: SimulatedLoop, take: Callable[[Any, bytes], None]) -> None:
        self._loop = loop
        self._take = take

    def send(self, transport: SimulatedTransport, data: bytes) -> None:
        transport.process = None
        self._loop.call_soon(self._take, transport, data, context=self._loop.outside.copy())


class SimulatedFront(Front):
    """A front in the process of the simulation. It is put together as Front is."""

    def __init__(
        self, config: FrontConfig, ends: FrontEnds, loop: SimulatedLoop, figures: SharedFigures,
        take: Callable[[Any, bytes], None], left: Callable[[], None],
    ) -> None:  # fmt: skip
        self._left_over = left
        self._over = asyncio.Event()
        self._draining = None
        self._link = Link(ends.link, loop, reader_of_dispatcher(), self._received, self._left)
        memory = MemoryReceiver(ends.connections)
        self._outputs = OutputReader(memory, self._link.put, loop)
        self._requests = Requests(self._link, self._outputs)
        self._models = _Models(self._requests, config.fronts, memory, loop.time)
        self._product = self._grpc = None
        self._account = OrderedSharedAccount(config.http, figures, ends.index)
        sender: Any = _Sender(loop, take)
        self._relays = Relays(sender, self._account)
        context = FrontContext(self._models, config.http, access=config.access, account=self._account)
        self.server = self._server = _Server(
            context, ends, self._sweep, [RefusalObserver(self._link)], route_handlers=(), log=None, clock=loop.time, time_of_day=loop.time,
            hand_over=_PassOn(sender, self._relays, self._link, self._report),
        )  # fmt: skip
        self._models.changed.append(self._server.routes_changed)

    async def run(self) -> None:
        """See Front."""
        self._link.open()
        await self._models.known.wait()
        await asyncio.sleep(START)
        await self._server.start()
        self._link.put(FrontListens())
        await self._over.wait()
        await self._server.stop()
        self._report()
        self._link.flush()
        self._left_over()

    def _left(self, reason: str) -> None:
        self._left_over()

    @property
    def open_requests(self) -> int:
        """How many requests wait for the dispatcher."""
        return len(self._requests.open)


class _Machine:
    """What the system knows of one front."""

    def __init__(self, process: SimulatedProcess, front: SimulatedFront, ends: FrontEnds) -> None:
        self.process = process
        self.front = front
        self.ends = ends
        self.connections = Ordered()


class SimulatedFronts(Fronts):
    """Starts, watches and replaces fronts."""

    loop: SimulatedLoop
    draw: random.Random
    take: Callable[[Any, bytes], None]
    shared: SharedFigures
    broken: Callable[[str], None]

    def begin(
        self, loop: SimulatedLoop, draw: random.Random, take: Any, figures: SharedFigures, broken: Callable[[str], None]
    ) -> None:
        """Set what is simulated."""
        self.loop, self.draw, self.take, self.shared, self.broken = loop, draw, take, figures, broken
        self.machines: dict[int, _Machine] = {}
        self.former: list[_Machine] = []  # nothing of them is collected: they would complain that they have not ended
        self.stops: list[tuple[float, SimulatedProcess]] = []
        self.gone_on: dict[SimulatedProcess, float] = {}

    @property
    def open(self) -> bool:
        """Whether the server listens."""
        return not self._closing

    async def _start(self, index: int) -> bool:
        loop = self.loop
        latency = self.draw.choice(LATENCIES)
        (link, its_link), (connections, its_connections) = socket_pair(loop, latency), socket_pair(loop, latency)
        process = SimulatedProcess(loop)
        front = self._make(link, connections, partial(self._ended, index))
        ends = FrontEnds(its_link, its_connections, -1, (), index + 1)
        end = partial(self.die, index, process)
        made = process.context().run(SimulatedFront, self._config, ends, loop, self.shared, self.take, end)
        self.machines[index] = _Machine(process, made, ends)
        self._starts[index] += 1
        system: Any = process
        self._running[index] = RunningFront(system, front, loop.now)
        front.tell(self._table())
        if self._refusing:
            front.tell(Refuse())
        process.start(made.run())
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([front.listening])
        return not front.listening.cancelled()

    def _ended(self, index: int, reason: str) -> None:
        running = self._running.pop(index, None)
        if running is None:
            return
        requests = list(running.front.open.values())
        running.front.close()
        if left := [request.number for request in requests if not request.settled]:
            self.broken(f"front {index} has ended, and its requests {left} go on")
        self._cleared(index)
        self.die(index, running.process)
        if not self._running:
            self._all_gone.set()
        if not self._closing:
            task = asyncio.ensure_future(self._replace(index, self.loop.now - running.since))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """See Fronts."""
        self.close()
        for task in list(self._tasks):
            task.cancel()
        if self._running and all(each.front.drained.done() for each in self._running.values()):
            await self._gone()
        for index, running in list(self._running.items()):
            self.die(index, running.process)
        await self._gone()

    # What happens to them.

    def die(self, index: int, process: Any) -> None:
        """The process of a front ends, and with it its sockets."""
        machine = self.machines.get(index)
        if machine is None or machine.process is not process:
            return
        self.former.append(self.machines.pop(index))
        process.kill()
        self.gone_on.setdefault(process, self.loop.now)
        for transport in list(machine.connections):
            if transport.process is process:
                transport.cut_off()
        machine.ends.link.close()
        machine.ends.connections.close()

    async def _drawn(self) -> int | None:
        """Return the number of a front, if possible of one that has requests: for that it waits a while."""
        for _ in range(_WAITS):
            if busy := [index for index, each in self.machines.items() if each.front.open_requests]:
                return self.draw.choice(busy)
            await asyncio.sleep(_WAIT)
        return self.draw.choice(list(self.machines)) if self.machines else None

    async def kill(self) -> None:
        """Kill one of the fronts."""
        if (index := await self._drawn()) is not None:
            self.die(index, self.machines[index].process)

    async def hold(self) -> None:
        """Stop one of the fronts for a while."""
        if (index := await self._drawn()) is not None:
            process = self.machines[index].process
            if process.runs:
                process.stop()
                self.stops.append((self.loop.now, process))
                self.gone_on.pop(process, None)
                self.loop.call_later(self.draw.choice(STOPS), self._go_on, process)

    def _go_on(self, process: SimulatedProcess) -> None:
        if not process.killed:
            self.gone_on[process] = self.loop.now
        process.go_on()

    def stood_still(self, since: float) -> bool:
        """Return whether a front has been stopped, or has begun to work off what had come meanwhile, since this instant."""
        return any(self.gone_on.get(process, self.loop.now) + 1.0 > since for _, process in self.stops)

    def accept(self, peer: Peer, window: int | None) -> SimulatedTransport | None:
        """Connect a client to one of the fronts that listen; return None if there is none."""
        listening = [
            index for index, each in self._running.items() if each.front.listening.done() and index in self.machines
        ]
        if self._closing or not listening:
            return None
        machine = self.machines[self.draw.choice(sorted(listening))]
        transport = SimulatedTransport(
            self.loop, peer, machine.front.server._connect, window=window, process=machine.process
        )
        machine.connections.add(transport)
        return transport


class SimulatedFrontsServer(FrontsServer):
    """A dispatcher, but for its processes and sockets."""

    listening: SimulatedFronts
    _loop: SimulatedLoop
    _draw: random.Random
    _broken: Callable[[str], None]

    def simulate(self, loop: SimulatedLoop, draw: random.Random, broken: Callable[[str], None]) -> None:
        """Set what is simulated."""
        self._loop, self._draw, self._broken = loop, draw, broken

    async def _open_fronts(self) -> Fronts:
        fronts = self.listening = SimulatedFronts(
            self._config,
            -1,
            [[] for _ in range(self._config.fronts)],
            self._make_front,
            self._catalogue.table,
            self._figures.ended,
        )
        fronts.begin(self._loop, self._draw, self._take, self._figures.figures, self._broken)
        self._fronts = fronts
        await fronts.start()
        return fronts

    def _take(self, transport: SimulatedTransport, data: bytes) -> None:
        """Go on with a connection that a front has passed on."""
        if not transport.is_closing():
            protocol = _Passed(self._connect_any, data, None)
            transport.set_protocol(protocol)
            transport.set_write_buffer_limits()
            protocol.connection_made(transport)
            transport.resume_reading()

    def accept(self, loop: SimulatedLoop, peer: Peer, window: int | None) -> SimulatedTransport | None:
        """Connect a client; return None if nothing listens."""
        return self.listening.accept(peer, window)

    def left(self) -> dict[str, int]:
        """Return what fronts have left."""
        return {
            f"front {index}: requests": each.front.open_requests for index, each in self.listening.machines.items()
        } | {f"front {view.number}: requests at the dispatcher": view.requests for view in self.fronts}


def config_of(http: Any, access: Access, fronts: int) -> FrontConfig:
    """Return the settings of the fronts."""
    return FrontConfig(http, access, False, 0, fronts)
