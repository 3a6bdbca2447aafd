"""Gives requests their answers and errors, notifies the observers once for each batch, and begins traces where a tracer observes."""

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from weir.batching.collate import answers_in, deliver, dropped_in
from weir.batching.request_state import finish_each, gathered
from weir.errors import ModelError, WeirError
from weir.messages import Dispatch, Events, Kind, Observer, Request
from weir.telemetry.recorder import SilentObserver
from weir.telemetry.tracecontext import Trace

logger = logging.getLogger("weir")

EVENTS = ("refused", "dispatched", "answered", "streamed", "failed", "computed", "worker_changed")


class Delivery:
    """Gives requests their answers and errors. An exception of a request's `finish` or `fail` is logged and harms no other request."""

    def __init__(self, model: str, observers: Sequence[Observer]) -> None:
        self.model = model
        # By event, without the observers that do not define it: there are three events for each batch.
        self._methods = {event: _methods(observers, event) for event in EVENTS}
        # Set when the executor has given out its first Block: before that, no payload can be one.
        self.blocks_in_use = False

    def give(self, dispatch: Dispatch, events: Events, now: float) -> None:
        """Give the requests of `dispatch` what `events` say of them."""
        if events.kinds is not None:
            self.tell_failed([output for output in events.outputs if isinstance(output, ModelError)], now)
        whole = dispatch.plain and events.indices is None and events.kinds is None
        if whole and len(events.outputs) == len(dispatch.requests):
            self._give_whole(dispatch, events.outputs, now)
        else:
            if any(map(_is_block_type, set(map(type, events.outputs)))):
                for output in dropped_in(dispatch, events):
                    discard(output)
            self.give_each(deliver(dispatch, events), dispatch, now)
        if events.final and events.timing is not None:
            self.tell("computed", dispatch, events.timing, now)

    def _give_whole(self, dispatch: Dispatch, outputs: list[Any], now: float) -> None:
        # The hot path: every request is in the batch whole, and every entry has its answer.
        unwanted = finish_each(dispatch.requests, outputs, dispatch, log_undelivered)
        answered: Sequence[Request] = dispatch.requests
        if unwanted:
            before = {id(request) for request, _ in unwanted}
            answered = [request for request in dispatch.requests if id(request) not in before]
            for _, output in unwanted:
                discard(output)
        self._had_their_end(answered, None, now)

    def give_parts(self, dispatch: Dispatch, events: Events, now: float) -> list[tuple[Request, WeirError]]:
        """Give the requests of a streaming model the parts in `events`; the rest is for `give` afterwards.

        Returns the requests whose readers cannot take their parts, each with the error that ends it.
        """
        answers = answers_in(dispatch, events)
        refused: list[tuple[Request, WeirError]] = []
        for output in answers.dropped:
            discard(output)
        for request, output in answers.parts:
            try:
                request.part(output, dispatch)
            except WeirError as error:
                discard(output)
                refused.append((request, error))
            except Exception:
                log_undelivered(request)
        if answers.answered:
            self.tell("streamed", answers.answered, answers.firsts, now)
        return refused

    def give_each(self, ends: Iterable[tuple[Request, Any]], dispatch: Dispatch, now: float) -> None:
        """Give each request, already marked as settled, its answer or error."""
        answered = []
        for request, output in ends:
            if isinstance(output, WeirError):
                self.give_error(request, output, now)
                continue
            answered.append(request)
            try:
                request.finish(output, dispatch)
            except Exception:
                log_undelivered(request)
        self._had_their_end(answered, None, now)

    def fail(self, requests: Iterable[Request], error: Callable[[Request], WeirError], now: float) -> None:
        """Give each request, already marked as settled, an error of its own."""
        for request in requests:
            self.give_error(request, error(request), now)

    def dispatched(self, dispatch: Dispatch) -> None:
        """Tell the observers that a batch was handed to a worker."""
        self.tell("dispatched", dispatch)

    def refused(self, request: Request, error: WeirError) -> None:
        """Tell the observers that `request` was not taken."""
        self.tell("refused", request.door, error)

    def cancelled(self, request: Request, error: WeirError, now: float) -> None:
        """Tell the observers that the caller of `request` left."""
        _discard_gathered(request)
        self._had_their_end([request], error, now)
        drop_payload(request)

    def give_error(self, request: Request, error: WeirError, now: float) -> None:
        """Give `request`, already marked as settled, an error."""
        _discard_gathered(request)
        if isinstance(error, ModelError):
            self.tell_failed([error], now)
        try:
            request.fail(error)
        except Exception:
            log_undelivered(request)
        self._had_their_end([request], error, now)
        drop_payload(request)

    def _had_their_end(self, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        if not requests:
            return
        if self.blocks_in_use:
            for request in requests:
                discard(request.payload)
        self.tell("answered", requests, error, now)

    def tell_failed(self, errors: Sequence[ModelError], now: float) -> None:
        """Tell the observers that the model failed, once of each error."""
        news = [error for error in errors if not error.told]
        if news:
            for error in news:
                error.told = True
            self.tell("failed", news, now)

    def tell(self, event: str, *facts: Any) -> None:
        """Call the method `event` of every observer. One that raises is logged, and decides nothing."""
        for notify in self._methods[event]:
            try:
                notify(self.model, *facts)
            except Exception:
                logger.exception("observer %r raised at %r", type(notify.__self__).__name__, event)


def _methods(observers: Sequence[Observer], event: str) -> list[Any]:
    silent = getattr(SilentObserver, event)
    return [
        getattr(each, event) for each in observers if getattr(type(each), event, silent) is not silent
    ]  # one that was made before there was such an event does not have it


def drop_payload(request: Request) -> None:
    """Release a payload that is not read any more: the batch of the request may run for long, and its worker has a copy of its own."""
    if request.kind is Kind.ITEM:
        request.payload = None
    elif request.kind is Kind.TENSORS:
        request.payload = {}


def _discard_gathered(request: Request) -> None:
    if request.partial is not None:
        for output in gathered(request):
            discard(output)


def log_undelivered(request: Request) -> None:
    """Log the exception that `request` raised in `finish`, `fail` or `part`."""
    trace = request.trace
    extra = {"trace_id": trace.name} if type(trace) is Trace else {}
    logger.exception("frontend %r could not deliver an answer", request.door, extra=extra)


def discard(value: Any) -> None:
    """Release `value` if it is a Block."""
    if is_block(value):
        value.release()


def is_block(value: Any) -> bool:
    """Tell whether `value` is a Block: it has `view`, `retain` and `release`."""
    kind: Any = type(value)
    return _is_block_type(kind)


@lru_cache(maxsize=256)
def _is_block_type(kind: Hashable) -> bool:
    return all(hasattr(kind, name) for name in ("view", "retain", "release"))


@runtime_checkable
class Tracer(Protocol):
    """An Observer that begins traces too: telemetry/tracing.py, which only loads where tracing is on."""

    def begin(self, request: Any) -> None:
        """Give `request` a Trace. Its attribute `trace` is a Trace already, or the caller's `traceparent`, or None."""

    def new(self, traceparent: str | None) -> Trace:
        """Return the Trace of a request that is about to be made."""

    def not_taken(self, model: str, request: Request, error: WeirError, now: float) -> None:
        """Record that the queue refused a request that has a Trace."""

    def ended(
        self, name: str, trace: Trace, start: float, now: float, *, attributes: dict[str, Any], error: WeirError | None = None,
        inside: bool = False,
    ) -> None:  # fmt: skip
        """Record a span that has just ended and is no request of a queue. `inside`: the server began it, not a caller."""

    def step(self, name: str, trace: Trace, start: float, now: float, *, attributes: dict[str, Any]) -> None:
        """Record a step within the span of `trace` that has just ended."""


def tracer_among(observers: Iterable[Observer]) -> Tracer | None:
    """Return the first of `observers` that is a Tracer, or None."""
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
