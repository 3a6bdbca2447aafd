"""One worker process, seen from the server: from its start until it has been reaped.

Nothing here waits for the process: it may be stopped, or in uninterruptible sleep, and so may the template that it is forked from.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, Protocol

from weir.wire.frames import Frame, FrameParser, Free, Start, encode_control
from weir.workers.arena import ResultFetch, Results, create_memory
from weir.workers.process.channel import Channel
from weir.workers.process.entry import hurry
from weir.workers.process.launch import KILL_GRACE, Launch, Process

# Seconds after the end of its channel until a process that still runs is killed: it is of no use, but one that is just ending needs a moment.
END_GRACE = 1.0

logger = logging.getLogger("weir")


class ChildListener(Protocol):
    """What a Child reports to, on the loop's thread."""

    def received(self, frame: Frame) -> None:
        """A frame has come."""

    def refused(self, error: OSError) -> None:
        """The system has refused a process. Nothing is left behind."""

    def exited(self, reason: str) -> None:
        """The process has ended and was reaped, its last frames have been passed on, and its resources are freed.

        Or it is still running after it was killed: nothing more comes from it, and it is reaped and freed when it ends.
        """


class ChannelWithResults:
    """What one worker is sent, and what comes from it: its channel, once there is one, and its arena of results, if it has one."""

    def __init__(self) -> None:
        self._channel: Channel[Frame] | None = None
        self._results: Results | None = None

    @property
    def held_bytes(self) -> int:
        """How many bytes of its arena hold results that have not been released."""
        return 0 if self._results is None else self._results.held_bytes

    def send(self, frame: bytearray) -> None:
        """Send `frame`, and before it the places of the results that were released."""
        freed = self._results.take_freed() if self._results is not None else None
        if self._channel is not None:
            self._channel.send(encode_control(Free(freed)) + frame if freed else frame)

    def receive(self) -> None:
        """Pass on the frames that have arrived, without waiting for the loop to notice."""
        if self._channel is not None:
            self._channel.receive_rest()

    def _make_results(self, launch: Launch) -> int:
        """Make the arena of results; return its descriptor, which the worker needs; -1 if there is none. Raises OSError."""
        if not launch.result_bytes:
            return -1
        fd = create_memory(f"weir-results-{launch.name}-{launch.index}", launch.result_bytes)
        try:
            self._results = Results(fd, launch.result_bytes)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _make_parser(self, *, lends: bool) -> FrameParser:
        if self._results is None:
            return FrameParser(None)
        if not lends:
            return FrameParser(ResultFetch(self._results))
        from weir.workers.run.tensors import lease  # needs numpy, which other models' workers and servers do without

        return FrameParser(ResultFetch(self._results, lease))

    def _close_ours(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._results is not None:
            self._results.close()


class Child(ChannelWithResults):
    """A worker process. Its `owner` is notified of its frames and its end."""

    def __init__(
        self, launch: Launch, owner: ChildListener, loop: asyncio.AbstractEventLoop, niceness: int = 0
    ) -> None:
        super().__init__()
        self._launch = launch
        self._niceness = niceness  # while it loads
        self._owner = owner
        self._loop = loop
        self._reason = ""
        self._killed = False
        self._reported = False  # the owner knows of its end
        self._starts = False  # a thread is starting it, which ends with a process or with an error
        self._timer: asyncio.TimerHandle | None = None  # until the next step towards its end
        self._process: Process | None = None
        self._pidfd = -1
        self._inherited: tuple[socket.socket, int]  # its socket and the descriptor of its arena, or -1

    @property
    def pid(self) -> int | None:
        """The process id, also that of its process group; None while it is being started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, at once or soon. The owner is notified if the system refuses."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._owner.refused(error)
            return
        self._inherited = theirs, -1
        try:
            self._inherited = theirs, self._make_results(self._launch)
        except OSError as error:
            ours.close()
            self._refused(error)
            return
        parser = self._make_parser(lends=self._launch.lends)
        self._channel = Channel(ours, parser, self._owner.received, self._channel_ended)
        end, result_fd = self._inherited
        if not self._launch.fork(end.fileno(), result_fd, self._niceness, self._forked):
            self._spawn()

    def kill(self, reason: str = "") -> None:
        """Kill the process and all that it started, now. `exited` is still called, with `reason` if that was the cause: when it has ended, or
        KILL_GRACE seconds later."""
        self._reason = self._reason or reason
        if not self._killed:
            self._killed = True
            self._set_timer(KILL_GRACE if self._starts or self._process is not None else 0.0, self._stays)
            if self._process is not None:
                hurry(self._process.pid)
        self._signal()

    def _spawn(self) -> None:
        theirs, result_fd = self._inherited
        self._starts = True
        self._launch.spawn(theirs.fileno(), result_fd, self._niceness, self._forked)

    def _forked(self, process: Process | OSError | None) -> None:
        self._starts = False
        if isinstance(process, OSError):
            self._refused(process)
        elif process is not None:
            self._began(process)
        elif self._killed:
            self._refused(ProcessLookupError())
        else:
            self._spawn()

    def _began(self, process: Process) -> None:
        self._process = process
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            self._signal()
            process.reap(lambda _: None)
            self._refused(error)
            return
        self._close_inherited()
        self._loop.add_reader(self._pidfd, self._exited)
        if self._killed:  # while it was being started
            self._signal()
        elif self._channel is not None:
            self._channel.open(self._loop)
            self._channel.send(encode_control(Start(self._launch.source, self._launch.options())))

    def _refused(self, error: OSError) -> None:
        self._close_inherited()
        self._free()
        if not self._reported:
            self._reported = True
            self._owner.refused(error)

    def _signal(self) -> None:
        if self._process is not None:
            for end in (os.killpg, os.kill):  # both: the model may have moved the process to another group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    end(self._process.pid, signal.SIGKILL)

    def _channel_ended(self, reason: str) -> None:
        self._set_timer(END_GRACE, self.kill, f"it was ended because {reason}")

    def _exited(self) -> None:
        assert self._process is not None
        self._loop.remove_reader(self._pidfd)
        # Until it is reaped, its process id and group belong to it: no other process can be killed.
        self._signal()
        self._set_timer(END_GRACE, self._reaped, None)  # the template that reaps it may hang
        self._process.reap(self._reaped)

    def _reaped(self, code: int | None) -> None:
        if self._pidfd < 0:
            return
        if not self._reported:
            self.receive()
        self._free()
        self._report("it has ended" if code is None else self._cause(code))

    def _stays(self) -> None:
        if self._process is None:
            self._report("it was ended before it had started")
            return
        logger.warning(
            "process %d, worker %d of %r, is still running after it was killed, and is left behind",
            self._process.pid,
            self._launch.index,
            self._launch.name,
        )
        self._close_ours()  # nothing that it sends is read any more
        why = f" ({self._reason})" if self._reason else ""
        self._report(f"it was killed{why} and does not end: process {self._process.pid} is left behind")

    def _report(self, reason: str) -> None:
        if not self._reported:
            self._reported = True
            self._owner.exited(reason)

    def _set_timer(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, act, *arguments)

    def _free(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._close_ours()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _close_inherited(self) -> None:
        theirs, result_fd = self._inherited
        theirs.close()
        if result_fd >= 0:
            os.close(result_fd)

    def _cause(self, code: int) -> str:
        if code >= 0:
            return f"it exited with code {code}"
        if code == -signal.SIGKILL and self._reason:
            return self._reason
        hint = ", killed from outside or out of memory" if code == -signal.SIGKILL else ""
        return f"it was ended by signal {-code} ({signal.strsignal(-code)}{hint})"
