"""How an EmbeddingClient speaks HTTP: POST /encode with the vectors as bytes, /status, /terminate."""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from threading import Lock
from typing import Any

import msgspec
import numpy

from weir.client import failures
from weir.client.blocking_http import Connections
from weir.client.embedding_transport import EncodeCall, Heard, Vectors, not_unicode
from weir.client.failures import Unreachable
from weir.client.http_calls import HttpReply, HttpRequest
from weir.client.retrying import NEVER, Retry
from weir.errors import Cancelled, CapacityError, InvalidRequest, SettingsError, Unsupported, WeirError

_FOREIGN = "x-weir-foreign-ids"  # how many texts came as token ids of another tokenizer
_MSGPACK = "application/msgpack"
_LEAST = 0.001  # seconds that a request gets that is sent again at its deadline: 0 would be an invalid one
_AT_ONCE = 32  # requests that are under way without anybody waiting for them; more wait here


def open_transport(
    url: str, *, identity: str, token: str | None, retry: Retry, port_out: int | None
) -> "HttpEmbedding":
    """Return the way to `url`. Raises SettingsError."""
    if port_out is not None:
        raise SettingsError(f"port_out={port_out}: is of ZeroMQ; over HTTP answers come back on the same connection")
    return HttpEmbedding(Connections(url, token, _AT_ONCE * 2), identity, retry)


class HttpEmbedding:
    """Asks a server over HTTP. `identity` tells it whose texts they are. What it refuses for now is sent again as `retry` says."""

    def __init__(self, transport: Connections, identity: str, retry: Retry = NEVER) -> None:
        self._transport = transport
        self._identity = identity
        self._retry = retry
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: set[Future[Vectors]] = set()
        self._lock = Lock()
        self._closed = False

    def encode(self, asked: EncodeCall, timeout: float) -> Vectors:
        """Return the answer."""
        deadline, left, tried = time.monotonic() + timeout, timeout, 0
        while True:
            try:
                return _read(self._sent(_request(asked, self._identity, left), left))
            except CapacityError as error:
                wait = None if isinstance(error, Unreachable) else self._retry.wait(error, tried)
                if wait is None or time.monotonic() + wait >= deadline:
                    raise
            time.sleep(wait)
            tried, left = tried + 1, max(_LEAST, deadline - time.monotonic())

    def start(self, asked: EncodeCall, timeout: float) -> Future[Vectors]:
        """Send from a thread, and return what the answer will be in."""
        future: Future[Vectors] = Future()
        with self._lock:
            if self._closed:
                raise Cancelled("this client has been closed")
            self._threads = self._threads or ThreadPoolExecutor(_AT_ONCE, "weir-embedding")
            self._under_way.add(future)
            self._threads.submit(self._run, future, lambda: self.encode(asked, timeout))
        return future

    def _run(self, future: Future[Vectors], encode: Callable[[], Vectors]) -> None:
        with contextlib.suppress(InvalidStateError):  # it has been cancelled, or the client closed
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(encode())
            except Exception as error:
                future.set_exception(error)
        self._under_way.discard(future)

    def config(self, timeout: float) -> dict[str, Any]:
        """Return the server's configuration."""
        return self.status(timeout)

    def status(self, timeout: float) -> dict[str, Any]:
        """Return the server's configuration and statistics."""
        found: dict[str, Any] = msgspec.json.decode(self._sent(HttpRequest("GET", "/status/server"), timeout).body)
        return found

    def terminate(self, timeout: float) -> None:
        """Have the server end."""
        self._sent(HttpRequest("POST", "/terminate"), timeout)

    def listen(self, timeout: float | None) -> Iterator[Heard]:
        """Refused: over HTTP an answer goes to who asked."""
        raise Unsupported(
            "listen: over HTTP answers go to who asked; clients of one identity hear each other over ZeroMQ"
        )

    def close(self) -> None:
        """End it: what is under way fails with Cancelled. Idempotent."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        for future in list(self._under_way):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(Cancelled("the client was closed before the answer"))
        self._transport.close()

    def _sent(self, request: HttpRequest, timeout: float) -> HttpReply:
        reply = self._transport.send(request, timeout)
        if reply.status != 200:
            raise error_of(reply)
        return reply


def _request(asked: EncodeCall, identity: str, timeout: float) -> HttpRequest:
    pairs = any(isinstance(text, tuple) for text in asked.texts)
    if pairs and not all(isinstance(text, tuple) for text in asked.texts):
        raise InvalidRequest("texts: over HTTP either all of a request are pairs or none is")
    said = {
        "texts": list(asked.texts), "pairs": pairs or None, "model": asked.model or None, "dimensions": asked.dimensions,
        "truncate": asked.truncate, "show_tokens": asked.want_tokens or None, "prompt": asked.prompt,
    }  # fmt: skip
    headers = {
        "content-type": _MSGPACK, "accept": _MSGPACK, "x-client-id": identity, "x-request-timeout": f"{timeout:.6f}",
    }  # fmt: skip
    if asked.priority is not None:
        headers["x-request-priority"] = str(asked.priority)
    try:
        body = msgspec.msgpack.encode({name: value for name, value in said.items() if value is not None})
    except UnicodeEncodeError as error:
        raise not_unicode(asked.texts) from error
    return HttpRequest("POST", "/encode", headers, body)


def _read(reply: HttpReply) -> Vectors:
    said = msgspec.msgpack.decode(reply.body)
    vectors = numpy.frombuffer(said["result"], "<f4").astype(numpy.float32).reshape(said["shape"])
    foreign = reply.headers.get(_FOREIGN, "")
    return Vectors(vectors, said.get("truncated", ()), said.get("tokens"), int(foreign) if foreign.isdigit() else 0)


def error_of(reply: HttpReply) -> WeirError:
    """Return the error that `reply` stands for."""
    try:
        said = msgspec.json.decode(reply.body)
        text, name = str(said["description"]), str(said["type"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        text, name = reply.body[:1000].decode(errors="replace"), ""
    after = reply.headers.get("retry-after", "")
    return failures.of_status(reply.status, text, name=name, retry_after=float(after) if after.isdigit() else None)
