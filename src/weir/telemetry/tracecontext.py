"""Identifies a request in a trace: what its caller says, as headers that are read only if requests are traced, and the request's own
span.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

HEADER = "traceparent"
# The headers, and in gRPC the metadata, that the propagators of OpenTelemetry read.
FIELDS = frozenset(
    (
        HEADER, "tracestate", "baggage", "b3", "x-b3-traceid", "x-b3-spanid", "x-b3-parentspanid", "x-b3-sampled", "x-b3-flags",
        "uber-trace-id", "x-amzn-trace-id", "ot-tracer-traceid", "ot-tracer-spanid", "ot-tracer-sampled",
    )
)  # fmt: skip
FIELD_NAMES = {name.encode(): name for name in FIELDS}  # by name as it is in a head

# The trace of the request that the running task belongs to. Log lines carry its id.
CURRENT: "ContextVar[Trace | None]" = ContextVar("trace", default=None)


class Trace:
    """The span of one request, from its arrival on. `parent_id` 0: the span is the first of its trace.

    Attributes:
        batches: the contexts of the spans of the batches that the request was in.
        dispatched: the instant, in seconds of the service's clock, at which it left the queue first; None before.
        has_span: whether the span has been made, which says how the request has ended.
        state: what vendors have added to the trace (`tracestate`), as OpenTelemetry has it; None for nothing.
    """

    __slots__ = ("batches", "dispatched", "has_span", "parent_id", "sampled", "span_id", "state", "trace_id")

    def __init__(
        self, trace_id: int, span_id: int, parent_id: int = 0, *, sampled: bool = True, state: Any = None
    ) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent_id = parent_id
        self.sampled = sampled
        self.state = state
        self.dispatched: float | None = None
        self.has_span = False
        self.batches: list[Any] = []

    @property
    def traceparent(self) -> str:
        """The value of the header `traceparent` for requests that this one causes."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    @property
    def name(self) -> str:
        """The id of the trace as 32 hexadecimal digits."""
        return f"{self.trace_id:032x}"


class ChildOrigin(NamedTuple):
    """Stands for a request that `trace` causes: its span is a child of the one that `trace` stands for."""

    trace: Trace


# Whose child the span of a request is, before it has one: the caller's headers in FIELDS by name, a request of this server, or nobody's.
Origin = Mapping[str, str] | ChildOrigin | None


def child_of(trace: Trace | Origin) -> Origin:
    """Return the origin of another request that has the same cause as `trace`, or of one that `trace` causes."""
    return ChildOrigin(trace) if type(trace) is Trace else cast(Origin, trace)


def carry(carrier: dict[str, str] | None, name: str, value: str) -> dict[str, str]:
    """Return `carrier` with one more header, or a new one. A header that comes several times is a list, as HTTP has it."""
    if carrier is None:
        return {name: value}
    carrier[name] = f"{carrier[name]},{value}" if name in carrier else value
    return carrier


def attributes_of_frontend(name: str) -> dict[str, str]:
    """Return the attributes of a span that name its frontend; `weir.door` is the former name, until 0.2."""
    return {"weir.frontend": name, "weir.door": name}
