"""The same application without a server of its own, for any ASGI server: uvicorn, gunicorn, hypercorn.

app = weir.asgi(Square, max_batch_size=64)      # uvicorn module:app
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

from starlette.types import ASGIApp

from weir.catalog.loading import load_target
from weir.catalog.registry import Registry, running
from weir.frontends.dashboard.routes import make_dashboard
from weir.frontends.http.access_log import HttpLog
from weir.frontends.http.application import make_app
from weir.frontends.http.pages import code_of, make_exposition
from weir.messages import Observer
from weir.model import Model
from weir.protocols.access import Access, AccessSettings, Control, ControlSettings
from weir.protocols.kserve.context import KServeContext
from weir.protocols.kserve.settings import KserveSettings
from weir.protocols.settings import HttpSettings
from weir.serving.service import Service
from weir.telemetry.exposition import NAMESPACE, Exposition
from weir.telemetry.logs import AccessLog, LogObserver, get_logger
from weir.telemetry.recorder import Metrics
from weir.telemetry.settings import TelemetrySettings

Target = str | type[Model] | type[Service] | Service

# The variable with which processes that use prometheus_client say where they put what they count.
SHARED = "PROMETHEUS_MULTIPROC_DIR"
SHARE_INTERVAL = 1.0  # seconds that counts of another process may be old

# What belongs to the server that hosts the application, and is said there.
_OF_THE_HOST = ("host", "port", "uds", "uds_mode", "idle_timeout", "header_timeout", "tls_certfile", "tls_keyfile")
_HTTP = {declared.name for declared in fields(HttpSettings)}.difference(_OF_THE_HOST)
_CONTROL = {declared.name for declared in fields(ControlSettings)}
_ACCESS = {declared.name for declared in fields(AccessSettings)}
_KSERVE = {declared.name for declared in fields(KserveSettings)}


def asgi(
    *models: Target,
    routes: Mapping[str, str | Sequence[str]] | None = None,
    metrics: bool = True,
    metrics_namespace: str = NAMESPACE,
    access_log: bool = False,
    observers: Sequence[Observer] = (),
    **settings: Any,
) -> ASGIApp:
    """Return an ASGI application that serves `models`: classes, texts like "module:Class", or Services of your own.

    Its lifespan starts the models and, at the end, drains and stops them, so the hosting server must offer lifespan
    events (all do). Each process of that server runs models and workers of its own.

    `settings` are those of the HTTP door, but for what the hosting server says (address, TLS, idle connections), of who may call, of the Open
    Inference Protocol, and those of Service, which hold for every model that is not a Service already. `routes` maps a model's name to paths of its
    own. Nobody may change anything while it runs, but with `allow_control=True` or the token of `control_token_file`: where
    a caller is, only the hosting server knows. `metrics` are collected and served at /metrics, under names that begin with `metrics_namespace`; a Service already made counts
    only if its observers do. With the variable PROMETHEUS_MULTIPROC_DIR they are those of all processes that have it. `access_log`: log each HTTP request,
    and each request for a model, to the logger `weir.access`.

    Raises SettingsError for an unusable model, setting or route; nothing has been started then.
    """
    http = HttpSettings(**{name: settings.pop(name) for name in _HTTP & settings.keys()})
    said = ControlSettings(**{name: settings.pop(name) for name in _CONTROL & settings.keys()})
    control = Control(said, trusts_local=False)
    access = Access(AccessSettings(**{name: settings.pop(name) for name in _ACCESS & settings.keys()}), control)
    kserve = KserveSettings(**{name: settings.pop(name) for name in _KSERVE & settings.keys()})
    recorded = Metrics() if metrics else None
    heard: list[Observer] = [LogObserver(get_logger("weir")), *observers]
    if recorded is not None:
        heard.insert(0, recorded)
    log = None
    if access_log:
        heard.append(AccessLog(get_logger("weir.access"), code_of))
        log = HttpLog(get_logger("weir.access"))
    registry = Registry([_service(model, heard, settings) for model in models], routes)
    naming = TelemetrySettings(metrics_namespace=metrics_namespace)
    exposition = (
        make_exposition(recorded, registry, namespace=naming.metrics_namespace) if recorded is not None else None
    )
    render = None if exposition is None else exposition.render

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        async with counting_together(exposition), running(registry):
            shown.begin()
            yield

    site = KServeContext(registry, http, control, settings=kserve, access=access)
    shown = make_dashboard(registry, recorded)
    return make_app(registry, http, metrics=render, site=site, lifespan=lifespan, added=shown, log=log)


@asynccontextmanager
async def counting_together(exposition: Exposition | None) -> AsyncIterator[None]:
    """Meanwhile, have `exposition` show what all processes of the hosting server count, if its environment says where."""
    folder = os.environ.get(SHARED)
    if exposition is None or not folder:
        yield
        return
    shared = exposition.share(folder)

    async def write() -> None:
        while True:
            shared.write()
            await asyncio.sleep(SHARE_INTERVAL)

    writing = asyncio.create_task(write())
    try:
        yield
    finally:
        writing.cancel()
        await asyncio.wait([writing])
        shared.close()
        if not writing.cancelled():
            writing.result()  # why it ended before


def _service(model: Target, observers: Sequence[Observer], settings: dict[str, Any]) -> Service:
    if isinstance(model, Service):
        return model
    found = load_target(model) if isinstance(model, str) else model
    if isinstance(found, type) and issubclass(found, Service):
        return found(observers=observers, **settings)
    return Service(found, observers=observers, **settings)
