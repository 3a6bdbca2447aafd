"""Several fronts of a simulated server: each has connections of its own, and reaches the dispatcher over a link of bytes. They can be stopped and killed."""

import asyncio
import errno
import math
import random
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.simulated.arenas import close_received
from tests.simulated.encrypted import RelaySocket
from tests.simulated.loop import SimulatedLoop
from tests.simulated.processes import CAPACITY, SimulatedProcess, socket_pair
from tests.simulated.texts import left_in
from tests.simulated.transport import Ordered, Peer, SimulatedTransport

from weir.frontends.http.fast.shared import Clocks
from weir.frontends.http.server import tls_context
from weir.fronts.calls import FrontGrpc
from weir.fronts.front import Front, FrontConfig, FrontEnds
from weir.fronts.messages import ModelTable
from weir.fronts.passing import Origin
from weir.fronts.server import FrontProcesses, Fronts, FrontsServer, MakeFront, StartedFront, _Passed
from weir.protocols.account import SharedAccount, SharedFigures
from weir.text_server.encoder import Encoder

if TYPE_CHECKING:
    from tests.simulated.world import World

START = 0.2  # seconds until a front listens
LATENCIES = (0.0, 0.0001, 0.002)  # seconds of a link
_WAIT, _WAITS = 0.003, 300  # until a front has requests
_DIES_YOUNG = 0.5  # the share of killed fronts whose replacement is killed, too
_UNREPORTED = 0.03  # seconds until what a front counts has come to the dispatcher
STOPS = (0.05, 0.5, 3.0, 30.0)  # seconds for which a front is stopped: after ten it is replaced
STALLS = (
    0.0,
    0.002,
    0.05,
    0.5,
    3.0,
    12.0,
)  # seconds for which the dispatcher does not read a link: after ten it replaces the front
HANGS = 15.0  # seconds for which a front was stopped that must have been replaced, whatever still came from it
COMES_AGAIN = 4.0  # seconds after the end of a front in which the next one listens


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


class _Sender:
    """Passes connections on to the dispatcher, where they arrive in the next round of the loop."""

    def __init__(
        self, process: SimulatedProcess, account: SharedAccount, take: Callable[..., None], check: Callable[[], None]
    ) -> None:
        self._loop, self._process, self._account, self._take, self._check = process.loop, process, account, take, check

    def send_from(self, transport: SimulatedTransport, data: bytes) -> None:
        """See ConnectionSender."""
        self._account.pass_on()
        transport.get_protocol().connection_lost(None)
        transport.process = None
        self._send(transport, data)

    def relay(self, data: bytes, origin: Origin) -> Any:
        """See ConnectionSender."""
        ours, theirs = RelaySocket(self._loop, self._process), RelaySocket(self._loop, None)
        ours.other, theirs.other = theirs, ours
        self._process.at_end.append(ours.cut_off)
        self._account.pass_on()
        self._send(theirs, data, origin)
        return ours

    def _send(self, connection: Any, data: bytes, origin: Origin | None = None) -> None:
        self._check()
        self._loop.call_soon(self._take, connection, data, origin, context=self._loop.outside.copy())


class _Machine:
    """What the system knows of one front."""

    def __init__(self, process: SimulatedProcess, front: Front, ends: FrontEnds) -> None:
        self.process, self.front, self.ends, self.connections = process, front, ends, Ordered()

    @property
    def busy(self) -> int:
        """How many requests wait for the dispatcher."""
        return len(self.front._requests.open)


