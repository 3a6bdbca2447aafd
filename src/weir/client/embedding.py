"""The client that turns texts into vectors over HTTP. It has the methods of bert-as-service's client, and raises errors where that
one waits for ever."""

import contextlib
import time
import uuid
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from io import BytesIO
from itertools import count, islice
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from threading import BoundedSemaphore, Lock
from typing import Any, NamedTuple, Protocol, Self

import msgspec
import numpy
from numpy.typing import NDArray

from weir._version import __version__
from weir.client.calls import NEVER, Retry, Unreachable, of_call, of_client, reading
from weir.client.http_connection import Connections, HttpReply, OutgoingRequest, checked, headers_with
from weir.errors import (
    Cancelled,
    CapacityError,
    Conflict,
    InvalidRequest,
    Overloaded,
    SettingsError,
    Unsupported,
    add_extra,
)

# By default, requests that a full queue refuses are sent again until their deadline.
PATIENT = Retry(times=1_000_000, first_wait=0.05, longest_wait=1.0)
_SCHEMES = ("http://", "https://", "unix:")
AHEAD = 64  # batches that encode_async has under way
_SHOWN = 10  # indices of cut texts that a warning names


_FOREIGN = "x-weir-foreign-ids"  # how many texts came as token ids of another tokenizer
_MSGPACK = "application/msgpack"
_SHORTEST_TIMEOUT = 0.001  # seconds, for a request that is sent again at its deadline; 0 would be invalid
_AT_ONCE = 32  # requests of `start` that are under way; further ones wait in this process

# A text; a pair of texts; a list of words; a list of token ids that includes all special tokens.
Text = str | tuple[str, str] | list[str] | list[int]
# The path of an image file, its bytes, an array of uint8 [height, width, 3], or an image of Pillow.
ImageSource = str | PathLike[str] | bytes | NDArray[numpy.uint8] | Any


class EncodeCall(NamedTuple):
    """Texts and image files to be encoded, and how. None and "" leave a choice to the server; see EmbeddingClient.encode for the fields.

    `priority` is that of Weir's queue: higher goes first. `bulk` work gets the time that other requests leave.
    """

    texts: Sequence[Text]
    model: str = ""
    priority: int | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    want_tokens: bool = False
    prompt: str | None = None
    bulk: bool = False
    images: Sequence[bytes] = ()


class Vectors(NamedTuple):
    """The result for n texts and images, in order, the texts first.

    Attributes:
        vectors: shape (n, dimensions), or (n, tokens, dimensions) if each token has a vector.
        truncated: the indices of the texts that were cut.
        tokens: the tokens of each text as the model read them, or None if they were not requested.
        foreign: how many texts came as token ids that the model's tokenizer would not make of their text.
    """

    vectors: NDArray[Any]
    truncated: Sequence[int] = ()
    tokens: list[list[str]] | None = None
    foreign: int = 0


class EmbeddingTransport(Protocol):
    """Sends requests for vectors, and returns the results. Many threads may use it at a time.

    All methods raise, or set as the Future's exception, the WeirError that a caller in the server's process would get; Unreachable
    if no server listens; DeadlineExceeded if there is no response within `timeout` seconds. Requests that the server refuses for now
    are sent again. A Future always ends; cancelling it cancels the request.
    """

    def encode(self, call: EncodeCall, timeout: float) -> Vectors:
        """Send the texts and return their vectors."""

    def start(self, call: EncodeCall, timeout: float) -> Future[Vectors]:
        """Return a Future of the vectors; do not wait for them."""

    def config(self, timeout: float) -> dict[str, Any]:
        """Return the server's configuration: `weir_version`, `max_seq_len` and everything else that does not change."""

    def status(self, timeout: float) -> dict[str, Any]:
        """Return the server's configuration and statistics."""

    def terminate(self, timeout: float) -> None:
        """Make the server finish what it has accepted, and stop."""

    def close(self) -> None:
        """Close all connections: requests that are under way fail with Cancelled. Idempotent."""


class _Encoded(msgspec.Struct):
    result: bytes
    shape: list[int]
    truncated: list[int] = []
    tokens: list[list[str]] | None = None


class Fetched(NamedTuple):
    """The vectors of request number `id` (from 1), and its `tokens` if they were requested."""

    id: int
    embedding: Any
    tokens: list[list[str]] | None


