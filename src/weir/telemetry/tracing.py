"""Spans for OpenTelemetry: one for each request with its queue and its compute as children, and one for each batch, linked to them.

Nothing is recorded while a request runs: its spans are made of what observers hear, when it has had its end. Requests and
batches link to each other both ways, for neither is the other's parent.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from opentelemetry import trace as api
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from weir._version import __version__
from weir.errors import Cancelled, ModelError, WeirError
from weir.messages import Dispatch, Request, Timing
from weir.telemetry.logs import get_logger
from weir.telemetry.recorder import SilentObserver
from weir.telemetry.tracecontext import Trace, Traces

_SCOPE = InstrumentationScope("weir", __version__)
_MOST_LINKS = 128
_MOST_BATCHES = 10_000  # that are remembered while they run


class Tracing(SilentObserver):
    """An Observer that hands spans to `processor`, and begins the traces of requests for services that have it.

    `ratio` is the share of requests recorded among those whose callers have not decided. `service_name` is what the spans say
    that they come from. Leave the block to flush. `wall_ns` returns nanoseconds since 1970.
    """

    def __init__(
        self, processor: SpanProcessor, *, ratio: float = 1.0, service_name: str = "weir", traces: Traces | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        self._processor = processor
        self._traces = traces or Traces(ratio)
        self._resource = Resource.create({"service.name": service_name, "service.version": __version__})
        self._wall_ns = wall_ns
        self._batches: dict[tuple[str, int], tuple[SpanContext, Dispatch, list[Trace]]] = {}
        self._logger = get_logger("weir")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._processor.shutdown()

    # Beginning.

    def begin(self, request: Any) -> None:
        """Let `request` have a Trace. Its attribute `trace` is one already, or the caller's `traceparent`, or None."""
        said = request.trace
        if type(said) is not Trace:
            request.trace = self._inside() if said is None and request.door == "python" else self._traces.new(said)

    def new(self, traceparent: str | None) -> Trace:
        """Return the trace of a request that is about to be made."""
        return self._traces.new(traceparent)

    def _inside(self) -> Trace:
        """Return the trace of a call in process: within the span that is current there, if there is one."""
        context = api.get_current_span().get_span_context()
        if not context.is_valid:
            return self._traces.new(None)
        span_id = self._traces.new_id(64)
        return Trace(context.trace_id, span_id, context.span_id, sampled=context.trace_flags.sampled)

    # What happens.

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """Note the batch that requests are in."""
        traces = [trace for request in dispatch.requests if (trace := _recorded(request)) is not None]
        if not traces:
            return
        context = _context(self._traces.new_id(128), self._traces.new_id(64))
        for trace in traces:
            trace.batches.append(context)
            if trace.dispatched is None:
                trace.dispatched = dispatch.at
        if len(self._batches) >= _MOST_BATCHES:
            del self._batches[next(iter(self._batches))]
        self._batches[model, dispatch.batch_id] = context, dispatch, traces

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Make the spans of requests that had their end."""
        for request in requests:
            trace = _recorded(request)
            if trace is not None:
                self._request(model, request, trace, error, now)

    def not_taken(self, model: str, request: Request, error: WeirError, now: float) -> None:
        """Make the span of a request that the line refused."""
        trace = _recorded(request)
        if trace is not None:
            self._request(model, request, trace, error, now)

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Make the span of a batch that is back."""
        found = self._batches.pop((model, dispatch.batch_id), None)
        if found is not None:
            context, _, traces = found
            steps = {f"weir.{step}_seconds": seconds for step, seconds in timing._asdict().items()}
            self._batch(model, context, dispatch, traces, now, steps, Status())

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """Make the spans of batches that were lost with their worker."""
        if state not in ("lost", "stopped", "failed"):
            return
        for key, (context, dispatch, traces) in list(self._batches.items()):
            if key[0] == model and dispatch.worker == worker:
                del self._batches[key]
                status = Status(StatusCode.ERROR, f"worker {state}: {reason}")
                self._batch(model, context, dispatch, traces, dispatch.at, {}, status)

    # What others tell of what they do themselves.

    def ended(
        self, name: str, trace: Trace, start: float, now: float, *, attributes: dict[str, Any], error: WeirError | None = None,
        inside: bool = False,
    ) -> None:  # fmt: skip
        """Make the span called `name` that `trace` stands for: it has just ended. `inside`: nobody asked for it from outside."""
        if trace.sampled:
            own = _context(trace.trace_id, trace.span_id)
            parent = _context(trace.trace_id, trace.parent_id, remote=True) if trace.parent_id else None
            if error is not None:
                attributes = {**attributes, "error.type": type(error).__name__}
            span = (
                name,
                own,
                parent,
                SpanKind.INTERNAL if inside else SpanKind.SERVER,
                start,
                now,
                self._epoch_ns(now),
            )
            self._end(*span, attributes=attributes, status=_status(error))

    def step(self, name: str, trace: Trace, start: float, now: float, *, attributes: dict[str, Any]) -> None:
        """Make a span called `name` below that which `trace` stands for: it has just ended."""
        if trace.sampled:
            parent = _context(trace.trace_id, trace.span_id)
            context = _context(trace.trace_id, self._traces.new_id(64))
            span = (name, context, parent, SpanKind.INTERNAL, start, now, self._epoch_ns(now))
            self._end(*span, attributes=attributes)

    # Spans.

    def _request(self, model: str, request: Request, trace: Trace, error: WeirError | None, now: float) -> None:
        own = _context(trace.trace_id, trace.span_id)
        parent = _context(trace.trace_id, trace.parent_id, remote=True) if trace.parent_id else None
        attributes = {
            "weir.model": model, "weir.door": request.door, "weir.rows": request.rows, "weir.priority": request.priority
        }  # fmt: skip
        if error is not None:
            attributes["error.type"] = type(error).__name__
        kind = SpanKind.INTERNAL if request.door == "python" else SpanKind.SERVER
        links = [Link(context) for context in trace.batches]
        epoch_ns = self._epoch_ns(now)
        span = (f"infer {model}", own, parent, kind, request.arrival, now, epoch_ns)
        self._end(*span, attributes=attributes, links=links, status=_status(error))
        left = now if trace.dispatched is None else trace.dispatched
        self._child("queue", own, request.arrival, left, epoch_ns)
        if trace.dispatched is not None:
            self._child("compute", own, left, now, epoch_ns, links)
        if isinstance(error, ModelError):
            self._logger.warning("request failed", model=model, error=error.message, trace_id=trace.name)

    def _batch(
        self, model: str, context: SpanContext, dispatch: Dispatch, traces: list[Trace], now: float,
        steps: dict[str, float], status: Status,
    ) -> None:  # fmt: skip
        attributes = {
            "weir.model": model, "weir.rows": dispatch.rows, "weir.worker": dispatch.worker,
            "weir.reason": dispatch.reason.name.lower(), "weir.waiting_rows": dispatch.waiting,
            "weir.oldest_age_seconds": dispatch.oldest_age, "weir.attempt": dispatch.attempt, **steps,
        }  # fmt: skip
        links = [Link(_context(trace.trace_id, trace.span_id)) for trace in traces[:_MOST_LINKS]]
        span = (f"batch {model}", context, None, SpanKind.INTERNAL, dispatch.at, now, self._epoch_ns(now))
        self._end(*span, attributes=attributes, links=links, status=status)

    def _child(
        self, name: str, parent: SpanContext, start: float, end: float, epoch_ns: int, links: Sequence[Link] = ()
    ) -> None:  # fmt: skip
        context = _context(parent.trace_id, self._traces.new_id(64))
        self._end(name, context, parent, SpanKind.INTERNAL, start, end, epoch_ns, links=links)

    def _epoch_ns(self, now: float) -> int:
        """Return the day's time, in nanoseconds, at which the service's clock was 0: it is another clock."""
        return self._wall_ns() - round(1e9 * now)

    def _end(
        self, name: str, context: SpanContext, parent: SpanContext | None, kind: SpanKind, start: float, end: float,
        epoch_ns: int, **more: Any,
    ) -> None:  # fmt: skip
        span = ReadableSpan(
            name, context, parent, self._resource, kind=kind, instrumentation_scope=_SCOPE,
            start_time=epoch_ns + round(1e9 * start), end_time=epoch_ns + round(1e9 * end), **more,
        )  # fmt: skip
        self._processor.on_end(span)


def make_tracing(endpoint: str, ratio: float, service_name: str) -> Tracing:
    """Return a Tracing that sends its spans to an OTLP receiver over HTTP, in a thread of its own and in batches.

    `endpoint` is a URL; without a path it gets the usual one.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    base, slashes, rest = endpoint.partition("://")
    url = endpoint if "/" in rest.rstrip("/") else f"{base}{slashes}{rest.rstrip('/')}/v1/traces"
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(url)), ratio=ratio, service_name=service_name)


def _recorded(request: Any) -> Trace | None:
    trace = getattr(request, "trace", None)
    return trace if type(trace) is Trace and trace.sampled else None


def _context(trace_id: int, span_id: int, *, remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED))


def _status(error: WeirError | None) -> Status:
    if error is None or isinstance(error, Cancelled):  # that the caller left is no failure of ours
        return Status()
    return Status(StatusCode.ERROR, error.message)
