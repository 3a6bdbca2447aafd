"""The process that the workers of a model are forked from, seen from the server.

It has imported the model and called `load_shared`. What it has loaded is every worker's, and lies in memory once, for as long as nobody writes to it. It has one
thread, and does nothing but fork and reap, as it is told.
"""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from weir.wire.frames import Start, encode_control

# Forking and reaping take milliseconds. What takes longer hangs, and is given up.
PATIENCE = 10.0
READY = b"1"


class Process(Protocol):
    """What the server needs of a process that it has started, by itself or from a template."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> Any:
        """What it ended with, once `wait` has returned."""

    def wait(self) -> Any:
        """Return when it has ended and has been reaped."""


class Template:
    """Forks workers, once `start` has returned True."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process's number, while there is one."""
        return None if self._popen is None else self._popen.pid

    async def start(self, start: Start, environment: dict[str, str], niceness: int) -> bool:
        """Start the process, and have it load what is shared. Return whether it has; if not, it has said why on stderr.

        Called on the thread that is to outlive it. Raises OSError when the system refuses.
        """
        ours = self._spawn((start.options["name"], os.getpid(), niceness), environment)
        loop = asyncio.get_running_loop()
        ours.setblocking(False)
        try:
            await loop.sock_sendall(ours, encode_control(start))
            loaded = await loop.sock_recv(ours, 1) == READY
        except ConnectionError:
            loaded = False
        if not loaded:
            self.close()
            return False
        ours.settimeout(PATIENCE)
        return True

    def fork(self, arguments: dict[str, Any], descriptors: Sequence[int]) -> "Forked | None":
        """Return a new process that is told `arguments` and has the descriptors; None if there is no template any more.

        Raises OSError when the system refuses.
        """
        answer = self._ask({"fork": arguments}, descriptors)
        if answer is None:
            return None
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        return Forked(int(answer), self)

    def reap(self, pid: int) -> int | None:
        """Wait until the process `pid` has ended; return its code. None if there is no template any more, and so nobody has it."""
        return self._ask({"reap": pid}, ())

    def close(self) -> None:
        """End the process; those that came of it end with it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
            self._popen = None

    def _spawn(self, described: tuple[Any, ...], environment: dict[str, str]) -> socket.socket:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "weir.workers.forking", *map(str, described), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()], process_group=0,
            )  # fmt: skip
        return self._socket

    def _ask(self, question: dict[str, Any], descriptors: Sequence[int]) -> int | None:
        if self._socket is None:
            return None
        try:
            socket.send_fds(self._socket, [json.dumps(question).encode()], descriptors)
            answer = self._socket.recv(32)
            return int(answer)
        except (OSError, ValueError):  # it is gone, or hangs
            self.close()
            return None


class Forked:
    """A process that came of a template: what subprocess.Popen is for others."""

    def __init__(self, pid: int, template: Template) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template
        self._pidfd = os.pidfd_open(pid)

    def wait(self) -> int:
        """Return the process's code once it is gone."""
        if self.returncode is not None:
            return self.returncode
        code = self._template.reap(self.pid)
        if code is None:  # the kernel kills it with its template, and init reaps it
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            ended.poll()
            code = -signal.SIGKILL
        os.close(self._pidfd)
        self.returncode = code
        return code