class EmbeddingClient:
    """A client of a server for the vectors of texts, over HTTP.

    Arguments:
        url: http://HOST:PORT, https://HOST:PORT or unix:PATH.
        timeout: seconds for each call that has no timeout of its own.
        model: the model to use; "" is the server's first.
        identity: whose texts these are: clients of one identity have one share of the queue. By default, a random identity.
        token: the control token, for `terminate`.
        output: the type of the vectors, "ndarray" or "list".
        retry: which requests are sent again; by default, those that the server refuses for now, until their deadline.
        port_out: was for ZeroMQ, and is refused.
        check_version: whether to request the server's version at once, and raise Conflict if it does not fit this client.
        check_length: whether a warning names texts that were cut.
        ignore_all_checks: turns both checks off, and also the warning about token ids of another model's tokenizer, which
            give wrong vectors.
        transport: replaces HTTP.

    Many threads may call `encode` at a time, but only one may use it without `blocking` and fetch the results. Every method
    raises the WeirError that a caller in the server's process would get, Unreachable if no server listens, and DeadlineExceeded
    if there is no response in time.
    """

    def __init__(
        self, url: str = "http://localhost:8000", *, timeout: float = 60.0, model: str = "", identity: str | None = None,
        token: str | None = None, output: str = "ndarray", retry: Retry | None = None, port_out: int | None = None, check_version: bool = True,
        check_length: bool = True, ignore_all_checks: bool = False, transport: EmbeddingTransport | None = None,
    ) -> None:  # fmt: skip
        if output not in ("ndarray", "list"):
            raise SettingsError(f"output={output!r}: must be ndarray or list")
        self._url = url
        self._identity = identity or uuid.uuid4().hex
        self._timeout = of_client(timeout)
        self._model = model
        self._as_lists = output == "list"
        self._check_length = check_length and not ignore_all_checks
        self._check_ids = not ignore_all_checks
        self._numbers = count(1)
        self._count = 0
        self._pending: dict[int, Future[Vectors]] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._transport = transport or _http(url, self._identity, token, retry or PATIENT, port_out)
        if check_version and not ignore_all_checks:
            self._require_version()

    def _require_version(self) -> None:
        try:
            found = self.server_config.get("weir_version")
            if found is None:
                raise Unsupported(f"{self._url}: is not a Weir server, by its configuration (check_version)")
            if str(found).split(".")[0] != __version__.split(".")[0]:
                raise Conflict(f"{self._url}: the server is Weir {found}, this client {__version__} (check_version)")
        except BaseException:
            self.close()
            raise

    def encode(
        self, texts: Sequence[Text] = (), blocking: bool = True, is_tokenized: bool = False, show_tokens: bool = False, *,
        timeout: float | None = None, dimensions: int | None = None, truncate: bool | None = None,
        priority: int | None = None, model: str | None = None, prompt: str | None = None, bulk: bool = False,
        images: Sequence[ImageSource] = (),
    ) -> Any:  # fmt: skip
        """Return the vectors of `texts` and then of `images`: float32 of shape (n, dimensions), or (n, tokens, dimensions) if each token has one.

        Arguments:
            texts: each is a string, a pair of strings, or a list of token ids; with `is_tokenized`, a list of words.
            blocking: whether to wait for the vectors. Otherwise the number of the request is returned, for `fetch`.
            show_tokens: whether to return a pair of the vectors and the tokens of each text.
            timeout: seconds; None is the client's.
            dimensions: how many numbers to keep, from the start of each vector.
            truncate: False refuses texts that are too long; True cuts them.
            priority: higher goes first.
            model: the model to use; None is the client's.
            prompt: a text to put before every text, or the name of one of the model's prompts.
            bulk: whether this is bulk work, which gets the time that other requests leave.
            images: for a model that reads images: each is the path of an image file, its bytes, an image of Pillow, or an array
                of uint8 [height, width, 3]. The last two need Pillow, and are sent as PNG files.

        Raises InvalidRequest for a `timeout` that is not a number greater than 0, for texts of wrong types, and for images that cannot be read.
        """
        given = texts if images and not len(texts) else _checked(texts, is_tokenized)
        files = tuple(_image_file(image, index) for index, image in enumerate(images))
        model = self._model if model is None else model
        call = EncodeCall(given, model, priority, dimensions, truncate, show_tokens, prompt, bulk, files)
        seconds = of_call(timeout, self._timeout)
        self._count = next(self._numbers)
        if not blocking:
            return self._start(call, seconds, self._pending, self._ended)
        result = self._transport.encode(call, seconds)
        made = self._made(result)
        return (made, result.tokens) if show_tokens else made

    def _start(
        self, call: EncodeCall, timeout: float, pending: dict[int, Future[Vectors]], ended: SimpleQueue[int]
    ) -> int:
        number = self._count
        future = pending[number] = self._transport.start(call, timeout)
        future.add_done_callback(lambda _: ended.put(number))
        return number

    def fetch(self, delay: float = 0.0) -> Generator[Fetched, None, None]:
        """Yield the results of all non-blocking requests as they come; begin after `delay` seconds.

        A failed request raises its error; the other results can still be fetched then.
        """
        time.sleep(delay)
        while self._pending:
            yield self._next(self._pending, self._ended)

    def fetch_all(self, sort: bool = True, concat: bool = False) -> Any:
        """Return the vectors of all non-blocking requests, with `sort` in the order of the requests, else as they came. With
        `concat`, return one array (or list) of all."""
        fetched = list(self.fetch())
        if sort:
            fetched.sort(key=lambda each: each.id)
        found = [each.embedding for each in fetched]
        if not concat:
            return found
        if self._as_lists:
            return [vector for vectors in found for vector in vectors]
        return numpy.concatenate(found) if found else numpy.empty((0, 0), numpy.float32)

    def encode_async(
        self,
        batches: Iterable[Sequence[Text]],
        max_num_batch: int | None = None,
        *,
        ahead: int = AHEAD,
        is_tokenized: bool = False,
        show_tokens: bool = False,
        timeout: float | None = None,
        prompt: str | None = None,
    ) -> Generator[Fetched, None, None]:
        """Yield the vectors of each of `batches` as they come, for at most `max_num_batch` batches.

        At most `ahead` batches are under way, so `batches` may be endless. They are read in the thread that reads the results.
        For the other arguments, see `encode`; an invalid `timeout` is refused before the first batch is read.
        """
        call = EncodeCall([], self._model, want_tokens=show_tokens, prompt=prompt)
        return self._stream(islice(batches, max_num_batch), ahead, is_tokenized, call, of_call(timeout, self._timeout))

    def _stream(
        self, batches: Iterable[Sequence[Text]], ahead: int, is_tokenized: bool, template: EncodeCall, timeout: float
    ) -> Generator[Fetched, None, None]:
        pending: dict[int, Future[Vectors]] = {}
        ended: SimpleQueue[int] = SimpleQueue()
        try:
            for texts in batches:
                self._count = next(self._numbers)
                self._start(template._replace(texts=_checked(texts, is_tokenized)), timeout, pending, ended)
                while pending and (len(pending) >= ahead or not ended.empty()):
                    yield self._next(pending, ended)
            while pending:
                yield self._next(pending, ended)
        finally:
            for future in pending.values():
                future.cancel()

    def _next(self, pending: dict[int, Future[Vectors]], ended: SimpleQueue[int]) -> Fetched:
        number = ended.get()
        result = pending.pop(number).result()
        return Fetched(number, self._made(result), result.tokens)

    def _made(self, result: Vectors) -> Any:
        if result.truncated and self._check_length:
            shown = ", ".join(map(str, result.truncated[:_SHOWN])) + (", ..." if len(result.truncated) > _SHOWN else "")
            rule = "truncate=False refuses them, check_length=False turns this warning off"
            what = f"{len(result.truncated)} texts are longer than the model reads and were cut: {shown}"
            warnings.warn(f"{what} ({rule})", stacklevel=3)
        if result.foreign and self._check_ids:
            rule = "those of another model give wrong vectors (send texts, or the ids of this model's tokenizer)"
            what = f"{result.foreign} texts came as token ids that the model's tokenizer would not make of their text"
            warnings.warn(f"{what}: {rule}", stacklevel=3)
        return result.vectors.tolist() if self._as_lists else result.vectors

    def listen(self, timeout: float | None = None) -> Iterator[Any]:
        """Raise Unsupported: this was for ZeroMQ, where a client can receive the responses to other clients."""
        rule = "over HTTP each client gets only its own responses; clients of bert-as-service receive all, over ZeroMQ"
        raise Unsupported(f"listen: {rule}")

    @property
    def status(self) -> dict[str, Any]:
        """The state of this client."""
        return {
            "identity": self._identity,
            "num_request": self._count,
            "num_pending_request": len(self._pending),
            "pending_request": set(self._pending),
            "output_fmt": "list" if self._as_lists else "ndarray",
            "url": self._url,
            "client_version": __version__,
            "timeout": self._timeout,
        }

    @property
    def server_config(self) -> dict[str, Any]:
        """The server's configuration."""
        return self._transport.config(self._timeout)

    @property
    def server_status(self) -> dict[str, Any]:
        """The server's configuration and statistics."""
        return self._transport.status(self._timeout)

    def terminate(self) -> None:
        """Make the server finish what it has accepted, and stop. The server needs the control token, or else accepts this only
        from its own machine."""
        self._transport.terminate(self._timeout)

    def close(self) -> None:
        """Close all connections: requests that are under way fail with Cancelled. Idempotent."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ConcurrentEmbeddingClient(EmbeddingClient):
    """An EmbeddingClient for many threads: at most `max_concurrency` requests are under way; a further one fails with Overloaded.

    Only blocking calls are supported: with `fetch`, the threads would get each other's results.
    """

    def __init__(self, url: str = "http://localhost:8000", max_concurrency: int = 10, **fields: Any) -> None:
        self._places = BoundedSemaphore(max_concurrency)
        self._most = max_concurrency
        super().__init__(url, **fields)

    def encode(self, texts: Sequence[Text] = (), blocking: bool = True, *rest: Any, **fields: Any) -> Any:
        """Return the vectors of `texts` and images; see EmbeddingClient.encode."""
        if not blocking:
            raise Unsupported("blocking=False: a client for many threads has blocking calls only")
        if not self._places.acquire(blocking=False):
            raise Overloaded(f"max_concurrency={self._most}: this many requests are already in flight")
        try:
            return super().encode(texts, True, *rest, **fields)
        finally:
            self._places.release()

    def encode_async(self, *arguments: Any, **fields: Any) -> Generator[Fetched, None, None]:
        """Raise Unsupported."""
        raise Unsupported("encode_async: a client for many threads has blocking calls only")


def _checked(texts: Any, is_tokenized: bool) -> Sequence[Text]:
    """Return `texts` if it is a list of the right types. Raises InvalidRequest naming the first wrong entry. The server checks
    all other rules."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
        raise InvalidRequest(f"texts: must be a list of texts, not {type(texts).__name__}")
    if not texts:
        raise InvalidRequest("texts: must not be empty")
    for index, text in enumerate(texts):
        if is_tokenized and not (isinstance(text, list) and all(isinstance(word, str) for word in text)):
            raise InvalidRequest(f"texts[{index}]: must be a list of words (is_tokenized)")
        if not is_tokenized and not _is_text(text):
            raise InvalidRequest(f"texts[{index}]: must be a text, not {type(text).__name__}")
    return texts


