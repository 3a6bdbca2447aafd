from weir.messages import ChildOrigin, Trace, carry, child_of

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"


def test_a_trace_names_its_span_and_whether_it_is_recorded() -> None:
    trace = Trace(0xAB, 0xCD)
    assert trace.traceparent == f"00-{'0' * 30}ab-{'0' * 14}cd-01" and trace.name == "0" * 30 + "ab"
    assert Trace(1, 2, sampled=False).traceparent.endswith("-00")


def test_a_request_with_a_span_is_the_origin_of_others() -> None:
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
