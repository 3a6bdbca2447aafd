"""Turn a dispatch into the batch that a worker gets, and the worker's events into responses.

A dispatch consists of requests, a batch of *entries*: one for an item, one for each item of a list, one for tensors. An entry is
(request, start, stop), which is its range of items (0 to 1 for a single item) or of rows.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

from weir.batching.request_state import has_response, respond
from weir.errors import ModelCrashed, ModelError, WeirError, WorkerLost
from weir.messages import NO_RESPONSE, Batch, Dispatch, EventKind, Events, Kind, Request

Entry = tuple[Request, int, int]
End = tuple[Request, Any]
RETRY_AFTER = 1.0  # seconds after which the caller of a batch that cannot run again may try again


class Lost(NamedTuple):
    """A batch whose worker died, and its entries that do not run again.

    Each of `crashed` ended its worker even when it ran alone. `interrupted` had already received a part of their responses.
    """

    dispatch: Dispatch
    crashed: list[Entry]
    interrupted: list[Entry]


def entries_of(dispatch: Dispatch) -> list[Entry]:
    """Return the entries of a dispatch, in order."""
    if dispatch.entries is None:
        slices = dispatch.slices or [None] * len(dispatch.requests)
        dispatch.entries = [
            entry for request, part in zip(dispatch.requests, slices, strict=True) for entry in _entries(request, part)
        ]
    return dispatch.entries


def indices_of(dispatch: Dispatch, requests: Container[int]) -> list[int]:
    """Return which entries of `dispatch` are of `requests`, which are given by `id`."""
    return [index for index, entry in enumerate(entries_of(dispatch)) if id(entry[0]) in requests]


def _entries(request: Request, part: tuple[int, int] | None) -> list[Entry]:
    if request.form.kind is Kind.ITEM:
        return [(request, 0, 1)]
    if request.form.kind is Kind.TENSORS:
        return [(request, *(part or (0, request.form.rows)))]
    start, stop = part or (0, len(request.payload))
    return [(request, item, item + 1) for item in range(start, stop)]


def is_done(entry: Entry) -> bool:
    """Return whether this entry has its response, or its request is settled."""
    request, start, _ = entry
    return has_response(request, start)


def to_batch(dispatch: Dispatch) -> Batch:
    """Return the batch for the worker of `dispatch`. Payloads stay as they are; tensors are sliced, not copied."""
    if dispatch.undivided:
        requests = dispatch.requests
        if len(requests) == 1:
            (request,) = requests
            form, payloads = request.form, [request.payload]
            return Batch(
                dispatch.batch_id, payloads, form.content_type, form.accept, dispatch.attempt, requests=requests
            )
        payloads = [request.payload for request in requests]
    else:
        entries = entries_of(dispatch)
        requests = [entry[0] for entry in entries]
        payloads = [_payload(*entry) for entry in entries]
    forms = [request.form for request in requests]
    content_types: str | list[str] = forms[0].content_type
    accepts: str | list[str] = forms[0].accept
    if forms.count(forms[0]) < len(forms):  # few batches have several forms
        content_types = _one_or_all([form.content_type for form in forms])
        accepts = _one_or_all([form.accept for form in forms])
    return Batch(dispatch.batch_id, payloads, content_types, accepts, dispatch.attempt, requests=requests)


def _payload(request: Request, start: int, stop: int) -> Any:
    if request.form.kind is Kind.ITEM:
        return request.payload
    if request.form.kind is Kind.ITEMS:
        return request.payload[start]
    if stop - start == request.form.rows:
        return request.payload
    return {name: array[start:stop] for name, array in request.payload.items()}


def _one_or_all(values: list[str]) -> str | list[str]:
    return values[0] if values.count(values[0]) == len(values) else values


def deliver(dispatch: Dispatch, events: Events) -> list[End]:
    """Settle and return the requests that these events complete, each with its output or its WeirError.

    Outputs for a request that is settled already are dropped. After the final events no request waits for this batch: an entry without a response
    gets a ModelError.
    """
    entries = entries_of(dispatch)
    ends: list[End] = []
    for index, kind, output in _each(events):
        if kind == EventKind.PART:
            dispatch.begun = dispatch.begun or set()
            dispatch.begun.add(index)
        elif 0 <= index < len(entries):
            ends += _responded(entries[index], NO_RESPONSE if kind == EventKind.END else output)
    if events.final:
        left = [entry for entry in entries if not is_done(entry)]
        ends += _fail(left, lambda: ModelError("the worker finished the batch without a response to this item"))
    return ends


def dropped_in(dispatch: Dispatch, events: Events) -> list[Any]:
    """Return the outputs of these events, except parts, that no caller gets because their entries are done. To be called before `deliver`."""
    entries = entries_of(dispatch)
    return [
        output
        for index, kind, output in _each(events)
        if kind != EventKind.PART and (not 0 <= index < len(entries) or is_done(entries[index]))
    ]


def _each(events: Events) -> Iterator[tuple[int, int, Any]]:
    """Return the entry index, the kind and the output of each event."""
    count = len(events.outputs)
    indices = range(count) if events.indices is None else events.indices
    return zip(indices, events.kinds or [EventKind.DONE] * count, events.outputs, strict=True)


class Responses(NamedTuple):
    """The responses in events of a streaming model: the parts for unsettled requests, the requests that have a response here (a part or the
    last), those of them for which it is the first, and the parts that are dropped because their requests are settled."""

    parts: list[End]
    responded: list[Request]
    firsts: list[Request]
    dropped: list[Any]


def responses_in(dispatch: Dispatch, events: Events) -> Responses:
    """Return the responses in these events. To be called before `deliver`, which settles their requests."""
    responses = Responses([], [], [], [])
    entries = entries_of(dispatch)
    begun = dispatch.begun = dispatch.begun or set()
    for index, kind, output in _each(events):
        if kind not in (EventKind.PART, EventKind.DONE) or not 0 <= index < len(entries):
            continue
        request = entries[index][0]
        if request.settled:
            if kind == EventKind.PART:
                responses.dropped.append(output)
            continue
        responses.responded.append(request)
        if index not in begun:
            begun.add(index)
            responses.firsts.append(request)
        if kind == EventKind.PART:
            responses.parts.append((request, output))
    return responses


def fail_entries(lost: Lost, reason: str = "the worker died") -> list[End]:
    """Give the entries that do not run again an error. Settle and return the requests that this completes, as `deliver` does. `reason` says why the
    worker is gone."""
    ends = _fail(lost.crashed, lambda: ModelCrashed(f"it crashed its worker, even when rerun alone: {reason}"))
    ends += _fail(
        lost.interrupted, lambda: WorkerLost(f"lost while it was responding: {reason}", retry_after=RETRY_AFTER)
    )
    return ends


def _fail(entries: Iterable[Entry], error: Callable[[], WeirError]) -> list[End]:
    return [end for entry in entries for end in _responded(entry, error())]


def _responded(entry: Entry, output: Any) -> list[End]:
    """Return the request of the entry with its whole output, if this output completes it."""
    end = respond(*entry, output)
    return [] if end is None else [end]