def _is_text(text: Any) -> bool:
    if isinstance(text, str):
        return True
    if isinstance(text, tuple):
        return len(text) == 2 and all(isinstance(part, str) for part in text)
    return isinstance(text, list) and all(isinstance(token, int) for token in text)


def _image_file(image: ImageSource, index: int) -> bytes:
    """Return an image as a file. Raises InvalidRequest naming its place, and SettingsError if Pillow is missing."""
    if isinstance(image, bytes):
        return image
    try:
        if isinstance(image, (str, PathLike)):
            return Path(image).read_bytes()
        if isinstance(image, numpy.ndarray):
            from PIL import Image

            image = Image.fromarray(image)
        file = BytesIO()
        image.save(file, "PNG", compress_level=1)
    except ModuleNotFoundError:
        raise SettingsError(f"images[{index}]: an array needs Pillow; {add_extra('images')}") from None
    except (OSError, AttributeError, TypeError, ValueError) as error:
        rule = "must be a path, bytes, an image of Pillow, or an array of uint8 [height, width, 3]"
        raise InvalidRequest(f"images[{index}]: {rule} ({error})") from error
    return file.getvalue()


def _http(url: str, identity: str, token: str | None, retry: Retry, port_out: int | None) -> "HttpEmbedding":
    """Return the transport to `url`. Raises SettingsError for an address that is not one of HTTP."""
    if url.lower().startswith("tcp://"):
        raise SettingsError(
            f"url={url!r}: EmbeddingClient speaks HTTP: give the server's HTTP address, such as http://localhost:8000; bert-serving-client speaks ZeroMQ"
        )
    if not url.lower().startswith(_SCHEMES):
        raise SettingsError(f"url={url!r}: must begin with one of {', '.join(_SCHEMES)}")
    if port_out is not None:
        raise SettingsError(f"port_out={port_out}: is for ZeroMQ; over HTTP responses come back on the same connection")
    return HttpEmbedding(Connections(url, headers_with(token), _AT_ONCE * 2), identity, retry)


