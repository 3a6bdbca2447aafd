"""What an EmbeddingClient needs of the way to a server. There is one for each scheme of URLs."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from weir.client.retrying import Retry
from weir.errors import InvalidRequest, SettingsError

# One text; two that belong together; words already cut; token ids with all special tokens.
Text = str | tuple[str, str] | list[str] | list[int]


class EncodeCall(NamedTuple):
    """Texts to be encoded, and how; None and "" leave it to the server.

    `priority` is that of Weir's line: higher goes first.
    """

    texts: Sequence[Text]
    model: str = ""
    priority: int | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    want_tokens: bool = False
    prompt: str | None = None


class Vectors(NamedTuple):
    """What came of `n` texts, in order: `vectors` (n, dimensions), or (n, tokens, dimensions) where each token has one;
    `truncated` the places of the texts that were cut; `tokens` the texts as the model read them, if they were asked for; `foreign` how
    many came as token ids that the model's tokenizer would not make of their own text."""

    vectors: NDArray[Any]
    truncated: Sequence[int] = ()
    tokens: list[list[str]] | None = None
    foreign: int = 0


class Heard(NamedTuple):
    """An answer to a request of another client with the same identity, under the id that it has on the wire."""

    id: int
    embedding: Any
    tokens: list[list[str]] | None


class EmbeddingTransport(Protocol):
    """Sends what is asked, and brings what comes of it. May be used by many threads at a time.

    All raise, or set as the exception of the Future, the WeirError that a caller in process would get; Unreachable where nobody
    listens; DeadlineExceeded if there is no answer within `timeout` seconds. What the server refuses for now is sent again as the
    `retry` says that it was opened with. A Future always ends; cancelling it takes the request back.
    """

    def encode(self, asked: EncodeCall, timeout: float) -> Vectors:
        """Return the answer."""

    def start(self, asked: EncodeCall, timeout: float) -> Future[Vectors]:
        """Send, and return what the answer will be in; does not wait for it."""

    def config(self, timeout: float) -> dict[str, Any]:
        """Return the server's configuration: `weir_version`, `max_seq_len` and all else that /status/server says that stays."""

    def status(self, timeout: float) -> dict[str, Any]:
        """Return the server's configuration and statistics."""

    def terminate(self, timeout: float) -> None:
        """Have the server finish what it has accepted, and end."""

    def listen(self, timeout: float | None) -> Iterator[Heard]:
        """Yield the answers to other clients of this identity; ends after `timeout` seconds without one, or when closed.
        Raises Unsupported where answers go to one client only."""

    def close(self) -> None:
        """End it: what is under way fails with Cancelled. Idempotent."""


class OpenTransport(Protocol):
    """What each module of a scheme has, called `open_transport`."""

    def __call__(
        self, url: str, *, identity: str, token: str | None, retry: Retry, port_out: int | None
    ) -> EmbeddingTransport:
        """Return the way to `url`. Raises SettingsError for an address that cannot be, or a library that is missing."""


# The modules of the schemes: each loads a library that need not be installed.
_HTTP = "weir.client.embedding_http"
_SCHEMES = {"http://": _HTTP, "https://": _HTTP, "unix:": _HTTP, "tcp://": "weir.client.embedding_zeromq"}


def open_transport(
    url: str, *, identity: str, token: str | None, retry: Retry, port_out: int | None
) -> EmbeddingTransport:
    """Return the way to `url`, by its scheme. Raises SettingsError for a scheme that there is none for."""
    module = next((_SCHEMES[scheme] for scheme in _SCHEMES if url.lower().startswith(scheme)), None)
    if module is None:
        raise SettingsError(f"url={url!r}: must begin with one of {', '.join(_SCHEMES)}")
    opened: OpenTransport = import_module(module).open_transport
    return opened(url, identity=identity, token=token, retry=retry, port_out=port_out)


def not_unicode(texts: Sequence[Text]) -> InvalidRequest:
    """Return the error for what could not be written, naming the text that has half of a surrogate pair, if one has."""
    for place, text in enumerate(texts):
        for part in [text] if isinstance(text, str) else text:
            try:
                str(part).encode()
            except UnicodeEncodeError as error:
                rule = f"is not valid Unicode: character {error.start} is half of a surrogate pair"
                return InvalidRequest(f"texts[{place}]: {rule}")
    return InvalidRequest("model, prompt: must be valid Unicode")
