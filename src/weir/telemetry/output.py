"""The outlets of log lines and recordings, which never block, fail or end a server, and the capture of what is written to stdout and stderr.

Nothing else writes to a descriptor of the log. Each outlet writes in a thread of its own, so a reader who is slow, stopped or gone, a full disk
and a hung file system cost lines, which are counted, and nothing else.
"""

import fcntl
import logging
import os
import pty
import selectors
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal, Self, TextIO

MOST_WAITING = 4 << 20  # bytes that wait for an outlet; what comes beyond is lost
PATIENCE = 2.0  # seconds that an outlet gets at the end to write what waits
TOGETHER = 0.005  # seconds after a write, in which lines gather for the next
_PIECE_BYTES = 64 << 10
_LONGEST_LINE = 256 << 10

# How many lines of this process were lost, by where they should have gone.
LOST = {"stdout": 0, "stderr": 0, "log_file": 0, "record": 0}

logger = logging.getLogger("weir")


class Outlet:
    """Passes what it is given to `write`, in order, in a thread of its own.

    `name` is a key of LOST. What cannot be written is lost, and logged once, until writing works again.
    """

    def __init__(self, name: str, write: Callable[[bytes], None], where: str) -> None:
        self._name = name
        self._write = write
        self._where = where
        self._waiting: list[bytes] = []
        self._size = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"weir-{name}", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Have `data` written soon. Never waits and never raises."""
        with self._changed:
            if self._closing.is_set() or self._size + len(data) > MOST_WAITING:
                LOST[self._name] += max(1, data.count(b"\n"))
                return
            self._waiting.append(data)
            self._size += len(data)
            self._changed.notify()

    def close(self) -> bool:
        """Write what waits, for PATIENCE seconds at most. Return whether the thread has ended, and `write` is not called any more."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        self._thread.join(PATIENCE)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while data := self._next():
            try:
                self._write(data)
            except OSError as error:
                LOST[self._name] += max(1, data.count(b"\n"))
                self._report(error)
            else:
                self._failed = False
            self._closing.wait(TOGETHER)

    def _next(self) -> bytes:
        """Return all that waits, as soon as there is something; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._size = 0
        return data

    def _report(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            logger.error("%s: cannot be written: %s", self._where, error.strerror)


class OutletHandler(logging.Handler):
    """Writes lines to an outlet. A line that cannot be formatted becomes one that says so."""

    def __init__(self, outlet: Outlet, formatter: logging.Formatter | None) -> None:
        super().__init__()
        self.outlet = outlet
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            line = self.format(record)
        except Exception as error:
            text = f"a line of {record.pathname}, line {record.lineno}, cannot be written: {error!r}"
            line = self.format(logging.LogRecord(record.name, logging.ERROR, "", 0, text, (), None))
        self.outlet.put(line.encode(errors="backslashreplace") + b"\n")


class StderrHandler(OutletHandler):
    """Writes to an outlet, or to what has taken the place of sys.stderr: a progress bar, while it is shown, writes lines above itself."""

    def __init__(self, outlet: Outlet, formatter: logging.Formatter | None) -> None:
        super().__init__(outlet, formatter)
        self._own = sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        if sys.stderr is self._own:
            super().emit(record)
        else:
            with suppress(OSError, ValueError):
                sys.stderr.write(self.format(record) + "\n")


class LogFile:
    """A file to which lines are appended. When it was renamed or removed, a new one takes its place, as programs that rotate logs expect it.

    Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = self._open()

    def write(self, data: bytes) -> None:
        """Append `data`. Raises OSError."""
        with suppress(OSError):  # without a new file, the old one is better than none
            if self._is_elsewhere():
                before, self._fd = self._fd, self._open()
                os.close(before)
        write_all(self._fd, data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _is_elsewhere(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return True


@contextmanager
def file_outlet(path: str) -> Iterator[Outlet]:
    """Give an outlet to the file at `path`. Raises OSError if it cannot be opened."""
    file = LogFile(path)
    outlet = Outlet("log_file", file.write, f"log_file={path!r}")
    try:
        yield outlet
    finally:
        if outlet.close():
            file.close()


def write_all(fd: int, data: bytes) -> None:
    """Write `data`, and wait as long as that takes. Raises OSError."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another program has made the descriptor that it shares with us non-blocking
            with selectors.DefaultSelector() as selector:
                selector.register(fd, selectors.EVENT_WRITE)
                selector.select()


@contextmanager
def standard_outlets() -> Iterator[dict[str, Outlet]]:
    """Give outlets to where stdout and stderr lead now, by name."""
    before = [os.dup(1), os.dup(2)]
    outlets = {
        name: Outlet(name, partial(write_all, fd), name) for name, fd in zip(("stdout", "stderr"), before, strict=True)
    }
    try:
        yield outlets
    finally:
        for outlet, fd in zip(outlets.values(), before, strict=True):
            if outlet.close():
                os.close(fd)


class Capture:
    """Takes what this process and its children write to the descriptors 1 and 2, while its block runs.

    They become pipes, which a thread always reads: nobody who prints ever waits, or fails because a reader has gone. What is read goes on,
    unchanged, to `outlets`. Each line also goes to `tell`, with the name of its stream; with `replaces`, to `tell` alone. Without `tell`, a
    descriptor that was a terminal becomes one.
    """

    def __init__(
        self, outlets: Mapping[str, Outlet], tell: Callable[[str, str], None] | None = None, *, replaces: bool = False
    ) -> None:
        self._outlets = outlets
        self._tell = tell
        self._replaces = replaces
        self._closing = False
        self._thread = threading.Thread(target=self._read, name="weir-output", daemon=True)

    def __enter__(self) -> Self:
        self._selector = selectors.DefaultSelector()
        self._wake, self._rouse = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        _flush()
        self._before = {number: os.dup(number) for number in (1, 2)}
        self._ours = [self._replace(number, name) for number, name in ((1, "stdout"), (2, "stderr"))]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        _flush()
        for number, before in self._before.items():
            os.dup2(before, number)
        self._closing = True
        os.write(self._rouse, b"x")
        self._thread.join()
        self._selector.close()
        for fd in (self._wake, self._rouse, *self._ours, *self._before.values()):
            os.close(fd)

    def _replace(self, number: int, name: str) -> int:
        """Have the descriptor `number` lead to us; return where we read."""
        terminal = _terminal_like(number) if self._tell is None else None
        read, write = terminal or os.pipe()
        os.set_blocking(read, False)
        os.dup2(write, number)
        os.close(write)
        self._selector.register(read, selectors.EVENT_READ, _Lines(name))
        return read

    def _read(self) -> None:
        while True:
            ready = [key for key, _ in self._selector.select() if key.data is not None]
            # At the end, read only what is there already: processes that were left behind may go on writing.
            if not sum(self._read_some(key.fd, key.data) for key in ready) and self._closing:
                break
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.data.rest:
                self._pass_on(key.data, [key.data.rest])

    def _read_some(self, fd: int, lines: "_Lines") -> bool:
        try:
            data = os.read(fd, _PIECE_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # the end of a terminal
            data = b""
        if not data:
            self._selector.unregister(fd)
        if not self._replaces:
            self._outlets[lines.stream].put(data)
        if self._tell is not None:
            self._pass_on(lines, lines.feed(data))
        return bool(data)

    def _pass_on(self, lines: "_Lines", found: Sequence[bytes]) -> None:
        for line in found:
            try:
                assert self._tell is not None
                self._tell(lines.stream, line.decode(errors="backslashreplace"))
            except Exception:  # the thread must not end: whoever prints would wait for ever
                LOST[lines.stream] += 1


class _Lines:
    """Divides what is written to a stream into lines; a very long line becomes several."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _LONGEST_LINE:
            lines, self.rest = [*lines, self.rest], b""
        return lines


def _terminal_like(fd: int) -> tuple[int, int] | None:
    """Return both ends of a terminal of the same size if `fd` is one: programs then write to it as before, with colours and progress bars."""
    if not os.isatty(fd):
        return None
    try:
        ours, theirs = pty.openpty()
    except OSError:  # the system has none left
        return None
    tty.setraw(theirs)  # the real one does what terminals do with lines
    with suppress(OSError):
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)))
    return ours, theirs


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def open_standard_descriptors() -> None:
    """Have the descriptors 0 to 2 lead to /dev/null where they are closed, as some supervisors start programs.

    Otherwise the next socket or file gets their number, and what anybody prints goes there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or _text(0, "r")
    sys.stdout = sys.stdout or _text(1, "w")
    sys.stderr = sys.stderr or _text(2, "w")


def _text(number: int, mode: Literal["r", "w"]) -> TextIO:
    return open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)
