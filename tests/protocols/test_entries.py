"""What the body of a request is to the line."""

from typing import Any

import numpy
import pytest
from tests.frontends.http.models import Add, Echo, Shout, Words
from tests.protocols.test_response import read_head_of
from tests.rings import subcases

from weir.errors import InvalidRequest, TooLarge
from weir.messages import JSON, LENT, OBJECT, OCTETS, Form, Kind
from weir.model import Measure
from weir.protocols import entries
from weir.protocols.entries import QueueEntry, item_entries


class Loud(Shout):
    """Its opaque bodies are not measured."""

    @classmethod
    def measure(cls, item: Any) -> Measure:
        return Measure(rows=7)


class Chunks(Words):
    """Its octets are measured as bytes."""

    @classmethod
    def measure(cls, item: Any) -> Measure:
        return Measure(rows=len(item))


LIST = "/infer/echo/batch"


@subcases(
    ("model", "path", "headers", "body", "entry"),
    [
        (Echo, "/infer/echo", {"x_batch_key": "blue"}, b"{broken", (b"{broken", Kind.ITEM, JSON, JSON, 1, 1.0, "blue")),
        (Echo, LIST, {}, b'[1, {"a": 2}]', ([b"1", b'{"a": 2}'], Kind.ITEMS, JSON, JSON, 2, 2.0, None)),
        (Echo, LIST, {}, b"[" + b"1," * 16 + b"1]", ([b"1"] * 17, Kind.ITEMS, JSON, JSON, 17, 17.0, None)),
        (Echo, "/infer/echo", {"content_type": OCTETS}, b"", (b"", Kind.ITEM, OCTETS, JSON, 1, 1.0, None)),
        (Words, "/infer/words", {}, b'"to be or"', (b'"to be or"', Kind.ITEM, JSON, JSON, 3, 8.0, "t")),
        (Words, "/infer/words", {"x_batch_key": "blue"}, b'"t"', (b'"t"', Kind.ITEM, JSON, JSON, 1, 1.0, ("t", "blue"))),
        (Loud, "/infer/loud", {"content_type": "text/plain"}, b"a b", (b"a b", Kind.ITEM, "text/plain", "text/plain", 1, 1.0, None)),
        (Chunks, "/infer/chunks", {"content_type": OCTETS}, b"abc", (b"abc", Kind.ITEM, OCTETS, JSON, 3, 1.0, None)),
    ],
)  # fmt: skip
def test_what_a_body_is_to_the_line(model: Any, path: str, headers: Any, body: bytes, entry: Any) -> None:
    route = f"/infer/{{model}}{'/batch' if path.endswith('/batch') else ''}"
    assert item_entries(read_head_of(model, path, **headers), body) == [
        QueueEntry(Form(30.0, *entry[1:]).replaced(frontend="http", route=route), entry[0])
    ]


def test_measured_items_of_a_list_are_requests_of_their_own_and_fail_alone() -> None:
    first, second, third = item_entries(read_head_of(Words, "/infer/words/batch"), b'["a b", 7, "c"]')
    assert isinstance(first, QueueEntry) and isinstance(third, QueueEntry)
    assert (first.form.rows, third.form.rows) == (2, 1)
    assert isinstance(second, InvalidRequest)


def test_tensors_are_arrays_whose_shapes_are_the_key_and_can_be_measured() -> None:
    class Dear(Add):
        @classmethod
        def measure(cls, item: Any) -> Measure:
            return Measure(cost=float(item["a"].sum()), key="dear")

    body = b'{"a": [[1, 2], [3, 4]], "b": [[1, 2], [3, 4]]}'
    entry: Any
    dear: Any
    (entry,), (dear,) = (item_entries(read_head_of(model), body) for model in (Add, Dear))
    assert (entry.form.kind, entry.form.rows, entry.form.cost) == (Kind.TENSORS, 2, 2.0)
    assert (entry.form.content_type, entry.form.accept) == (OBJECT, LENT)
    assert entry.payload["a"].dtype == numpy.float32
    assert hash(entry.form.key) is not None
    assert (dear.form.rows, dear.form.cost, dear.form.key[0]) == (2, 10.0, "dear")


def test_more_rows_than_the_line_holds_and_empty_bodies_are_refused() -> None:
    (most,) = item_entries(read_head_of(Echo, LIST), b"[" + b"1," * 1023 + b"1]")
    assert isinstance(most, QueueEntry) and most.form.rows == 1024
    with pytest.raises(TooLarge, match="max_queue_size"):
        item_entries(read_head_of(Echo, LIST), b"[" + b"1," * 1024 + b"1]")
    with pytest.raises(InvalidRequest, match="empty"):
        item_entries(read_head_of(Echo), b"")


@pytest.mark.parametrize(("model", "item"), [(Echo, b"1"), (Add, b'{"x": [[1, 2]]}'), (Words, b'"a"')])
def test_a_list_that_can_never_fit_is_refused_before_its_items_are_read(
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
