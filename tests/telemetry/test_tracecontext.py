import random
from typing import Any

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


def test_callers_decide_what_is_recorded_unless_a_sampler_does() -> None:
    assert not Traces().new(CALLER[:-1] + "0").sampled
    assert Traces().new(CALLER).sampled and Traces().new(None).sampled
    asked = list[Any]()

    def never_sampled(trace_id: int, caller: Any) -> bool:
        asked.append((trace_id, caller))
        return False

    never = Traces(never_sampled)
    assert not never.new(CALLER).sampled and not never.new(None).sampled
    assert asked[0] == (int("ab" * 16, 16), (int("ab" * 16, 16), int("cd" * 8, 16), True))
    assert asked[1][1] is None
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
