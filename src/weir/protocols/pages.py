"""Everything that is not inference: what there is, health, the state of models and their policies, metrics, documentation."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weir._version import __version__
from weir.errors import InvalidRequest, SettingsError, ValidationFailed, brief
from weir.messages import JSON
from weir.protocols.auth_middleware import with_key
from weir.protocols.bodies import Body
from weir.protocols.compression import accepted_coding
from weir.protocols.kserve.context import KServeContext
from weir.protocols.kserve.openapi import kserve_paths
from weir.protocols.openapi import CHANGES, openapi, paths_of
from weir.protocols.response import Headers, HttpResponse, compressed, encode_safely
from weir.protocols.sending import as_response
from weir.protocols.settings import HttpSettings
from weir.wire.values import decode

if TYPE_CHECKING:
    from weir.serving.service import Service

# Takes an Accept header and returns the metrics in Prometheus' text format, and their content type.
RenderMetrics = Callable[[str], tuple[bytes, str]]

Page = Callable[[Request], Awaitable[HttpResponse]]

_DOCS_POLICY = (
    b"default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
)


_LARGEST_CHANGE = 65536  # bytes of a body that changes something


class Pages:
    """The pages about the models of `site`. `others` are paths that are not answered here, as OpenAPI describes them."""

    def __init__(
        self, site: KServeContext, settings: HttpSettings, metrics: RenderMetrics | None, others: Mapping[str, Any]
    ) -> None:
        self._others = others
        self._site = site
        self._registry = site.registry
        self._settings = settings
        self._metrics = metrics
        self._checking: dict[str, asyncio.Future[dict[str, Any]]] = {}

    def routes(self) -> list[Route]:
        """Return Starlette's routes to the pages."""
        return [
            Route(path, self._endpoint(page), methods=["GET", "PUT"] if path in CHANGES else ["GET"])
            for path, page in self._pages().items()
        ]

    def _pages(self) -> dict[str, Page]:
        pages: dict[str, Page] = {
            "/": self.index,
            "/health": self.ready,
            "/health/live": self.live,
            "/health/ready": self.ready,
            "/health/deep": self.deep,
            "/models": self.models,
            "/models/{model}": self.model,
            "/models/{model}/policy": self.policy,
            "/openapi.json": self.openapi,
            "/docs": self.docs,
        }
        if self._metrics is not None:
            pages["/metrics"] = self.metrics
        return pages

    async def index(self, request: Request) -> HttpResponse:
        """Say what there is."""
        models = [self._line(service) | {"paths": paths_of(self._registry, service)} for service in self._services()]
        pages = {path: _summary(page) for path, page in self._pages().items()} | _summaries(self._others)
        return _json({"server": "weir", "version": __version__, "models": models, "pages": pages})

    async def live(self, request: Request) -> HttpResponse:
        """Say that this process answers: 200; or 503 with the models that can start no worker, where liveness counts them."""
        failed = self._site.failed
        return _health({"live": not failed} | ({"models": failed} if failed else {}), not failed)

    async def ready(self, request: Request) -> HttpResponse:
        """Say whether every model takes requests: 200, or 503 with the reasons."""
        lines = [self._line(service) for service in self._services()]
        ready = self._registry.ready
        return _health({"ready": ready, "models": lines}, ready)

    async def deep(self, request: Request) -> HttpResponse:
        """Run every model's examples: 200 if the answers are as they must be, or 503 with what is wrong."""
        reports = await asyncio.gather(*map(self._check, self._services()))
        healthy = all(report["healthy"] for report in reports)
        return _health({"healthy": healthy, "models": reports}, healthy)

    async def models(self, request: Request) -> HttpResponse:
        """List the models."""
        return _json({"models": [self._line(service) for service in self._services()]})

    async def model(self, request: Request) -> HttpResponse:
        """Show the state of one model."""
        return _json(self._registry.get(request.path_params["model"]).state())

    async def policy(self, request: Request) -> HttpResponse:
        """Explain the policy of one model: what it does, what was predicted and what is measured."""
        if request.method == "PUT":
            self._site.control.require_http(_peer(request), request.headers.raw)
        service = self._registry.get(request.path_params["model"])
        if request.method == "PUT":
            return _json(await self._change(service, request))
        return _json(service.explain_policy())

    async def _change(self, service: "Service", request: Request) -> dict[str, Any]:
        settings = self._settings
        body = await Body(request.receive).read(min(_LARGEST_CHANGE, settings.max_body_size), settings.body_timeout)
        said = decode(body or b"", JSON)
        if not isinstance(said, dict):
            raise InvalidRequest(f"body: must be a JSON object, is {brief(said, 100)}")
        try:
            return await service.set_prices(**said)
        except SettingsError as error:  # well said, but there is no such policy
            raise ValidationFailed(error.message) from error

    async def openapi(self, request: Request) -> HttpResponse:
        """Describe all routes as OpenAPI."""
        pages = {path: _summary(page) for path, page in self._pages().items()}
        root = request.scope.get("root_path", "")
        described = openapi(self._registry, pages, root, {**kserve_paths(self._site), **self._others})
        return _json(with_key(described) if self._site.access.required else described)

    async def docs(self, request: Request) -> HttpResponse:
        """Show the description to people, with a form to try each route."""
        page = (files("weir.protocols") / "docs.html").read_bytes()
        policy = (b"content-security-policy", _DOCS_POLICY)
        return HttpResponse(200, [(b"content-type", b"text/html; charset=utf-8"), policy], page)

    async def metrics(self, request: Request) -> HttpResponse:
        """Show the metrics."""
        assert self._metrics is not None, "there is no route without metrics: this is a bug"
        body, content_type = self._metrics(request.headers.get("accept", ""))
        return HttpResponse(200, [(b"content-type", content_type.encode())], body)

    async def _check(self, service: "Service") -> dict[str, Any]:
        """Run one deep check at a time of each model: all who ask meanwhile share it."""
        check = self._checking.get(service.name)
        if check is None:
            check = self._checking[service.name] = asyncio.ensure_future(service.deep_health())
            check.add_done_callback(lambda _: self._checking.pop(service.name))
        return await asyncio.shield(check)

    def _services(self) -> "list[Service]":
        return list(self._registry.services.values())

    def _line(self, service: "Service") -> dict[str, Any]:
        return {"name": service.name, "ready": service.ready, "reason": service.not_ready_reason}

    def _endpoint(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            answer = await page(request)
            coding = accepted_coding(request.headers.get("accept-encoding", ""))
            if coding and len(answer.body) > self._settings.compress_above:
                answer = compressed(answer, coding)
            return as_response(answer)

        return endpoint


def _summaries(paths: Mapping[str, Any]) -> dict[str, str]:
    return {path: " ".join(call["summary"] for call in calls.values()) for path, calls in paths.items()}


def _json(value: dict[str, Any], status: int = 200) -> HttpResponse:
    headers: Headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
    return HttpResponse(status, headers, encode_safely(value))


def _health(value: dict[str, Any], good: bool) -> HttpResponse:
    answer = _json(value, 200 if good else 503)
    if not good:
        answer.headers.append((b"retry-after", b"1"))
    return answer


def _peer(request: Request) -> str | None:
    return None if request.client is None else request.client.host


def _summary(page: Page) -> str:
    return (page.__doc__ or "").strip().rstrip(".")
