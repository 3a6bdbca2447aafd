"""The HTTP endpoints of texts over encoders without a model, behind a real HTTP server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import httpx
from tests.text_server.hashing import HashingEncoder

from weir.catalog.registry import Registry
from weir.frontends.http.application import make_app
from weir.frontends.http.asgi import described_paths
from weir.frontends.http.openapi import openapi
from weir.frontends.http.server import HttpServer
from weir.protocols import HttpSettings
from weir.protocols.access import Control
from weir.protocols.kserve import KserveContext
from weir.text_server.bert_as_service.http import Encode, Status
from weir.text_server.exchange import EmbeddingContext
from weir.text_server.http import FastTexts, TextApi
from weir.text_server.metrics import TextCounts
from weir.text_server.protocols import text_apis
from weir.text_server.server import added_by
from weir.text_server.texts import Encodes

T = TypeVar("T")

MAX_TEXTS = 50


class Served:
    """A running server: its address, a client of it, and what was counted."""

    def __init__(
        self, server: HttpServer, client: httpx.AsyncClient, site: EmbeddingContext, ended: asyncio.Event
    ) -> None:
        self.server = server
        self.url = server.address
        self.client = client
        self.counts = site.counts
        self.clients = site.clients
        self.ended = ended  # set when somebody had it end

    def counted(self) -> dict[tuple[str, ...], float]:
        """Return every sample by its name and labels."""
        samples = [sample for family in self.counts.collect() for sample in family.samples]
        return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


@asynccontextmanager
async def served(
    *encoders: Encodes, fast: bool = True, hot: Sequence[str] | None = None, **http: Any
) -> AsyncIterator[Served]:
    """Serve until the block ends, with the fast path for small calls (of the models `hot`; None: of all) unless told otherwise."""
    settings, counts, ended = HttpSettings(port=0, **http), TextCounts(), asyncio.Event()
    site = EmbeddingContext({encoder.name: encoder for encoder in encoders}, settings, MAX_TEXTS, counts)
    apis = apis_of(site, ended.set)
    names = list(site.encoders) if hot is None else hot
    route_handlers = [FastTexts(api.texts, names) for api in apis] if fast else []
    context = KserveContext(Registry([]), settings)
    server = HttpServer(context, make_app(context, added=added_by(apis)), route_handlers=route_handlers)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url="http://unix" if "uds" in http else server.address) as client:
            yield Served(server, client, site, ended)
    finally:
        await server.stop()


class Standing:
    """A server of `encoders` that serves only while somebody waits for it here, for many tests that leave nothing behind."""

    def __init__(self, *encoders: Encodes, **http: Any) -> None:
        self.encoder: Any = encoders[0]
        self._runner = asyncio.Runner()
        self._serving = served(*encoders, **http)
        self._server = self._runner.run(self._serving.__aenter__())

    def ask(self, ask: Callable[[Served], Coroutine[Any, Any, T]]) -> T:
        """Return what `ask` returns."""
        return self._runner.run(ask(self._server))

    def post(self, path: str, document: Any = None, **sent: Any) -> httpx.Response:
        """Return the answer to one call."""
        if document is not None:
            sent["json"] = document
        return self._runner.run(self._server.client.post(path, **sent))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._serving.__aexit__(None, None, None))
        self._runner.close()


def asked(ask: Callable[[Served], Coroutine[Any, Any, T]], *encoders: Encodes, **http: Any) -> T:
    """Return what `ask` returns on a server of `encoders`."""

    with Standing(*(encoders or (HashingEncoder(),)), **http) as server:
        return server.ask(ask)


def post(path: str, document: Any = None, *encoders: Encodes, **sent: Any) -> httpx.Response:
    """Return the answer to one call of a server of `encoders`, or of one that needs nothing else."""
    with Standing(*(encoders or (HashingEncoder(),))) as server:
        return server.post(path, document, **sent)


def apis_of(site: EmbeddingContext, end: Callable[[], None] = lambda: None) -> list[TextApi]:
    """Return all APIs of texts."""
    status = Status(site.encoders, site.clients)
    return [*text_apis(site), Encode(site, status, control=Control(), end=end)]


def described() -> dict[str, Any]:
    """Return the OpenAPI description of all APIs of texts."""
    return openapi(
        Registry([]),
        described_paths(added_by(apis_of(EmbeddingContext({}, HttpSettings(), 1, TextCounts()))).endpoints),
    )


def message_of(answer: httpx.Response) -> str:
    """Return the message of an error in the form of any API."""
    document = answer.json()
    found = next(document[key] for key in ("error", "message", "description") if key in document)
    return str(found["message"] if isinstance(found, dict) else found)
