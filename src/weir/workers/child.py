"""One worker process, seen from the server: from its start until it has been reaped."""

import asyncio
import contextlib
import os
import signal
import socket
from typing import Protocol

from weir.wire.frames import Frame, FrameParser, Free, Start, encode_control
from weir.workers.arena import Results, create_memory
from weir.workers.channel import Channel
from weir.workers.launch import Launch
from weir.workers.places import ResultFetch
from weir.workers.template import Process

# A process whose channel has ended but that lives on is of no use; one that is just dying needs a moment to be gone.
END_GRACE = 1.0


class Owner(Protocol):
    """Hears from a Child, on the loop's thread."""

    def received(self, frame: Frame) -> None:
        """A frame came."""

    def exited(self, reason: str) -> None:
        """The process is gone and reaped, its last frames have been handed on, and what it had is freed."""


class Child:
    """A process with its channel and its results."""

    def __init__(self, launch: Launch, owner: Owner, loop: asyncio.AbstractEventLoop, niceness: int = 0) -> None:
        self._launch = launch
        self._niceness = niceness  # while it loads
        self._owner = owner
        self._loop = loop
        self._reason = ""
        self._end_timer: asyncio.TimerHandle | None = None
        self._results: Results | None = None
        self._pidfd = -1
        self._popen: Process
        self._channel: Channel[Frame]

    @property
    def pid(self) -> int:
        """The process's number, also that of its process group."""
        return self._popen.pid

    @property
    def held_bytes(self) -> int:
        """How much of its arena is taken by results that nobody has released yet."""
        return 0 if self._results is None else self._results.held_bytes

    def start(self) -> None:
        """Start the process. Raises OSError when the system refuses; nothing is left behind then."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._popen = self._start(theirs)
            self._pidfd = self._open_pidfd()
        except BaseException:
            ours.close()
            self._close_results()
            raise
        fetch = None if self._results is None else ResultFetch(self._results, lends=self._launch.lends)
        self._channel = Channel(ours, FrameParser(fetch), self._owner.received, self._channel_ended)
        self._channel.open(self._loop)
        self._loop.add_reader(self._pidfd, self._exited)
        self._channel.send(encode_control(Start(self._launch.source, {}, self._launch.options())))

    def send(self, frame: bytearray) -> None:
        """Send `frame`, and before it the names of the results that have been read."""
        freed = self._results.take_freed() if self._results is not None else None
        self._channel.send(encode_control(Free(freed)) + frame if freed else frame)

    def receive(self) -> None:
        """Hand on what has arrived, without waiting for the loop to notice."""
        self._channel.receive_rest()

    def kill(self, reason: str = "") -> None:
        """End the process and all that it started, now. `exited` is still called, with `reason` if that was the cause."""
        self._reason = self._reason or reason
        for end in (os.killpg, os.kill):  # both: the model may have moved to another group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)

    def abort(self) -> None:
        """End and reap the process and free all it had before returning. `exited` is not called."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._pidfd)
        self._reap()
        self._free()

    def _start(self, theirs: socket.socket) -> Process:
        if not self._launch.result_bytes:
            return self._launch.start(theirs.fileno(), -1, self._niceness)
        result_fd = create_memory(f"weir-results-{self._launch.name}-{self._launch.index}", self._launch.result_bytes)
        try:
            self._results = Results(result_fd, self._launch.result_bytes)
            return self._launch.start(theirs.fileno(), result_fd, self._niceness)
        finally:
            os.close(result_fd)

    def _open_pidfd(self) -> int:
        try:
            return os.pidfd_open(self.pid)
        except OSError:
            self._reap()
            raise

    def _channel_ended(self, reason: str) -> None:
        self._end_timer = self._loop.call_later(END_GRACE, self.kill, f"it was ended because {reason}")

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._reap()
        self._channel.receive_rest()
        self._free()
        self._owner.exited(self._cause(self._popen.returncode))

    def _reap(self) -> None:
        # Until it is reaped its number is its own, and that of its group: nobody else can be hit.
        self.kill()
        self._popen.wait()

    def _free(self) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._channel.close()
        self._close_results()
        os.close(self._pidfd)

    def _close_results(self) -> None:
        if self._results is not None:
            self._results.close()

    def _cause(self, code: int) -> str:
        if code >= 0:
            return f"it exited with code {code}"
        if code == -signal.SIGKILL and self._reason:
            return self._reason
        hint = ", killed from outside or out of memory" if code == -signal.SIGKILL else ""
        return f"it was ended by signal {-code} ({signal.strsignal(-code)}{hint})"
