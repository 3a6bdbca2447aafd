"""The OpenAPI description of a server, with JSON Schemas of what its models read and write."""

import re
from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from weir import errors
from weir._version import __version__
from weir.messages import JSON, MSGPACK, DispatchRecord
from weir.model import Example, Model, Tensor, is_tensor_model
from weir.policy.cost import Prices
from weir.protocols.response import ErrorValue, read_types
from weir.serving.generation import WorkerView
from weir.serving.handle import ModelHealth, ResidencyView
from weir.wire.schema import REF_TEMPLATE, json_schemas, schema_of
from weir.wire.sse import CONTENT_TYPE
from weir.wire.status import http_code
from weir.wire.values import UNWRITABLE, decode, encode

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle, Models


Schema = dict[str, Any]

EVENTS = {"schema": {"description": "events, each with a response as its data"}}

_COMPONENTS = REF_TEMPLATE.format("")
_NUMBERS = {
    "BOOL": "boolean",
    "BYTES": "string",
    "BF16": "number",
    "FP16": "number",
    "FP32": "number",
    "FP64": "number",
}


class Described:
    """Describes what a model reads (`item`) and writes (`output`) as schemas, the `components` these refer to, and `examples`."""

    def __init__(self, model: type[Model], name: str) -> None:
        self.components: dict[str, Schema] = {}
        self._prefix = re.sub(r"[^A-Za-z0-9._-]", "_", name)
        if is_tensor_model(model):
            self.item, self.output = tensors_schema(model.inputs), tensors_schema(model.outputs)
        else:
            self.item = self._schema(model.Input, "Input")
            self.output = self._schema(model.Output, "Output")
        self.examples = [example_value(each) for each in model.examples]

    def _schema(self, declared: Any, role: str) -> Schema:
        """Return the schema of a declared type, with its components under names that no other model's have."""
        if declared is None:
            return {}
        schema, components = schema_of(declared, role).json_schema(output=role == "Output")
        prefix = f"{self._prefix}.{role}."
        self.components |= {prefix + name: _renamed(each, prefix) for name, each in components.items()}
        renamed: Schema = _renamed(schema, prefix)
        return renamed


