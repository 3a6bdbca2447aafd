"""The socket that external workers attach to."""

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable

from weir.errors import SettingsError
from weir.workers.address import WorkerAddress

BACKLOG = 128
TRY_AGAIN = 1.0  # seconds until connections are accepted again, when the system had no descriptor left
# A host that is gone is noticed after about half a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class WorkerSocket:
    """Listens at an address, and hands each connection to `on_connection`, non-blocking."""

    def __init__(self, address: WorkerAddress, on_connection: Callable[[socket.socket], None]) -> None:
        self.address = address
        self._on_connection = on_connection
        self._socket: socket.socket | None = None
        self._inode: tuple[int, int] | None = None
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Listen. Raises SettingsError if the address cannot be had. A Unix socket is for its owner only."""
        self._loop = asyncio.get_running_loop()
        try:
            self._socket = _bound_path(self.address.path) if self.address.path else _bound_port(self.address)
        except OSError as error:
            why = f"worker_socket={self.address}: cannot be had: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                why += " (a model with external workers that runs already is unloaded before it is loaded again)"
            raise SettingsError(why) from error
        if self.address.path:
            self._inode = _inode(self.address.path)
        else:
            self.address = self.address._replace(port=self._socket.getsockname()[1])
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Listen no more, and take the path away. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        if self.address.path and self._inode == _inode(self.address.path):
            os.unlink(self.address.path)

    def _accept(self) -> None:
        if self._socket is None:
            return
        try:
            end, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            self._loop.remove_reader(self._socket.fileno())
            self._timer = self._loop.call_later(TRY_AGAIN, self._accept_again)
            return
        end.setblocking(False)
        if end.family != socket.AF_UNIX:
            _tune(end)
        self._on_connection(end)

    def _accept_again(self) -> None:
        if self._socket is not None:
            self._loop.add_reader(self._socket.fileno(), self._accept)


def _tune(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _bound_port(address: WorkerAddress) -> socket.socket:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(found[0], socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(found[4])
    except BaseException:
        made.close()
        raise
    return made


def _bound_path(path: str) -> socket.socket:
    _remove_stale(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(path)
        os.chmod(path, 0o600)  # before anybody can connect: it does not listen yet
    except BaseException:
        made.close()
        raise
    return made


def _remove_stale(path: str) -> None:
    """Remove a socket that a dead server has left there."""
    if not (os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode)):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def _inode(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None
