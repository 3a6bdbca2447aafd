"""Spans for OpenTelemetry: one for each request, with its queue and its compute as children, and one for each batch.

Nothing is recorded while a request runs. Its spans are made when it has ended, from the events of an observer.
Requests and batches link to each other both ways, because neither is the parent of the other.
"""

import logging
import random
import time
import uuid
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from opentelemetry import propagate
from opentelemetry import trace as api
from opentelemetry.context import Context, get_current
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    NoOpTracer,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)
from prometheus_client.samples import Exemplar

from weir._version import __version__
from weir.errors import Cancelled, ModelError, WeirError
from weir.messages import ChildOrigin, Dispatch, Origin, Request, Timing, Trace, of_route
from weir.telemetry.exporters import make_exporter, otlp_protocol
from weir.telemetry.recorder import SECONDS, Exemplars, SilentObserver

logger = logging.getLogger("weir")


SCOPE = InstrumentationScope("weir", __version__)
_MOST_LINKS = 128
_MOST_BATCHES = 10_000  # remembered while they run


class Tracing(SilentObserver):
    """An Observer that hands spans to `processor`, and starts the traces of requests for its services.

    Use it as a context manager: at the end of the block the spans are flushed.

    Args:
        processor: takes the finished spans.
        ratio: the share, 0 to 1, of requests that are recorded, of those whose callers have not decided; None: as OTEL_TRACES_SAMPLER
            says, or all.
        service_name: the name of the service in the spans, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES state one.
        exemplars: where the latest span of each model and each interval of SECONDS is noted.
    """

    def __init__(
        self,
        processor: SpanProcessor,
        *,
        ratio: float | None = None,
        service_name: str = "weir",
        exemplars: Exemplars | None = None,
    ) -> None:
        self._processor = processor
        self._exemplars: Exemplars = {} if exemplars is None else exemplars
        # The SDK reads the environment as it does for any program: what is disabled, which sampler decides, and the resource.
        provider = TracerProvider(
            None if ratio is None else ParentBased(TraceIdRatioBased(ratio)),
            make_resource(service_name),
            shutdown_on_exit=False,
        )
        self._sampler = provider.sampler
        self._resource = provider.resource
        self.enabled = not isinstance(provider.get_tracer(SCOPE.name, SCOPE.version), NoOpTracer)  # OTEL_SDK_DISABLED
        self._random = random.Random()
        self._batches: dict[tuple[str, int], _TracedBatch] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._processor.shutdown()

    # The start of a trace.

    def begin(self, request: Any) -> None:
        """Give `request` a Trace, unless its attribute `trace` is one. Else that is its Origin; a call in this process without one is inside
        the current span, if there is one.
        """
        given = request.trace
        if type(given) is not Trace:
            inside = given is None and request.form.frontend == "python"
            request.trace = self._within(get_current()) if inside else self.new(given)

    def new(self, origin: Origin) -> Trace:
        """Return the trace of a request that is about to be made. What its caller says is read by the propagators that OTEL_PROPAGATORS
        names; what they cannot read counts as nothing."""
        if type(origin) is ChildOrigin:
            context = api.set_span_in_context(NonRecordingSpan(_context_of(origin.trace)), Context())
        elif isinstance(origin, Mapping):
            context = propagate.extract(origin, Context())
        else:
            context = Context()
        return self._within(context)

    def _within(self, context: Context) -> Trace:
        """Return the trace of a request whose caller's span, if it has one, is that of `context`."""
        caller = api.get_current_span(context).get_span_context()
        trace_id, parent_id = (caller.trace_id, caller.span_id) if caller.is_valid else (self._new_id(128), 0)
        decided = self._sampler.should_sample(context, trace_id, "infer", SpanKind.SERVER)
        sampled = self.enabled and decided.decision is Decision.RECORD_AND_SAMPLE
        return Trace(trace_id, self._new_id(64), parent_id, sampled=sampled, state=decided.trace_state)

    def _new_id(self, bits: int) -> int:
        """Return a random id of at most `bits` bits, never 0."""
        return self._random.getrandbits(bits) or 1

    # Events.

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """Note which requests are in the batch."""
        traces = [trace for request in dispatch.requests if (trace := _recorded(request)) is not None]
        if not traces:
            return
        context = _context(self._new_id(128), self._new_id(64))
        for trace in traces:
            trace.batches.append(context)
            if trace.dispatched is None:
                trace.dispatched = dispatch.at
        if len(self._batches) >= _MOST_BATCHES:
            del self._batches[next(iter(self._batches))]
        self._batches[model, dispatch.batch_id] = _TracedBatch(context, dispatch, traces)

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Make the spans of requests that had their end at `now` (seconds)."""
        for request in requests:
            trace = _recorded(request)
            if trace is not None:
                self._request(model, request, trace, error, now)

    def not_taken(self, model: str, request: Request, error: WeirError, now: float) -> None:
        """Make the span of a request that the queue refused."""
        trace = _recorded(request)
        if trace is not None:
            self._request(model, request, trace, error, now)

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Make the span of a batch that came back at `now` (seconds)."""
        found = self._batches.pop((model, dispatch.batch_id), None)
        if found is not None:
            steps = {f"weir.{step}_seconds": seconds for step, seconds in timing._asdict().items()}
            self._batch(model, found, now, steps, Status())

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """Make the spans of batches that were lost with their worker."""
        if state not in ("lost", "stopped", "failed"):
            return
        for key, lost in list(self._batches.items()):
            if key[0] == model and lost.dispatch.worker == worker:
                del self._batches[key]
                status = Status(StatusCode.ERROR, f"worker {state}: {reason}")
                self._batch(model, lost, lost.dispatch.at, {}, status)

    # Spans that other parts request.

    def ended(
        self, name: str, trace: Trace, start: float, now: float, *, attributes: dict[str, Any], error: WeirError | None = None,
        inside: bool = False,
    ) -> None:  # fmt: skip
        """Make the span `name` that `trace` stands for, from `start` to `now` (seconds). `inside`: it was not caused
        from outside.
        """
        trace.has_span = True
        if trace.sampled:
            self._whole(name, trace, self._interval(start, now), attributes, error, inside=inside)

    def step(self, name: str, trace: Trace, start: float, now: float, *, attributes: dict[str, Any]) -> None:
        """Make a span `name` as a child of the one that `trace` stands for, from `start` to `now` (seconds)."""
        if trace.sampled:
            self._child(name, _context_of(trace), self._interval(start, now), attributes=attributes)

    # Spans.

    def _request(self, model: str, request: Request, trace: Trace, error: WeirError | None, now: float) -> None:
        attributes = {
            "weir.model": model,
            "weir.frontend": request.form.frontend,
            "weir.rows": request.form.rows,
            "weir.priority": request.form.priority,
            **of_route(request.form.route),
        }
        links = [Link(context) for context in trace.batches]
        inside = request.form.frontend == "python"
        whole = self._interval(request.arrival, now)
        own = self._whole(f"infer {model}", trace, whole, attributes, error, inside=inside, links=links)
        left = now if trace.dispatched is None else trace.dispatched
        self._child("queue", own, whole._replace(end=left))
        if request.form.priority >= 0:
            self._keep(model, own, whole)
        if trace.dispatched is not None:
            self._child("compute", own, whole._replace(start=left), links=links)
        if isinstance(error, ModelError):
            logger.warning("request failed", extra={"model": model, "error": error.message, "trace_id": trace.name})

    def _keep(self, model: str, own: SpanContext, whole: "_Interval") -> None:
        """Let a request with this span be an example of its time in the metrics of `model`."""
        spent = whole.end - whole.start
        ids = {"trace_id": f"{own.trace_id:032x}", "span_id": f"{own.span_id:016x}"}
        ended = 1e-9 * whole.epoch_ns + whole.end
        self._exemplars.setdefault(model, {})[bisect_left(SECONDS, spent)] = Exemplar(ids, spent, ended)

    def _whole(
        self,
        name: str,
        trace: Trace,
        interval: "_Interval",
        attributes: dict[str, Any],
        error: WeirError | None,
        *,
        inside: bool,
        links: Sequence[Link] = (),
    ) -> SpanContext:
        """Make the span that `trace` stands for, and return its context."""
        trace.has_span = True
        own = _context_of(trace)
        parent = _context(trace.trace_id, trace.parent_id, trace.state, remote=True) if trace.parent_id else None
        if error is not None:
            attributes = {**attributes, "error.type": type(error).__name__}
        kind = SpanKind.INTERNAL if inside else SpanKind.SERVER
        self._end(name, own, parent, kind, interval, attributes=attributes, links=links, status=_status(error))
        return own

    def _batch(self, model: str, batch: "_TracedBatch", now: float, steps: dict[str, float], status: Status) -> None:
        context, dispatch, traces = batch
        attributes = {
            "weir.model": model,
            "weir.rows": dispatch.rows,
            "weir.worker": dispatch.worker,
            "weir.reason": dispatch.reason.name.lower(),
            "weir.waiting_rows": dispatch.waiting,
            "weir.oldest_age_seconds": dispatch.oldest_age,
            "weir.attempt": dispatch.attempt,
            **steps,
        }
        links = [Link(_context_of(trace)) for trace in traces[:_MOST_LINKS]]
        span = (f"batch {model}", context, None, SpanKind.INTERNAL, self._interval(dispatch.at, now))
        self._end(*span, attributes=attributes, links=links, status=status)

    def _child(self, name: str, parent: SpanContext, interval: "_Interval", **more: Any) -> None:
        context = _context(parent.trace_id, self._new_id(64), parent.trace_state)
        self._end(name, context, parent, SpanKind.INTERNAL, interval, **more)

    def _interval(self, start: float, now: float) -> "_Interval":
        """Return the interval from `start` to `now` (seconds of the service's clock)."""
        return _Interval(start, now, time.time_ns() - round(1e9 * now))

    def _end(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        interval: "_Interval",
        **more: Any,
    ) -> None:
        start, end = (interval.epoch_ns + round(1e9 * each) for each in (interval.start, interval.end))
        span = ReadableSpan(
            name, context, parent, self._resource, kind=kind, instrumentation_scope=SCOPE,
            start_time=start, end_time=end, **more,
        )  # fmt: skip
        self._processor.on_end(span)


