"""A client that speaks as bert-serving-client does, over ZeroMQ. Needs pyzmq.

`weir embed benchmark --zmq` and `weir embed terminate --ip` ask with it. Programs use EmbeddingClient, which speaks HTTP, or bert-serving-client
itself.
"""

import itertools
import threading
import time
import uuid
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy

from weir.client.calls import Unreachable, error_of_status
from weir.client.embedding import EncodeCall, Vectors
from weir.embedding.bert_as_service.frames import SHOW_CONFIG, SHOW_STATUS, TERMINATION, encode_json
from weir.errors import Cancelled, DeadlineExceeded, SettingsError, Unsupported, WeirError

_LOOK_MS = 50  # between two looks at whether a request is too late
_LINGER_MS = 1000  # that the last messages get to leave


class _Pending(NamedTuple):
    future: "Future[Any]"
    deadline: float


class BertTransport:
    """Asks the server at `host`, whose requests go to `port` and whose answers come from `port_out`. An EmbeddingTransport without choices:
    bert-as-service has no word for a model, a priority or a prompt, nor for a deadline: what is too late fails here, and is computed there."""

    def __init__(self, host: str, port: int, port_out: int | None = None, *, identity: str | None = None) -> None:
        """Connect; `identity` is whom the server counts, by default a new one. Raises SettingsError where pyzmq is not installed, or the address cannot be."""
        try:
            import zmq
        except ModuleNotFoundError:
            raise SettingsError('ZeroMQ needs pyzmq, which is not installed: pip install "weir-serving[zmq]"') from None
        self._where = f"tcp://{f'[{host}]' if ':' in host else host}"
        self._identity = (identity or uuid.uuid4().hex).encode()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()  # around the sending socket and what is pending
        self._closed = self._heard = False
        self._context = zmq.Context()
        self._sender, self._receiver = self._context.socket(zmq.PUSH), self._context.socket(zmq.SUB)
        try:
            for socket, number in ((self._sender, port), (self._receiver, port_out or port + 1)):
                socket.setsockopt(zmq.IPV6, 1)
                socket.setsockopt(zmq.LINGER, _LINGER_MS if socket is self._sender else 0)
                socket.connect(f"{self._where}:{number}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SettingsError(f"{self._where}:{port}: cannot be connected to: {error}") from None
        self._receiver.subscribe(self._identity)
        self._thread = threading.Thread(target=self._receive, name="weir-bert-client", daemon=True)
        self._thread.start()

    def encode(self, asked: EncodeCall, timeout: float) -> Vectors:
        """Return the answer."""
        return self.start(asked, timeout).result()

    def start(self, asked: EncodeCall, timeout: float) -> "Future[Vectors]":
        """Send, and return what the answer will be in."""
        if asked._replace(texts=[], want_tokens=False) != EncodeCall([]):
            raise Unsupported(
                "over ZeroMQ requests name no model, priority, dimensions or prompt: EmbeddingClient does, over HTTP"
            )
        texts = [" ||| ".join(text) if isinstance(text, tuple) else text for text in asked.texts]
        return self._ask(encode_json(texts), len(texts), timeout)

    def config(self, timeout: float) -> dict[str, Any]:
        """Return the server's configuration."""
        facts: dict[str, Any] = self._ask(SHOW_CONFIG, 0, timeout).result()
        return facts

    def status(self, timeout: float) -> dict[str, Any]:
        """Return the server's configuration and statistics."""
        facts: dict[str, Any] = self._ask(SHOW_STATUS, 0, timeout).result()
        return facts

    def terminate(self, timeout: float) -> None:
        """Have the server finish what it has accepted, and end. It must be on this machine, and have no control token: there is no place for one here."""
        self.config(timeout)  # an answer shows that the server hears this client, and this client the server
        self._ask(TERMINATION, 0, timeout).result()

    def close(self) -> None:
        """End it: what is under way fails with Cancelled. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._thread.join()
        self._end(list(self._pending), Cancelled("this client was closed"))
        self._sender.close()
        self._context.term()

    def _ask(self, payload: bytes, size: int, timeout: float) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise Cancelled("this client is closed")
            number = next(self._numbers)
            self._pending[number] = _Pending(future, time.monotonic() + timeout)
            self._sender.send_multipart([self._identity, payload, b"%d" % number, b"%d" % size])
        return future

    def _receive(self) -> None:
        while not self._closed:
            if self._receiver.poll(_LOOK_MS):
                self._take(self._receiver.recv_multipart())
            now = time.monotonic()
            with self._lock:
                late = [number for number, pending in self._pending.items() if now >= pending.deadline]
            if late:
                known = "no answer in time" + ("" if self._heard else ", to anything: does a server listen there?")
                self._end(late, (DeadlineExceeded if self._heard else Unreachable)(f"{self._where}: {known}"))
        self._receiver.close()

    def _take(self, frames: list[bytes]) -> None:
        if frames[0] != self._identity or not frames[-1].isdigit():
            return  # another client's, whose identity begins with this one's
        self._heard = True
        with self._lock:
            pending = self._pending.pop(int(frames[-1]), None)
        if pending is None:
            return
        with suppress(InvalidStateError):  # it has been cancelled
            try:
                pending.future.set_result(_read(frames))
            except WeirError as error:
                pending.future.set_exception(error)

    def _end(self, numbers: list[int], error: WeirError) -> None:
        for number in numbers:
            with self._lock:
                pending = self._pending.pop(number, None)
            if pending is not None:
                with suppress(InvalidStateError):
                    pending.future.set_exception(error)


def _read(frames: list[bytes]) -> Any:
    """Return vectors or facts. Raises the error that the server answers, and WeirError for what is no answer."""
    try:
        head = msgspec.json.decode(frames[1])
        if error := head.get("error"):
            raise error_of_status(
                error["status"], error["message"], name=error["type"], retry_after=error.get("retry_after")
            )
        if len(frames) == 3:
            return head
        vectors = numpy.frombuffer(frames[2], head["dtype"]).reshape(head["shape"])
        return Vectors(vectors.copy(), (), head["tokens"] or None)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise WeirError(f"the server has answered something other than vectors: {error}") from None