class SimulatedFrontProcesses(FrontProcesses):
    """Processes of the simulation, by their index: real fronts, which take over connections by `take`, and none of whose sockets is real."""

    def __init__(
        self, config: FrontConfig, world: "World", draw: random.Random, take: Any, figures: SharedFigures
    ) -> None:
        super().__init__(config, -1, [])
        self.machines: dict[int, _Machine] = {}
        self.gone_on: dict[SimulatedProcess, float] = {}
        self.stopped: dict[SimulatedProcess, float] = {}  # since when
        self.ends: list[tuple[float, float]] = []  # of killed ones: when they did their last work, and their ends
        self.started: list[SimulatedProcess] = []
        self.left: dict[str, int] = {}  # what fronts had when they had drained
        self.check: Callable[[], None] = lambda: None  # called while a connection is on its way to the dispatcher
        self._refused: set[int] = set()  # fronts for which the system had no descriptor once
        self._world, self._loop, self._draw, self._take, self._shared = world, world.loop, draw, take, figures
        self._tls = tls_context(config.http)
        self._former: list[_Machine] = []  # nothing of them is collected: they would complain that they have not ended

    async def start(self, index: int) -> StartedFront | None:
        """See FrontProcesses. The system refuses each front once, when it is to be replaced."""
        if index in [each.ends.index - 1 for each in self._former] and index not in self._refused:
            self._refused.add(index)
            raise OSError(errno.EMFILE, "Too many open files")
        loop = self._loop
        latency = self._draw.choice(LATENCIES)
        (link, its_link), (connections, its_connections) = socket_pair(loop, latency), socket_pair(loop, latency)
        its_connections.loses = self._world.loses_memory
        process: Any = SimulatedProcess(loop)
        ends = FrontEnds(its_link, its_connections, -1, (), index + 1, self._tls)
        front = process.context().run(self._front, process, ends)
        self.machines[index] = _Machine(process, front, ends)
        self.started.append(process)
        process.start(self._life(process, front))
        return StartedFront(process, link, connections)

    def _front(self, process: Any, ends: FrontEnds) -> Front:
        config, clock = self._config, self._loop.time
        account = OrderedSharedAccount(config.http, self._shared, ends.index)
        config = replace(config, product=copy(config.product))  # each process has its own
        sender: Any = _Sender(process, account, partial(self._take, ends.index - 1), self.check)

        def left(reason: str) -> None:
            self.kill(process)

        return Front(config, ends, account, sender, left=left, clocks=Clocks(clock, self._loop.wall))

    async def _life(self, process: Any, front: Front) -> None:
        await asyncio.sleep(START)
        await front.start()
        await front.run()
        self.left |= {f"{what} of a front that had drained": count for what, count in left_in_front(front).items()}
        self.kill(process)

    def kill(self, process: Any) -> None:
        """See FrontProcesses. Its sockets end with it."""
        index = next((index for index, machine in self.machines.items() if machine.process is process), None)
        if index is None:
            return
        machine = self.machines.pop(index)
        self._former.append(machine)
        process.kill()
        self.gone_on.setdefault(process, self._loop.now)
        self.ends.append((self.stopped.pop(process, self._loop.now), self._loop.now))
        for transport in list(machine.connections):
            if transport.process is process:
                transport.cut_off()
        machine.ends.link.close()
        machine.ends.connections.close()
        close_received(machine.front._outputs._memory._come)


