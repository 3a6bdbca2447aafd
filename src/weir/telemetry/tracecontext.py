"""What identifies a request in a trace: W3C's trace context, and the span that stands for it here."""

import random
import re
from contextvars import ContextVar
from typing import Any

HEADER = "traceparent"

# The trace of the request that the running task is about: log lines carry its id.
CURRENT: "ContextVar[Trace | None]" = ContextVar("trace", default=None)

_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_LONGEST = 256  # characters of a header that is worth reading


class Trace:
    """The span of one request, from its arrival on. `parent_id` 0: it is the first of its trace.

    The batches that it was in are noted as they are cut: `batches` are their spans' contexts, `dispatched` is when it left
    the line first.
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
        """What travels as the header `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    @property
    def name(self) -> str:
        """The trace's id as people write it."""
        return f"{self.trace_id:032x}"


class Traces:
    """Begins traces. `ratio` is the share of those that no caller has begun that are recorded."""

    def __init__(self, ratio: float = 1.0, source: random.Random | None = None) -> None:
        self._ratio = ratio
        self._source = source or random.Random()

    def new(self, traceparent: str | None) -> Trace:
        """Return the trace of a request that came with this header; one that is malformed counts as none."""
        span_id = self.new_id(64)
        parent = read(traceparent) if traceparent else None
        if parent is None:
            return Trace(self.new_id(128), span_id, sampled=self._source.random() < self._ratio)
        trace_id, parent_id, sampled = parent
        return Trace(trace_id, span_id, parent_id, sampled=sampled)

    def new_id(self, bits: int) -> int:
        """Return an id, which is never 0."""
        return self._source.getrandbits(bits) or 1


def read(traceparent: str) -> tuple[int, int, bool] | None:
    """Return trace id, parent id and whether the trace is recorded; None for what is no `traceparent`."""
    found = _FORM.fullmatch(traceparent.strip()) if len(traceparent) <= _LONGEST else None
    if found is None or (found[1] == "00" and found[5]):
        return None
    trace_id, parent_id = int(found[2], 16), int(found[3], 16)
    return (trace_id, parent_id, bool(int(found[4], 16) & _SAMPLED)) if trace_id and parent_id else None
