"""An event loop without sockets whose time is virtual: it jumps to the next timer when nothing else is to do."""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import Context, ContextVar, copy_context
from functools import partial
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from tests.simulated.processes import SimulatedProcess, SimulatedSocket
    from tests.simulated.transport import Peer, SimulatedTransport

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_WHOLE = 0.001  # seconds: uvloop's timers count whole milliseconds
_MOST_ROUNDS = 100_000  # of the loop in one instant


class Stuck(RuntimeError):
    """Everything waits, and no timer is set: a wake-up was lost. Or nothing waits, and time stands: something wakes itself up for ever."""


class _Handle(asyncio.TimerHandle):
    """asyncio's, made and cancelled without a look at whether the loop is debugged."""

    __slots__ = ()

    def __init__(
        self, when: float, callback: Any, args: tuple[Any, ...], loop: "SimulatedLoop", context: Context | None
    ) -> None:  # fmt: skip
        self._when, self._callback, self._args, self._loop = when, callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        """Leave it where it is until its time has come."""
        self._cancelled, self._callback, self._args = True, None, ()


class SimulatedLoop(asyncio.BaseEventLoop):
    """With `coarse`, timers fire at whole milliseconds, and so up to half a millisecond too early, as those of uvloop do.

    Timers of the same instant fire in the order in which they were set. Calls and timers are asyncio's; only what asyncio does for sockets, signals and
    debugging is left out, because that took a third of the time of a simulation.
    """

    _ready: "deque[Any]"  # asyncio's own, of its handles

    def __init__(self, *, coarse: bool = False) -> None:
        super().__init__()
        self.now = self.jumped_at = 0.0
        self.leapt_at = -math.inf
        self._ahead = 0.0  # seconds that the wall clock has jumped
        self._coarse = coarse
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._number = 0  # of the last timer
        self._rounds = 0  # since time has passed
        self.process: ContextVar[SimulatedProcess | None] = ContextVar("process", default=None)
        self.has_processes = False  # besides the one that begins
        self.outside = copy_context()  # of no process
        self._tasks: set[asyncio.Task[Any]] = set()  # of processes: nothing else holds those of one that is killed
        self._sockets: list[SimulatedSocket] = []
        self.sockets_of_clients: dict[int, Any] = {}  # of TLS, until the server has taken them, by their inodes
        self._listening: dict[int, Callable[[], Any]] = {}
        self.work_takes: Callable[[], float] | None = None  # seconds, of what other threads do

    def time(self) -> float:
        return self.now

    def wall(self) -> float:
        """Return what the wall clock shows."""
        return self.now + self._ahead

    def jump(self, seconds: float) -> None:
        """Have the wall clock jump."""
        self._ahead += seconds
        self.jumped_at = self.now

    def leap(self, seconds: float) -> None:
        """Have so much time pass in which nothing is done: what was due then is done now."""
        self.now += seconds
        self.jumped_at = self.leapt_at = self.now

    def create_task(self, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        """A task of a process is kept until it has ended: if it was collected before, asyncio would report that at any time."""
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        if self.has_processes:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return task

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(self.now, callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._coarse:
            when = max(self.now, round(when / _WHOLE) * _WHOLE)
        return self.happen_at(when, callback, *args, context=context)

    def happen_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call `callback` at this very instant, however coarse timers are: what comes from outside does not wait for them."""
        self._number += 1
        timer = _Handle(when, callback, args, self, context)
        heappush(self._timers, (when, self._number, timer))
        return timer

    def do(self, process: "SimulatedProcess | None", step: Callable[..., object], *arguments: Any) -> None:
        """Have a process do a step, if there is one."""
        if process is None:
            step(*arguments)
        else:
            process.do(step, *arguments)

    def at_client(self, process: "SimulatedProcess | None", step: Callable[..., object], *arguments: Any) -> None:
        """Have a client of a process do a step, which is not in that process."""
        if process is None:
            step(*arguments)
        else:
            self.outside.copy().run(step, *arguments)

    def add(self, handle: asyncio.Handle) -> None:
        """Run `handle` in the next round."""
        self._ready.append(handle)

    def add_socket(self, end: "SimulatedSocket") -> int:
        """Return the descriptor of a new socket."""
        self._sockets.append(end)
        return len(self._sockets) - 1

    def add_reader(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        self._sockets[fd].watch("r", asyncio.Handle(callback, args, self))

    def add_writer(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        self._sockets[fd].watch("w", asyncio.Handle(callback, args, self))

    def remove_reader(self, fd: Any) -> bool:
        self._sockets[fd].watch("r", None)
        return True

    def remove_writer(self, fd: Any) -> bool:
        self._sockets[fd].watch("w", None)
        return True

    def _make_ssl_transport(self, rawsock: Any, protocol: Any, sslcontext: Any, waiter: Any = None, **options: Any) -> Any:  # fmt: skip
        from tests.simulated.encrypted import encrypt

        return encrypt(self, rawsock, protocol, sslcontext, waiter, options)

    def _make_socket_transport(self, sock: Any, protocol: Any, waiter: Any = None, **_: Any) -> Any:
        waiter.set_result(None)
        return sock.open(protocol)

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, *, sock: Any = None, **_: Any) -> Any:  # fmt: skip
        protocol = protocol_factory()
        transport = sock.open(protocol)
        await asyncio.sleep(0)  # a process that works off what came while it was stopped connects it only then
        return transport, protocol

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Listen at a port of its own, whatever the host is: see `dial`."""
        listener = SimpleNamespace(getsockname=lambda: (host, port))
        self._listening[port] = protocol_factory
        return SimpleNamespace(sockets=[listener], close=lambda: self._listening.pop(port, None))

    def dial(self, port: int, peer: "Peer", window: int | None) -> "SimulatedTransport | None":
        """Connect a client to a port; return None if nobody listens there."""
        from tests.simulated.transport import SimulatedTransport

        connect = self._listening.get(port)
        return None if connect is None else SimulatedTransport(self, peer, connect, window=window)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> "asyncio.Future[T]":
        """Do the work in this thread: at once, unless `work_takes` says how long that takes. What nobody awaits any more is done, too."""
        future: asyncio.Future[T] = self.create_future()
        if self.work_takes is None:
            future.set_result(func(*args))
        else:
            self.call_later(self.work_takes(), settle, future, partial(func, *args))
        return future

    def _run_once(self) -> None:
        """Let time pass if nothing is to be done now, then do what was to be done when this round began."""
        ready, timers = self._ready, self._timers
        if not ready:
            self._pass_time()
        self._rounds += 1
        if self._rounds > _MOST_ROUNDS:
            following = ready[0] if ready else timers[0][2]
            raise Stuck(
                f"at {self.now:.6f}: time stands for {self._rounds} rounds of the loop; the next is {following}"
            )
        while timers and timers[0][0] <= self.now:
            timer = heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled and not (self.has_processes and self._waits(handle)):
                try:
                    handle._context.run(handle._callback, *handle._args)
                except BaseException as error:
                    self.call_exception_handler({"message": f"in {handle}", "exception": error})

    def _waits(self, handle: Any) -> bool:
        """Return whether `handle` is of a process that does not run, which keeps it then."""
        process = handle._context.get(self.process)
        if process is None or process.runs:
            return False
        process.hold(handle)
        return True

    def _pass_time(self) -> None:
        """Go to the instant of the next timer. Raises Stuck if there is none."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not timers:
            raise Stuck(f"at {self.now:.6f}: everything waits, and no timer is set")
        if timers[0][0] > self.now:
            self.now = timers[0][0]
            self._rounds = 0

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class SimulatedThreads(Executor):
    """Threads that do their work after a while, in the loop's own thread: a piece of work can be cancelled before that."""

    def __init__(self, loop: SimulatedLoop, draw: random.Random) -> None:
        self._loop = loop
        self._draw = draw

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self._loop.call_later(self._draw.choice((0.0, 0.001, 0.02)), self._work, future, fn, args, kwargs)
        return future

    def _work(self, future: "Future[Any]", fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if future.set_running_or_notify_cancel():
            settle(future, partial(fn, *args, **kwargs))


def settle(future: Any, work: Callable[[], Any]) -> None:
    """Do some work, and end `future` as it ends."""
    try:
        result = work()
    except Exception as error:
        if not future.cancelled():
            future.set_exception(error)
    else:
        if not future.cancelled():
            future.set_result(result)
