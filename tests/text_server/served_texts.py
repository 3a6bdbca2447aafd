"""The HTTP endpoints of texts over encoders without a model, behind a real HTTP server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from weir.catalog.registry import Registry
from weir.frontends.http.application import make_app
from weir.frontends.http.openapi import openapi
from weir.frontends.http.server import HttpServer
from weir.protocols.access import Control
from weir.protocols.settings import HttpSettings
from weir.text_server.bert_as_service.http import Encode
from weir.text_server.bert_as_service.status import Status
from weir.text_server.exchange import EmbeddingContext
from weir.text_server.http import FastTexts, TextApi
from weir.text_server.metrics import TextCounts
from weir.text_server.server import added_by, text_apis
from weir.text_server.texts import Encodes

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
    registry = Registry([])
    app = make_app(registry, settings, added=added_by(apis))
    server = HttpServer(registry, app, settings, route_handlers=route_handlers)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url="http://unix" if "uds" in http else server.address) as client:
            yield Served(server, client, site, ended)
    finally:
        await server.stop()


def apis_of(site: EmbeddingContext, end: Callable[[], None] = lambda: None) -> list[TextApi]:
    """Return all APIs of texts."""
    status = Status(site.encoders, site.clients)
    return [*text_apis(site), Encode(site, status, control=Control(), end=end)]


def described() -> dict[str, Any]:
    """Return the OpenAPI description of all APIs of texts."""
    return openapi(Registry([]), added_by(apis_of(EmbeddingContext({}, HttpSettings(), 1, TextCounts()))).paths)