def _renamed(schema: Any, prefix: str) -> Any:
    """Return `schema` with every reference leading to the component of that name with `prefix`."""
    if isinstance(schema, list):
        return [_renamed(each, prefix) for each in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {key: _renamed(each, prefix) for key, each in schema.items()}
    reference = renamed.get("$ref")
    if isinstance(reference, str) and reference.startswith(_COMPONENTS):
        renamed["$ref"] = _COMPONENTS + prefix + reference[len(_COMPONENTS) :]
    mapping = renamed.get("mapping")  # of a discriminator: tag -> reference
    if isinstance(mapping, dict) and "propertyName" in renamed:
        renamed["mapping"] = {tag: _renamed({"$ref": each}, prefix)["$ref"] for tag, each in mapping.items()}
    return renamed


def tensors_schema(tensors: Sequence[Tensor]) -> Schema:
    """Return the schema of an object that holds these tensors as nested lists."""
    return {
        "type": "object",
        "properties": {tensor.name: _tensor_schema(tensor) for tensor in tensors},
        "required": [tensor.name for tensor in tensors if not tensor.optional],
    }


def _tensor_schema(tensor: Tensor) -> Schema:
    schema: Schema = {"type": _NUMBERS.get(tensor.datatype, "integer")}
    for length in reversed(tensor.shape):
        bounds = {} if length < 0 else {"minItems": length, "maxItems": length}
        schema = {"type": "array", "items": schema, **bounds}
    return schema | {"description": f"{tensor.datatype}, shape {list(tensor.shape)}"}


def example_value(example: Any) -> dict[str, Any]:
    """Return an example as {"item", "output"}, as JSON can hold it; "output" only if the model declares it."""
    given = example if isinstance(example, Example) else Example(example)
    shown = {"item": _plain(given.item)}
    if given.expected is not ...:
        shown["output"] = _plain(given.expected)
    return shown


def _plain(value: Any) -> Any:
    """Return `value` as JSON holds it; what JSON cannot hold, as its repr."""
    try:
        return decode(encode(value, JSON), JSON)
    except UNWRITABLE:
        return repr(value)


_INFERENCE_ERRORS: tuple[type[errors.WeirError], ...] = (
    errors.InvalidRequest,
    errors.RequestTimeout,
    errors.DeadlineExceeded,
    errors.TooLarge,
    errors.UnsupportedMediaType,
    errors.ValidationFailed,
    errors.Overloaded,
    errors.ModelError,
    errors.ModelNotReady,
    errors.Draining,
    errors.WorkerLost,
)

_HEADERS = {
    "X-Request-Timeout": ("seconds until the request expires", {"type": "number", "exclusiveMinimum": 0}),
    "X-Request-Priority": ("higher goes first; 0 if not given; below 0: bulk work", {"type": "integer"}),
    "X-Weir-Class": ("bulk: the request gets the time that interactive ones leave", {"enum": ["interactive", "bulk"]}),
    "X-Batch-Key": ("only requests of equal key share a batch", {"type": "string", "minLength": 1, "maxLength": 256}),
    "X-Explain": ("1: explain the batch in the headers of the response", {"type": "string", "enum": ["0", "1"]}),
    "X-Client-Id": (
        "whose texts these are, so that nobody takes more than a fair share",
        {"type": "string", "minLength": 1, "maxLength": 128},
    ),
    "X-Request-Id": ("sent back with the response", {"type": "string", "maxLength": 256}),
}
_OF_INFERENCE = ("X-Request-Timeout", "X-Request-Priority", "X-Weir-Class", "X-Batch-Key", "X-Explain", "X-Request-Id")


class ErrorBody(Struct):
    """The document of an error."""

    error: ErrorValue


class FailedItem(Struct):
    """An error that stands for an output in the response to a list; `code` is the HTTP status that it would have alone."""

    error: ErrorValue
    code: int


# Prices checks the value, and explains why it is too small.
Weight = Annotated[float, Meta(extra_json_schema={"minimum": 0})]


class ModelLine(TypedDict):
    """A model, why it takes no requests ("" if it does), and how many of how many workers are ready: `2 of 2`, or `3 of 1..16`."""

    name: str
    ready: bool
    reason: str
    workers: str
    state: NotRequired[str]  # of a model on demand: available, waiting, loading, loaded, leaving, evicted or failed


class IndexedModel(ModelLine):
    """A model, and its paths."""

    paths: list[str]


class ServerIndex(TypedDict):
    """The models, and the purpose of each page, by path. KServe's client reads `status`."""

    status: Literal["alive"]
    server: str
    version: str
    models: list[IndexedModel]
    pages: dict[str, str]


class Liveness(TypedDict):
    """Whether this process responds, and why models can start no worker, where liveness counts them."""

    live: bool
    models: NotRequired[dict[str, str]]


class Readiness(TypedDict):
    """Whether every model takes requests."""

    ready: bool
    models: list[ModelLine]


class DeepHealth(TypedDict):
    """Whether the responses of all models are as they must be."""

    healthy: bool
    models: list[ModelHealth]


class ModelList(TypedDict):
    """The models."""

    models: list[ModelLine]


class ScalingState(TypedDict):
    """The range of workers (`1..16`), the number that there shall be, and the reason."""

    allowed: str
    wanted: int
    because: str


class DeviceState(TypedDict):
    """The device on which a model takes turns with others: its part of the time that they have used, how many turns it had for each reason, and
    why it had the last one."""

    group: str
    order: str
    busy_seconds: float
    share: float
    turns: dict[str, int]
    because: str | None


class KindCounts(TypedDict):
    """The work of the workers of one kind. Rows and batches of bulk workers do not count."""

    kind: str
    ready: int
    batches: int
    rows: int


class ServiceState(TypedDict):
    """The state of a model. Sizes are in rows unless the name says otherwise, ages in seconds; `recent` has the last batches."""

    model: str
    ready: bool
    reason: str
    shortage: Annotated[
        str, Meta(description="how many of how many workers are ready, and why the others are not; empty if all are")
    ]
    draining: bool
    waiting: int
    waiting_requests: int
    waiting_outside: int
    waiting_bulk: int
    bulk_limit: Annotated[float, Meta(description="what a batch of bulk work may cost, in rows or units of cost")]
    bulk_delay: Annotated[float, Meta(description="the seconds that bulk work may add to other requests")]
    oldest_age: float | None
    in_flight: int
    in_flight_batches: int
    workers: list[WorkerView]
    kinds: Annotated[list[KindCounts], Meta(description="empty if all workers are alike")]
    residency: Annotated[ResidencyView | None, Meta(description="null: the model is not loaded on demand")]
    scaling: Annotated[ScalingState | None, Meta(description="null: the number of workers is fixed")]
    device: Annotated[DeviceState | None, Meta(description="null: the model takes no turns with others")]
    gauges: dict[str, float]
    settings: dict[str, Any]
    batches: Annotated[dict[str, int], Meta(description="how many batches were dispatched for each reason")]
    recent: list[DispatchRecord]
    policy: Annotated[dict[str, Any], Meta(description="the numbers of the policy's explanation")]


class PolicyFigures(TypedDict):
    """The figures that a policy achieves. Null: unknown."""

    response_time_ms: float | None
    p99_ms: float | None
    power_w: float | None
    cost: float | None


class MeasuredFigures(PolicyFigures):
    """The figures measured in the last `seconds`; `rate` is in rows per second."""

    rate: float
    seconds: float
    requests: int
    rows: int
    batches: int


class WorkersFigures(TypedDict):
    """The figures of some number of workers at the present rate; null: the queue grows without end. `utilisation` is their busy share."""

    workers: int
    response_time_ms: float | None
    p99_ms: float | None
    utilisation: float


class ScalingReport(TypedDict):
    """The number of workers that there are and shall be, the reason, and the effect of one more or one less. Unknown figures are null."""

    allowed: Annotated[str, Meta(description="the fewest and the most workers", examples=["1..16"])]
    present: int
    ready: int
    starting: int
    wanted: int
    reason: Annotated[str | None, Meta(description="rate, queue, held, first, idle, least or most")]
    because: Annotated[str, Meta(description="the reason as a sentence")]
    goal: Annotated[str | None, Meta(description="what the workers keep: p99=20ms, load=0.7, or the knee of the cost")]
    solved: Annotated[bool, Meta(description="whether what workers can do has been simulated, not only assumed")]
    rate: Annotated[float | None, Meta(description="the estimated arrival rate in rows per second")]
    high_rate: Annotated[float | None, Meta(description="a rate that is hardly exceeded while a worker starts")]
    start_up_seconds: float
    starts: int
    stops: int
    failures: Annotated[int, Meta(description="workers that could not be started")]
    error: Annotated[str | None, Meta(description="why the last one could not be started")]
    one_less: WorkersFigures | None
    now: WorkersFigures | None
    one_more: WorkersFigures | None


class PolicyReport(TypedDict):
    """The decisions of a policy and their effect. Rates and the capacity are in rows per second; unknown figures are null."""

    model: str
    policy: str
    rate: float | None
    capacity: float | None
    table: Annotated[
        dict[str, float | None], Meta(description="the table in use, and the rows that it waits for (`limit`)")
    ]
    prices: Prices | None
    objective: dict[str, Any] | None
    workers: int
    predicted: PolicyFigures
    measured: MeasuredFigures
    profile: dict[str, Any] | None
    drift: dict[str, float | None] | None
    kinds: Annotated[dict[str, Any] | None, Meta(description="null: all workers are alike")]
    solved: dict[str, Any] | None
    learning: bool
    scaling: Annotated[ScalingReport | None, Meta(description="null: the number of workers is fixed")]
    guards: NotRequired[Annotated[dict[str, float | None], Meta(description="the longest waits, in seconds")]]
    max_waiting: NotRequired[int | None]
    beside_greedy: NotRequired[
        Annotated[
            dict[str, bool | float | None],
            Meta(description="whether it must be greedy, and its excess of greedy's cost"),
        ]
    ]
    device: NotRequired[
        Annotated[
            dict[str, Any] | None,
            Meta(
                description="where models share a device: the limit in rows, and the urgency by waiting rows; null: none is shared"
            ),
        ]
    ]


class PolicyChange(Struct, forbid_unknown_fields=True):
    """Prices to solve the policy of a model for; those that are not given stay as they are."""

    latency_weight: Annotated[Weight, Meta(description="weight of a millisecond of mean response time")] | UnsetType = (
        UNSET
    )
    energy_weight: Annotated[Weight, Meta(description="weight of a watt of mean power")] | UnsetType = UNSET
    reference_rate: (
        Annotated[
            float | None,
            Meta(description="rows per second at which a row's millisecond has that price; null: at every rate"),
        ]
        | UnsetType
    ) = UNSET
    latency_objective: (
        Annotated[
            str | None,
            Meta(
                description="a promise: a percentile and a duration; or in-time and a duration; null: none",
                examples=["p99=20ms"],
            ),
        ]
        | UnsetType
    ) = UNSET


_, _COMPONENTS_OF_PAGES = json_schemas([ErrorBody, FailedItem, PolicyChange])
_CHANGE_ERRORS = (
    errors.InvalidRequest,
    errors.ModelNotFound,
    errors.DeadlineExceeded,
    errors.Conflict,
    errors.TooLarge,
    errors.ValidationFailed,
    errors.ModelError,
    errors.ModelNotReady,
    errors.Draining,
)


def openapi(
    registry: "Models", others: Mapping[str, Any], components: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document.

    `others` are described paths in addition to those of inference, and `components` the schemas that they refer to; in place of a schema they may have
    a type that msgspec knows. Where the server is, `servers` says.
    """
    paths: dict[str, Any] = {}
    schemas: dict[str, Schema] = {**_COMPONENTS_OF_PAGES, **components}
    for service in registry.services.values():
        described = Described(service.facts.model, service.facts.name)
        schemas |= described.components
        for path in paths_of(registry, service):
            paths[path] = {"post": _operation(service, described, path, batch=path.endswith("/batch"))}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Weir", "version": __version__, "description": "Models served with dynamic batching."},
        "paths": {**paths, **_with_schemas(others, schemas)},
        "components": {"schemas": schemas},
    }


def servers(path: str) -> list[dict[str, str]]:
    """Return where the described paths are, as seen from the document at `path` of this application. A relative URL holds behind every
    proxy, also behind one that removes a prefix and does not say so."""
    return [{"url": "/".join([".."] * (path.count("/") - 1)) or "."}]


def _with_schemas(paths: Mapping[str, Any], components: dict[str, Schema]) -> dict[str, Any]:
    """Return described paths with the schema of each declared type in its place; what the schemas refer to is added to `components`."""

    def schema(declared: Any) -> Schema:
        (found,), referred = json_schemas([declared])
        components.update(referred)
        return found

    described: dict[str, Any] = msgspec.to_builtins(paths, enc_hook=schema)
    return described


def paths_of(registry: "Models", service: "ModelHandle") -> list[str]:
    """Return the paths at which `service` answers; a path with `/batch` after each of them takes a list."""
    extra = [path for path, routed in registry.routes.items() if routed is service]
    sole = ["/inference"] if registry.sole is service else []
    endings = ("",) if service.facts.streaming else ("", "/batch")
    return [path + ending for path in (f"/infer/{service.facts.name}", *extra, *sole) for ending in endings]


def _operation(service: "ModelHandle", described: Described, path: str, *, batch: bool) -> dict[str, Any]:
    model, streams = service.facts.model, service.facts.streaming
    types = read_types(model, batch)
    item, output = described.item, described.output
    if batch:
        item, output = {"type": "array", "items": item}, {"type": "array", "items": _batch_output(output)}
    written = {each: _body(each, output, {} if batch else _examples(described, "output", batch)) for each in types}
    shown = "The response" + (", with an output or an error for each item" if batch else "")
    return described_call(
        path.strip("/").replace("/", "_"),
        service.facts.name,
        f"Run {service.facts.name}" + (" on each item of a list" if batch else ""),
        {CONTENT_TYPE: EVENTS} if streams else written,
        _error_responses((*_INFERENCE_ERRORS, errors.Unsupported) if streams else _INFERENCE_ERRORS),
        shown=_EVENTS_SHOWN if streams else shown,
        body={each: _body(each, item, _examples(described, "item", batch)) for each in types},
        description=first_paragraph(model.__doc__),
        parameters=described_headers(_OF_INFERENCE),
    )


_EVENTS_SHOWN = "The responses, each as the data of an event, in JSON; an error after the first is an event `error`"


def _batch_output(of_one: Schema) -> Schema:
    output = {"type": "object", "properties": {"output": of_one}, "required": ["output"]}
    return {"oneOf": [output, _reference(FailedItem)]}


def _reference(declared: type[Struct]) -> Schema:
    return {"$ref": REF_TEMPLATE.format(declared.__name__)}


def _body(content_type: str, schema: Schema, examples: dict[str, Any]) -> dict[str, Any]:
    if content_type not in (JSON, MSGPACK):
        return {"schema": {"description": "bytes"}}
    return {"schema": schema, "examples": examples} if examples and content_type == JSON else {"schema": schema}


def _examples(described: Described, key: str, batch: bool) -> dict[str, Any]:
    values = [example[key] for example in described.examples if key in example]
    if batch and values:
        return {"all": {"value": values}}
    return {str(number): {"value": value} for number, value in enumerate(values, 1)}


def described_headers(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the headers that a request may have, as OpenAPI describes them."""
    return [
        {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
        for name in names
        for text, schema in [_HEADERS[name]]
    ]


def _error_responses(possible: Sequence[type[errors.WeirError]]) -> dict[str, Any]:
    return described_errors(possible, http_code, _reference(ErrorBody))


def described_errors(
    possible: Sequence[type[errors.WeirError]], code_of: Callable[[BaseException], int], schema: Schema
) -> dict[str, Any]:
    """Return the responses that the `possible` errors are, by code; their bodies have `schema`."""
    kinds: dict[str, list[type[errors.WeirError]]] = {}
    for kind in possible:
        kinds.setdefault(str(code_of(kind())), []).append(kind)
    return {code: _error_response(found, schema) for code, found in sorted(kinds.items())}


def _error_response(kinds: Sequence[type[errors.WeirError]], schema: Schema) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": " ".join(f"{kind.__name__}: {(kind.__doc__ or '').strip()}" for kind in kinds),
        "content": {JSON: {"schema": schema}},
    }
    if all(issubclass(kind, errors.CapacityError) for kind in kinds):
        text = "seconds after which it is worth trying again"
        response["headers"] = {"Retry-After": {"description": text, "schema": {"type": "integer", "minimum": 1}}}
    return response


def described_call(
    name: str,
    tag: str,
    summary: str,
    content: Mapping[str, Any],
    failures: Mapping[str, Any],
    *,
    shown: str = "The response",
    body: Mapping[str, Any] | None = None,
    needs_body: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Return an operation as OpenAPI describes it, with types in place of schemas.

    Arguments:
        name: its id.
        tag, summary: where and how it is listed.
        content: its response, by content type; `shown` describes it.
        failures: its other responses, by code.
        body: its request, by content type; None if it has none. `needs_body` says whether that may be left out.
        more: its further fields.
    """
    request = {} if body is None else {"requestBody": {"required": needs_body, "content": body}}
    responses = {"200": {"description": shown, "content": content}, **failures}
    return {"operationId": name, "tags": [tag], "summary": summary, **more, **request, "responses": responses}


def operation(
    method: str, path: str, summary: str, response: Any, error: Any = ErrorBody, *, tag: str = "server", **more: Any
) -> dict[str, Any]:
    """Return the operation of `method` at `path`. `response` is its type, or the content type of one that is not JSON; `error` is the
    type of its errors; `more` is that of `described_call`."""
    content = {response: {}} if isinstance(response, str) else {JSON: {"schema": response}}
    name = f"{method}_{re.sub('[{}]', '', re.sub('[/.]', '_', path.strip('/')))}"
    failures = {"default": {"description": "What is wrong", "content": {JSON: {"schema": error}}}}
    return described_call(name, tag, summary, content, failures | more.pop("failures", {}), **more)


def described_page(method: str, path: str, page: Callable[..., Any]) -> dict[str, Any]:
    """Return the operation of the page that answers `method` at `path`. Its docstring says what it is good for; its return type,
    `Annotated[HttpResponse, response]`, its response, see `described_call`; and `Annotated[Request, body]` what it takes, if it has a body."""
    hints = get_type_hints(page, include_extras=True)
    (response,) = hints["return"].__metadata__
    more: dict[str, Any] = {}
    for body in getattr(hints.get("request"), "__metadata__", ()):
        more = {"body": {JSON: {"schema": body}}, "failures": _error_responses(_CHANGE_ERRORS)}
    described = operation(method.lower(), path, summary_of(page), response, **more)
    if path.startswith("/health"):
        described["responses"]["503"] = described["responses"]["200"] | {"description": "Not so; the response says why"}
    return described


def summary_of(page: Callable[..., Any]) -> str:
    """Return what a page is good for: the first sentence of its docstring."""
    return re.split(r"[.:;] ", first_paragraph(page.__doc__))[0].rstrip(".")


def first_paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring in one line: what follows is for who reads the source."""
    return " ".join(cleandoc(text or "").partition("\n\n")[0].split())
