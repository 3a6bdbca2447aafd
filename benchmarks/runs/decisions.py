"""What the core costs with so many requests already waiting: prints µs. Argument: WAITING.

The batcher is driven as the service drives it, with a worker that is done at once.
"""

import gc
import json
import sys
import time
from statistics import median

from weir.batching.batcher import Batcher
from weir.batching.request_state import RequestBase
from weir.batching.settings import BatchingSettings
from weir.errors import WeirError
from weir.messages import Dispatch, Wakeup
from weir.policy.rules import Greedy

BATCH = 64
REPEATS = 400


class Waiting(RequestBase):
    """A request whose end nobody hears."""

    __slots__ = ()

    def finish(self, output: object, dispatch: Dispatch) -> None:
        self.settled = True

    def fail(self, error: WeirError) -> None:
        raise error


def measure(waiting: int) -> dict[str, float]:
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


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
