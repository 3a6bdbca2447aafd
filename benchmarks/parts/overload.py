"""Ten times more than the model can do."""

from benchmarks.harness.result import Part, Result, Run, count, mebibytes, middle, milliseconds, short, spread
from benchmarks.harness.servers import Server, ask_own, load, serving, weir_command

QUEUE = 64
TIMES = 10


def measure(run: Run) -> Result:
    """In each round: what it can do with just enough connections, then ten times that in an open loop."""
    rounds = []
    command = weir_command("benchmarks.models:Slow", "--max-queue-size", str(QUEUE))
    with serving("Weir", command, path="/infer/slow", body=b"3", expected=b"3") as server:
        _round(server, run.seconds)
        run.step("warmed up")
        for _ in range(run.rounds):
            rounds.append(_round(server, run.seconds))
            run.step(f"{rounds[-1]['goodput']:.3f} of capacity")
    return _result(rounds)


def _round(server: Server, seconds: float) -> dict[str, float]:
    capacity = load(server.url, QUEUE, seconds).rate
    before = server.usage().memory_bytes
    path = "/infer/slow"
    seen = ask_own(
        "harness.open_loop", "127.0.0.1", server.port, path, TIMES * capacity, max(seconds, 2), 4 * QUEUE, "3"
    )
    codes = seen["codes"]
    others = {code: number for code, number in codes.items() if code not in ("200", "429", "unsent")}
    if others or seen["unanswered"]:
        raise RuntimeError(f"answers other than 200 and 429, or none: {seen}")
    return {
        "capacity": capacity, "offered": seen["offered_rate"], "good": seen["good_rate"],
        "goodput": seen["good_rate"] / capacity, "p50": seen["p50"], "p99": seen["p99"],
        "refused": codes.get("429", 0) / seen["sent"], "before": before, "after": server.usage().memory_bytes,
    }  # fmt: skip


def _result(rounds: list[dict[str, float]]) -> Result:
    def of(key: str) -> list[float]:
        return [seen[key] for seen in rounds]

    result = Result(["", "median (smallest to largest)"])
    result.rows += [
        ["capacity, answers/s", spread(of("capacity"), count)],
        ["offered, requests/s", spread(of("offered"), count)],
        ["good answers/s", spread(of("good"), count)],
        ["refused with 429", spread([100 * part for part in of("refused")], lambda part: f"{part:.1f} %")],
        ["p50 of the good, ms", spread(of("p50"), milliseconds)],
        ["p99 of the good, ms", spread(of("p99"), milliseconds)],
        ["memory before, MiB", mebibytes(rounds[0]["before"])],
        ["memory after, MiB", mebibytes(rounds[-1]["after"])],
    ]
    goodput, growth = middle(of("goodput")), rounds[-1]["after"] / rounds[0]["before"]
    result.goal("goodput at least 0.9 of capacity", f"{goodput:.3f}", goodput >= 0.9)
    result.goal("memory flat within 10 %", f"{100 * (growth - 1):+.1f} %", growth <= 1.1)
    result.values |= {"goodput": goodput, "growth": growth, "times": middle(of("offered")) / middle(of("capacity"))}
    result.notes.append(
        f"Offered was {short(result.values['times'])} times the capacity; an open loop, random instants."
    )
    return result


PART = Part(
    "overload",
    "Ten times too much",
    f"A model that takes 20 ms for a batch of up to 8, a line of {QUEUE}; capacity is what it answers to {QUEUE} connections.",
    lambda rounds: rounds + 1,
    measure,
)
