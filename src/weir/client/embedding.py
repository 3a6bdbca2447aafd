"""Texts to vectors over a connection, with the methods that bert-as-service's client has, and errors instead of silence."""

import time
import uuid
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import count, islice
from queue import SimpleQueue
from threading import BoundedSemaphore
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy

from weir._version import __version__
from weir.client.embedding_transport import EmbeddingTransport, EncodeCall, Heard, Text, Vectors, open_transport
from weir.client.retrying import Retry, of_call, of_client
from weir.errors import Conflict, InvalidRequest, Overloaded, SettingsError, Unsupported

# By default what a full line refuses is sent again for as long as there is time.
PATIENT = Retry(times=1_000_000, first_wait=0.05, longest_wait=1.0)
AHEAD = 64  # batches that encode_async has under way
_SHOWN = 10  # places of cut texts that a warning names


class Fetched(NamedTuple):
    """The answer to request number `id` (from 1); `tokens` if they were asked for."""

    id: int
    embedding: Any
    tokens: list[list[str]] | None


class EmbeddingClient:
    """Asks a server for the vectors of texts: `http://localhost:8000`, `unix:weir.sock`, or `tcp://localhost:5555` for ZeroMQ.

    `timeout` is in seconds, for each call that names none. `model` is the one asked for, "" the server's first. `token` is the control
    token, for `terminate`. `retry` says what is sent again that the server refused for now. `output` is "ndarray" or "list". Over ZeroMQ `identity` names this client (all clients of one
    identity can hear each other's answers: `listen`), and `port_out` is the port of the answers, by default the one after the other.
    Unless `ignore_all_checks`, the server is asked for its configuration at once: `check_version` raises Conflict if its version
    does not fit this client's; with `check_length` a warning names the texts that were cut. Another one says that the server found
    token ids that the model's tokenizer would not make: those of another model give wrong vectors.

    `encode` may be used by many threads at a time; what is not `blocking`, and then fetched, by one.
    Every method raises the WeirError that a caller in process would get: Unreachable where nobody answers,
    DeadlineExceeded when there is no answer in time.
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
        self._transport = transport or open_transport(
            url, identity=self._identity, token=token, retry=retry or PATIENT, port_out=port_out
        )
        if check_version and not ignore_all_checks:
            self._require_version()

    def _require_version(self) -> None:
        try:
            found = self.server_config.get("weir_version")
            if found is None:
                raise Unsupported(f"{self._url}: no server of Weir's, by its configuration (check_version)")
            if str(found).split(".")[0] != __version__.split(".")[0]:
                raise Conflict(f"{self._url}: the server is Weir {found}, this client {__version__} (check_version)")
        except BaseException:
            self.close()
            raise

    # Encoding.

    def encode(
        self, texts: Sequence[Text], blocking: bool = True, is_tokenized: bool = False, show_tokens: bool = False, *,
        timeout: float | None = None, dimensions: int | None = None, truncate: bool | None = None,
        priority: int | None = None, model: str | None = None, prompt: str | None = None,
    ) -> Any:  # fmt: skip
        """Return the vectors of `texts`: (n, dimensions) float32, or (n, tokens, dimensions) where each token has one.

        A text is a string, a pair of strings, or a list of token ids; with `is_tokenized` a list of words. With `show_tokens` returns
        the vectors and the tokens of each text. Not `blocking`: returns the number of the request, for `fetch`. `dimensions` keeps
        the first numbers of each vector; `truncate` False refuses a text that is too long; `prompt` is the name of one of the model's, or
        the text itself, to stand before every text. Raises InvalidRequest for a `timeout` that is no number of seconds greater than 0.
        """
        asked = EncodeCall(
            _checked(texts, is_tokenized), self._model if model is None else model, priority, dimensions, truncate,
            show_tokens, prompt,
        )  # fmt: skip
        seconds = of_call(timeout, self._timeout)
        self._count = next(self._numbers)
        if not blocking:
            return self._start(asked, seconds, self._pending, self._ended)
        answer = self._transport.encode(asked, seconds)
        made = self._made(answer)
        return (made, answer.tokens) if show_tokens else made

    def _start(
        self, asked: EncodeCall, timeout: float, pending: dict[int, Future[Vectors]], ended: SimpleQueue[int]
    ) -> int:
        number = self._count
        future = pending[number] = self._transport.start(asked, timeout)
        future.add_done_callback(lambda _: ended.put(number))
        return number

    def fetch(self, delay: float = 0.0) -> Generator[Fetched, None, None]:
        """Yield the answers to what was encoded without blocking, as they come, until none is missing; begin after `delay` seconds.

        A request that failed raises its error; the others can still be fetched then.
        """
        time.sleep(delay)
        while self._pending:
            yield self._next(self._pending, self._ended)

    def fetch_all(self, sort: bool = True, concat: bool = False) -> Any:
        """Return all answers to what was encoded without blocking, in the order of the requests (`sort`) or as they came; with
        `concat` as one array (or list)."""
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
        self, batches: Iterable[Sequence[Text]], max_num_batch: int | None = None, *, ahead: int = AHEAD,
        is_tokenized: bool = False, show_tokens: bool = False, timeout: float | None = None, prompt: str | None = None,
    ) -> Generator[Fetched, None, None]:  # fmt: skip
        """Yield the vectors of each of `batches` as they come. `ahead` are under way at most: an endless generator is well.

        It is read in the thread of whoever reads the answers. Stops after `max_num_batch`. What `encode` refuses of `timeout` is refused
        at once, before the first batch is read.
        """
        asked = EncodeCall([], self._model, want_tokens=show_tokens, prompt=prompt)
        return self._stream(islice(batches, max_num_batch), ahead, is_tokenized, asked, of_call(timeout, self._timeout))

    def _stream(
        self, batches: Iterable[Sequence[Text]], ahead: int, is_tokenized: bool, alike: EncodeCall, timeout: float
    ) -> Generator[Fetched, None, None]:
        pending: dict[int, Future[Vectors]] = {}
        ended: SimpleQueue[int] = SimpleQueue()
        try:
            for texts in batches:
                self._count = next(self._numbers)
                self._start(alike._replace(texts=_checked(texts, is_tokenized)), timeout, pending, ended)
                while pending and (len(pending) >= ahead or not ended.empty()):
                    yield self._next(pending, ended)
            while pending:
                yield self._next(pending, ended)
        finally:
            for future in pending.values():
                future.cancel()

    def _next(self, pending: dict[int, Future[Vectors]], ended: SimpleQueue[int]) -> Fetched:
        number = ended.get()
        answer = pending.pop(number).result()
        return Fetched(number, self._made(answer), answer.tokens)

    def _made(self, answer: Vectors) -> Any:
        if answer.truncated and self._check_length:
            shown = ", ".join(map(str, answer.truncated[:_SHOWN])) + (", ..." if len(answer.truncated) > _SHOWN else "")
            warnings.warn(
                f"{len(answer.truncated)} texts are longer than the model reads and were cut: {shown} "
                "(truncate=False refuses them, check_length=False says nothing)",
                stacklevel=3,
            )
        if answer.foreign and self._check_ids:
            warnings.warn(
                f"{answer.foreign} texts came as token ids that the model's tokenizer would not make of their text: those of another "
                "model give wrong vectors (send texts, or the ids of this model's tokenizer)",
                stacklevel=3,
            )
        return answer.vectors.tolist() if self._as_lists else answer.vectors

    def listen(self, timeout: float | None = None) -> Iterator[Heard]:
        """Yield what the other clients of this identity are answered, over ZeroMQ; ends after `timeout` seconds without an answer."""
        heard = self._transport.listen(timeout)  # from now on, not from the first answer that is read
        return (each._replace(embedding=each.embedding.tolist()) for each in heard) if self._as_lists else heard

    # The server.

    @property
    def status(self) -> dict[str, Any]:
        """What there is to know of this client."""
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
        """Have the server finish what it has accepted, and end. It asks for the control token, or to be asked on its machine."""
        self._transport.terminate(self._timeout)

    def close(self) -> None:
        """Close all connections; what is under way fails with Cancelled. Idempotent."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ConcurrentEmbeddingClient(EmbeddingClient):
    """The same for many threads: at most `max_concurrency` of them ask at a time, and one more gets Overloaded at once.

    Only what blocks is offered: answers that are fetched later would mix between the threads.
    """

    def __init__(self, url: str = "http://localhost:8000", max_concurrency: int = 10, **said: Any) -> None:
        self._places = BoundedSemaphore(max_concurrency)
        self._most = max_concurrency
        super().__init__(url, **said)

    def encode(self, texts: Sequence[Text], blocking: bool = True, *rest: Any, **said: Any) -> Any:
        """Return the vectors of `texts`; see EmbeddingClient.encode."""
        if not blocking:
            raise Unsupported("blocking=False: a client of many threads only offers what blocks")
        if not self._places.acquire(blocking=False):
            raise Overloaded(f"max_concurrency={self._most}: that many threads are asking already")
        try:
            return super().encode(texts, True, *rest, **said)
        finally:
            self._places.release()

    def encode_async(self, *arguments: Any, **said: Any) -> Generator[Fetched, None, None]:
        """Refused: raises Unsupported."""
        raise Unsupported("encode_async: a client of many threads only offers what blocks")


def _checked(texts: Any, is_tokenized: bool) -> Sequence[Text]:
    """Return `texts` if that is a list. Raises InvalidRequest naming the first place that is of the wrong kind; the server knows
    all other rules."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
        raise InvalidRequest(f"texts: must be a list of texts, not {type(texts).__name__}")
    if not texts:
        raise InvalidRequest("texts: must not be empty")
    for place, text in enumerate(texts):
        if is_tokenized and not (isinstance(text, list) and all(isinstance(word, str) for word in text)):
            raise InvalidRequest(f"texts[{place}]: must be a list of words (is_tokenized)")
        if not is_tokenized and not _is_text(text):
            raise InvalidRequest(f"texts[{place}]: must be a text, not {type(text).__name__}")
    return texts


def _is_text(text: Any) -> bool:
    if isinstance(text, str):
        return True
    if isinstance(text, tuple):
        return len(text) == 2 and all(isinstance(part, str) for part in text)
    return isinstance(text, list) and all(isinstance(token, int) for token in text)
