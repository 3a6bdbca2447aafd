"""The HTTP doors of texts over encoders without a model, behind a real HTTP server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.routing import BaseRoute

from weir.embedding.calling import Models, Site
from weir.embedding.counts import Counts
from weir.embedding.encode import Encode
from weir.embedding.openai import OpenAI
from weir.embedding.openapi import text_paths
from weir.embedding.status import Status
from weir.embedding.texts import Encodes
from weir.manager.registry import Registry
from weir.protocols.control import Control
from weir.protocols.rest import Added, make_app
from weir.protocols.server import HttpServer
from weir.protocols.settings import HttpSettings

MAX_TEXTS = 50


class Served:
    """A running server: its address, a client of it, and what was counted."""

    def __init__(self, url: str, client: httpx.AsyncClient, counts: Counts, ended: asyncio.Event) -> None:
        self.url = url
        self.client = client
        self.counts = counts
        self.ended = ended  # set when somebody had it end

    def counted(self) -> dict[tuple[str, ...], float]:
        """Return every sample by its name and labels."""
        samples = [sample for family in self.counts.collect() for sample in family.samples]
        return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


@asynccontextmanager
async def served(*encoders: Encodes, **http: Any) -> AsyncIterator[Served]:
    """Serve until the block ends."""
    settings, counts, ended = HttpSettings(port=0, **http), Counts(), asyncio.Event()
    models = Models({encoder.name: encoder for encoder in encoders})
    routes = routes_of(models, settings, counts, ended.set)
    registry = Registry([])
    server = HttpServer(registry, make_app(registry, settings, added=Added(routes, text_paths())), settings)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.address) as client:
            yield Served(server.address, client, counts, ended)
    finally:
        await server.stop()


def routes_of(models: Models, http: HttpSettings, counts: Counts, end: Callable[[], None]) -> list[BaseRoute]:
    """Return the routes of both doors."""
    site = Site(models, http, MAX_TEXTS, counts)
    return [
        *OpenAI(site).routes(),
        *Encode(site, Status(models.encoders, site.clients), control=Control(), end=end).routes(),
    ]
