"""Ten and twenty times more than the model can do, every request with a timeout, over each protocol."""

from collections import Counter
from typing import Any

from benchmarks.children import ask_own
from benchmarks.load import load
from benchmarks.result import Part, Result, Run, count, middle, milliseconds, short, spread
from benchmarks.servers import free_port, serving, weir_command

TIMES = (10, 20)
TIMEOUT = 0.3  # seconds
# HTTP has one request at a time on each connection; the others have any number.
CONNECTIONS = {"http": 800, "websocket": 8, "grpc": 8}
# Two in 20 ms: so few requests/s that 20 times as many, and who sends them, do not fill two processors.
BATCH = 2
CAPACITY = 100
# How a request may end whose deadline has passed, or cannot be met: by it, or by what a client may try again.
ENDS = {
    "http": {"200", "408", "429", "503"},
    "websocket": {"200", "408", "429", "503"},
    "grpc": {"OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"},
}


def measure(run: Run) -> Result:
    """In each round: what closed loops get, then each protocol and overload."""
    seen: dict[tuple[str, int], list[dict[str, Any]]] = {}
    capacity: list[float] = []
    grpc_port = free_port()
    command = weir_command("benchmarks.models:Four", "--max-batch-size", str(BATCH), "--grpc-port", str(grpc_port))
    with serving("Weir", command, path="/infer/four", body=b"3", expected=b"3") as server:
        for _ in range(run.rounds):
            capacity.append(load(server.url, 16, run.seconds).rate)
            for protocol, connections in CONNECTIONS.items():
                for times in TIMES:
                    port = grpc_port if protocol == "grpc" else server.port
                    rate, seconds = times * CAPACITY, max(2.0, run.seconds)
                    got = ask_own("deadlines", protocol, "127.0.0.1", port, "four", rate, seconds, connections, TIMEOUT)
                    if got["unanswered"]:
                        raise RuntimeError(f"{protocol}: requests without an end: {got}")
                    seen.setdefault((protocol, times), []).append(got)
                    run.step(f"{protocol}, {times} times: {got['good_rate'] / capacity[-1]:.2f} of capacity")
    return _result(seen, capacity)


def _result(seen: dict[tuple[str, int], list[dict[str, Any]]], capacity: list[float]) -> Result:
    result = Result(
        [
            "protocol",
            "times the capacity",
            "good answers/s",
            "of capacity",
            "late by more than 10 ms",
            "worst, ms",
            "other ends",
        ]
    )
    for (protocol, times), got in seen.items():
        goodput = [each["good_rate"] / most for each, most in zip(got, capacity, strict=True)]
        result.rows.append([
            protocol, str(times), spread([each["good_rate"] for each in got], count), spread(goodput, short),
            short(middle([each["late"] for each in got])), milliseconds(middle([each["worst_late"] for each in got])),
            _others(got),
        ])  # fmt: skip
        result.values[f"{protocol} {times}"] = middle(goodput)
        text = f"{protocol}, {times} times: goodput at least 0.9 of capacity"
        result.goal(text, f"{middle(goodput):.3f}", middle(goodput) >= 0.9)
        late = sum(each["late"] for each in got)
        result.goal(f"{protocol}, {times} times: no answer more than 10 ms late", f"{late:g}", not late)
        strange = sorted({code for each in got for code in each["codes"]} - ENDS[protocol] - {"unsent"})
        text = f"{protocol}, {times} times: ends by the deadline, or as may be tried again"
        result.goal(text, ", ".join(strange) or "all", not strange)
    result.notes.append(
        f"Capacity, by 16 connections in closed loops: {spread(capacity, count)} answers/s. Every request has {TIMEOUT:g} s, from the instant at "
        "which it was due at the client; a good answer was read there within it. The client is a Python process on the same machine, and late "
        "answers include its own lateness; of HTTP/2 it reads and writes the frames itself, as a client of grpcio would cost more than the server."
    )
    return result


def _others(got: list[dict[str, Any]]) -> str:
    """Show how the requests ended that got no result, in all rounds."""
    codes: Counter[str] = Counter()
    for each in got:
        codes.update(each["codes"])
    return ", ".join(f"{code}: {count(number)}" for code, number in codes.most_common() if code not in ("200", "OK"))


PART = Part(
    "goodput",
    "Overload with deadlines",
    "A model that takes 20 ms for a batch of up to 2; an open loop, random instants.",
    lambda rounds: rounds * len(CONNECTIONS) * len(TIMES),
    measure,
)
