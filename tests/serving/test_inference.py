"""What the body of a request is to the line."""

from typing import Any

import numpy
import pytest
from tests.frontends.http.models import Add, Echo, Shout, Words
from tests.protocols.test_response import ask_for

from weir.errors import InvalidRequest, TooLarge
from weir.messages import JSON, LENT, OBJECT, OCTETS, Kind
from weir.model import Measure
from weir.serving import inference
from weir.serving.inference import QueueEntry, read_work


def test_an_item_stays_as_it_is() -> None:
    (work,) = read_work(ask_for(Echo, x_batch_key="blue"), b"{broken")
    assert work == QueueEntry(b"{broken", Kind.ITEM, JSON, JSON, 1, 1.0, "blue", False)


def test_a_list_is_one_request_of_items_still_encoded() -> None:
    (work,) = read_work(ask_for(Echo, "/infer/echo/batch"), b'[1, {"a": 2}]')
    assert work == QueueEntry([b"1", b'{"a": 2}'], Kind.ITEMS, JSON, JSON, 2, 2.0, None, False)


def test_many_items_are_a_large_request() -> None:
    (work,) = read_work(ask_for(Echo, "/infer/echo/batch"), b"[" + b"1," * 16 + b"1]")
    assert isinstance(work, QueueEntry)
    assert work.large


def test_a_measured_item_says_its_rows_cost_and_key() -> None:
    (work,) = read_work(ask_for(Words), b'"to be or"')
    assert work == QueueEntry(b'"to be or"', Kind.ITEM, JSON, JSON, 3, 8.0, "t", False)
    (keyed,) = read_work(ask_for(Words, x_batch_key="blue"), b'"to be or"')
    assert isinstance(keyed, QueueEntry)
    assert keyed.key == ("t", "blue")


def test_measured_items_of_a_list_are_requests_of_their_own_and_fail_alone() -> None:
    first, second, third = read_work(ask_for(Words, "/infer/words/batch"), b'["a b", 7, "c"]')
    assert isinstance(first, QueueEntry) and isinstance(third, QueueEntry)
    assert (first.rows, third.rows) == (2, 1)
    assert isinstance(second, InvalidRequest)


def test_an_opaque_body_is_not_measured() -> None:
    class Loud(Shout):
        @classmethod
        def measure(cls, item: Any) -> Measure:
            return Measure(rows=7)

    (work,) = read_work(ask_for(Loud, content_type="text/plain"), b"a b c")
    assert isinstance(work, QueueEntry)
    assert (work.rows, work.content_type) == (1, "text/plain")


def test_octets_are_measured_as_bytes() -> None:
    class Chunks(Words):
        @classmethod
        def measure(cls, item: Any) -> Measure:
            return Measure(rows=len(item))

    (work,) = read_work(ask_for(Chunks, content_type=OCTETS), b"abc")
    assert isinstance(work, QueueEntry)
    assert work.rows == 3


def test_tensors_become_arrays_whose_shapes_are_the_key() -> None:
    (work,) = read_work(ask_for(Add), b'{"a": [[1, 2], [3, 4]], "b": [[1, 2], [3, 4]]}')
    assert isinstance(work, QueueEntry)
    assert (work.kind, work.rows, work.cost, work.content_type, work.accept) == (Kind.TENSORS, 2, 2.0, OBJECT, LENT)
    assert work.payload["a"].dtype == numpy.float32
    assert hash(work.key) is not None


def test_tensors_can_be_measured_too() -> None:
    class Dear(Add):
        @classmethod
        def measure(cls, item: Any) -> Measure:
            return Measure(cost=float(item["a"].sum()), key="dear")

    (work,) = read_work(ask_for(Dear), b'{"a": [[1, 2], [3, 4]], "b": [[1, 2], [3, 4]]}')
    assert isinstance(work, QueueEntry)
    assert (work.rows, work.cost, work.key[0]) == (2, 10.0, "dear")


def test_more_rows_than_the_line_holds_can_never_be_taken() -> None:
    with pytest.raises(TooLarge, match="max_queue_size"):
        read_work(ask_for(Echo, "/infer/echo/batch"), b"[" + b"1," * 1024 + b"1]")


def test_an_empty_body_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        read_work(ask_for(Echo), b"")


def test_an_empty_body_is_an_item_where_it_can_be_one() -> None:
    (octets,) = read_work(ask_for(Echo, content_type=OCTETS), b"")
    (own,) = read_work(ask_for(Shout, content_type="text/plain"), b"")
    assert isinstance(octets, QueueEntry) and isinstance(own, QueueEntry)
    assert (octets.payload, own.payload) == (b"", b"")


@pytest.mark.parametrize(("model", "item"), [(Echo, b"1"), (Add, b'{"x": [[1, 2]]}'), (Words, b'"a"')])
def test_a_list_that_can_never_fit_is_refused_before_its_items_are_looked_into(
    model: Any, item: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each tensor was a request of its own, made on the event loop and held against nothing.
    read = []
    monkeypatch.setattr(inference, "read_item", lambda ask, body: read.append(body))
    ask = ask_for(model, f"/infer/{model.__name__.lower()}/batch")
    for body in (b"[" + (item + b",") * 1024 + item + b"]", b"[" + b"[]," * 1_000_000 + b"[]]"):
        with pytest.raises(TooLarge, match=r"must have at most 1024 \(max_queue_size\)"):
            read_work(ask, body)
    assert not read


def test_the_rows_of_all_items_are_held_against_the_queue() -> None:
    ask = ask_for(Words, "/infer/words/batch")
    with pytest.raises(TooLarge, match=r"body of 1200 rows: must have at most 1024 \(max_queue_size\)"):
        read_work(ask, b"[" + b",".join([b'"a b c"'] * 400) + b"]")
