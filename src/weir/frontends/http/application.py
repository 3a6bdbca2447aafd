"""The whole HTTP frontend as one ASGI application, which any ASGI server can run.

Its pages are what there is in addition to inference: health, models, metrics, documentation; and what callers get when one fails or is not there. Each model has
a request to try: a command of curl, with the model's first example or an item of its type.
"""

import asyncio
import logging
import math
import re
import shlex
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, ExceptionHandler, Lifespan, Receive, Scope, Send

from weir._version import __version__
from weir.errors import (
    CapacityError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    SettingsError,
    ValidationFailed,
    WeirError,
    brief,
)
from weir.frontends.frontend import open_protocols
from weir.frontends.http import openapi as documents
from weir.frontends.http.access_log import HttpLog, Logged
from weir.frontends.http.asgi import (
    ANY,
    AsgiInference,
    Body,
    Gate,
    HttpEndpoint,
    answered,
    as_response,
    described_paths,
    inner_path,
    refusals_of,
    routes_of,
    with_key,
    with_names,
)
from weir.frontends.http.kserve_routes import PREFIX, kserve_endpoints, kserve_openapi
from weir.frontends.websocket import WebSockets
from weir.messages import JSON
from weir.model import Example, Tensor, is_tensor_model
from weir.policy.residency import Presence, Residents
from weir.protocols import HttpSettings
from weir.protocols.account import Account, Counted
from weir.protocols.data_plane import ModelNames, ReadyState, check_ready
from weir.protocols.exchange import HttpProtocol, inference_of
from weir.protocols.kserve import V1, KserveContext, KserveProtocol, KserveV1Protocol
from weir.protocols.kserve import error_response as kserve_error
from weir.protocols.native import PREFIX as NATIVE
from weir.protocols.native import NativeProtocol
from weir.protocols.response import (
    JSON_HEADER,
    NO_STORE,
    HttpResponse,
    accepted_coding,
    compressed_off_loop,
    encode_safely,
    error_response,
    json_response,
)
from weir.serving.handle import ModelHandle, ModelHealth
from weir.telemetry.exposition import NAMESPACE, Exposition, ModelCounts, State, TritonNames
from weir.telemetry.recorder import Metrics
from weir.wire import predictions
from weir.wire.forms import MULTIPART
from weir.wire.schema import read_document, schema_of
from weir.wire.status import codes_of_type
from weir.wire.values import UNWRITABLE, decode, encode
from weir.workers.timer import outcome_of

if TYPE_CHECKING:
    from weir.serving.handle import Models


_LONGEST_EXAMPLE = 200  # characters of JSON in a command to be copied
_DEEPEST = 8  # levels of a type that are followed


def request_to_try(service: ModelHandle, curl: str, base: str) -> str:
    """Return a command for a shell. `curl` is the program with its first options, and `base` the server's URL."""
    if predictions.CONTENT_TYPE in service.facts.model.content_types:
        return f"{curl} -T FILE {base}/predictions/{service.facts.name}"
    # Without declared inputs there are no items, as for most models of MLServer.
    path = (
        f"/infer/{service.facts.name}"
        if inference_of(service).inputs(service)
        else f"/v2/models/{service.facts.name}/infer"
    )
    return f"{curl} {_options(service)} {base}{path}"


def _options(service: ModelHandle) -> str:
    """Return the options of curl for a request to try: with the model's first example, or else a file of its content type, or an
    item of its type."""
    model = service.facts.model
    stream = "-N " if service.facts.streaming else ""
    for example in model.examples[:1]:
        if data := _quoted(example.item if isinstance(example, Example) else example):
            return f"{stream}-d {data}"
    if MULTIPART in model.content_types:
        return f"{stream}-F file=@FILE"
    if model.content_types:
        return f"{stream}-H {shlex.quote(f'Content-Type: {model.content_types[0]}')} --data-binary @FILE"
    if is_tensor_model(model):
        item: Any = {tensor.name: _zeros(tensor) for tensor in model.inputs if not tensor.optional}
        if any(math.prod(map(abs, tensor.shape)) > _LONGEST_EXAMPLE for tensor in model.inputs):
            return f"{stream}-d JSON"
    elif model.Input is not None:
        try:
            item = _sample(*schema_of(model.Input, "item").json_schema(output=False))
        except Exception:  # a type may describe itself in any way, and no server ends for want of an example
            return f"{stream}-d JSON"
    else:
        return f"{stream}-d {'TEXT' if model.plain_texts else 'JSON'}"
    return f"{stream}-d {_quoted(item) or 'JSON'}"