class HttpEmbedding:
    """The EmbeddingTransport over HTTP. `identity` tells the server whose texts these are; `retry` tells what is sent again."""

    def __init__(self, transport: Connections, identity: str, retry: Retry = NEVER) -> None:
        self._transport = transport
        self._identity = identity
        self._retry = retry
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: set[Future[Vectors]] = set()
        self._lock = Lock()
        self._closed = False

    def encode(self, call: EncodeCall, timeout: float) -> Vectors:
        """See EmbeddingTransport."""
        deadline, left, tried = time.monotonic() + timeout, timeout, 0
        while True:
            try:
                return _read(self._sent(_request(call, self._identity, left), left))
            except CapacityError as error:
                left = deadline - time.monotonic()
                wait = None if isinstance(error, Unreachable) else self._retry.wait(error, tried, left)
                if wait is None:
                    raise
            time.sleep(wait)
            tried, left = tried + 1, max(_SHORTEST_TIMEOUT, deadline - time.monotonic())

    def start(self, call: EncodeCall, timeout: float) -> Future[Vectors]:
        """See EmbeddingTransport. A thread sends the request."""
        future: Future[Vectors] = Future()
        with self._lock:
            if self._closed:
                raise Cancelled("this client has been closed")
            self._threads = self._threads or ThreadPoolExecutor(_AT_ONCE, "weir-embedding")
            self._under_way.add(future)
            self._threads.submit(self._run, future, lambda: self.encode(call, timeout))
        return future

    def _run(self, future: Future[Vectors], encode: Callable[[], Vectors]) -> None:
        with contextlib.suppress(InvalidStateError):  # the future was cancelled, or the client closed
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(encode())
            except Exception as error:
                future.set_exception(error)
        self._under_way.discard(future)

    def config(self, timeout: float) -> dict[str, Any]:
        """See EmbeddingTransport."""
        return self.status(timeout)

    def status(self, timeout: float) -> dict[str, Any]:
        """See EmbeddingTransport."""
        reply = self._sent(OutgoingRequest("GET", "/status/server"), timeout)
        with reading("/status/server"):
            return msgspec.json.decode(reply.body, type=dict[str, Any])

    def terminate(self, timeout: float) -> None:
        """See EmbeddingTransport."""
        self._sent(OutgoingRequest("POST", "/terminate"), timeout)

    def close(self) -> None:
        """See EmbeddingTransport."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        for future in list(self._under_way):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(Cancelled("the client was closed before the response"))
        self._transport.close()

    def _sent(self, request: OutgoingRequest, timeout: float) -> HttpReply:
        return checked(self._transport.send(request, timeout))


def _request(call: EncodeCall, identity: str, timeout: float) -> OutgoingRequest:
    pairs = any(isinstance(text, tuple) for text in call.texts)
    if pairs and (call.images or not all(isinstance(text, tuple) for text in call.texts)):
        raise InvalidRequest("texts: over HTTP either all of a request are pairs or none is")
    fields = {
        "texts": [*call.texts, *({"image": image} for image in call.images)],
        "pairs": pairs or None,
        "model": call.model or None,
        "dimensions": call.dimensions,
        "truncate": call.truncate,
        "show_tokens": call.want_tokens or None,
        "prompt": call.prompt,
    }
    own = {"x-client-id": identity, "x-request-timeout": f"{timeout:.6f}"}
    headers = {"content-type": _MSGPACK, "accept": _MSGPACK, **own}
    if call.priority is not None:
        headers["x-request-priority"] = str(call.priority)
    if call.bulk:
        headers["x-weir-class"] = "bulk"
    try:
        body = msgspec.msgpack.encode({name: value for name, value in fields.items() if value is not None})
    except UnicodeEncodeError as error:
        raise not_unicode(call.texts) from error
    return OutgoingRequest("POST", "/encode", headers, body)


def _read(reply: HttpReply) -> Vectors:
    with reading("/encode"):
        fields = msgspec.msgpack.decode(reply.body, type=_Encoded)
        vectors = numpy.frombuffer(fields.result, "<f4").astype(numpy.float32).reshape(fields.shape)
        return Vectors(vectors, fields.truncated, fields.tokens, int(reply.headers.get(_FOREIGN, 0)))


def not_unicode(texts: Sequence[Text]) -> InvalidRequest:
    """Return the error for a request that is not valid Unicode. It names the first text with half of a surrogate pair, if a text
    has one."""
    for index, text in enumerate(texts):
        for part in [text] if isinstance(text, str) else text:
            try:
                str(part).encode()
            except UnicodeEncodeError as error:
                rule = f"is not valid Unicode: character {error.start} is half of a surrogate pair"
                return InvalidRequest(f"texts[{index}]: {rule}")
    return InvalidRequest("model, prompt: must be valid Unicode")
