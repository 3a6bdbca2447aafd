"""The calls over HTTP: the request for each, and how its response is read; and how callers in threads send them with the standard library only.

Their connections are kept, and a small request is sent in one piece. httpx does more, but takes longer for a request than the server takes for
one vector without the model.
"""

import base64
import select
import socket
import ssl
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from threading import BoundedSemaphore, Lock
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit

import msgspec

from weir.client.calls import Calls, ConnectionLost, Decoder, Program, Silence, Streaming, Unreachable, error_of_status
from weir.errors import Cancelled, DeadlineExceeded, SettingsError, WeirError
from weir.wire import kserve_binary, kserve_json
from weir.wire.inference import DATA_PLANE, ERROR_NAME, InferenceRequest, InferenceResponse
from weir.wire.sse import CONTENT_TYPE, EventParser

HEADER_LENGTH = "inference-header-content-length"

_dumps, _loads = msgspec.json.encode, msgspec.json.decode


class OutgoingRequest(NamedTuple):
    """An HTTP request to send."""

    method: str
    path: str
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes = b""


class HttpReply(NamedTuple):
    """The HTTP response. The names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpCalls(Calls):
    """Calls whose steps are OutgoingRequests, answered by HttpReplys. With `binary`, tensors travel as raw bytes both ways."""

    def __init__(self, *, binary: bool = True) -> None:
        self._binary = binary

    def call(self, name: str, body: Mapping[str, Any] | None = None, /, **path: str) -> Program[Any]:
        """See Calls."""
        call = DATA_PLANE[name]
        method, route = list(call.routes())[bool(path.get("version"))]
        filled = route.format(**{key: quote(value, safe="") for key, value in path.items()})
        if method == "GET":
            request = OutgoingRequest(method, filled)
        else:
            request = OutgoingRequest(method, filled, {"content-type": "application/json"}, _dumps(dict(body or {})))
        reply = yield request
        if call.asks:
            return {call.asks: _holds(method, reply)}
        checked(reply)
        if call.name == "load_worker":
            return reply.body.decode()
        try:
            return _loads(reply.body) if reply.body else {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WeirError(f"{filled}: the response is not JSON ({error})") from error

    def infer(self, request: InferenceRequest) -> Program[InferenceResponse]:
        """See Calls."""
        sent = with_binary_outputs(request) if self._binary else request
        reply = checked((yield self._posted(sent, "/infer", "*/*")))
        length = reply.headers.get(HEADER_LENGTH)
        if length is None:
            return kserve_json.read_response(reply.body)
        return kserve_binary.read_response(reply.body, int(length))

    def stream(self, request: InferenceRequest) -> Streaming:
        """See Calls. Each response is an event in JSON, so FP16 and BF16 cannot be outputs."""
        return Streaming(self._posted(request, "/infer_stream", CONTENT_TYPE), _event_decoder)

    def _posted(self, request: InferenceRequest, call: str, accept: str) -> OutgoingRequest:
        written = kserve_binary.write_request(request, lambda _: self._binary)
        headers = {"accept": accept, "content-type": "application/json"}
        if written.header_length is not None:
            headers |= {"content-type": "application/octet-stream", HEADER_LENGTH: str(written.header_length)}
        path = _model(request.model, request.version) + call
        return OutgoingRequest("POST", path, headers, b"".join(written.parts))


def with_binary_outputs(request: InferenceRequest) -> InferenceRequest:
    """Return `request` with the parameter that makes the server send every output as raw bytes."""
    parameters = {**request.parameters, "binary_data_output": True}
    return InferenceRequest(
        request.model,
        request.inputs,
        version=request.version,
        id=request.id,
        outputs=request.outputs,
        parameters=parameters,
    )


def checked(reply: HttpReply) -> HttpReply:
    """Return `reply` if its status is 200. Raises the error that it stands for otherwise."""
    if reply.status != 200:
        raise error_of(reply)
    return reply


def error_of(reply: HttpReply) -> WeirError:
    """Return the error that `reply` stands for."""
    text, name = _text_of(reply.body), reply.headers.get(ERROR_NAME, "")
    return error_of_status(reply.status, text, name=name, retry_after=_seconds(reply.headers.get("retry-after", "")))


def _event_decoder() -> Decoder:
    parser = EventParser()

    def feed(data: bytes) -> Iterable[InferenceResponse]:
        for event in parser.feed(data):
            if event.name == "error":
                document = _loads(event.data)
                raise error_of_status(500, _text_of(event.data), name=str(document.get("type", "")))
            yield kserve_json.read_response(event.data)

    return feed


def _holds(method: str, reply: HttpReply) -> bool:
    """Return what the reply to a question says. Status 404 is no; to a GET, so is every other error but 401 and 403, as servers differ in these."""
    if reply.status == 404 or (method == "GET" and reply.status not in (200, 401, 403)):
        return False
    checked(reply)
    return True


def _model(name: str, version: str) -> str:
    return f"/v2/models/{quote(name, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


def _text_of(body: bytes) -> str:
    """Return the text of an error's body in the protocol's form or in ours (docs/reference/errors.md), else the body itself."""
    try:
        error = _loads(body)["error"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return body[:1000].decode(errors="replace")
    return str(error.get("message", "")) if isinstance(error, dict) else str(error)


def _seconds(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def address_of(url: str) -> tuple[str, str | None]:
    """Return the base of all URLs, and the path of the Unix socket if `url` is unix:PATH. A url without a scheme is of http. Raises
    SettingsError for unix: without a path."""
    if not url.startswith("unix:"):
        return url if "://" in url else f"http://{url}", None
    path = url.removeprefix("unix:").removeprefix("//")
    if not path:
        raise SettingsError(f"url={url!r}: must be http://HOST:PORT, https://HOST:PORT or unix:PATH")
    return "http://localhost", path


_PIECE = 1 << 20  # bytes of a body that are read at a time
_JOINED = 65_536  # a request of at most so many bytes is sent in one piece
_SHORTEST = 1e-3  # seconds: a timeout of 0 would make the socket non-blocking


class _Plain(HTTPConnection):
    """A connection that sends head and body of a small request together, so that the server wakes up only once."""

    def __init__(self, host: str, port: int | None, timeout: float, **options: Any) -> None:
        super().__init__(host, port, timeout=timeout, **options)
        self._held: list[bytes] = []

    def send(self, data: Any) -> None:
        """Keep `data` until `flush`."""
        self._held.append(data)

    def flush(self) -> None:
        """Send the kept data."""
        held, self._held = self._held, []
        for piece in [b"".join(held)] if sum(map(len, held)) <= _JOINED else held:
            super().send(piece)


def connect_unix(path: str, timeout: float | None) -> socket.socket:
    """Return a connection to the Unix socket `path`. Raises OSError, and TimeoutError after `timeout` seconds."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


