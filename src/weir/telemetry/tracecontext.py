"""Identifies a request in a trace: the trace context of the W3C (recommendation "Trace Context"), and the request's
own span.
"""

import random
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

HEADER = "traceparent"

# The trace of the request that the running task belongs to. Log lines carry its id.
CURRENT: "ContextVar[Trace | None]" = ContextVar("trace", default=None)

_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_LONGEST = 256  # characters; a longer header is ignored


class Trace:
    """The span of one request, from its arrival on. `parent_id` 0: the span is the first of its trace.

    Attributes:
        batches: the contexts of the spans of the batches that the request was in.
        dispatched: the instant, in seconds of the service's clock, at which it left the queue first; None before.
    """

    __slots__ = ("batches", "dispatched", "parent_id", "sampled", "span_id", "trace_id")

    def __init__(self, trace_id: int, span_id: int, parent_id: int = 0, *, sampled: bool = True) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent_id = parent_id
        self.sampled = sampled
        self.dispatched: float | None = None
        self.batches: list[Any] = []

    @property
    def traceparent(self) -> str:
        """The value of the header `traceparent` for requests that this one causes."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    @property
    def name(self) -> str:
        """The id of the trace as 32 hexadecimal digits."""
        return f"{self.trace_id:032x}"


# Where a caller's span is: the ids of its trace and of the span, and whether the trace is recorded.
Caller = tuple[int, int, bool]
# Tells from the id of a trace and the caller, if it has one, whether a request is recorded.
Sampler = Callable[[int, Caller | None], bool]


def follow(trace_id: int, caller: Caller | None) -> bool:
    """Return what the caller has decided, or True."""
    return caller is None or caller[2]


class Traces:
    """Starts traces. `is_sampled` tells which requests are recorded."""

    def __init__(self, is_sampled: Sampler = follow, source: random.Random | None = None) -> None:
        self._is_sampled = is_sampled
        self._source = source or random.Random()

    def new(self, traceparent: str | None) -> Trace:
        """Return the trace of a request that came with this header `traceparent`. A malformed header counts as none."""
        return self.within(read(traceparent) if traceparent else None)

    def within(self, caller: Caller | None) -> Trace:
        """Return the trace of a request of this caller."""
        span_id = self.new_id(64)
        trace_id, parent_id = (self.new_id(128), 0) if caller is None else caller[:2]
        return Trace(trace_id, span_id, parent_id, sampled=self._is_sampled(trace_id, caller))

    def new_id(self, bits: int) -> int:
        """Return a random id of so many bits, never 0."""
        return self._source.getrandbits(bits) or 1


def read(traceparent: str) -> Caller | None:
    """Return the trace's id, the parent's id and whether the trace is recorded; None for a malformed `traceparent`."""
    found = _FORM.fullmatch(traceparent.strip()) if len(traceparent) <= _LONGEST else None
    if found is None or (found[1] == "00" and found[5]):
        return None
    trace_id, parent_id = int(found[2], 16), int(found[3], 16)
    return (trace_id, parent_id, bool(int(found[4], 16) & _SAMPLED)) if trace_id and parent_id else None
