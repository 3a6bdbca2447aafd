"""A ZeroMQ client with the protocol of bert-serving-client. It needs pyzmq.

`weir embed benchmark --zmq` and `weir embed terminate --ip` use it. Programs should use EmbeddingClient, which uses HTTP, or bert-serving-client
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
from weir.errors import Cancelled, DeadlineExceeded, SettingsError, Unsupported, WeirError, add_extra
from weir.text_server.bert_as_service.frames import SHOW_CONFIG, SHOW_STATUS, TERMINATION, encode_json

_POLL_MS = 50  # between two checks for requests whose deadline has passed
_LINGER_MS = 1000  # that the last messages get to leave when the client is closed


class _Pending(NamedTuple):
    future: "Future[Any]"
    deadline: float


class BertTransport:
    """An EmbeddingTransport that sends requests to `port` of `host` and receives responses from `port_out`, by default the next port.

    A request of bert-as-service cannot state a model, a priority, a prompt or a deadline. A request that is too late fails here, and the server
    computes it all the same.
    """

    def __init__(self, host: str, port: int, port_out: int | None = None, *, identity: str | None = None) -> None:
        """Connect as the client `identity`, by default a new random one. Raises SettingsError if pyzmq is missing or the address is invalid."""
        try:
            import zmq
        except ModuleNotFoundError:
            raise SettingsError(f"ZeroMQ needs pyzmq, which is not installed; {add_extra('zmq')}") from None
        self._where = f"tcp://{f'[{host}]' if ':' in host else host}"
        self._identity = (identity or uuid.uuid4().hex).encode()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()  # guards the sending socket and `_pending`
        self._closed = self._has_received = False
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

    def encode(self, call: EncodeCall, timeout: float) -> Vectors:
        """Send the call and return its response. Raises what `start` raises, and the error of the response."""
        return self.start(call, timeout).result()

    def start(self, call: EncodeCall, timeout: float) -> "Future[Vectors]":
        """Send the call, and return a future of the response. After `timeout` seconds the future fails with DeadlineExceeded, or with Unreachable if
        the server has never answered.

        Raises Unsupported if the call states more than texts and `want_tokens`, and Cancelled if the client is closed.
        """
        if call._replace(texts=[], want_tokens=False) != EncodeCall([]):
            rule = "over ZeroMQ requests name no model, priority, dimensions, prompt or images: EmbeddingClient does, over HTTP"
            raise Unsupported(rule)
        texts = [" ||| ".join(text) if isinstance(text, tuple) else text for text in call.texts]
        return self._send(encode_json(texts), len(texts), timeout)

    def config(self, timeout: float) -> dict[str, Any]:
        """Return the server's configuration."""
        facts: dict[str, Any] = self._send(SHOW_CONFIG, 0, timeout).result()
        return facts

    def status(self, timeout: float) -> dict[str, Any]:
        """Return the server's configuration and statistics."""
        facts: dict[str, Any] = self._send(SHOW_STATUS, 0, timeout).result()
        return facts

    def terminate(self, timeout: float) -> None:
        """Make the server finish what it has accepted, and end. It must run on this machine without a control token, which ZeroMQ cannot send."""
        self.config(timeout)  # a response shows that both connections are established
        self._send(TERMINATION, 0, timeout).result()

    def close(self) -> None:
        """Close the connections. Requests under way fail with Cancelled. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._thread.join()
        self._fail(list(self._pending), Cancelled("this client was closed"))
        self._sender.close()
        self._context.term()

    def _send(self, payload: bytes, size: int, timeout: float) -> "Future[Any]":
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
            if self._receiver.poll(_POLL_MS):
                self._deliver(self._receiver.recv_multipart())
            now = time.monotonic()
            with self._lock:
                late = [number for number, pending in self._pending.items() if now >= pending.deadline]
            if late:
                late_error = DeadlineExceeded(f"{self._where}: no response in time")
                silence = Unreachable(f"{self._where}: no response in time, to anything: does a server listen there?")
                self._fail(late, late_error if self._has_received else silence)
        self._receiver.close()

    def _deliver(self, frames: list[bytes]) -> None:
        if frames[0] != self._identity or not frames[-1].isdigit():
            return  # a response to another client, whose identity begins with this one
        self._has_received = True
        with self._lock:
            pending = self._pending.pop(int(frames[-1]), None)
        if pending is None:
            return
        with suppress(InvalidStateError):  # the caller has cancelled the future
            try:
                pending.future.set_result(_read(frames))
            except WeirError as error:
                pending.future.set_exception(error)

    def _fail(self, numbers: list[int], error: WeirError) -> None:
        for number in numbers:
            with self._lock:
                pending = self._pending.pop(number, None)
            if pending is not None:
                with suppress(InvalidStateError):
                    pending.future.set_exception(error)


def _read(frames: list[bytes]) -> Any:
    """Return the vectors or the facts of a response. Raises the error that the response holds, and WeirError if it is not a valid answer."""
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