def _quoted(item: Any) -> str:
    """Return an item as JSON, quoted for a shell; "" if JSON cannot represent it, or if it is long."""
    try:
        text = encode(item, JSON).decode()
    except UNWRITABLE:
        return ""
    return shlex.quote(text) if len(text) <= _LONGEST_EXAMPLE else ""


def _zeros(tensor: Tensor) -> Any:
    """Return a tensor of zeros as nested lists, of length 1 where any length may be."""
    array: Any = "text" if tensor.datatype == "BYTES" else False if tensor.datatype == "BOOL" else 0
    for length in reversed(tensor.shape):
        array = [array] * abs(length)
    return array


_SAMPLES: Mapping[str, Any] = MappingProxyType(
    {"string": "text", "integer": 1, "number": 1.0, "boolean": True, "null": None}
)


def _sample(schema: Mapping[str, Any], components: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value of a JSON schema; it may break rules such as patterns and limits."""
    if "$ref" in schema and depth < _DEEPEST:
        return _sample(components[schema["$ref"].rpartition("/")[2]], components, depth + 1)
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key) and depth < _DEEPEST:
            return _sample(schema[key][0], components, depth + 1)
    kind = schema.get("type")
    if kind == "array":
        return [_sample(schema.get("items") or {}, components, depth + 1)] if depth < _DEEPEST else []
    if kind == "object" and depth < _DEEPEST:
        needed = schema.get("required") or schema.get("properties", {})
        return {name: _sample(schema["properties"][name], components, depth + 1) for name in needed}
    return max(schema.get("minimum", 0), _SAMPLES[kind]) if kind in ("integer", "number") else _SAMPLES.get(str(kind))


# Takes an Accept header and returns the metrics in Prometheus' text format, and their content type.
RenderMetrics = Callable[[str], tuple[bytes, str]]

Page = Callable[[Request], Awaitable[HttpResponse]]

_DOCS_POLICY = (
    b"default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
)


# The links of every page for browsers.
_LINKS = {"/docs": "API", "/dashboard": "Dashboard", "/health": "Health", "/metrics": "Metrics"}
_HTML = b"text/html; charset=utf-8"
_STYLED = (b"content-security-policy", b"default-src 'none'; img-src data:; style-src 'unsafe-inline'")


_LARGEST_CHANGE = 65536  # bytes of a body that changes something


class Pages:
    """The pages about the models of `context`. `others` are the endpoints of products, which the index and OpenAPI show too."""

    def __init__(
        self,
        context: KserveContext,
        settings: HttpSettings,
        metrics: RenderMetrics | None,
        others: Sequence[HttpEndpoint],
    ) -> None:
        self._others = others
        self._context = context
        self._registry = context.registry
        self._settings = settings
        self._metrics = metrics
        self._checking: dict[str, asyncio.Future[ModelHealth]] = {}
        # /openapi.json, but for its servers: to describe all takes tens of milliseconds.
        self._described: bytes | None = None
        self._registry.changed.append(self._forget_description)

    def endpoints(self) -> list[HttpEndpoint]:
        """Return the endpoints of the pages."""
        pages: list[tuple[str, str, Page]] = [
            ("GET", "/", self.index),
            ("GET", "/health", self.ready),
            ("GET", "/health/live", self.live),
            ("GET", "/health/ready", self.ready),
            ("GET", "/health/deep", self.deep),
            ("GET", "/models", self.models),
            ("GET", "/models/{model}", self.model),
            ("GET", "/models/{model}/policy", self.policy),
            ("PUT", "/models/{model}/policy", self.change_policy),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/docs", self.docs),
            ("GET", V1, self.v1_models),
            ("GET", V1 + "/{model}", self.v1_model),
        ]
        if self._metrics is not None:
            pages.append(("GET", "/metrics", self.metrics))
        return [
            HttpEndpoint(method, with_names(path), self._app(page), documents.described_page(method, path, page))
            for method, path, page in pages
        ] + [  # where SageMaker, and clients of TEI and vLLM look for a page
            *[HttpEndpoint(method, "/ping", self._app(self.ready)) for method in ("GET", "POST")],
            HttpEndpoint("GET", "/api-doc/openapi.json", self._app(self.openapi)),
        ]

    def _operations(self) -> dict[str, dict[str, Any]]:
        """Return the operations of all endpoints by path and method."""
        return described_paths([*self._others, *self.endpoints()])

    async def index(self, request: Request) -> Annotated[HttpResponse, documents.ServerIndex]:
        """List the models and pages. A browser gets a page with links and commands to try."""
        if _is_browser(request):
            return self._welcome(_base_of(request))
        models: list[documents.IndexedModel] = [
            {**self._line(service), "paths": documents.paths_of(self._registry, service)}
            for service in self._services()
        ]
        described = self._operations()
        pages = {path: "; ".join(each["summary"] for each in calls.values()) for path, calls in described.items()}
        return _json(
            documents.ServerIndex(status="alive", server="weir", version=__version__, models=models, pages=pages)
        )

    def _welcome(self, base: str) -> HttpResponse:
        curl = 'curl -H "Authorization: Bearer $KEY"' if self._context.access.required else "curl"
        calls = "".join(
            f"<h3>{escape(str((each.described or {})['summary']))}</h3>"
            f"<pre>{escape(f'{curl} -d {shlex.quote(encode(each.example, JSON).decode())} {base}{each.path}')}</pre>"
            for each in self._others
            if each.example is not None
        )
        models = "".join(self._model_card(each, base, "" if calls else curl) for each in self._services())
        return self._page(base, models + (f"<section><h2>Calls</h2>{calls}</section>" if calls else ""))

    def _model_card(self, service: ModelHandle, base: str, curl: str) -> str:
        """Return a model's card, with a command to try if there is the `curl` for it."""
        name, reason = escape(service.facts.name), service.not_ready_reason
        link = f"{escape(base)}/models/{name}"
        explained = any(each.path == "/dashboard/policy.html" for each in self._others)
        policy = f"{escape(base)}/dashboard/policy.html#{name}" if explained else f"{link}/policy"
        ready = f'<span class="warn">{escape(reason)}</span>' if reason else '<span class="good">ready</span>'
        return (
            f"<section><h2>{name}</h2><p>{ready}, {self._line(service)['workers']} workers &middot; "
            f'<a href="{link}">State</a> &middot; <a href="{policy}">Policy</a></p>'
            + (f"<pre>{escape(request_to_try(service, curl, base))}</pre></section>" if curl else "</section>")
        )

    def _page(self, base: str, content: str) -> HttpResponse:
        """Return a page for a browser with this `content`, as HTML."""
        pages, shown = self._operations(), escape(base)
        links = " ".join(f'<a href="{shown}{path}">{text}</a>' for path, text in _LINKS.items() if path in pages)
        page = Template((files("weir.frontends.http") / "page.html").read_text())
        body = page.substitute(base=shown, version=__version__, links=links, content=content).encode()
        return HttpResponse(200, [(b"content-type", _HTML), NO_STORE, _STYLED, (b"vary", b"accept")], body)

    def _readable(self, request: Request, response: HttpResponse) -> HttpResponse:
        """Return a response in JSON as a browser shows it to people."""
        title, text = request.url.path, msgspec.json.format(response.body, indent=2).decode()
        page = self._page(_base_of(request), f"<section><h2>{escape(title)}</h2><pre>{escape(text)}</pre></section>")
        named = {name for name, _ in page.headers}
        kept = [header for header in response.headers if header[0] not in named]
        return page._replace(status=response.status, headers=[*page.headers, *kept])

    async def live(self, request: Request) -> Annotated[HttpResponse, documents.Liveness]:
        """Check liveness: 200, or 503 with the models that can start no worker, where liveness counts them."""
        failed = self._context.failed
        return _health(
            documents.Liveness(live=False, models=failed) if failed else documents.Liveness(live=True), not failed
        )

    async def ready(self, request: Request) -> Annotated[HttpResponse, documents.Readiness]:
        """Check readiness: 200 if every model accepts requests, or 503 with the reasons."""
        ready = self._registry.ready
        return _health(documents.Readiness(ready=ready, models=self._lines()), ready)

    async def deep(self, request: Request) -> Annotated[HttpResponse, documents.DeepHealth]:
        """Run the examples of every model, in all versions: 200 if the responses are as they must be, or 503 with what is wrong."""
        reports = await asyncio.gather(*map(self._check, self._registry.all))
        healthy = all(report["healthy"] for report in reports)
        return _health(documents.DeepHealth(healthy=healthy, models=reports), healthy)

    async def models(self, request: Request) -> Annotated[HttpResponse, documents.ModelList]:
        """List the models."""
        services, unread = self._registry.services, sorted(self._registry.on_demand.items())
        lines = [_unread(name, reason) for name, reason in unread if name not in services]
        return _json(documents.ModelList(models=[*self._lines(), *lines]))

    async def model(self, request: Request) -> Annotated[HttpResponse, documents.ServiceState]:
        """Show the state of one model."""
        return _json(self._registry.get(request.path_params["model"]).control.state())

    async def v1_models(self, request: Request) -> Annotated[HttpResponse, ModelNames]:
        """Name the models, as KServe's first protocol does."""
        return _json(ModelNames(models=list(self._registry.services)))

    async def v1_model(self, request: Request) -> Annotated[HttpResponse, ReadyState]:
        """Return whether one model accepts requests, as KServe's first protocol does."""
        name = request.path_params["model"]
        check_ready(self._registry, name)
        return _json(ReadyState(name=name, ready=True))

    async def policy(self, request: Request) -> Annotated[HttpResponse, documents.PolicyReport]:
        """Explain the policy of one model: what it does, what was predicted and what is measured. With `Accept: text/plain`, for people."""
        report = self._registry.get(request.path_params["model"]).control.explain_policy()
        if "text/plain" not in request.headers.get("accept", ""):
            return _json(report)
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        return HttpResponse(200, headers, "".join(_outline(report)).encode())

    async def change_policy(
        self, request: Annotated[Request, documents.PolicyChange]
    ) -> Annotated[HttpResponse, documents.PolicyReport]:
        """Solve the policy for other weights; those that are not given stay."""
        self._context.control.require_http(_peer(request), request.headers.raw)
        service = self._registry.get(request.path_params["model"])
        settings = self._settings
        body = await Body(request.receive).read(min(_LARGEST_CHANGE, settings.max_body_size), settings.body_timeout)
        document = decode(body or b"", JSON)
        if not isinstance(document, dict):
            raise InvalidRequest(f"body: must be a JSON object, is {brief(document, 100)}")
        change = read_document(document, documents.PolicyChange)
        try:
            return _json(await service.control.set_prices(**msgspec.to_builtins(change)))
        except SettingsError as error:  # it is well formed, but there is no such policy
            raise ValidationFailed(error.message) from error

    async def openapi(self, request: Request) -> Annotated[HttpResponse, dict[str, Any]]:
        """Describe all routes as OpenAPI."""
        if self._described is None:
            self._described = encode_safely(self._description())
        servers = encode_safely({"servers": documents.servers(inner_path(request.scope))})
        return HttpResponse(200, [JSON_HEADER, NO_STORE], b"%b,%b" % (self._described[:-1], servers[1:]))

    def _description(self) -> dict[str, Any]:
        paths, components = kserve_openapi(self._context)
        described = documents.openapi(self._registry, {**self._operations(), **paths}, components)
        return with_key(described) if self._context.access.required else described

    def _forget_description(self) -> None:
        self._described = None

    async def docs(self, request: Request) -> Annotated[HttpResponse, "text/html"]:
        """Show the API documentation, with a form to try each route."""
        page = (files("weir.frontends.http") / "docs.html").read_bytes()
        policy = (b"content-security-policy", _DOCS_POLICY)
        return HttpResponse(200, [(b"content-type", _HTML), policy], page)

    async def metrics(self, request: Request) -> Annotated[HttpResponse, "text/plain"]:
        """Show the metrics."""
        assert self._metrics is not None, "there is no route without metrics: this is a bug"
        body, content_type = self._metrics(request.headers.get("accept", ""))
        return HttpResponse(200, [(b"content-type", content_type.encode())], body)

    async def _check(self, service: "ModelHandle") -> ModelHealth:
        """Return the result of a deep check. Only one check of a model runs at a time; requests that come meanwhile share it."""
        label = service.facts.label
        check = self._checking.get(label)
        if check is None:
            check = self._checking[label] = asyncio.ensure_future(service.control.deep_health())
            check.add_done_callback(lambda _: self._checking.pop(label))
        return await outcome_of(check)

    def _services(self) -> "list[ModelHandle]":
        return list(self._registry.services.values())

    def _lines(self) -> list[documents.ModelLine]:
        return [self._line(service) for service in self._services()]

    def _line(self, service: "ModelHandle") -> documents.ModelLine:
        line: documents.ModelLine = {
            "name": service.facts.name,
            "ready": not service.not_ready_reason,
            "reason": service.not_ready_reason,
            "workers": f"{service.control.ready_workers} of {service.control.workers.workers}",
        }
        if (residency := service.control.state(brief=True)["residency"]) is not None:
            line |= {"state": residency["state"], "reason": line["reason"] or residency["reason"]}
        return line

    def _app(self, page: Page) -> ASGIApp:
        async def endpoint(request: Request) -> Response:
            response = await page(request)
            if _is_browser(request) and JSON_HEADER in response.headers and page != self.openapi:
                response = self._readable(request, response)
            coding = accepted_coding(request.headers.get("accept-encoding", ""))
            if coding and len(response.body) > self._settings.compress_above:
                response = await compressed_off_loop(response, coding)
            return as_response(response)

        return answered(endpoint)


def _outline(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield a line for each value that is known, those of a mapping further to the right, and of a long list the beginning."""
    for key, each in value.items():
        if isinstance(each, Mapping):
            lines = list(_outline(each, indent + "  "))
            yield from [f"{indent}{key}:\n", *lines] if lines else []
        elif each is not None:
            shown = each if isinstance(each, str) else brief(each, 100)
            yield f"{indent}{key}: {shown}{'' if len(shown) < 100 else ' ...'}\n"


def _unread(name: str, reason: str) -> documents.ModelLine:
    """Return the line of a model on demand that was not read; `reason` is why it could not be, or ""."""
    state = "failed" if reason else "available"
    return {"name": name, "ready": not reason, "reason": reason, "workers": "0", "state": state}


def _json(value: Mapping[str, Any], status: int = 200) -> HttpResponse:
    return json_response(value, [NO_STORE], status)


def _health(value: Mapping[str, Any], good: bool) -> HttpResponse:
    response = _json(value, 200 if good else 503)
    if not good:
        response.headers.append((b"retry-after", b"1"))
    return response


def _is_browser(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


def _base_of(request: Request) -> str:
    return str(request.base_url).rstrip("/")


def _peer(request: Request) -> str | None:
    return None if request.client is None else request.client.host


# The frontends whose responses have HTTP's status codes: Weir's own, and those of products.
HTTP_FRONTENDS = frozenset(("http", "openai", "tei", "cohere", "infinity", "vllm", "encode"))


def make_exposition(
    metrics: Metrics, registry: "Models", *, triton_names: bool = False, namespace: str = NAMESPACE
) -> Exposition:
    """Return the exposition of `metrics`, which must be an observer of the services of `registry`.

    With `triton_names` it also has the metrics that Triton's dashboards use. `namespace` is the first word of the names of all other metrics.
    """
    exposition = Exposition(
        metrics, code_of, lambda: {each.facts.label: state_of(each) for each in registry.all}, namespace
    )
    if triton_names:
        exposition.registry.register(TritonNames(metrics, lambda: map(counted, registry.all)))
    return exposition


# A kind of metric, its name, its text and its value.
Number = tuple[Callable[[str, str, float], Metric], str, str, float]


class NumbersCollector(Collector):
    """Shows what `numbers` returns, which is called for each response."""

    def __init__(self, numbers: Callable[[], Iterable[Number]]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        return (kind(name, text, value) for kind, name, text, value in self._numbers())


def held(account: Account) -> Iterator[Number]:
    """Yield the bytes and connections of all clients of a server."""
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    yield gauge, "weir_held_bytes", "Bytes held by requests and responses.", account.total_bytes
    yield gauge, "weir_max_held_bytes", "Limit of the bytes held (max_waiting_bytes).", account.max_bytes
    yield gauge, "weir_connections", "Open connections of all kinds.", account.connections
    yield gauge, "weir_max_connections", "Limit of open connections.", account.max_connections
    yield counter, "weir_held_refusals", "Requests refused because memory was short.", account.total_refused


def in_memory(core: Residents) -> Iterator[Number]:
    """Yield how many models are in memory, what they take, and how often they come and go."""
    gauge, counter, waiting = GaugeMetricFamily, CounterMetricFamily, core.count(Presence.WAITING, Presence.LOADING)
    taken = "Memory that models on demand take, as measured or declared."
    took = "Seconds that loads of models on demand took together."
    yield gauge, "weir_models_loaded", "Models on demand that are loaded.", core.count(Presence.LOADED)
    yield gauge, "weir_models_waiting", "Models on demand that wait or load.", waiting
    yield gauge, "weir_models_memory_bytes", taken, core.used.memory
    yield gauge, "weir_models_gpu_memory_bytes", "The same of GPU memory, as declared.", core.used.gpu_memory
    yield counter, "weir_models_loads", "Loads of models on demand.", core.loads
    yield counter, "weir_models_failed_loads", "Loads of models on demand that failed.", core.failures
    yield counter, "weir_models_load_seconds", took, core.load_seconds
    yield counter, "weir_models_evictions", "Models on demand that left memory for others.", core.evictions


def counted(service: "ModelHandle") -> ModelCounts:
    """Return the counts of `service` that are shown under Triton's names."""
    return ModelCounts(
        service.facts.name,
        service.facts.version,
        service.control.statistics,
        service.control.state()["waiting_requests"],
    )


def code_of(frontend: str, kind: type[WeirError] | None) -> str:
    """Return the status code of a request that ended with an error of type `kind` (None: a response), as its frontend `frontend` has codes.

    A call in process has no codes: the name of the error stands for one.
    """
    if frontend in HTTP_FRONTENDS:
        return "200" if kind is None else str(codes_of_type(kind).http)
    if frontend == "grpc":
        return "OK" if kind is None else codes_of_type(kind).grpc
    return "ok" if kind is None else kind.__name__


def state_of(service: "ModelHandle") -> State:
    """Return the present state of `service` for the metrics."""
    state = service.control.state()
    wanted = service.control.worker_count if state["scaling"] is None else state["scaling"]["wanted"]
    return {**state, "version": service.facts.version, "wanted_workers": wanted}


_log = logging.getLogger("weir.http")

# Clients of the Open Inference Protocol read errors as texts only. The first path is the WebSocket path of AMD's client; the last begins a path if the
# client's base URL ends with a slash.
_OF_KSERVE = re.compile(rf"/models/infer|{PREFIX}(/.*)?|//v2.*", re.DOTALL)


def exception_handlers(context: KserveContext) -> Mapping[Any, ExceptionHandler]:
    """Return the exception handlers for Starlette."""

    # Each is a coroutine: Starlette has a thread call one that is not.
    async def ours(request: Request, error: Exception) -> Response:
        path, named = inner_path(request.scope), request.path_params.get("model", "")
        if _OF_KSERVE.fullmatch(path):
            # Else the rest of a path was taken for a part of the name.
            is_path = "/" not in named or context.registry.knows(named)
            return as_response(kserve_error(error if is_path else NotFound(f"{path}: unknown path")))
        # Only a page of a known model gets far enough to fail otherwise.
        known = not isinstance(error, (ModelNotFound, MethodNotAllowed))
        return as_response(
            error_response(error, named or None if known else None, development=context.http.development)
        )

    async def unknown(request: Request, error: Exception) -> Response:
        path = request.scope["path"]
        if (request.method, path) == (
            "OPTIONS",
            "*",
        ):  # RFC 9110, section 9.3.7: it is for the server, not for one path
            return Response()
        return await ours(request, NotFound(f"{path}: unknown path; GET / lists those there are"))

    async def any_other(request: Request, error: Exception) -> Response:
        _log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
        return await ours(request, error)

    return {HTTPException: unknown, WeirError: ours, Exception: any_other}


_SHOWN_TO_PAGES = (
    "Retry-After", "X-Request-Id", "X-Batch-Size", "X-Batch-Reason", "X-Batch-Waiting", "X-Batch-Oldest-Age",
    "X-Batch-Limit", "X-Batch-Wakeup", "X-Queue-Time", "X-Weir-Truncated",
)  # fmt: skip


class AddedEndpoints(NamedTuple):
    """The parts that a product adds to the application. `begin` is called on the event loop when the server runs."""

    endpoints: Sequence[HttpEndpoint] = ()
    begin: Callable[[], None] = lambda: None


NO_ENDPOINTS = AddedEndpoints()


class InferencePaths(Container[str]):
    """The paths at which a POST of JSON is a request for inference with one response: those of `protocols` and of `endpoints`."""

    def __init__(self, protocols: Sequence[HttpProtocol], endpoints: Sequence[HttpEndpoint] = ()) -> None:
        self._protocols = protocols
        self._more = {each.path for each in endpoints if each.infers}

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and (path in self._more or any(_takes(each, path) for each in self._protocols))


def _takes(protocol: HttpProtocol, path: str) -> bool:
    try:
        head = protocol.read_head("POST", path, ())
    except (ModelNotFound, CapacityError):  # the model may be loaded later
        return True
    except WeirError:
        return False
    return head is not None and not head.stream


class Shortcut:
    """ASGI middleware that finds those of `endpoints` that have no parameters in one look-up: a router would try all routes, one after the other."""

    def __init__(self, app: ASGIApp, endpoints: Sequence[HttpEndpoint]) -> None:
        self._app = app
        self._found = {(each.method, each.path): each.app for each in reversed(endpoints) if "{" not in each.path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        found = self._found.get((scope["method"], inner_path(scope))) if scope["type"] == "http" else None
        if found is None:
            return await self._app(scope, receive, send)
        await found({**scope, "path_params": {}}, receive, send)


def inference_protocols(context: KserveContext) -> Sequence[HttpProtocol]:
    """Return the protocols of inference: those that the settings name, and Weir's own. Raises SettingsError for one that cannot be made."""
    registry, settings = context.registry, context.http
    own = KserveProtocol(context), KserveV1Protocol(context), NativeProtocol(registry, settings)
    return (*open_protocols(registry, settings), *own)


def _cors(settings: HttpSettings, endpoints: Iterable[HttpEndpoint]) -> Middleware:
    """Return what lets pages of `cors_origins` call the `endpoints`."""
    return Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=sorted({"POST", *[each.method for each in endpoints]} - {ANY}),
        allow_headers=["*"],
        expose_headers=_SHOWN_TO_PAGES,
    )


def make_app(
    context: KserveContext,
    *,
    metrics: RenderMetrics | None = None,
    lifespan: Lifespan[Any] | None = None,
    websockets: WebSockets | None = None,
    added: AddedEndpoints = NO_ENDPOINTS,
    log: HttpLog | None = None,
    protocols: Sequence[HttpProtocol] | None = None,
) -> Starlette:
    """Return the application that serves the models of `context`, which the frontends of the Open Inference Protocol share.

    The caller starts and stops the models: before and after, or in `lifespan`. Without `metrics` there is no /metrics. `websockets` are the WebSockets of
    the application, if the caller wants to drain them. `added` has the endpoints of a product. `log` gets a line for each request.
    `protocols` are those of `inference_protocols`.

    No model's route may begin as a path of the application does. Raises SettingsError if one does already.
    """
    registry, settings = context.registry, context.http
    protocols = inference_protocols(context) if protocols is None else protocols
    pages = Pages(context, settings, metrics, added.endpoints).endpoints()
    endpoints = [*added.endpoints, *pages, *kserve_endpoints(context)]
    refusals = {**refusals_of(added.endpoints), PREFIX: kserve_error}
    stated = [  # from the outermost to the innermost: a browser's preflight request has no key
        None if log is None else Middleware(Logged, log),
        _cors(settings, endpoints) if settings.cors_origins else None,
        Middleware(Gate, context.access, refusals, settings) if context.access.required else None,
        Middleware(Counted, context.account),
        Middleware(Shortcut, added.endpoints) if added.endpoints else None,
        Middleware(AsgiInference, protocols, settings),
    ]
    middleware = [each for each in stated if each is not None]
    routes = [*routes_of(endpoints), *(websockets or WebSockets(registry, settings, context.account)).routes()]
    own = [each.prefix.decode() for each in protocols] + [getattr(each, "path", "/") for each in routes]
    # Models may have routes below /v1: those of the first version of KServe's protocol are few.
    registry.reserve(path.split("/")[1] for path in (NATIVE, *own) if not path.startswith(V1))
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers=exception_handlers(context), lifespan=lifespan
    )
    app.router.redirect_slashes = False  # its redirects repeat whatever Host the client sent
    # Build it now: building it for the first request would delay all others by tens of milliseconds.
    app.middleware_stack = app.build_middleware_stack()
    return app
