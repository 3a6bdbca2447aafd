"""Requests for vectors in traces: their own span, their reading, and their texts in the line; and whose text enters the queue next."""

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from tests.rings import subcases
from tests.telemetry.test_tracing import CALLER, Kept, attributes, ids, times
from tests.text_server.test_encoder import of, serving

from weir.errors import InvalidRequest
from weir.messages import LONGEST_TIMEOUT
from weir.telemetry.tracing import Tracing
from weir.text_server import requests
from weir.text_server.requests import CallerQueue, Deadline, PieceVectors, deadline_of


async def traced(texts: list[Any], **options: Any) -> Kept:
    """Encode in a server that traces; return the spans."""
    kept = Kept()
    async with serving(observers=[Tracing(kept)]) as encoder:
        await of(encoder, texts, **options)
    return kept


def below(kept: Kept, name: str, span: ReadableSpan) -> list[ReadableSpan]:
    return [each for each in kept.named(name) if each.parent is not None and each.parent.span_id == ids(span)[1]]


async def test_a_call_has_its_reading_and_its_texts_below() -> None:
    began = time.monotonic_ns()
    kept = await traced(["one", "two three"], trace={"traceparent": CALLER})
    slack = time.monotonic_ns() - began  # each span is put on the clock of the day by itself
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


async def test_a_large_call_has_spans_of_its_first_texts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    count = requests.MAX_SPANS + 40
    kept = await traced([f"w{number}" for number in range(count)])
    (call,) = kept.named("encode summing")
    assert call.parent is None and attributes(call)["weir.texts"] == count
    assert len(kept.named("infer summing")) == requests.MAX_SPANS == len(below(kept, "infer summing", call))
    assert sum(attributes(span)["weir.texts"] for span in below(kept, "tokenize", call)) == count
    monkeypatch.setattr("weir.text_server.encoder.CHUNK", 1)  # as many rounds of the tokenizer
    assert (
        len((await traced([f"w{number}" for number in range(requests.MAX_SPANS + 2)])).named("tokenize"))
        == requests.MAX_SPANS
    )


async def test_what_is_wrong_is_in_the_span() -> None:
    kept = Kept()
    async with serving(observers=[Tracing(kept)]) as encoder:
        with pytest.raises(InvalidRequest):
            await of(encoder, ["fine", ""])
        await of(encoder, ["fine"], trace={"traceparent": CALLER[:-1] + "0"})  # not to be recorded
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

    def __init__(self, name: str, texts: int, cost: float = 1.0, priority: int = 0, caller: str | None = None) -> None:
        self.name, self.texts, self.cost, self.key = name, texts, cost, (priority, caller or name)
        self.ready = True


def queue_of(*works: Work) -> CallerQueue[Work]:
    shares: CallerQueue[Work] = CallerQueue()
    for work in works:
        shares.add(work.key, work)
    return shares


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


@subcases(("works", "served"), [
    ([Work("a", 3), Work("b", 3)], ["a", "b"] * 3),
    ([Work("low", 2), Work("high", 2, priority=1)], ["high", "high", "low", "low"]),
    ([Work("many", 4, caller="a"), Work("one", 1, caller="a")], ["many", "one", "many", "many", "many"]),
])  # fmt: skip
def test_equal_callers_take_turns_and_so_do_requests_of_one(works: list[Work], served: list[str]) -> None:
    shares = queue_of(*works)
    assert serve(shares, 1000) == served
    assert (len(shares), shares.next()) == (0, None)


@subcases(("works", "served"), [
    ([Work("long", 100, 30.0), Work("short", 1000, 10.0)], {"long": 50, "short": 150}),  # shares are counted in tokens
    ([Work("one", 1000) if place == 50 else Work("many", 10) for place in range(100)], {"many": 100, "one": 100}),
])  # fmt: skip
def test_no_caller_has_more_than_another(works: list[Work], served: dict[str, int]) -> None:
    counts = Counter(serve(queue_of(*works), 200))
    assert counts.keys() == served.keys() and all(abs(counts[name] - count) <= 1 for name, count in served.items())