class _Local(_Plain):
    """A connection to a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", None, timeout)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = connect_unix(self._path, self.timeout)


class _Encrypted(_Plain, HTTPSConnection):
    """A connection with TLS."""


class Connections:
    """A Transport for OutgoingRequests to `url`, which is http://, https:// or unix:PATH. Many threads may use it at a time.

    At most `limit` connections are open; they are kept for later requests. `token` goes with each request; `tls` is as for HttpClient.
    Raises SettingsError for a URL of another form.
    """

    def __init__(self, url: str, token: str | None, limit: int, tls: bool | ssl.SSLContext = True) -> None:
        self._url = url
        base, self._path = address_of(url)
        parts = _parsed(base)
        self._where = (str(parts.hostname), parts.port)
        self._prefix = parts.path.rstrip("/")
        self._tls = tls_context(tls) if parts.scheme == "https" else None
        self._headers = _authorization(parts, token)
        self._places = BoundedSemaphore(limit)
        self._lock = Lock()
        self._idle: list[_Plain] = []
        self._all: set[_Plain] = set()
        self._closed = False

    def send(self, step: OutgoingRequest, timeout: float) -> HttpReply:
        """Send a request and return the response. Raises DeadlineExceeded after `timeout` seconds, Unreachable if nothing could
        be sent, ConnectionLost if the connection ended before the response, and Cancelled after `close`."""
        deadline = time.monotonic() + timeout
        with self._answered(step, deadline) as (connection, _, answer):
            pieces = []
            while piece := answer.read1(_PIECE):
                pieces.append(piece)
                if not answer.isclosed():
                    self._set_timeout(connection, deadline)
        return _reply(answer, b"".join(pieces))

    def chunks(self, step: OutgoingRequest, silence: Silence) -> Generator[bytes, None, None]:
        """Send a request and yield the response's body as it arrives. Raises DeadlineExceeded when `silence` is over, what `send` raises,
        or the error that the response stands for."""
        with self._answered(step, time.monotonic() + silence.seconds) as (_, sock, answer):
            if answer.status != 200:
                raise error_of(_reply(answer, answer.read()))
            sock.settimeout(silence.seconds)
            with silence.ending(partial(_shut, sock)), self._failing():
                while piece := answer.read1(_PIECE):
                    yield piece

    @contextmanager
    def _answered(self, step: OutgoingRequest, deadline: float) -> Iterator[tuple[_Plain, socket.socket, HTTPResponse]]:
        """Send a request and give its connection, the socket, and the response, whose body the block must read. The connection is kept
        if the block has read all."""
        if not self._places.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._late()
        try:
            connection = self._connected(deadline)
            try:
                with self._failing():
                    sock, answer = self._sent(connection, step, deadline)
                    yield connection, sock, answer
                    if answer.length:
                        raise HTTPException(f"{answer.length} bytes of its body are missing")
                    answer.close()
            except BaseException:
                self._discard(connection)
                raise
            self._give_back(connection) if connection.sock is not None else self._discard(connection)
        finally:
            self._places.release()

    def _connected(self, deadline: float) -> _Plain:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if not _ended(connection):
                    return connection
                self._all.discard(connection)
                connection.close()
        connection = self._new(deadline)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise Unreachable(f"{self._url}: no connection ({error})") from error
        with self._lock:
            self._all.add(connection)
            closed = self._closed
        if closed:
            self._discard(connection)
            raise self._cancelled()
        return connection

    def _new(self, deadline: float) -> _Plain:
        left = max(_SHORTEST, deadline - time.monotonic())
        if self._path is not None:
            return _Local(self._path, left)
        if self._tls is None:
            return _Plain(*self._where, timeout=left)
        return _Encrypted(*self._where, timeout=left, context=self._tls)

    def _sent(self, connection: _Plain, step: OutgoingRequest, deadline: float) -> tuple[socket.socket, HTTPResponse]:
        """Send a request, and return the socket and the response, whose head has been read."""
        self._set_timeout(connection, deadline)
        sock: socket.socket = connection.sock
        with suppress(BrokenPipeError, ConnectionResetError):
            # A server may respond and close before it has read all.
            connection.request(
                step.method, self._prefix + step.path, step.body or None, {**self._headers, **step.headers}
            )
            connection.flush()
        return sock, connection.getresponse()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Translate errors of the connection in the block into ours."""
        try:
            yield
        except WeirError:
            raise
        except TimeoutError as error:
            raise self._late() from error
        except (OSError, HTTPException) as error:
            if self._closed:
                raise self._cancelled() from error
            raise ConnectionLost(f"{self._url}: the connection ended before the response ({error})") from error

    def _set_timeout(self, connection: _Plain, deadline: float) -> None:
        """Let the socket wait until `deadline` at most. Raises TimeoutError if it has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(max(_SHORTEST, left))

    def _give_back(self, connection: _Plain) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        self._discard(connection)

    def _discard(self, connection: _Plain) -> None:
        with self._lock:
            self._all.discard(connection)
        connection.close()

    def close(self) -> None:
        """Close all connections: requests that are under way fail with Cancelled. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = self._all.difference(idle)
            self._all.clear()
        for connection in idle:
            connection.close()
        for connection in busy:
            with suppress(OSError, AttributeError):  # the thread that uses the connection may be closing it just now
                connection.sock.shutdown(2)

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._url}: no response in time")

    def _cancelled(self) -> Cancelled:
        return Cancelled(f"{self._url}: this client has been closed")


