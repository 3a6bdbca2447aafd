"""Requests for vectors in traces: their own span, their reading, and their texts in the line."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from tests.telemetry.test_tracing import CALLER, Kept, attributes, ids, times
from tests.text_server.test_encoder import of, serving
from tests.text_server.text_models import Summing

from weir import Service
from weir.batching.request_state import RequestBase
from weir.errors import InvalidRequest
from weir.messages import OBJECT, Kind
from weir.protocols.entries import QueueEntry, Schedule
from weir.protocols.exchange import Exchange, QueuedRequest
from weir.serving.settings import LONGEST_TIMEOUT
from weir.telemetry.tracing import Tracing
from weir.testing import FakeClock, FakeExecutor
from weir.text_models.texts import Tokens
from weir.text_server.requests import MAX_SPANS, Deadline, PieceVectors, TextRequest, deadline_of


def traced(texts: list[Any], **options: Any) -> Kept:
    """Encode in a server that traces; return the spans."""

    async def main() -> Kept:
        kept = Kept()
        async with serving(observers=[Tracing(kept)]) as encoder:
            await of(encoder, texts, **options)
        return kept

    return asyncio.run(main())


def below(kept: Kept, name: str, span: ReadableSpan) -> list[ReadableSpan]:
    return [each for each in kept.named(name) if each.parent is not None and each.parent.span_id == ids(span)[1]]


def test_the_constructor_of_a_text_sets_what_that_of_a_queued_request_sets() -> None:
    service = Service(Summing, executor=FakeExecutor(), clock=FakeClock())
    exchange, tokens = Exchange(service, frontend="lines"), Tokens(b"abcd", 1)

    def ended(request: QueuedRequest) -> None: ...

    entry = QueueEntry(tokens, Kind.ITEM, OBJECT, OBJECT, 1, 3.0, None, False)
    queued = QueuedRequest(entry, exchange, Schedule(-1, 2.0), ended)
    text = TextRequest(
        exchange, tokens, ended, arrival=service.now(), timeout=2.0, deadline=service.now() + 2.0, priority=-1, cost=3.0
    )  # fmt: skip
    for name in (*RequestBase.__slots__, *QueuedRequest.__slots__):
        assert hasattr(text, name) == hasattr(queued, name), name  # a front alone gives a request its number
        assert getattr(text, name, None) == getattr(queued, name, None), name


def test_a_call_has_its_reading_and_its_texts_below() -> None:
    began = time.monotonic_ns()
    kept = traced(["one", "two three"], trace={"traceparent": CALLER})
    slack = (
        time.monotonic_ns() - began
    )  # each span is put on the clock of the day by itself, when the machine comes to it
    (call,) = kept.named("encode summing")
    assert call.parent is not None and f"{call.parent.span_id:x}" == "cd" * 8 and call.kind is SpanKind.SERVER
    assert attributes(call) == {"weir.model": "summing", "weir.frontend": "test", "weir.door": "test", "weir.texts": 2}
    (reading,) = below(kept, "tokenize", call)
    texts = below(kept, "infer summing", call)
    assert len(texts) == 2 and attributes(reading) == {"weir.texts": 2}
    assert {f"{ids(span)[0]:x}" for span in [call, reading, *texts]} == {"ab" * 16}
    assert all(len(below(kept, "queue", text)) == len(below(kept, "compute", text)) == 1 for text in texts)
    for span in (reading, *texts):
        assert times(call)[0] - slack <= times(span)[0] <= times(span)[1] <= times(call)[1] + slack


def test_a_large_call_has_spans_of_its_first_texts_only() -> None:
    count = MAX_SPANS + 40
    kept = traced([f"w{number}" for number in range(count)])
    (call,) = kept.named("encode summing")
    assert call.parent is None and attributes(call)["weir.texts"] == count
    assert len(kept.named("infer summing")) == MAX_SPANS == len(below(kept, "infer summing", call))
    assert sum(attributes(span)["weir.texts"] for span in below(kept, "tokenize", call)) == count


def test_of_rounds_of_reading_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.text_server.encoder.CHUNK", 1)
    kept = traced([f"w{number}" for number in range(MAX_SPANS + 2)])
    assert len(kept.named("tokenize")) == MAX_SPANS


def test_what_is_wrong_is_in_the_span() -> None:
    async def main() -> Kept:
        kept = Kept()
        async with serving(observers=[Tracing(kept)]) as encoder:
            with pytest.raises(InvalidRequest):
                await of(encoder, ["fine", ""])
            await of(encoder, ["fine"], trace={"traceparent": CALLER[:-1] + "0"})  # not to be recorded
        return kept

    kept = asyncio.run(main())
    (call,) = kept.named("encode summing")
    assert call.status.status_code is StatusCode.ERROR and attributes(call)["error.type"] == "InvalidRequest"
    assert len(kept.named("tokenize")) == 1 and not kept.named("infer summing")


def test_a_request_that_states_no_timeout_has_longer_the_more_texts_it_has() -> None:
    assert deadline_of(None, 16, own=2.0, began=5.0) == Deadline(5.0, 2.0, "timeout=2 s, the server's setting")
    limit = "timeout=12500 s, of 100000 texts: the server's setting of 2 s holds for 16"
    assert deadline_of(None, 100_000, own=2.0, began=0.0) == Deadline(0.0, 12_500.0, limit)
    assert deadline_of(None, 10**12, own=2.0, began=0.0).at == LONGEST_TIMEOUT


def test_terms_of_pieces_are_joined_each_once_with_its_largest_weight() -> None:
    pieces = PieceVectors([3, 2], normalize=True, terms=True)
    assert pieces.put(1, np.array([[4, 0.5], [9, 2]], np.float32)) is None
    assert pieces.put(0, np.array([[2, 1], [4, 0.75]], np.float32)).tolist() == [[2, 1], [4, 0.75], [9, 2]]
