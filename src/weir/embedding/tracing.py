"""A request for vectors in a trace: its span, below it those of its reading, and of its texts in the line, each with its queue and compute."""

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from weir.errors import WeirError
from weir.telemetry.tracecontext import CURRENT, Trace

if TYPE_CHECKING:
    from weir.serving.delivery import Tracer
    from weir.serving.service import Service

MOST_SPANS = 128  # of texts, and of rounds of reading, of one request: the others of a large one have none


class CallTrace:
    """The span of one request for the vectors of `count` texts: it lasts as long as the block. `trace` is the `traceparent` that the caller
    sent, or the Trace that a door has begun; it is the current one of the task from then on, so that the door can name it."""

    __slots__ = (
        "_attributes",
        "_began",
        "_door",
        "_model",
        "_others",
        "_read_since",
        "_service",
        "_spans",
        "_trace",
        "_tracer",
    )

    def __init__(
        self, tracer: "Tracer", service: "Service", model: str, trace: str | Trace | None, *, door: str, count: int
    ) -> None:
        self._tracer = tracer
        self._service = service
        self._model = model
        self._door = door
        self._attributes = {"weir.model": model, "weir.door": door, "weir.texts": count}
        self._trace = trace if isinstance(trace, Trace) else tracer.new(trace)
        self._others = Trace(self._trace.trace_id, self._trace.span_id, sampled=False)
        self._spans = [
            MOST_SPANS,
            MOST_SPANS if self._trace.sampled else 0,
        ]  # rounds of reading, texts: as many may still come
        self._began = self._read_since = service.now()

    def __enter__(self) -> Self:
        CURRENT.set(self._trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        told = error if isinstance(error, WeirError) else None
        self._tracer.ended(
            f"encode {self._model}", self._trace, self._began, self._service.now(), attributes=self._attributes, error=told,
            inside=self._door == "python",
        )  # fmt: skip

    def of_text(self) -> str | Trace:
        """Return the trace of the next text: a child of this, as far as there are not too many."""
        if not self._spans[1]:
            return self._others
        self._spans[1] -= 1
        return self._trace.traceparent

    def reads(self) -> None:
        """A round of reading begins: texts are on their way to become tokens."""
        self._read_since = self._service.now()

    def has_read(self, count: int) -> None:
        """It is over: so many texts have become tokens."""
        if self._spans[0]:
            self._spans[0] -= 1
            said: dict[str, Any] = {"weir.texts": count}
            self._tracer.step("tokenize", self._trace, self._read_since, self._service.now(), attributes=said)
