"""Turn a dispatch into the batch that a worker gets, and the worker's events into answers.

A dispatch speaks of requests, a batch of *entries*: one for an item, one for each item of a list, one for tensors. An
entry is (request, start, stop), the range being that of its items (0 to 1 for a single item) or rows.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from weir.batching.request_state import answer, has_answer, settle
from weir.errors import ModelCrashed, ModelError, WeirError, WorkerLost
from weir.messages import NO_ANSWER, Batch, Dispatch, EventKind, Events, Kind, Request

Entry = tuple[Request, int, int]
End = tuple[Request, Any]
RETRY_AFTER = 1.0  # seconds; what is said to the caller of a batch that cannot run again


class Lost(NamedTuple):
    """A batch whose worker died, and those of its entries that do not run again.

    `crashed` are out of tries: each ended its worker even alone. `interrupted` had already received a part.
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


def indices_of(dispatch: Dispatch, request: Request) -> list[int]:
    """Return which entries of `dispatch` are of `request`."""
    return [index for index, entry in enumerate(entries_of(dispatch)) if entry[0] is request]


def _entries(request: Request, part: tuple[int, int] | None) -> list[Entry]:
    if request.kind is Kind.ITEM:
        return [(request, 0, 1)]
    if request.kind is Kind.TENSORS:
        return [(request, *(part or (0, request.rows)))]
    start, stop = part or (0, len(request.payload))
    return [(request, item, item + 1) for item in range(start, stop)]


def is_done(entry: Entry) -> bool:
    """Tell whether this entry has its answer, or its request has had its end."""
    request, start, _ = entry
    return has_answer(request, start)


def to_batch(dispatch: Dispatch) -> Batch:
    """Return what the worker of `dispatch` gets. Payloads stay as they are; tensors are sliced, not copied."""
    if dispatch.plain:
        requests = dispatch.requests
        payloads = [request.payload for request in requests]
    else:
        entries = entries_of(dispatch)
        requests = [entry[0] for entry in entries]
        payloads = [_payload(*entry) for entry in entries]
    content_types = _one_or_all([request.content_type for request in requests])
    accepts = _one_or_all([request.accept for request in requests])
    return Batch(dispatch.batch_id, payloads, content_types, accepts, dispatch.attempt)


def _payload(request: Request, start: int, stop: int) -> Any:
    if request.kind is Kind.ITEM:
        return request.payload
    if request.kind is Kind.ITEMS:
        return request.payload[start]
    if stop - start == request.rows:
        return request.payload
    return {name: array[start:stop] for name, array in request.payload.items()}


def _one_or_all(values: list[str]) -> str | list[str]:
    return values[0] if values.count(values[0]) == len(values) else values


def deliver(dispatch: Dispatch, events: Events) -> list[End]:
    """Return the requests that reach their end by these events, each with its output or its WeirError.

    They are marked settled. What is for a request that has had its end already is dropped. After the final events no
    request is left waiting for this batch: an entry that the worker forgot gets a ModelError.
    """
    outputs = events.outputs
    requests = dispatch.requests
    if dispatch.plain and events.indices is None and events.kinds is None and len(outputs) == len(requests):
        return [end for end in zip(requests, outputs, strict=True) if settle(end[0])]
    return _deliver_each(dispatch, events)


def dropped_in(dispatch: Dispatch, events: Events) -> list[Any]:
    """Return the outputs in these events, but for parts, that nobody gets, as their entries are done. To be asked before
    `deliver`."""
    entries = entries_of(dispatch)
    indices = range(len(events.outputs)) if events.indices is None else events.indices
    kinds = events.kinds or [EventKind.DONE] * len(events.outputs)
    return [
        output
        for index, kind, output in zip(indices, kinds, events.outputs, strict=True)
        if kind != EventKind.PART and (not 0 <= index < len(entries) or is_done(entries[index]))
    ]


def _deliver_each(dispatch: Dispatch, events: Events) -> list[End]:
    entries = entries_of(dispatch)
    indices = range(len(events.outputs)) if events.indices is None else events.indices
    kinds = events.kinds or [EventKind.DONE] * len(events.outputs)
    ends: list[End] = []
    for index, kind, output in zip(indices, kinds, events.outputs, strict=True):
        if kind == EventKind.PART:
            dispatch.begun = dispatch.begun or set()
            dispatch.begun.add(index)
        elif 0 <= index < len(entries):
            ends += _answered(entries[index], NO_ANSWER if kind == EventKind.END else output)
    if events.final:
        forgotten = [entry for entry in entries if not is_done(entry)]
        ends += _fail(forgotten, lambda: ModelError("the worker ended the batch without an answer to this item"))
    return ends


class Answers(NamedTuple):
    """What events of a streaming model bring: each part for a request that has not had its end, and the requests, in
    order, for which there is an answer here, last ones too, and for which it is the first. `dropped` are the parts for
    requests that have had their end."""

    parts: list[End]
    answered: list[Request]
    firsts: list[Request]
    dropped: list[Any]


def answers_in(dispatch: Dispatch, events: Events) -> Answers:
    """Return the answers in these events. To be asked before `deliver`, which gives them their ends."""
    answers = Answers([], [], [], [])
    entries = entries_of(dispatch)
    begun = dispatch.begun = dispatch.begun or set()
    indices = range(len(events.outputs)) if events.indices is None else events.indices
    kinds = events.kinds or [EventKind.DONE] * len(events.outputs)
    for index, kind, output in zip(indices, kinds, events.outputs, strict=True):
        if kind not in (EventKind.PART, EventKind.DONE) or not 0 <= index < len(entries):
            continue
        request = entries[index][0]
        if request.settled:
            if kind == EventKind.PART:
                answers.dropped.append(output)
            continue
        answers.answered.append(request)
        if index not in begun:
            begun.add(index)
            answers.firsts.append(request)
        if kind == EventKind.PART:
            answers.parts.append((request, output))
    return answers


def fail_entries(lost: Lost, reason: str = "the worker died") -> list[End]:
    """Give the entries that do not run again their error; return the requests that reach their end thereby.

    They are marked settled; each comes with its output or error, as from `deliver`.
    """
    ends = _fail(lost.crashed, lambda: ModelCrashed(f"this request ended its worker, also when run alone: {reason}"))
    ends += _fail(lost.interrupted, lambda: WorkerLost(f"lost amid the answer: {reason}", retry_after=RETRY_AFTER))
    return ends


def _fail(entries: Iterable[Entry], error: Callable[[], WeirError]) -> list[End]:
    return [end for entry in entries for end in _answered(entry, error())]


def _answered(entry: Entry, output: Any) -> list[End]:
    """Return the end of the entry's request, if this output is that."""
    end = answer(*entry, output)
    return [] if end is None else [end]
