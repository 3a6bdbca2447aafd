"""Gives requests their responses and errors, tells the observers once per batch, and begins traces if a tracer observes."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from weir.batching.collate import deliver, dropped_in, responses_in
from weir.batching.request_state import finish_each, gathered
from weir.errors import ModelError, WeirError
from weir.messages import Dispatch, Events, Kind, Observer, Origin, Request, Trace
from weir.telemetry.recorder import SilentObserver
from weir.workers.executor import discard, is_block_type

logger = logging.getLogger("weir")

EVENTS = ("refused", "dispatched", "answered", "streamed", "failed", "computed", "worker_changed", "metrics_reported")


class Delivery:
    """Gives requests their responses and errors, and tells the observers. `model` is the label of the service.

    An exception in a request's `finish`, `fail` or `part`, or in an observer, is logged and affects no other request.
    """

    def __init__(self, model: str, observers: Sequence[Observer]) -> None:
        self.model = model
        # The observers' methods by event, without observers that do not define the event: each batch has three events.
        self._methods = {event: methods_of(observers, event) for event in EVENTS}
        # Set when the executor has given out its first Block: before that, no payload is a Block.
        self.blocks_in_use = False

    def give(self, dispatch: Dispatch, events: Events, now: float) -> None:
        """Give the requests of `dispatch` their responses and errors in `events`. `now` is in seconds of the service's clock."""
        if events.kinds is not None:
            self._note_failed([output for output in events.outputs if isinstance(output, WeirError)], now)
        whole = dispatch.undivided and events.indices is None and events.kinds is None
        if whole and len(events.outputs) == len(dispatch.requests):
            self._give_whole(dispatch, events.outputs, now)
        else:
            if any(map(is_block_type, set(map(type, events.outputs)))):
                for output in dropped_in(dispatch, events):
                    discard(output)
            self.give_each(deliver(dispatch, events), dispatch, now)
        if events.final and events.timing is not None:
            self.tell("computed", dispatch, events.timing, now)

    def _give_whole(self, dispatch: Dispatch, outputs: list[Any], now: float) -> None:
        # The hot path: no request is divided, and every entry has its response.
        unwanted = finish_each(dispatch.requests, outputs, dispatch, undelivered)
        responded: Sequence[Request] = dispatch.requests
        if unwanted:
            before = {id(request) for request, _ in unwanted}
            responded = [request for request in dispatch.requests if id(request) not in before]
            for _, output in unwanted:
                discard(output)
        if dispatch.refused:
            responded = self._others(responded, dispatch, now)
        self._had_their_end(responded, None, now)

    def give_parts(self, dispatch: Dispatch, events: Events, now: float) -> list[tuple[Request, WeirError]]:
        """Give the requests of a streaming model the parts in `events`; `give` delivers the rest afterwards.

        Returns the requests whose readers cannot take their parts, each with the error that must end the request.
        """
        responses = responses_in(dispatch, events)
        refused: list[tuple[Request, WeirError]] = []
        for output in responses.dropped:
            discard(output)
        for request, output in responses.parts:
            try:
                request.part(output, dispatch)
            except WeirError as error:
                discard(output)
                refused.append((request, error))
            except Exception:
                undelivered(request)
        if responses.responded:
            self.tell("streamed", responses.responded, responses.firsts, now)
        return refused

    def give_each(self, ends: Iterable[tuple[Request, Any]], dispatch: Dispatch, now: float) -> None:
        """Give each request, which must be settled already, its response or error."""
        responded: list[Request] = []
        for request, output in ends:
            if isinstance(output, WeirError):
                output.ran = True
                self.give_error(request, output, now)
                continue
            responded.append(request)
            try:
                request.finish(output, dispatch)
            except Exception:
                undelivered(request)
        if dispatch.refused:
            responded = self._others(responded, dispatch, now)
        self._had_their_end(responded, None, now)

    def fail(self, requests: Iterable[Request], error: Callable[[Request], WeirError], now: float) -> None:
        """Give each request, which must be settled already, an error that `error` makes for it."""
        for request in requests:
            self.give_error(request, error(request), now)

    def refused(self, request: Request, error: WeirError) -> None:
        """Tell the observers that `request` was not accepted."""
        self.ended_outside(request.form.frontend, error, 0.0)

    def ended_outside(self, frontend: str, error: WeirError, now: float) -> None:
        """Notify the observers of an error of a request that is not in the queue: of a failure of the model, or else of a refusal by the frontend
        `frontend`. Nothing happens if they have been notified of it."""
        if isinstance(error, ModelError):
            self._note_failed([error], now)
        elif not error.reported:
            error.reported = True
            self.tell("refused", frontend, error)

    def cancelled(self, request: Request, error: WeirError, now: float) -> None:
        """Tell the observers that the caller of `request` left, and release its payload and responses."""
        _discard_gathered(request)
        self._had_their_end([request], error, now)
        drop_payload(request)

    def give_error(self, request: Request, error: WeirError, now: float) -> None:
        """Give `request`, which must be settled already, an error."""
        _discard_gathered(request)
        self._note_failed([error], now)
        try:
            request.fail(error)
        except Exception:
            undelivered(request)
        self._had_their_end([request], error, now)
        drop_payload(request)

    def _others(self, requests: Sequence[Request], dispatch: Dispatch, now: float) -> list[Request]:
        """Tell the observers of the requests whose callers got an error instead of the response. Return the others of `requests`."""
        refused, dispatch.refused = dispatch.refused, ()
        for request, error in refused:
            self._note_failed([error], now)
            self._had_their_end([request], error, now)
        those = {id(request) for request, _ in refused}
        return [request for request in requests if id(request) not in those]

    def _had_their_end(self, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        if not requests:
            return
        if self.blocks_in_use:
            for request in requests:
                discard(request.payload)
        self.tell("answered", requests, error, now)

    def _note_failed(self, errors: Sequence[WeirError], now: float) -> None:
        """Tell the observers of the failures of the model among `errors`, each once. Of the others they hear when the requests end."""
        new = [error for error in errors if not error.reported]
        for error in new:
            error.reported = True
        if failures := [error for error in new if isinstance(error, ModelError)]:
            self.tell("failed", failures, now)

    def tell(self, event: str, *facts: Any) -> None:
        """Call the method `event` of every observer. An exception in it is logged."""
        for notify in self._methods[event]:
            try:
                notify(self.model, *facts)
            except Exception:
                logger.exception("observer %r raised at %r", type(notify.__self__).__name__, event)


def methods_of(observers: Sequence[Observer], event: str) -> list[Any]:
    """Return the method `event` of each observer that does something at it."""
    silent = getattr(SilentObserver, event)  # an observer written for an older release may lack newer events
    return [getattr(each, event) for each in observers if getattr(type(each), event, silent) is not silent]


def drop_payload(request: Request) -> None:
    """Release the payload of a request that has ended: its batch may still run for long, but the worker has its own copy."""
    if request.form.kind is Kind.ITEM:
        request.payload = None
    elif request.form.kind is Kind.TENSORS:
        request.payload = {}


def _discard_gathered(request: Request) -> None:
    if request.partial is not None:
        for output in gathered(request):
            discard(output)


def undelivered(request: Request) -> None:
    """Log the exception that `request` raised in `finish`, `fail` or `part`, and have it leave its caller, who would wait for ever."""
    trace = request.trace
    extra = {"trace_id": trace.name} if type(trace) is Trace else {}
    logger.exception("frontend %r could not deliver a response", request.form.frontend, extra=extra)
    abandon = getattr(request, "abandon", None)
    if abandon is not None:
        abandon()


@runtime_checkable
class Tracer(Protocol):
    """An Observer that also begins traces. telemetry/tracing.py has one, and is imported only if tracing is on."""

    def begin(self, request: Any) -> None:
        """Set the attribute `trace` of `request` to a Trace. Before, it is a Trace, or its Origin."""

    def new(self, origin: Origin) -> Trace:
        """Return a Trace for a request that is about to be made."""

    def not_taken(self, model: str, request: Request, error: WeirError, now: float) -> None:
        """Record that the queue did not accept a request that has a Trace."""

    def ended(
        self,
        name: str,
        trace: Trace,
        start: float,
        now: float,
        *,
        attributes: dict[str, Any],
        error: WeirError | None = None,
        inside: bool = False,
    ) -> None:
        """Record a span that has just ended and does not belong to a request in a queue. `inside` tells whether the server began
        it, and not a caller. `start` and `now` are in seconds of the service's clock."""

    def step(self, name: str, trace: Trace, start: float, now: float, *, attributes: dict[str, Any]) -> None:
        """Record a step within the span of `trace`; the step has just ended."""


def tracer_among(observers: Iterable[Observer]) -> Tracer | None:
    """Return the first of `observers` that is a Tracer, or None."""
    return next((each for each in observers if isinstance(each, Tracer)), None)


def submit_traced(
    tracer: Tracer, model: str, submit: Callable[[Request, float], None], request: Request, now: float
) -> None:
    """Begin the trace of `request`, and submit it. A refusal is recorded as a span and raised."""
    tracer.begin(request)
    try:
        submit(request, now)
    except WeirError as error:
        tracer.not_taken(model, request, error, now)
        raise