class SimulatedFronts(Fronts):
    """The real fronts of a simulated server, and what befalls them."""

    def __init__(
        self, processes: SimulatedFrontProcesses, make: MakeFront, table: Callable[[], ModelTable], cleared: Callable[[int], None]
    ) -> None:  # fmt: skip
        self._loop, self._draw, self._broken = processes._loop, processes._draw, processes._world.broken
        super().__init__(processes._config.fronts, processes, make, table, cleared, self._loop.time)
        self.processes = processes
        self.gone_on, self.machines = processes.gone_on, processes.machines
        self.stops: list[SimulatedProcess] = []
        self._slow_until: list[float] = []  # when the dispatcher reads links again
        self._ended_at: dict[int, float] = {}
        self.accepted: list[Any] = []

    @property
    def open(self) -> bool:
        """Whether the server listens."""
        return not self._closing

    def _ended(self, index: int, reason: str) -> None:
        running = self._running.get(index)
        requests = [] if running is None else list(running.front.open.values())
        super()._ended(index, reason)
        self._ended_at[index] = self._loop.now
        if reason.startswith("it sent"):
            self._broken(f"the dispatcher has ended front {index}: {reason}")
        if left := [request.number for request in requests if not request.settled]:
            self._broken(f"front {index} has ended, and its requests {left} go on")

    async def _drawn(self) -> _Machine | None:
        """Return a front, if possible one that has requests: for that it waits a while."""
        for _ in range(_WAITS):
            if busy := [each for each in self.machines.values() if each.busy]:
                return self._draw.choice(busy)
            await asyncio.sleep(_WAIT)
        return self._draw.choice(list(self.machines.values())) if self.machines else None

    async def front_kill(self, _: str) -> None:
        """Kill one of the fronts, and sometimes the one that replaces it, before it listens."""
        if (machine := await self._drawn()) is not None:
            process: Any = machine.process
            index = machine.ends.index - 1
            self._processes.kill(process)
            if self._draw.random() < _DIES_YOUNG:
                self._loop.call_later(START / 2, self._kill_starting, index)

    def _kill_starting(self, index: int) -> None:
        machine = self.machines.get(index)
        if machine is not None and not self._listens(index):
            process: Any = machine.process
            self._processes.kill(process)

    def _listens(self, index: int) -> bool:
        return index in self._running and self._running[index].front.listening.done()

    async def front_stop(self, _: str) -> None:
        """Stop one of the fronts for a while."""
        machine = await self._drawn()
        if machine is not None and machine.process.runs:
            process = machine.process
            process.stop()
            self.stops.append(process)
            self.processes.stopped[process] = self._loop.now
            self.gone_on.pop(process, None)
            self._loop.call_later(self._draw.choice(STOPS), self._go_on, process)

    async def front_cut(self, _: str) -> None:
        """Cut the link of one of the fronts, whose process ends then."""
        if (machine := await self._drawn()) is not None:
            link: Any = machine.ends.link
            link.cut(self._draw)

    async def front_slow(self, _: str) -> None:
        """Let the dispatcher read slowly what one of the fronts sends."""
        machine = await self._drawn()
        link: Any = None if machine is None else machine.ends.link
        if machine is not None and link.other is not None:
            seconds, stopped = self._draw.choice(STALLS), self.processes.stopped
            capacity = self._draw.choice((CAPACITY, 600))
            link.other.read_slowly(seconds, capacity, *self._draw.choice(((0, 0), (300, 1), (300, 100))))
            self._slow_until.append(self._loop.now + seconds)
            if machine.process not in stopped:  # what it counts meanwhile is lost if it ends
                stopped[machine.process] = self._loop.now
                self._loop.call_later(seconds, self._went_on, machine.process)

    def _went_on(self, process: SimulatedProcess) -> None:
        if process.runs:
            self.processes.stopped.pop(process, None)

    @property
    def missing(self) -> int:
        """How many fronts have ended a while ago, and do not listen again."""
        now = self._loop.now
        return sum(not self._listens(index) and now > at + COMES_AGAIN for index, at in self._ended_at.items())

    @property
    def alive(self) -> int:
        """How many processes there are."""
        return sum(not process.killed for process in self.processes.started)

    def _go_on(self, process: SimulatedProcess) -> None:
        if not process.killed:
            now = self.gone_on[process] = self._loop.now
            since = self.processes.stopped.pop(process, now)
            excused_at = max(self._loop.leapt_at, *self._slow_until, -math.inf)
            if now - since > HANGS and since > excused_at and not self._closing:
                self._broken(f"a front was stopped for {now - since:.1f} s, and has not been replaced")
        process.go_on()

    def counts(self, at: float) -> bool:
        """Return whether what a front did at this instant is counted: no front has ended soon after, before it had reported that."""
        return not any(began - _UNREPORTED <= at <= end for began, end in self.processes.ends)

    def stood_still(self, since: float) -> bool:
        """Return whether a front or its link has been stopped, or has begun to work off what had come meanwhile, since this instant."""
        ended = (*(self.gone_on.get(process, self._loop.now) for process in self.stops), *self._slow_until)
        return any(at + 1.0 > since for at in ended)

    def accept(self, peer: Peer, window: int | None) -> Any:
        """Connect a client to one of the fronts that listen; return None if there is none."""
        listening = [index for index in self._running if self._listens(index) and index in self.machines]
        if self._closing or not listening:
            return None
        machine = self.machines[self._draw.choice(sorted(listening))]
        server, process = machine.front._server, machine.process
        transport: Any
        if server._tls is None:
            transport = SimulatedTransport(self._loop, peer, server._connect, window=window, process=process)
        else:
            transport = self.processes._world.encrypt(peer, server._accepted, window, process)
        machine.connections.add(transport)
        self.accepted.append(transport)
        return transport


