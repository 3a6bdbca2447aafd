"""Requests for vectors in traces: their own span, their reading, and their texts in the line; and whose text enters the queue next."""

import asyncio
import time
from collections import Counter
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
from weir.serving import LONGEST_TIMEOUT
from weir.telemetry.tracing import Tracing
from weir.testing import FakeClock, FakeExecutor
from weir.text_models.texts import Tokens
from weir.text_server.requests import (
    MAX_SPANS,
    REMEMBERED,
    CallerQueue,
    Deadline,
    PieceVectors,
    TextRequest,
    deadline_of,
)


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
    assert attributes(call) == {"weir.model": "summing", "weir.frontend": "test", "weir.texts": 2}
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


class Work:
    """So many texts of one cost."""

    def __init__(self, name: str, texts: int, cost: float = 1.0, priority: int = 0) -> None:
        self.name, self.texts, self.cost, self.key = name, texts, cost, (priority, name)
        self.ready = True


def serve(shares: CallerQueue[Work], count: int) -> list[str]:
    """Let so many texts go, each until the next one goes; return whose they were."""
    served: list[str] = []
    tag = None
    while len(served) < count and (work := shares.next()) is not None:
        if tag is not None:
            shares.ended(tag)
        tag = shares.charge(work.cost)
        work.texts -= 1
        served.append(work.name)
        if not work.texts:
            shares.leave(work.key, work)
    if tag is not None:
        shares.now  # noqa: B018  # the clock is asked while the text is under way
        shares.ended(tag)
    return served


def test_equal_callers_take_turns() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    for work in (Work("a", 50), Work("b", 50)):
        shares.add(work.key, work)
    assert serve(shares, 6) == ["a", "b"] * 3
    assert len(serve(shares, 1000)) == 94
    assert (len(shares), shares.next()) == (0, None)


def test_shares_are_counted_in_tokens() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    for work in (Work("long", 100, 30.0), Work("short", 1000, 10.0)):
        shares.add(work.key, work)
    counts = Counter(serve(shares, 200))
    assert abs(counts["short"] - 3 * counts["long"]) <= 3


def test_a_caller_with_many_requests_has_no_more_than_one_with_one() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    for number in range(100):
        work = Work("many", 10)
        shares.add(work.key, work)
        if number == 50:
            shares.add((0, "one"), Work("one", 1000))
    counts = Counter(serve(shares, 400))
    assert counts == {"many": 200, "one": 200}


def test_who_comes_anew_begins_where_the_others_are() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    first, late = Work("first", 1000), Work("late", 1000)
    shares.add(first.key, first)
    serve(shares, 500)
    shares.add(late.key, late)
    assert abs(Counter(serve(shares, 100))["late"] - 50) <= 1


def test_higher_priority_goes_first() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    for work in (Work("low", 2), Work("high", 2, priority=1)):
        shares.add(work.key, work)
    assert serve(shares, 4) == ["high", "high", "low", "low"]


def test_who_is_not_ready_is_passed_over_until_woken() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    slow, quick = Work("slow", 10), Work("quick", 10)
    slow.ready = False
    for work in (slow, quick):
        shares.add(work.key, work)
    assert serve(shares, 3) == ["quick"] * 3
    quick.ready = False
    assert shares.next() is None
    slow.ready = quick.ready = True
    shares.wake(slow.key, slow)
    shares.wake(quick.key, quick)
    assert serve(shares, 4) == ["slow", "slow", "slow", "quick"]  # it catches up
    shares.wake((0, "nobody"), slow)
    slow.ready = False
    shares.wake(slow.key, slow)
    assert serve(shares, 2) == ["quick", "quick"]


def test_who_leaves_is_forgotten() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    first, second = Work("a", 5), Work("a", 5)
    for work in (first, second):
        shares.add(work.key, work)
    shares.leave(first.key, first)
    shares.leave(first.key, first)
    assert shares.next() is second
    shares.leave(second.key, second)
    shares.leave(second.key, second)
    assert shares.next() is None


