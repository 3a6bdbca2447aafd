"""Starts the command `weir` by forking a process that has imported it already, as a process that behaves like one of `subprocess`.

To load Python and Weir takes half a second of processor time, and the tests start hundreds of servers. What a fork runs is `python -m weir`
all the same: its own directory, environment, arguments, output and exit code. An environment that means something to the interpreter or
to the loader of libraries needs an interpreter of its own: see `can_fork`.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO

# Read before the first line of Python runs, or by libraries when they are loaded.
_OF_THE_INTERPRETER = ("PYTHON", "LD_", "MALLOC_", "OPENBLAS_", "OMP_", "GRPC_", "SSL_")
# A program that is started ignores what its parent ignores.
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_LARGEST = 200_000  # bytes of a message: the arguments and the environment


def can_fork(env: Mapping[str, str]) -> bool:
    """Return whether a process with this environment may be forked from one with ours."""
    names = {*env, *os.environ}
    return all(env.get(name) == os.environ.get(name) for name in names if name.startswith(_OF_THE_INTERPRETER))


class Forked:
    """A process that runs `weir` with these arguments: what tests use of subprocess.Popen. It finds modules in `path`, too."""

    def __init__(
        self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, stdout: int = PIPE, stderr: int = PIPE,
        path: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.returncode: int | None = None
        self.stdout, out = _output(stdout)
        self.stderr, err = _output(stderr)
        self._status, theirs = socket.socketpair()
        ignored = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        message = json.dumps([list(arguments), dict(env), [str(cwd), *path], ignored]).encode()
        socket.send_fds(start(), [message], [out, err, theirs.fileno()])
        theirs.close()
        os.close(out)
        os.close(err)
        self.pid = int(self._read())

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, once it has ended."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired("weir", timeout)
            self.returncode = int(self._read())
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _read(self) -> bytes:
        read = self._status.recv(16)
        assert read, "the process that the tests fork servers from has ended"
        return read


@cache
def start() -> socket.socket:
    """Start the process that is forked, which loads Weir at the first request, and return what it listens to. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
    command = [sys.executable, __file__, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=DEVNULL, stdout=DEVNULL)
    process.returncode = 0  # nobody waits for it
    theirs.close()
    atexit.register(ours.close)
    return ours


def _output(wanted: int) -> tuple[IO[str] | None, int]:
    """Return what to read, and the descriptor that the process writes to. `wanted` is as for subprocess.Popen."""
    if wanted != PIPE:
        return None, os.open(os.devnull, os.O_WRONLY) if wanted == DEVNULL else os.dup(wanted)
    read, write = os.pipe()
    return os.fdopen(read), write


def _serve_forks(requests: socket.socket) -> None:
    """Fork a process for each of `requests`, and return in it, ready to run `weir`. Exit when the other end has closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the tests end first
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that shows the end of the process
    while True:
        for ready in select.select([requests.fileno(), *running], [], [])[0]:
            if ready in running:
                pid, status = running.pop(ready)
                os.close(ready)
                status.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                status.close()
                continue
            message, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, 3)
            if not message:
                os._exit(0)
            _load()
            pid = os.fork()
            if not pid:
                requests.close()
                for descriptor, (_, other) in running.items():
                    os.close(descriptor)
                    other.close()
                _become(*json.loads(message), *descriptors)
                return
            status = socket.socket(fileno=descriptors.pop())
            status.send(str(pid).encode())
            running[os.pidfd_open(pid)] = pid, status
            for descriptor in descriptors:
                os.close(descriptor)


@cache
def _load() -> None:
    """Load what a server loads, but nothing of a model or a library that is optional."""
    for name in ("weir.console", "weir.commands.options", "weir.frontends.websocket", "weir.catalog.loading"):
        import_module(name)
    with suppress(ImportError):  # not every environment of the tests has what texts need
        import_module("weir.text_server.server")
    # As in the process of the tests: see conftest.py.
    import_module("weir.tuning").SolvingProcess.__init__.__defaults__ = (0,)
    gc.collect()
    gc.freeze()  # the collector would write into each page, and so copy it


def _become(
    arguments: list[str], env: dict[str, str], path: list[str], ignored: list[int], out: int, err: int, status: int
) -> None:
    for given, own in ((out, 1), (err, 2)):
        os.dup2(given, own)
    for given in (out, err, status):
        os.close(given)
    for number in _SIGNALS:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else usual)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(path[0])
    sys.path[:1] = path
    sys.argv[1:] = arguments


if __name__ == "__main__":
    _serve_forks(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("weir", run_name="__main__", alter_sys=True)