def test_who_comes_anew_begins_where_the_others_are() -> None:
    shares, late = queue_of(Work("first", 1000)), Work("late", 1000)
    serve(shares, 500)
    shares.add(late.key, late)
    assert abs(Counter(serve(shares, 100))["late"] - 50) <= 1


def test_who_is_not_ready_is_passed_over_until_woken() -> None:
    slow, quick = Work("slow", 10), Work("quick", 10)
    slow.ready = False
    shares = queue_of(slow, quick)
    assert serve(shares, 3) == ["quick"] * 3
    quick.ready = False
    assert shares.next() is None
    slow.ready = quick.ready = True
    for work in (slow, quick):
        shares.wake(work.key, work)
    assert serve(shares, 4) == ["slow", "slow", "slow", "quick"]  # it catches up
    shares.wake((0, "nobody"), slow)
    slow.ready = False
    shares.wake(slow.key, slow)
    assert serve(shares, 2) == ["quick", "quick"]


def test_who_leaves_is_forgotten_without_a_look_at_the_others() -> None:
    # One batch of 40,000 texts with a prompt each is as many members of one share: each was sought for among all.
    compared = 0

    class Watched(Work):
        """Counts how often it is compared."""

        __hash__ = Work.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

    members = [Watched("one", 1) for _ in range(2000)]
    shares = queue_of(*members)
    for member in [*reversed(members[1000:]), *members[1000:], members[0]]:
        shares.leave(member.key, member)
    assert (len(shares), shares.next()) == (999, members[1])
    assert len(serve(shares, 2000)) == 999
    shares.leave((0, "one"), members[0])
    assert (compared, shares.next()) == (0, None)


def test_who_had_more_is_not_forgiven_it_by_leaving() -> None:
    greedy, other = Work("greedy", 10), Work("other", 1000)
    shares = queue_of(greedy, other)
    other.ready = False
    assert serve(shares, 10) == ["greedy"] * 10
    other.ready = True
    shares.wake(other.key, other)
    shares.add(greedy.key, Work("greedy", 10))
    assert serve(shares, 9) == ["other"] * 9


def test_one_text_of_a_new_caller_is_due_whatever_is_under_way() -> None:
    flood, new = Work("flood", 1000), Work("new", 2)
    shares, tags = queue_of(flood), list[float]()
    for _ in range(100):
        assert shares.next() is flood
        tags.append(shares.charge(1.0))
    assert not shares.due
    shares.add(new.key, new)
    assert (shares.next(), shares.due) == (new, True)
    assert tags[0] < shares.charge(1.0) <= tags[1]
    assert (shares.next(), shares.due) == (new, False)
    for tag in tags[:2]:
        shares.ended(tag)
    assert (shares.next(), shares.due) == (new, True)


def test_virtual_time_stands_still_while_a_text_out_of_turn_is_under_way() -> None:
    flood = Work("flood", 9)
    shares = queue_of(flood)
    assert (shares.hold(), shares.hold()) == (0.0, 0.0)
    for ends in (True, False):
        assert shares.next() is flood
        tag = shares.charge(5.0)
        if ends:
            shares.ended(tag)
    shares.release()
    assert (shares.now, shares.hold()) == (0.0, 0.0)
    shares.release()
    shares.release()
    assert (shares.now, shares.hold()) == (tag, tag)
    assert len(shares._tags) == 1  # of texts that have ended no tag is kept


def test_of_callers_who_are_away_those_are_remembered_who_had_most() -> None:
    shares = queue_of(slow := Work("slow", 1))
    shares.next()
    shares.charge(1.0)  # its text stays under way, and holds virtual time
    slow.ready = False
    for number in range(10 * requests.REMEMBERED):
        shares.add((0, f"{number}"), one := Work(f"{number}", 1))
        assert shares.next() is one
        shares.charge(10.0 + number)
        shares.leave(one.key, one)
    assert len(shares._away) < 2 * requests.REMEMBERED
    assert max(shares._away.values()) > 10 * requests.REMEMBERED
