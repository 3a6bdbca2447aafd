"""A request of the ASGI door to a streaming model: its answers as the data of events."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from weir.errors import ModelError, WeirError
from weir.messages import Kind
from weir.protocols.events import Source
from weir.protocols.native import DOOR, RequestHead
from weir.protocols.offloading import written
from weir.protocols.payloads import QueueEntry
from weir.protocols.response import (
    Headers,
    echo_headers,
    error_answer,
    error_body,
    explain_headers,
    output_body,
    tensors_body,
    trace_headers,
)
from weir.serving.calls import Streamed
from weir.wire.elements import text_size


def enter_stream(ask: RequestHead, works: Sequence[QueueEntry | WeirError]) -> Streamed:
    """Put the one work of a streaming model into its line. Raises what the service raises when it refuses it."""
    (work,) = works
    if isinstance(work, WeirError):
        raise work
    service = ask.service
    request = new_request(work, service, ask.timeout, ask.priority, DOOR)
    request.trace = ask.traceparent
    service.submit(request)
    return request


def new_request(work: QueueEntry, service: Any, timeout: float, priority: int, door: str) -> Streamed:
    """Return the request that asks `service` for a stream; tensors are one item, which is not divided."""
    return Streamed(
        work.payload, service.now(), timeout, service.settings.stream_buffer, service.cancel, service.now, kind=Kind.ITEM,
        content_type=work.content_type, accept=work.accept, rows=work.rows, cost=work.cost, key=work.key,
        priority=priority, large=work.large, door=door,
    )  # fmt: skip


def stream_source(ask: RequestHead, request: Streamed, *, development: bool) -> Source:
    """Return what is to be sent for `request`."""
    name = ask.service.name
    return Source(
        _data(ask, request),
        partial(error_answer, model=name, development=development),
        partial(error_body, model=name, development=development),
        partial(_headers, ask, request),
    )


async def _data(ask: RequestHead, request: Streamed) -> AsyncIterator[bytes]:
    async for output in request:
        if not isinstance(output, dict):
            yield output_body(ask, output)
            continue
        size = sum(map(text_size, output.values()))
        body = await written(size, partial(tensors_body, ask, output))
        if isinstance(body, ModelError):
            raise ask.service.tell_failed(body)
        yield body


def _headers(ask: RequestHead, request: Streamed) -> Headers:
    headers = echo_headers(ask) + trace_headers(request)
    if ask.explain and request.dispatch is not None:
        headers += explain_headers(request.arrival, request.dispatch)
    return headers
