"""What one model has done since it was loaded, in the numbers of the Open Inference Protocol's statistics extension."""

import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from weir.errors import Cancelled, WeirError
from weir.messages import Dispatch, Request, Timing
from weir.telemetry.silent import SilentObserver

_arrival = attrgetter("arrival")


class Total:
    """How often something happened, and how long it took in all, in seconds."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, count: int, seconds: float) -> None:
        """It happened so many times more, which took so long together."""
        self.count += count
        self.seconds += seconds

    def to_dict(self) -> dict[str, int]:
        """Return count and nanoseconds."""
        return {"count": self.count, "ns": round(1e9 * self.seconds)}


class Steps:
    """The three steps of a batch in a worker: what is decoded and preprocessed, `predict`, what is postprocessed and encoded."""

    __slots__ = ("infer", "input", "output")

    def __init__(self) -> None:
        self.input = Total()
        self.infer = Total()
        self.output = Total()

    def add(self, count: int, timing: Timing) -> None:
        """A batch took so long for each of `count`."""
        self.input.add(count, count * timing.preprocess)
        self.infer.add(count, count * timing.predict)
        self.output.add(count, count * timing.postprocess)

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the three, by the protocol's names."""
        return {
            "compute_input": self.input.to_dict(), "compute_infer": self.infer.to_dict(),
            "compute_output": self.output.to_dict(),
        }  # fmt: skip


class Statistics(SilentObserver):
    """An Observer that counts for one service.

    `inference_count` counts rows and `execution_count` batches that came back from a worker; one that the worker ran again in
    halves is one. `success` and `fail` count requests and the time from arrival to end, `queue` that from arrival to dispatch.
    A caller who left is neither. `requests` has the steps once for each request in a batch, `batches` once for each batch, by
    its rows. `last_inference_ms` is the time of day of the last batch in milliseconds, 0 before the first.
    """

    def __init__(self, time_of_day: Callable[[], float] = time.time) -> None:
        self._time_of_day = time_of_day
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.success = Total()
        self.fail = Total()
        self.queue = Total()
        self.requests = Steps()
        self.batches: dict[int, Steps] = {}

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """Note how long the requests of a batch have waited."""
        if dispatch.attempt:
            return  # they were counted when they were dispatched first
        requests = dispatch.requests
        if dispatch.slices is not None:
            pieces = zip(requests, dispatch.slices, strict=True)
            requests = [request for request, piece in pieces if piece is None or piece[0] == 0]
        self.queue.add(len(requests), _ages(requests, dispatch.at))

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Count a batch."""
        rows = dispatch.rows
        self.inference_count += rows
        self.execution_count += 1
        self.last_inference_ms = round(1e3 * self._time_of_day())
        self.requests.add(len(dispatch.requests), timing)
        steps = self.batches.get(rows)
        if steps is None:
            steps = self.batches[rows] = Steps()
        steps.add(1, timing)

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Count requests that had their end."""
        if error is None:
            self.success.add(len(requests), _ages(requests, now))
        elif not isinstance(error, Cancelled):
            self.fail.add(len(requests), _ages(requests, now))

    def refused(self, model: str, door: str, error: WeirError) -> None:
        """Count a request that never entered the line."""
        self.fail.add(1, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return it as the protocol writes it, without name and version."""
        nothing = Total().to_dict()
        ends = {"success": self.success.to_dict(), "fail": self.fail.to_dict(), "queue": self.queue.to_dict()}
        caching = {"cache_hit": nothing, "cache_miss": nothing}
        return {
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {**ends, **self.requests.to_dict(), **caching},
            "batch_stats": [{"batch_size": rows, **self.batches[rows].to_dict()} for rows in sorted(self.batches)],
        }


def _ages(requests: Sequence[Request], now: float) -> float:
    arrivals: float = sum(map(_arrival, requests))
    return len(requests) * now - arrivals
