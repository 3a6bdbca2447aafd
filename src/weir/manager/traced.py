"""What a service does for whoever traces, if anybody does."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from weir.errors import WeirError
from weir.messages import Observer, Request
from weir.telemetry.tracecontext import Trace


@runtime_checkable
class Tracer(Protocol):
    """An Observer that begins traces too: telemetry/tracing.py, which only loads where tracing is on."""

    def begin(self, request: Any) -> None:
        """Let `request` have a Trace. Its attribute `trace` is one already, or the caller's `traceparent`, or None."""

    def new(self, traceparent: str | None) -> Trace:
        """Return the trace of a request that is about to be made."""

    def not_taken(self, model: str, request: Request, error: WeirError, now: float) -> None:
        """The line refused a request that has a Trace."""

    def ended(
        self, name: str, trace: Trace, start: float, now: float, *, attributes: dict[str, Any], error: WeirError | None = None,
        inside: bool = False,
    ) -> None:  # fmt: skip
        """What `trace` stands for, and no request in the line is, has just ended. `inside`: nobody asked for it from outside."""

    def step(self, name: str, trace: Trace, start: float, now: float, *, attributes: dict[str, Any]) -> None:
        """A part of what `trace` stands for has just ended."""


def tracer_among(observers: Iterable[Observer]) -> Tracer | None:
    """Return the one of `observers` that traces, if there is one."""
    return next((each for each in observers if isinstance(each, Tracer)), None)


def submit_traced(
    tracer: Tracer, model: str, submit: Callable[[Request, float], None], request: Request, now: float
) -> None:  # fmt: skip
    """Begin the trace of `request`, and submit it; a refusal is a span too."""
    tracer.begin(request)
    try:
        submit(request, now)
    except WeirError as error:
        tracer.not_taken(model, request, error, now)
        raise
