"""What a decision and a request cost, and that neither grows with the queue.

The child `WAITING` drives the batcher as the service drives it, with a worker that is done at once, and prints µs.
"""

import gc
import json
import sys
import time
from statistics import median

from benchmarks.harness.result import Part, Result, Run, middle, rotated, spread
from benchmarks.harness.servers import ask_own
from weir.batching.batcher import Batcher
from weir.batching.request_state import RequestBase
from weir.batching.settings import BatchingSettings
from weir.errors import WeirError
from weir.messages import Dispatch, Wakeup
from weir.policy.rules import Greedy

WAITING = (10, 1_000, 100_000)
COSTS = ("submit", "decision", "request")


def measure(run: Run) -> Result:
    """Each length of the line in a fresh process, in turn."""
    seen: dict[int, list[dict[str, float]]] = {waiting: [] for waiting in WAITING}
    for turn in range(run.rounds):
        for waiting in rotated(WAITING, turn):
            seen[waiting].append(ask_own("parts.decisions", waiting))
            run.step(f"{waiting:,} waiting: {seen[waiting][-1]['request']:.2f} µs a request")
    result = Result(["waiting", "a submit, µs", "a decision, µs", "a request in the core, µs"])
    for waiting in WAITING:
        costs = [spread([one[cost] for one in seen[waiting]], "{:.2f}".format) for cost in COSTS]
        result.rows.append([f"{waiting:,}", *costs])
    _goals(result, seen)
    result.notes.append(
        "A decision asks the policy and takes the batch out of the line: up to 64 requests, with 10 waiting only 10. A "
        "request in the core is its submit, its share of the decision and its end. What a request costs the whole "
        "server process, kernel included, is the column *CPU µs front* under *Square over HTTP*."
    )
    return result


def _goals(result: Result, seen: dict[int, list[dict[str, float]]]) -> None:
    for cost in COSTS:
        few, many = (middle([one[cost] for one in seen[waiting]]) for waiting in (1_000, 100_000))
        result.values |= {f"{cost} 1000": few, f"{cost} 100000": many}
        result.goal(
            f"{cost}: 100,000 waiting cost no more than 1,000 (within 25 %)", f"{many / few:.2f}", many <= 1.25 * few
        )


BATCH = 64
REPEATS = 400


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
        batcher.submit(Waiting(b"3", now, 1e6), now)
    batcher.worker_ready(0, 1, now)
    (dispatch,) = batcher.poll(now, Wakeup.WORKER)
    submits, decisions, ways = [], [], []
    gc.freeze()
    for _ in range(REPEATS):
        now += 0.001
        arrived = [Waiting(b"3", now, 1e6) for _ in range(min(BATCH, waiting))]
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


PART = Part(
    "decisions",
    "One decision, one request",
    "The batcher driven as the service drives it, with that many requests standing in the line.",
    lambda rounds: rounds * len(WAITING),
    measure,
)


if __name__ == "__main__":
    print(json.dumps(time_core(int(sys.argv[1]))))
