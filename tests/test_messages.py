from typing import Any

import pytest

from weir.messages import Batch, ChildOrigin, Trace, carry, child_of


def fields(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in Batch.__slots__}


def test_a_replaced_batch_differs_in_the_named_fields_alone() -> None:
    batch = Batch(1, ["a"], "t", "u", 2, 3, 4)
    whole = fields(batch)
    assert len(set(map(str, whole.values()))) == len(whole)  # so that none has the value of another
    for name in Batch.__slots__:
        assert fields(batch.replaced(**{name: "new"})) == {**whole, name: "new"}
    assert fields(batch) == whole


def test_a_field_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="a Batch has no payload"):
        Batch(1, [], "", "").replaced(payload=[])


CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"


def test_a_trace_names_its_span_and_whether_it_is_recorded() -> None:
    trace = Trace(0xAB, 0xCD)
    assert trace.traceparent == f"00-{'0' * 30}ab-{'0' * 14}cd-01" and trace.name == "0" * 30 + "ab"
    assert Trace(1, 2, sampled=False).traceparent.endswith("-00")


def test_a_request_with_a_span_is_the_origin_of_others_and_one_without_has_the_same_origin() -> None:
    trace = Trace(1, 2)
    assert child_of(trace) == ChildOrigin(trace)
    carrier = {"traceparent": CALLER}
    for origin in (ChildOrigin(trace), carrier, None):
        assert child_of(origin) is origin


def test_a_header_that_comes_several_times_is_a_list() -> None:
    carrier = carry(None, "traceparent", CALLER)
    for value in ("a=1", "b=2"):
        assert carry(carrier, "tracestate", value) is carrier
    assert carrier == {"traceparent": CALLER, "tracestate": "a=1,b=2"}