def _reply(answer: HTTPResponse, body: bytes) -> HttpReply:
    return HttpReply(answer.status, {name.lower(): value for name, value in answer.headers.items()}, body)


def _shut(sock: socket.socket) -> None:
    """End the connection of `sock`, so that a thread that reads from it returns."""
    with suppress(OSError):
        # That of a socket with TLS may not be called from another thread.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def tls_context(tls: bool | ssl.SSLContext) -> ssl.SSLContext:
    """Return `tls` itself, or a context that verifies certificates if `tls`, and else accepts any."""
    if isinstance(tls, ssl.SSLContext):
        return tls
    context = ssl.create_default_context()
    if not tls:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _ended(connection: _Plain) -> bool:
    """Return whether the server has closed an idle connection, or has sent something unexpected on it."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _parsed(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise SettingsError(f"url={url!r}: {error}") from None
    if not known or parts.query or parts.fragment:
        raise SettingsError(f"url={url!r}: must be http://HOST:PORT, https://HOST:PORT or unix:PATH")
    return parts


def _authorization(parts: SplitResult, token: str | None) -> dict[str, str]:
    if token is not None:
        return {"authorization": f"Bearer {token}"}
    if parts.username is None:
        return {}
    credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return {"authorization": "Basic " + base64.b64encode(credentials).decode()}
