"""What computing takes in one process: a decision and a request in the batcher, simulating policies, solving them.

Everything is measured in a child of its own. `decision WAITING` drives the batcher as the service drives it, with a worker that is done at once,
and prints µs. `simulation POLICY LOAD` prints how many requests there were in a batch, and how many were simulated per second of processor time.
`solver WORK` prints processor seconds. The last two print the best of some runs.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from reproduction.truncated import solve_truncated

from benchmarks.harness.result import Result, count, milliseconds
from benchmarks.harness.rounds import Measurements, Rounds, medians, spreads
from benchmarks.harness.servers import ask_own
from weir.batching import BatchingSettings
from weir.batching.batcher import Batcher
from weir.batching.request_state import RequestBase
from weir.errors import WeirError
from weir.messages import Dispatch, Form, Wakeup
from weir.policy.cost import GOOGLENET_P4, Profile
from weir.policy.decision import Greedy, Policy
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import default_rates, solve_bank
from weir.simulation.simulator import simulate

WAITING = (10, 1_000, 100_000)
COSTS = ("submit", "decision", "request")
BATCH = 64
REPEATS = 400
FORM = Form(1e6)


class Waiting(RequestBase):
    """A request whose end nobody hears."""

    __slots__ = ()

    def finish(self, output: object, dispatch: Dispatch) -> None:
        self.settled = True

    def fail(self, error: WeirError) -> None:
        raise error


def time_core(waiting: int) -> dict[str, float]:
    """Return the median µs of a submit, a decision with its take of 64, and a request's whole way."""
    settings = BatchingSettings(max_batch_size=BATCH, max_queue_size=waiting + 2 * BATCH)
    batcher = Batcher(settings, Greedy())
    now = 100.0
    for _ in range(waiting):
        batcher.submit(Waiting(FORM, b"3", now), now)
    batcher.worker_ready(0, 1, now)
    (dispatch,) = batcher.poll(now, Wakeup.WORKER)
    submits, decisions, ways = [], [], []
    gc.freeze()
    for _ in range(REPEATS):
        now += 0.001
        arrived = [Waiting(FORM, b"3", now) for _ in range(min(BATCH, waiting))]
        start = time.perf_counter_ns()
        for request in arrived:
            batcher.submit(request, now)
        submitted = time.perf_counter_ns()
        for answered in dispatch.requests:
            answered.finish(None, dispatch)
        batcher.finished(dispatch.batch_id, now)
        finished = time.perf_counter_ns()
        (dispatch,) = batcher.poll(now, Wakeup.WORKER)
        decided = time.perf_counter_ns()
        submits.append((submitted - start) / len(arrived) / 1e3)
        decisions.append((decided - finished) / 1e3)
        ways.append((decided - start) / len(arrived) / 1e3)
    return {"submit": median(submits), "decision": median(decisions), "request": median(ways)}


def _conclude_decisions(result: Result, measured: Measurements) -> None:
    for cost in COSTS:
        few, many = (measured.middle(str(waiting), figure=cost) for waiting in WAITING[1:])
        result.values |= {f"{cost} 1000": few, f"{cost} 100000": many}
        result.at_most(f"{cost}: 100,000 waiting cost no more than 1,000 (within 25 %)", many / few, 1.25)
    result.notes.append(
        "A decision cuts a batch of up to 64 requests. A request's time in the core is its submission, its share of the decision, and its end."
    )


DECISIONS = Rounds(
    "decisions",
    "One decision, one request",
    "The batcher, driven as a service drives it, with this many requests in the queue.",
    one=lambda waiting, case, seconds: ask_own("parts.core", "decision", waiting),
    contenders=tuple(map(str, WAITING)),
    labels={str(waiting): f"{waiting:,}" for waiting in WAITING},
    heads=("waiting",),
    columns=(
        spreads("a submit, µs", "submit", "{:.2f}".format),
        spreads("a decision, µs", "decision", "{:.2f}".format),
        spreads("a request in the core, µs", "request", "{:.2f}".format),
    ),
    conclude=_conclude_decisions,
    progress=("request", "{:.2f} µs a request".format),
)


LOADS = (0.1, 0.3, 0.7)
WISHED_RATE = 100_000  # simulated requests a second
REQUESTS = 200_000
RUNS = 3


def simulated(name: str, load: float) -> dict[str, float]:
    """Return the requests in a batch (`size`), and the most requests per second of RUNS runs (`rate`)."""
    policy: str | Policy = SolvedPolicy(solve_bank(GOOGLENET_P4)) if name == "solved policy" else name
    simulate(GOOGLENET_P4, {"policy": policy}, "poisson:0.5", requests=1_000)  # what is loaded once
    taken, size = [], 0.0
    for _ in range(RUNS):
        began = time.process_time()
        seen = simulate(GOOGLENET_P4, {"policy": policy}, f"poisson:{load}", requests=REQUESTS)
        taken.append(time.process_time() - began)
        size = seen.outcomes["policy"].batch_size
    return {"size": size, "rate": REQUESTS / min(taken)}