class _TracedBatch(NamedTuple):
    """A batch that runs: the context of its span, and the traces of its requests."""

    context: SpanContext
    dispatch: Dispatch
    traces: list[Trace]


class _Interval(NamedTuple):
    """Of a span: its start and end by the service's clock (seconds), and the time of day at which that clock was 0 (nanoseconds since 1970)."""

    start: float
    end: float
    epoch_ns: int


_INSTANCE = str(uuid.uuid4())  # what this process calls itself


def make_resource(service_name: str) -> Resource:
    """Return what the spans and metrics of this process are of, as far as OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME do not say."""
    own = {"service.name": service_name, "service.instance.id": _INSTANCE, "service.version": __version__}
    return Resource.create({**own, **OTELResourceDetector().detect().attributes})


def make_tracing(endpoint: str, ratio: float | None, service_name: str, exemplars: Exemplars | None = None) -> Tracing:
    """Return a Tracing that sends its spans, in batches and from a thread of its own, to an OTLP receiver.

    `endpoint` is its URL; over HTTP, /v1/traces is added to one without a path. The other arguments are as in Tracing. Raises SettingsError
    if the exporter is not installed.
    """
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    base, slashes, rest = endpoint.partition("://")
    whole = "/" in rest.rstrip("/") or otlp_protocol("traces") == "grpc"
    url = endpoint if whole else f"{base}{slashes}{rest.rstrip('/')}/v1/traces"
    processor = BatchSpanProcessor(make_exporter("traces", "otlp", "trace_endpoint", endpoint=url))
    return Tracing(processor, ratio=ratio, service_name=service_name, exemplars=exemplars)


def _recorded(request: Any) -> Trace | None:
    trace = getattr(request, "trace", None)
    return trace if type(trace) is Trace and trace.sampled else None


def _context(trace_id: int, span_id: int, state: TraceState | None = None, *, remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED), state)


def _context_of(trace: Trace) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT)
    return SpanContext(trace.trace_id, trace.span_id, False, flags, trace.state)


def _status(error: WeirError | None) -> Status:
    if error is None or isinstance(error, Cancelled):  # a caller that left is not a failure of the server
        return Status()
    return Status(StatusCode.ERROR, error.message)
