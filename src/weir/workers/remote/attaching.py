"""The worker's side of the lock-step protocol: a model that attaches to a server elsewhere, and attaches again when it is lost."""

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType

from weir.errors import UnsupportedMediaType, WeirError
from weir.messages import JSON, Batch
from weir.wire.frames import FrameError
from weir.wire.lockstep import ASK, LockstepParser, decode_jobs, encode_reply
from weir.wire.values import ENCODE
from weir.workers.run.runner import Runner
from weir.workers.settings import WorkerAddress

FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0
RECEIVE_BYTES = 256 << 10
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


class _Leave(BaseException):
    """A signal came while there was no batch."""


class Attachment:
    """Runs a started Runner for the server at `address`, until a signal. Bodies are of `content_type`, and so are answers.

    `tell` hears, as a line of text, when it has attached and when it is lost. It then waits 0.1 s before it tries again,
    twice as long each time, at most 5 s; a batch makes it forget that.
    """

    def __init__(self, runner: Runner, address: WorkerAddress, content_type: str, tell: Callable[[str], None]) -> None:
        self._runner = runner
        self._address = address
        self._content_type = content_type
        self._tell = tell
        self._wait = FIRST_WAIT
        self._batches = 0
        self._leaving = False
        self._busy = False

    def run(self) -> None:
        """Serve until a signal (SIGNALS); a batch that has come is answered first. For the main thread of a program."""
        with _handled(self._signalled), contextlib.suppress(_Leave):
            while not self._leaving:
                try:
                    self._serve_once()
                except (OSError, FrameError) as error:
                    self._tell(f"{self._address}: {error}; trying again in {self._wait:g} s")
                self._pause()

    def _pause(self) -> None:
        self._busy = False
        if not self._leaving:
            time.sleep(self._wait)
            self._wait = min(2 * self._wait, LONGEST_WAIT)

    def _serve_once(self) -> None:
        with self._connected() as end:
            end.sendall(ASK)
            self._tell(f"{self._address}: attached")
            parser = LockstepParser()
            while not self._leaving:
                end.sendall(self._answer(self._next(end, parser)))
                self._busy = False

    def _next(self, end: socket.socket, parser: LockstepParser) -> bytes:
        while True:
            data = end.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._busy = True  # a batch that has begun to come is answered
            for body in parser.feed(data):
                return body  # lock-step: there is one

    def _answer(self, body: bytes) -> bytes:
        jobs = decode_jobs(body)
        self._wait = FIRST_WAIT
        self._batches += 1
        batch = Batch(self._batches, list(jobs.values()), self._content_type, self._content_type)
        outputs = self._runner.compute(self._runner.prepare(batch)).outputs
        failed = [key for key, output in zip(jobs, outputs, strict=True) if isinstance(output, WeirError)]
        return encode_reply({key: _body(output) for key, output in zip(jobs, outputs, strict=True)}, failed)

    def _connected(self) -> socket.socket:
        if not self._address.path:
            return socket.create_connection((self._address.host, self._address.port))
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(self._address.path)
        except BaseException:
            end.close()
            raise
        return end

    def _signalled(self) -> None:
        self._leaving = True
        if not self._busy:
            raise _Leave


def _body(output: bytes | WeirError) -> bytes:
    """Return an answer's body; of an error, the document that a server of Weir's makes an error of again."""
    if not isinstance(output, WeirError):
        return output
    said = {"type": _nearest(output), "message": output.message, "details": output.details}
    try:
        return ENCODE[JSON]({"error": said})
    except (TypeError, ValueError, OverflowError, RecursionError):
        return ENCODE[JSON]({"error": {**said, "details": None}})


def _nearest(error: WeirError) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == UnsupportedMediaType.__module__)


@contextlib.contextmanager
def _handled(act: Callable[[], None]) -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None:
        act()

    kept = (number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)  # nohup has one ignored
    before = {number: signal.signal(number, handler) for number in kept}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
