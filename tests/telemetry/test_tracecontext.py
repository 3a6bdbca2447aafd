import random

import pytest

from weir.telemetry.tracecontext import Trace, Traces, read

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"


def test_a_request_is_within_the_trace_of_its_caller() -> None:
    trace = Traces().new(CALLER)
    assert (f"{trace.trace_id:x}", f"{trace.parent_id:x}", trace.sampled) == ("ab" * 16, "cd" * 8, True)
    assert trace.traceparent == f"00-{'ab' * 16}-{trace.span_id:016x}-01"
    assert trace.name == "ab" * 16


@pytest.mark.parametrize("header", [None, "", "nonsense"])
def test_without_a_caller_a_trace_begins(header: str | None) -> None:
    first, other = (Traces().new(header) for _ in range(2))
    assert first.parent_id == 0 and first.sampled
    assert first.trace_id != other.trace_id


def test_callers_decide_what_is_recorded_and_the_ratio_decides_the_rest() -> None:
    assert not Traces(1.0).new(CALLER[:-1] + "0").sampled
    assert Traces(0.0).new(CALLER).sampled
    assert not Traces(0.0).new(None).sampled
    some = Traces(0.3, random.Random(5))
    assert 200 < sum(some.new(None).sampled for _ in range(1000)) < 400
    assert Trace(1, 2, sampled=False).traceparent.endswith("-00")


@pytest.mark.parametrize(
    ("header", "parsed"),
    [
        (CALLER, True),
        (f" {CALLER} ", True),
        (CALLER.replace("00-", "cc-", 1) + "-what-will-be", True),  # a later version may say more
        (CALLER + "-more", False),
        (CALLER.replace("00-", "ff-", 1), False),
        (CALLER.upper(), False),
        (CALLER.replace("ab", "00"), False),
        (CALLER.replace("cd", "00"), False),
        (CALLER[:-1], False),
        ("cc-" + "a" * 1000, False),
    ],
)
def test_what_is_a_traceparent(header: str, parsed: bool) -> None:
    assert (read(header) is not None) == parsed


def test_an_id_is_never_zero() -> None:
    class Zero(random.Random):
        def getrandbits(self, k: int) -> int:
            return 0

    assert Traces(source=Zero()).new_id(64) == 1
