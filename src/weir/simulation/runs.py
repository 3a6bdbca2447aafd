"""One simulated run, request by request and batch by batch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weir.policy.cost.profile import Profile
from weir.simulation.event_log import Batches, LogPart
from weir.simulation.traces import Floats, Ints


@dataclass(frozen=True, eq=False)
class Run:
    """What happened to each request (arrays by order of arrival) and what each batch was. Instants are in seconds.

    `start` is when the last piece of the request was begun and `end` when its caller had the answer (the profile's latency
    offset included); both are NaN for those that were `refused` on arrival or had `expired` in the line.
    """

    profile: Profile
    workers: int
    arrival: Floats
    start: Floats
    end: Floats
    refused: NDArray[np.bool_]
    expired: NDArray[np.bool_]
    batches: Batches

    @property
    def response_time_ms(self) -> Floats:
        """From arrival to answer, of those that had one."""
        return 1000.0 * (self.end - self.arrival)[np.isfinite(self.end)]

    @property
    def seconds(self) -> float:
        """From the start of the clock to the last end of a batch, or the last arrival."""
        ends = [float(self.arrival[-1])] if len(self.arrival) else [0.0]
        return max([*ends, float(self.batches.end.max()) if len(self.batches.end) else 0.0])

    @property
    def power_w(self) -> float:
        """Mean power over the run."""
        return float(self.profile.energy_mj[self.batches.rows - 1].sum()) / 1000.0 / self.seconds

    @property
    def busy_share(self) -> float:
        """Share of the workers' time spent in batches."""
        return float((self.batches.end - self.batches.start).sum()) / (self.workers * self.seconds)


class Whole:
    """Keeps every part of a run."""

    def __init__(self) -> None:
        self._parts: list[LogPart] = []

    def __call__(self, part: LogPart) -> None:
        """Keep a part."""
        self._parts.append(part)

    def run(self, profile: Profile, workers: int, arrival: Floats) -> Run:
        """Return the run of the requests that arrived at `arrival`."""
        parts, count = self._parts, len(arrival)
        columns = zip(*(part.batches for part in parts), strict=True)
        batches = Batches(*(np.concatenate(column) for column in columns))
        index = np.concatenate([part.request for part in parts])
        end = np.concatenate([part.end for part in parts])
        start = np.concatenate([part.of_batch(part.batches.start) for part in parts])
        done = np.isfinite(end)
        starts, ends = np.full(count, np.nan), np.full(count, np.nan)
        starts[index[done]] = start[done]
        ends[index[done]] = end[done] + profile.latency_offset_ms / 1000.0
        refused = _marked(count, [part.refused for part in parts])
        return Run(
            profile, workers, arrival, starts, ends, refused, _marked(count, [part.expired for part in parts]), batches
        )


def _marked(count: int, indices: list[Ints]) -> NDArray[np.bool_]:
    marks = np.zeros(count, dtype=np.bool_)
    marks[np.concatenate(indices)] = True
    return marks
