"""Processes of one simulated machine, which share its loop: each can be stopped and killed. And the sockets between them."""

import asyncio
import os
import random
import socket
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulated.loop import SimulatedLoop

CAPACITY = 64 << 10  # bytes that a socket holds before its reader has taken them


class SimulatedProcess:
    """What is done in its context, and what that begins, is done by this process: later if it is stopped, never if it is killed."""

    pid = 0

    def __init__(self, loop: "SimulatedLoop") -> None:
        self.loop = loop
        self._held: deque[asyncio.Handle] = deque()
        self._begun: list[asyncio.Task[None]] = []  # what never goes on is not collected: it would do more then
        self.runs = True
        self._catches_up = False  # what had to wait is being done, and goes before what comes now
        self.killed = False
        self.at_end: list[Callable[[], None]] = []  # what others do when it is killed
        self._context = copy_context()
        self._context.run(loop.process.set, self)
        loop.has_processes = True

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin to do `work`."""
        self._begun.append(self.loop.create_task(work, context=self.context()))

    def context(self) -> Context:
        """Return a context in which this process works."""
        return self._context.copy()

    def do(self, step: Callable[..., object], *arguments: Any) -> None:
        """Have the process do a step: now, if it runs."""
        if self.runs and not self._catches_up:
            self.context().run(step, *arguments)
        elif not self.killed:
            self._put(step, *arguments)

    def _put(self, step: Callable[..., object], *arguments: Any) -> None:
        handle = asyncio.Handle(step, arguments, self.loop, self.context())
        if self.runs:
            self.loop.add(handle)
        else:
            self._held.append(handle)

    def hold(self, handle: asyncio.Handle) -> None:
        """Keep what a stopped process will do."""
        if not self.killed:
            self._held.append(handle)

    def stop(self) -> None:
        """Do nothing until `go_on`."""
        self.runs = False

    def go_on(self) -> None:
        """Do what had to wait, and run on."""
        if not self.killed:
            self.runs = True
            held, self._held = self._held, deque()
            for handle in held:
                self.loop.add(handle)
            self._catches_up = True
            self._put(setattr, self, "_catches_up", False)

    def kill(self) -> None:
        """Do nothing any more."""
        if self.killed:
            return
        self.runs, self.killed = False, True
        self._held.clear()
        for step in self.at_end:
            self.loop.outside.copy().run(step)

    def reap(self, done: Callable[[int | None], None]) -> None:
        """See Process."""
        done(None)


class SimulatedSocket:
    """One end of a stream socket. What is sent arrives after `latency` seconds. It can be watched by its loop, as by add_reader and add_writer."""

    def __init__(self, loop: "SimulatedLoop", latency: float) -> None:
        self._loop = loop
        self._number = loop.add_socket(self)
        self._latency = latency
        self.other: SimulatedSocket | None = None  # None once it is closed
        self._incoming = bytearray()
        self._coming = 0  # bytes that are under way to here
        self._ends = False  # all that the other end has sent has arrived, and it is closed
        self._arrives: int | None = None  # bytes of those under way that arrive before the connection breaks; None: all
        self._breaks = False  # whether its end is an error
        self._stalled = False  # nothing is read
        self._capacity = CAPACITY
        self._small: tuple[int, int] = 0, 0  # so many reads get at most so many bytes
        self._last = 0.0  # when the last bytes arrive
        self._open = True
        self.readers: dict[str, asyncio.Handle] = {}  # "r" and "w": what the loop calls when it can be read or written
        self._called: set[str] = set()
        self._messages: deque[tuple[bytes, list[int]]] = deque()  # with descriptors; they arrive at once
        self.loses: Callable[[], bool] = lambda: False  # whether the descriptors of a message are lost at this end

    def setblocking(self, flag: bool) -> None:
        """See socket."""

    def fileno(self) -> int:
        """See socket."""
        return self._number if self._open else -1

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """See socket."""
        other = self.other
        if other is None or not self._open:
            raise BrokenPipeError
        size = min(len(data), other._capacity - len(other._incoming) - other._coming)
        if size <= 0:
            raise BlockingIOError
        other._coming += size
        self._at_other(other._arrive, bytes(data[:size]))
        return size

    def _at_other(self, step: Callable[..., None], *arguments: Any) -> None:
        """Do a step when what was sent before has arrived at the other end."""
        self._last = max(self._last, self._loop.now + self._latency)
        self._loop.call_at(self._last, step, *arguments, context=self._loop.outside)

    def _arrive(self, data: bytes) -> None:
        self._coming -= len(data)
        if self._arrives is not None:
            data = data[: self._arrives]
            self._arrives -= len(data)
        self._incoming += data
        self._look("r")

    def _end(self) -> None:
        self._ends, self._stalled = True, False
        self._look("r")

    def recv_into(self, buffer: memoryview) -> int:
        """See socket."""
        size = min(len(buffer), len(self._incoming))
        if not size and not self._ends:
            raise BlockingIOError
        if not size and self._breaks:
            raise ConnectionResetError
        reads, most = self._small
        if reads:
            size, self._small = min(size, most), (reads - 1, most)
        buffer[:size] = self._incoming[:size]
        del self._incoming[:size]
        if size and self.other is not None:
            self.other._look("w")
        return size

    def sendmsg(self, buffers: Iterable[bytes], ancillary: Iterable[Any] = (), *_: Any) -> int:
        """See socket: descriptors of memory are sent so."""
        other = self.other
        if other is None or not self._open:
            raise BrokenPipeError
        data = b"".join(buffers)
        lost = other.loses()
        other._messages.append((data, [] if lost else [os.dup(each) for _, _, all_ in ancillary for each in all_]))
        return len(data)

    def recvmsg(self, *_: Any) -> Any:
        """See socket. No connections are passed on here."""
        if not self._messages and not self._ends:
            raise BlockingIOError
        if not self._messages:
            return b"", [], 0, None
        data, descriptors = self._messages.popleft()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors).tobytes())] if descriptors else []
        return data, rights, 0, None

    def close(self) -> None:
        """See socket."""
        if self._open:
            self._open = False
            for descriptor in (each for _, descriptors in self._messages for each in descriptors):
                os.close(descriptor)
            self._messages.clear()
            other, self.other = self.other, None
            if other is not None:
                other.other = None
                self._at_other(other._end)

    def cut(self, draw: random.Random) -> None:
        """Break the connection at both ends, in the middle of what is on its way to them."""
        other, self.other = self.other, None
        if other is None:
            return
        other.other = None
        for end, sender in ((self, other), (other, self)):
            arrives = draw.randint(0, len(end._incoming) + end._coming)
            end._arrives = max(0, arrives - len(end._incoming))
            del end._incoming[arrives:]
            end._breaks = draw.random() < 0.5
            sender._at_other(end._end)

    def read_slowly(self, seconds: float, capacity: int, reads: int, most: int) -> None:
        """Read nothing for so many seconds, and then so many times at most so many bytes. From now on the socket holds `capacity` bytes."""
        self._stalled, self._capacity, self._small = True, capacity, (reads, most)
        self._loop.call_later(seconds, self._read_on, context=self._loop.outside.copy())

    def _read_on(self) -> None:
        self._stalled = False
        self._look("r")

    def watch(self, kind: str, handle: asyncio.Handle | None) -> None:
        """Have the loop call `handle` when the socket can be read ("r") or written ("w"); None: no longer."""
        if handle is None:
            self.readers.pop(kind, None)
        else:
            self.readers[kind] = handle
            self._look(kind)

    def _look(self, kind: str) -> None:
        """Call who waits for this, in the next round, if it is so."""
        handle: Any = self.readers.get(kind)
        if handle is not None and kind not in self._called and self._can(kind):
            self._called.add(kind)
            self._loop.add(asyncio.Handle(self._call, (kind,), self._loop, handle._context.copy()))

    def _can(self, kind: str) -> bool:
        if not self._open:
            return False
        if kind == "r":
            return not self._stalled and (bool(self._incoming) or self._ends)
        other = self.other
        return other is None or len(other._incoming) + other._coming < other._capacity

    def _call(self, kind: str) -> None:
        self._called.discard(kind)
        handle: Any = self.readers.get(kind)
        if handle is not None and self._can(kind):
            handle._callback(*handle._args)
            self._look(kind)


def socket_pair(loop: "SimulatedLoop", latency: float) -> tuple[Any, Any]:
    """Return the two ends of a socket."""
    one, two = SimulatedSocket(loop, latency), SimulatedSocket(loop, latency)
    one.other, two.other = two, one
    return one, two
