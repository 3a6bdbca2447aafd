"""The way of an EmbeddingClient over ZeroMQ, in Weir's own dialect of bert-as-service's frames. Needs pyzmq.

A thread reads the answers; requests are sent from the threads of the callers, one at a time.
"""

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from queue import Empty, Full, Queue
from typing import Any
from urllib.parse import urlsplit

from weir.client.embedding_flights import Flight, Flights, Sending
from weir.client.embedding_transport import EncodeCall, Heard, Vectors
from weir.client.retrying import Retry
from weir.errors import Cancelled, DeadlineExceeded, InvalidRequest, SettingsError, WeirError
from weir.wire import zeromq
from weir.wire.zeromq import Answer, Wishes

try:
    import zmq
except ModuleNotFoundError as missing:
    raise SettingsError('tcp:// needs pyzmq, which is not installed: pip install "weir-serving[zmq]"') from missing

PORT = 5555
_HEARD = 1000  # answers to others that are kept for who listens
_QUEUED = 10_000  # messages that wait for a connection
_LINGER = 100  # ms that the last commands get to leave
_RECONNECT, _RECONNECT_MAX = 100, 1000  # ms


class ZeroMqTransport:
    """Asks the server at `url`, tcp://HOST:PORT, whose answers come from `port_out`. See EmbeddingTransport."""

    def __init__(self, url: str, *, identity: str, token: str | None, retry: Retry, port_out: int | None) -> None:
        host, port = _parsed(url)
        self._identity = identity.encode()
        if not 0 < len(self._identity) <= zeromq.MAX_IDENTITY or identity[0] == "\0":
            raise SettingsError(
                f"identity={identity!r:.80}: must be 1 to {zeromq.MAX_IDENTITY} bytes, the first not zero"
            )
        self._topic = zeromq.own_topic(self._identity)
        self._token = token
        self._url = url
        # Where other clients have the same identity, their numbers must be others.
        self._first = secrets.randbits(60)
        self._numbers = itertools.count(self._first)
        self._last = self._first
        self._flights = Flights(url, retry)
        self._lock = threading.RLock()  # around the sending sockets and the flights
        self._heard: Queue[Heard | None] | None = None
        self._closed = False
        self._open(f"tcp://{host}:{port}", f"tcp://{host}:{port_out or port + 1}")

    def _open(self, into: str, out: str) -> None:
        self._context = zmq.Context()
        self._sender = self._socket(zmq.PUSH, into)
        self._receiver = self._socket(zmq.SUB, out)
        self._receiver.subscribe(self._topic)
        self._waking = self._context.socket(zmq.PAIR)
        self._waking.bind("inproc://wake")
        self._woken = self._context.socket(zmq.PAIR)
        self._woken.connect("inproc://wake")
        self._sleeping_until: float | None = None  # None: until something is sent
        self._thread = threading.Thread(target=self._receive, name="weir-embedding-client", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.IPV6, 1)
        opened.setsockopt(zmq.LINGER, _LINGER if kind == zmq.PUSH else 0)
        opened.setsockopt(zmq.RECONNECT_IVL, _RECONNECT)
        opened.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX)
        opened.setsockopt(zmq.SNDHWM, _QUEUED)
        opened.setsockopt(zmq.RCVHWM, 0)  # answers under way are bounded by what was asked
        try:
            opened.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SettingsError(f"url={self._url!r}: {address} cannot be connected to: {error}") from None
        return opened

    # What is asked.

    def start(self, asked: EncodeCall, timeout: float) -> Future[Vectors]:
        """Send, and return what the answer will be in."""
        payload = zeromq.write_texts(asked.texts)
        wishes = Wishes(
            model=asked.model, priority=asked.priority, dimensions=asked.dimensions, truncate=asked.truncate, prompt=asked.prompt,
            tokens=asked.want_tokens,
        )  # fmt: skip
        future: Future[Vectors] = Future()
        answered = self._begin(payload, len(asked.texts), wishes, timeout)
        answered.add_done_callback(partial(_hand_over, future))
        future.add_done_callback(lambda ended: answered.cancel() if ended.cancelled() else None)
        return future

    def encode(self, asked: EncodeCall, timeout: float) -> Vectors:
        """Send, and return the answer."""
        answer: Vectors = self._wait(self.start(asked, timeout), timeout)
        return answer

    def config(self, timeout: float) -> dict[str, Any]:
        """Return the server's configuration."""
        return self._command(zeromq.SHOW_CONFIG, timeout)

    def status(self, timeout: float) -> dict[str, Any]:
        """Return the server's configuration and statistics."""
        return self._command(zeromq.SHOW_STATUS, timeout)

    def terminate(self, timeout: float) -> None:
        """Have the server end."""
        self._command(zeromq.TERMINATION, timeout)

    def _command(self, name: bytes, timeout: float) -> dict[str, Any]:
        answer = self._wait(self._begin(name, 0, Wishes(token=self._token), timeout), timeout)
        return answer.said.facts or {}

    def _begin(self, payload: bytes, size: int, wishes: Wishes, timeout: float) -> Future[Answer]:
        future: Future[Answer] = Future()
        now = time.monotonic()
        with self._lock:
            if self._closed:
                raise Cancelled("this client is closed")
            number = self._last = next(self._numbers)
            future.add_done_callback(partial(self._given_up, number))
            flight = Flight(payload, size, wishes, now + timeout, future, now)
            self._send([self._flights.add(number, flight, now)])
            until = self._flights.next()
            if until is not None and (self._sleeping_until is None or until < self._sleeping_until):
                self._sleeping_until = until
                self._waking.send(b"")
        return future

    def _wait(self, future: Future[Any], timeout: float) -> Any:
        try:
            return future.result(timeout)
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            future.cancel()
            raise self._flights.late() from None
        except BaseException:
            future.cancel()
            raise

    def _given_up(self, number: int, future: Future[Answer]) -> None:
        if future.cancelled():
            with self._lock:
                if self._flights.cancelled(number) and not self._closed:
                    self._send([Sending(zeromq.CANCEL, next(self._numbers), 0, Wishes(ids=[number]))])

    def _send(self, sendings: list[Sending]) -> None:
        for sending in sendings:
            frames = zeromq.write_ask(self._identity, sending.payload, sending.number, sending.size, sending.wishes)
            with contextlib.suppress(zmq.Again):  # no room: the server will not know it, and it is sent again then
                self._sender.send_multipart(frames, zmq.NOBLOCK)

    # What comes.

    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self._receiver, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll(self._sleep()))
            if self._woken in ready and self._woken.recv() == b"listen":
                self._receiver.subscribe(self._identity)
            if self._receiver in ready:
                self._take(self._receiver.recv_multipart())
        self._receiver.close()
        self._woken.close()

    def _sleep(self) -> int | None:
        """Do what is due; return the milliseconds until more is, None if nothing is under way."""
        now = time.monotonic()
        with self._lock:
            if self._closed:
                return 0
            if self._sleeping_until is not None and now >= self._sleeping_until:
                self._send(self._flights.due(now, next(self._numbers)))
            self._sleeping_until = self._flights.next()
            return None if self._sleeping_until is None else int(max(0.0, self._sleeping_until - now) * 1e3) + 1

    def _take(self, frames: list[bytes]) -> None:
        with contextlib.suppress(InvalidRequest):  # of a server of another kind, or a stranger's: not for us
            if frames[0] == self._topic:
                answer = zeromq.read_answer(frames)
                with self._lock:
                    self._send(self._flights.answered(answer, time.monotonic()))
                if not self._first <= answer.id <= self._last:
                    self._overhear(answer)
            elif frames[0] == self._identity and (stock := zeromq.read_stock_answer(frames)) is not None:
                self._overhear(stock)

    # What others are answered.

    def listen(self, timeout: float | None) -> Iterator[Heard]:
        """Yield the answers to other clients of this identity."""
        with self._lock:
            if self._heard is None:
                self._heard = Queue(_HEARD)
                self._waking.send(b"listen")
        return self._listened(self._heard, timeout)

    def _listened(self, heard: "Queue[Heard | None]", timeout: float | None) -> Iterator[Heard]:
        while True:
            try:
                answer = heard.get(timeout=timeout)
            except Empty:
                return
            if answer is None:
                return
            yield answer

    def _overhear(self, answer: Answer) -> None:
        if self._heard is not None and answer.vectors is not None:
            with contextlib.suppress(Full):
                self._heard.put_nowait(Heard(answer.id, answer.vectors, answer.said.tokens))

    def close(self) -> None:
        """End it. Idempotent."""
        with self._lock:
            if self._closed:
                return
            given_up = self._flights.end(Cancelled("this client was closed"))
            if given_up and self._flights.heard:
                self._send([Sending(zeromq.CANCEL, next(self._numbers), 0, Wishes(ids=given_up))])
            self._closed = True
            self._waking.send(b"")
        if self._heard is not None:
            with contextlib.suppress(Full):
                self._heard.put_nowait(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._waking.close()
        self._sender.close()
        self._context.term()


open_transport = ZeroMqTransport


def _hand_over(future: Future[Vectors], answered: Future[Answer]) -> None:
    if answered.cancelled() or not future.set_running_or_notify_cancel():
        return
    error = answered.exception()
    if error is not None:
        future.set_exception(error)
        return
    answer = answered.result()
    if answer.vectors is None:
        future.set_exception(WeirError("the server has answered something other than vectors"))
    else:
        said = answer.said
        future.set_result(Vectors(answer.vectors.copy(), said.truncated, said.tokens, said.foreign))


def _parsed(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port if parts.port is not None else PORT
    except ValueError as error:
        raise SettingsError(f"url={url!r}: {error}") from None
    if not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise SettingsError(f"url={url!r}: must be tcp://HOST:PORT")
    return (f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname), port