def test_who_leaves_is_found_without_looking_at_the_others() -> None:
    # One batch of 40,000 texts with a prompt each is as many members of one share: each was sought for among all.
    compared = 0

    class Watched(Work):
        """Counts how often it is compared."""

        __hash__ = Work.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

    shares: CallerQueue[Work] = CallerQueue()
    members = [Watched("one", 1) for _ in range(2000)]
    for member in members:
        shares.add(member.key, member)
    for member in reversed(members[1000:]):
        shares.leave(member.key, member)
    assert (len(shares), shares.next()) == (1000, members[0])
    assert len(serve(shares, 2000)) == 1000
    shares.leave((0, "one"), members[0])
    assert compared == 0


def test_requests_of_one_caller_take_turns() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    many, one = Work("a", 1000), Work("a", 1)
    many.name, one.name = "many", "one"
    for work in (many, one):
        shares.add(work.key, work)
    assert serve(shares, 4) == ["many", "one", "many", "many"]


def test_who_had_more_is_not_forgiven_it_by_leaving() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    greedy, other = Work("greedy", 10), Work("other", 1000)
    shares.add(greedy.key, greedy)
    shares.add(other.key, other)
    other.ready = False
    assert serve(shares, 10) == ["greedy"] * 10
    other.ready = True
    shares.wake(other.key, other)
    again = Work("greedy", 10)
    shares.add(again.key, again)
    assert serve(shares, 9) == ["other"] * 9


def test_one_text_of_a_new_caller_is_due_whatever_is_under_way() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    flood, new = Work("flood", 1000), Work("new", 2)
    shares.add(flood.key, flood)
    tags = []
    for _ in range(100):
        assert shares.next() is flood
        tags.append(shares.charge(1.0))
    assert not shares.due
    shares.add(new.key, new)
    assert (shares.next(), shares.due) == (new, True)
    first = shares.charge(1.0)
    assert tags[0] < first <= tags[1]
    assert (shares.next(), shares.due) == (new, False)
    for tag in tags[:2]:
        shares.ended(tag)
    assert (shares.next(), shares.due) == (new, True)


def test_of_thousands_of_callers_who_leave_those_are_remembered_who_have_had_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forgotten, forget = list[int](), CallerQueue._forget

    def counted(shares: CallerQueue[Work]) -> None:
        forgotten.append(len(shares._away))
        forget(shares)

    monkeypatch.setattr(CallerQueue, "_forget", counted)
    shares: CallerQueue[Work] = CallerQueue()
    slow = Work("slow", 1)
    shares.add(slow.key, slow)
    shares.next()
    shares.charge(1.0)  # its text stays under way, and holds virtual time
    slow.ready = False
    for number in range(10 * REMEMBERED):
        one = Work(f"{number}", 1)
        shares.add(one.key, one)
        assert shares.next() is one
        shares.charge(10.0 + number)
        shares.leave(one.key, one)
    assert forgotten == [2 * REMEMBERED] * 9
    assert len(shares._away) < 2 * REMEMBERED
    assert max(shares._away.values()) > 10 * REMEMBERED


def test_virtual_time_stands_still_while_a_text_out_of_turn_is_under_way() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    flood = Work("flood", 9)
    shares.add(flood.key, flood)
    assert (shares.hold(), shares.hold()) == (0.0, 0.0)
    assert shares.next() is flood
    tags = [shares.charge(5.0)]
    shares.ended(tags.pop())
    assert shares.next() is flood
    tag = shares.charge(5.0)
    shares.release()
    assert (shares.now, shares.hold()) == (0.0, 0.0)
    shares.release()
    shares.release()
    assert (shares.now, shares.hold()) == (tag, tag)
    assert len(shares._tags) == 1  # of texts that have ended no tag is kept


def test_callers_who_are_away_are_forgotten_once_the_others_have_had_as_much() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    for number in range(3 * REMEMBERED):
        work = Work(str(number), 1)
        shares.add(work.key, work)
        serve(shares, 1)
    assert len(shares._away) <= REMEMBERED
    stays = Work("stays", 10)
    shares.add(stays.key, stays)
    for number in range(3 * REMEMBERED):
        work = Work(f"again {number}", 1)
        shares.add(work.key, work)
        shares.leave(work.key, work)
    assert len(shares._away) <= REMEMBERED
