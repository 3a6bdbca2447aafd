"""One worker that has attached from outside, from its first frame to its leaving.

starting ──asks for work──> ready ──closes, breaks the protocol, takes too long──> lost
"""

import asyncio
import socket
import struct
import time
from typing import Protocol

from weir.messages import Batch, Events
from weir.wire.frames import FrameError
from weir.wire.lockstep import LockstepParser, Reply, decode_reply
from weir.workers.channel import Channel
from weir.workers.remote.lockstep import LockstepBatch
from weir.workers.timelimit import TimeLimit

GREETING = 10.0  # seconds that a connection may take to ask for work


class RemoteWorkerListener(Protocol):
    """Hears from attached workers."""

    def joined(self, worker: "RemoteWorker") -> None:
        """It asks for work, for the first time."""

    def answered(self, worker: "RemoteWorker", events: Events) -> None:
        """Its batch is back, and it asks for the next one."""

    def left(self, worker: "RemoteWorker") -> None:
        """It is gone; `reason` says why, `index` is -1 if it never joined."""


class RemoteWorker:
    """The server's side of one connection. Its public attributes are those of WorkerState."""

    def __init__(
        self,
        end: socket.socket,
        host: RemoteWorkerListener,
        salt: int,
        predict_timeout: float | None,
        max_body_bytes: int,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.index = -1
        self.state = "starting"
        self.pid = _pid(end)
        self.restarts = 0
        self.reason = ""
        self._host = host
        self._salt = salt
        self._work: LockstepBatch | None = None
        self._began = 0.0
        self._limit = TimeLimit(loop, predict_timeout, self._too_long)
        self._predict_timeout = predict_timeout
        self._greeting = loop.call_later(GREETING, self.leave, f"it did not ask for work within {GREETING:g} s")
        self._loop = loop
        self._channel: Channel[bytes] = Channel(end, LockstepParser(max_body_bytes), self._received, self.leave)
        self._channel.open(loop)

    @property
    def in_flight(self) -> int:
        """How many batches it has: one at most."""
        return int(self._work is not None)

    def run(self, batch: Batch) -> None:
        """Send `batch`."""
        if self.state != "ready" or self._work is not None:
            raise RuntimeError(
                f"external worker {self.index} was given a batch while {self.state}. This is a bug in Weir"
            )
        self._work = work = LockstepBatch(batch, self._salt)
        self._began = time.perf_counter()
        if work.ids:
            self._limit.begin()
            self._channel.send(work.frame)
        else:  # nothing of it can be sent
            self._loop.call_soon(self._finish, Reply([], frozenset()))

    def leave(self, reason: str) -> None:
        """Close the connection; the host hears of it once."""
        if self.state == "lost":
            return
        self.state, self.reason = "lost", reason
        self._greeting.cancel()
        self._limit.close()
        self._channel.close()
        self._work = None
        self._host.left(self)

    def _received(self, body: bytes) -> None:
        if self.state == "starting":
            if body:
                self.leave(f"its first frame must be empty, has {len(body)} bytes")
            else:
                self.state = "ready"
                self._greeting.cancel()
                self._host.joined(self)
        elif self._work is None:
            self.leave(f"it sent a frame of {len(body)} bytes while it had no batch")
        else:
            try:
                reply = decode_reply(body, self._work.ids)
            except FrameError as error:
                self.leave(f"it sent {error}")
            else:
                self._finish(reply)

    def _finish(self, reply: Reply) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            self._limit.end()
            self._host.answered(self, work.events(reply, time.perf_counter() - self._began))

    def _too_long(self) -> None:
        work = self._work
        self._channel.receive_rest()  # what has arrived was in time
        if self._work is work and work is not None:
            self.leave(f"it was cut off because a batch ran longer than predict_timeout={self._predict_timeout}")


def _pid(end: socket.socket) -> int | None:
    """Return the process at the other end, where the system knows: of a Unix socket on Linux."""
    if end.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    pid: int = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    return pid or None