class SimulatedFrontsServer(FrontsServer):
    """A dispatcher, but for its processes and sockets."""

    listening: SimulatedFronts
    world: "World"
    draw: random.Random

    async def _open_fronts(self) -> Fronts:
        plan = self._plan
        grpc = None if plan.grpc is None else await plan.grpc.reserve(_bind)
        config = replace(plan.config, grpc=grpc)
        processes = SimulatedFrontProcesses(config, self.world, self.draw, self._take, plan.figures.figures)
        processes.check = self._check_count
        figures, table = plan.figures, self._catalogue.table
        fronts = self.listening = SimulatedFronts(processes, self._make_front, table, figures.ended)
        self._fronts = fronts
        await fronts.start()
        return fronts

    def _check_count(self) -> None:
        """See that each connection is counted, wherever it is. Those on their way from a front that has just ended are not."""
        fronts = self.listening
        fronts.accepted = [each for each in fronts.accepted if not each.is_closing()]
        had_begun = [each for each in fronts.accepted if each.get_protocol() is not None]
        ended = max((end for _, end in fronts.processes.ends), default=-1.0)
        if len(had_begun) > self.account.connections and self.world.loop.now > ended + 1.0:
            self.world.broken(f"{len(had_begun)} connections are open, and {self.account.connections} are counted")

    def _take(self, front: int, transport: Any, data: bytes, origin: Origin | None) -> None:
        """Go on with a connection that a front has passed on."""
        if origin is not None:
            if front in self.listening._running:
                self._passed(front, transport, data, origin)
            return
        if front in self.listening._running:
            self._plan.figures.figures.took(front + 1)
        if not transport.is_closing():
            protocol = _Passed(self._connect_any, data, None)
            transport.set_protocol(protocol)
            transport.set_write_buffer_limits()
            protocol.connection_made(transport)
            transport.resume_reading()

    def accept(self, loop: SimulatedLoop, peer: Peer, window: int | None) -> Any:
        """Connect a client; return None if nothing listens."""
        return self.listening.accept(peer, window)

    def encoders(self) -> list[Encoder]:
        """Return the encoders of the fronts that run."""
        machines = self.listening.machines.values()
        return [each for machine in machines for each in encoders_of(machine.front)]

    def left(self) -> dict[str, int]:
        """Return what fronts have left, those that have ended and those that run."""
        left = dict(self.listening.processes.left)
        for index, machine in self.listening.machines.items():
            if machine.process.runs and machine.front._models.known.is_set():
                left |= {f"front {index}: {what}": count for what, count in left_in_front(machine.front).items()}
        left |= {f"front {view.number}: requests at the dispatcher": view.requests for view in self.fronts}
        return left | ({"fronts that do not come again": self.listening.missing} if self.listening.open else {})


def encoders_of(front: Front) -> list[Encoder]:
    """Return the encoders of a front, if it has started."""
    return list(getattr(front._product, "_encoders", {}).values())


def left_in_front(front: Front) -> dict[str, int]:
    """Return what is left in a front whose clients have gone."""
    relays = front._relays._running  # of clients that may have left while nothing was read from them
    left = {"requests": len(front._requests.open), "bytes in the account": 0 if relays else front._account.held_bytes}
    for encoder in encoders_of(front):
        left |= left_in(encoder)
    for each in front._frontends:
        if isinstance(each, FrontGrpc) and each._relay._channel is not None:
            left |= {"calls that are passed on": len(each._relay._channel.calls)}
    return left


async def _bind(host: str, port: int) -> list[Any]:
    """Return a socket that keeps a port."""
    return [SimpleNamespace(getsockname=lambda: ("192.0.2.0", 1), close=lambda: None)]
