"""What the body of a request is to the line."""

from typing import Any

import numpy
import pytest
from tests.frontends.http.models import Add, Echo, Shout, Words
from tests.protocols.test_response import read_head_of

from weir.errors import InvalidRequest, TooLarge
from weir.messages import JSON, LENT, OBJECT, OCTETS, Kind
from weir.model import Measure
from weir.protocols import entries
from weir.protocols.entries import QueueEntry, item_entries


def test_an_item_stays_as_it_is() -> None:
    (entry,) = item_entries(read_head_of(Echo, x_batch_key="blue"), b"{broken")
    assert entry == QueueEntry(b"{broken", Kind.ITEM, JSON, JSON, 1, 1.0, "blue", False)


def test_a_list_is_one_request_of_items_still_encoded() -> None:
    (entry,) = item_entries(read_head_of(Echo, "/infer/echo/batch"), b'[1, {"a": 2}]')
    assert entry == QueueEntry([b"1", b'{"a": 2}'], Kind.ITEMS, JSON, JSON, 2, 2.0, None, False)


def test_many_items_are_a_large_request() -> None:
    (entry,) = item_entries(read_head_of(Echo, "/infer/echo/batch"), b"[" + b"1," * 16 + b"1]")
    assert isinstance(entry, QueueEntry)
    assert entry.large


def test_a_measured_item_says_its_rows_cost_and_key() -> None:
    (entry,) = item_entries(read_head_of(Words), b'"to be or"')
    assert entry == QueueEntry(b'"to be or"', Kind.ITEM, JSON, JSON, 3, 8.0, "t", False)
    (keyed,) = item_entries(read_head_of(Words, x_batch_key="blue"), b'"to be or"')
    assert isinstance(keyed, QueueEntry)
    assert keyed.key == ("t", "blue")


def test_measured_items_of_a_list_are_requests_of_their_own_and_fail_alone() -> None:
    first, second, third = item_entries(read_head_of(Words, "/infer/words/batch"), b'["a b", 7, "c"]')
    assert isinstance(first, QueueEntry) and isinstance(third, QueueEntry)
    assert (first.rows, third.rows) == (2, 1)
    assert isinstance(second, InvalidRequest)


def test_an_opaque_body_is_not_measured() -> None:
    class Loud(Shout):
        @classmethod
        def measure(cls, item: Any) -> Measure:
            return Measure(rows=7)

    (entry,) = item_entries(read_head_of(Loud, content_type="text/plain"), b"a b c")
    assert isinstance(entry, QueueEntry)
    assert (entry.rows, entry.content_type) == (1, "text/plain")


def test_octets_are_measured_as_bytes() -> None:
    class Chunks(Words):
        @classmethod
        def measure(cls, item: Any) -> Measure:
            return Measure(rows=len(item))

    (entry,) = item_entries(read_head_of(Chunks, content_type=OCTETS), b"abc")
    assert isinstance(entry, QueueEntry)
    assert entry.rows == 3


def test_tensors_become_arrays_whose_shapes_are_the_key() -> None:
    (entry,) = item_entries(read_head_of(Add), b'{"a": [[1, 2], [3, 4]], "b": [[1, 2], [3, 4]]}')
    assert isinstance(entry, QueueEntry)
    assert (entry.kind, entry.rows, entry.cost, entry.content_type, entry.accept) == (
        Kind.TENSORS,
        2,
        2.0,
        OBJECT,
        LENT,
    )
    assert entry.payload["a"].dtype == numpy.float32
    assert hash(entry.key) is not None


def test_tensors_can_be_measured_too() -> None:
    class Dear(Add):
        @classmethod
        def measure(cls, item: Any) -> Measure:
            return Measure(cost=float(item["a"].sum()), key="dear")

    (entry,) = item_entries(read_head_of(Dear), b'{"a": [[1, 2], [3, 4]], "b": [[1, 2], [3, 4]]}')
    assert isinstance(entry, QueueEntry)
    assert (entry.rows, entry.cost, entry.key[0]) == (2, 10.0, "dear")


def test_more_rows_than_the_line_holds_can_never_be_taken() -> None:
    (most,) = item_entries(read_head_of(Echo, "/infer/echo/batch"), b"[" + b"1," * 1023 + b"1]")
    assert isinstance(most, QueueEntry) and most.rows == 1024
    with pytest.raises(TooLarge, match="max_queue_size"):
        item_entries(read_head_of(Echo, "/infer/echo/batch"), b"[" + b"1," * 1024 + b"1]")


def test_an_empty_body_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        item_entries(read_head_of(Echo), b"")


def test_an_empty_body_is_an_item_where_it_can_be_one() -> None:
    (octets,) = item_entries(read_head_of(Echo, content_type=OCTETS), b"")
    (own,) = item_entries(read_head_of(Shout, content_type="text/plain"), b"")
    assert isinstance(octets, QueueEntry) and isinstance(own, QueueEntry)
    assert (octets.payload, own.payload) == (b"", b"")


@pytest.mark.parametrize(("model", "item"), [(Echo, b"1"), (Add, b'{"x": [[1, 2]]}'), (Words, b'"a"')])
def test_a_list_that_can_never_fit_is_refused_before_its_items_are_looked_into(
    model: Any, item: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each tensor was a request of its own, made on the event loop and held against nothing.
    read = []
    monkeypatch.setattr(entries, "item_entry", lambda head, body: read.append(body))
    head = read_head_of(model, f"/infer/{model.__name__.lower()}/batch")
    for body in (b"[" + (item + b",") * 1024 + item + b"]", b"[" + b"[]," * 1_000_000 + b"[]]"):
        with pytest.raises(TooLarge, match=r"must have at most 1024 \(max_queue_size\)"):
            item_entries(head, body)
    assert not read


def test_the_rows_of_all_items_are_held_against_the_queue() -> None:
    head = read_head_of(Words, "/infer/words/batch")
    with pytest.raises(TooLarge, match=r"body of 1200 rows: must have at most 1024 \(max_queue_size\)"):
        item_entries(head, b"[" + b",".join([b'"a b c"'] * 400) + b"]")