def _conclude_simulation(result: Result, measured: Measurements) -> None:
    result.values |= {f"{policy} {load}": measured.middle(load, policy) for load, policy in measured.pairs()}
    slowest = min(result.values.values())
    result.at_least(f"at least {count(WISHED_RATE)} simulated requests a second", slowest, WISHED_RATE, "{:,.0f}")
    result.notes.append(
        "The paper's profile and Poisson arrivals, with everything that `weir simulate` reports; processor time of one thread."
    )


SIMULATION = Rounds(
    "simulation",
    "Simulating",
    "Policies in virtual time, with the server's own batcher, on one core.",
    one=lambda load, policy, seconds: ask_own("parts.core", "simulation", policy, load, one_thread=True),
    contenders=tuple(f"{load:g}" for load in LOADS),
    cases=("greedy", "solved policy"),
    heads=("policy", "share of capacity"),
    columns=(
        medians("requests in a batch", "size", "{:.1f}".format),
        spreads("requests simulated a second"),
    ),
    conclude=_conclude_simulation,
)


LOAD = 0.9  # of its capacity, that tables are solved for
TIMES = 50.0  # that policy iteration is wished to be faster than value iteration
TEXTS = {
    "policy iteration 32": "policy iteration, batches up to 32",
    "value iteration 32": "the same by value iteration, span below 0.01",
    "value iteration 32, to 1e-6": "the same, span below 0.000001",
    "policy iteration 256": "policy iteration, batches up to 256",
    "value iteration 256": "the same by value iteration, span below 0.01",
    "bank 128": "a bank of 24 rates, batches up to 128",
    "whole bank 128": "with further rates, as `weir solve` does",
}
SLOWEST = 1800.0  # seconds that a work may take: value iteration with batches up to 256 needs 48 s of processor time
MOST_SECONDS = (("policy iteration 32", 0.005), ("policy iteration 256", 0.5), ("bank 128", 1.0))


def larger(max_batch_size: int) -> Profile:
    """Return the paper's profile with larger batches."""
    fit = GOOGLENET_P4.fit()
    return Profile.linear(
        alpha_ms=fit.alpha_ms,
        tau0_ms=fit.tau0_ms,
        beta_mj=fit.beta_mj,
        zeta0_mj=fit.zeta0_mj,
        max_batch_size=max_batch_size,
    )


def solved(name: str) -> dict[str, float]:
    """Do one of the works of TEXTS some times; return the processor seconds of the quickest time."""
    work, runs = _work(name)
    taken = []
    for _ in range(runs):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return {"seconds": min(taken)}


def _work(name: str) -> tuple[Callable[[], object], int]:
    """Return what is to be done, and how often."""
    if name.endswith("bank 128"):
        profile = larger(128)
        rates = None if name.startswith("whole") else default_rates(profile.max_rate)
        return lambda: solve_bank(profile, rates=rates), 3
    small = " 32" in name
    profile = GOOGLENET_P4 if small else larger(256)
    asked: dict[str, Any] = {"s_max": 100 if small else 1000}
    if name.startswith("value"):
        asked |= {"method": "value-iteration"} | ({"epsilon": 1e-6} if name.endswith("1e-6") else {})
    runs = {"policy iteration 32": 20, "value iteration 256": 1}.get(name, 3)
    return lambda: solve_truncated(profile, LOAD * profile.max_rate, **asked), runs


def _conclude_solver(result: Result, measured: Measurements) -> None:
    result.values |= measured.values("seconds")
    for name, most in MOST_SECONDS:
        taken = result.values[name]
        result.goal(f"{TEXTS[name]}: under {milliseconds(most)} ms", milliseconds(taken), taken < most)
    for slow, size in (("32", "32"), ("32, to 1e-6", "32"), ("256", "256")):
        faster = measured.times(f"value iteration {slow}", f"policy iteration {size}", figure="seconds")
        text = f"policy iteration at least {TIMES:g} times faster than value iteration, batches up to {slow}"
        result.at_least(text, faster, TIMES, "{:.0f} times")
    result.notes.append(
        "The paper's profile at 0.9 of its capacity, continued to larger batches; processor time of one thread."
    )


SOLVER = Rounds(
    "solver",
    "Solving",
    "The tables of a solved policy, computed on one core.",
    one=lambda work, case, seconds: ask_own("parts.core", "solver", work, one_thread=True, timeout=SLOWEST),
    contenders=tuple(TEXTS),
    labels=TEXTS,
    heads=("work",),
    columns=(spreads("ms", "seconds", milliseconds),),
    conclude=_conclude_solver,
    progress=("seconds", lambda seconds: f"{milliseconds(seconds)} ms"),
)


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "decision":
        print(json.dumps(time_core(int(arguments[0]))))
    elif kind == "simulation":
        print(json.dumps(simulated(arguments[0], float(arguments[1]))))
    else:
        print(json.dumps(solved(arguments[0])))
