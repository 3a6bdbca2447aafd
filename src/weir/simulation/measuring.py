"""What a run is summed up from, part by part: sums per stretch of requests, in memory that does not grow with the run.

All that a batch costs is shared out among its requests by their rows, so every measure is a sum over requests, and two
policies can be compared stretch by stretch over the very same arrivals.
"""

from math import inf, nan

import numpy as np

from weir.policy.cost.profile import Profile
from weir.simulation.event_log import LogPart
from weir.simulation.log_histogram import LogHistogram
from weir.simulation.statistics import stretch_length
from weir.simulation.traces import Floats, Ints

SUMS = (
    "answered", "response", "response_squared", "queue", "energy", "busy", "batches", "rows", "late", "refused", "ended",
)  # fmt: skip


class BatchMeans:
    """The sums of the stretches of a run. Requests before `first` are the warm-up, and not counted.

    Times are in milliseconds, energies in millijoules. `starts` are the arrivals at which stretches begin, in seconds.
    """

    def __init__(self, profile: Profile, first: int, requests: int, late_after: float = inf) -> None:
        self._profile = profile
        self._last = requests
        self._late_after_ms = 1000.0 * late_after
        self.length = stretch_length(requests - first)
        self.count = (requests - first) // self.length
        self._first = requests - self.count * self.length  # what does not fill a stretch is warm-up too
        self.sums = {name: np.zeros(self.count) for name in SUMS}
        self.starts = np.full(self.count + 1, nan)
        self.responses = LogHistogram(self.count)
        self.sizes: Ints = np.zeros(profile.max_batch_size + 1, dtype=np.int64)
        self.reasons: Ints = np.zeros(16, dtype=np.int64)
        self.least_waiting = np.full(self.count, inf)  # rows in the line at a decision
        self.most_waiting = np.full(self.count, -inf)
        self._last_arrival = inf

    def arrived(self, index: int, times: Floats) -> None:
        """Requests from that index on arrived at `times`: remember when stretches begin, and when the last one ends."""
        begins = self._first + self.length * np.arange(self.count)
        inside = (begins >= index) & (begins < index + len(times))
        self.starts[:-1][inside] = times[begins[inside] - index]
        if len(times) and index + len(times) >= self._last:
            self._last_arrival = last = float(times[-1])
            gaps = self.length - 1
            self.starts[-1] = last + (last - self.starts[-2]) / gaps if gaps else last

    def __call__(self, part: LogPart) -> None:
        """Count a part of the run."""
        profile, batches = self._profile, part.batches
        stretch = self._stretch(part.request)
        share = part.rows / part.of_batch(batches.rows)
        took = batches.end - batches.start
        response = 1000.0 * (part.end - part.arrival) + profile.latency_offset_ms
        queue = 1000.0 * (part.of_batch(batches.start) - part.arrival)
        done = np.isfinite(response)
        self._add("energy", stretch, share * part.of_batch(profile.energy_mj[batches.rows - 1]))
        self._add("busy", stretch, share * part.of_batch(1000.0 * took))
        self._add("batches", stretch, share)
        self._add("rows", stretch, part.rows.astype(np.float64))
        self._answered(stretch[done], response[done], queue[done])
        for name, lost in (("refused", part.refused), ("late", part.expired)):
            stretches = self._stretch(lost)
            self._add(name, stretches, np.ones(len(lost)))
            self._add("ended", stretches, np.ones(len(lost)))
        self._count_batches(part)

    def _stretch(self, index: Ints) -> Ints:
        """Return the stretch of each request; those of the warm-up have one below 0."""
        return (index - self._first) // self.length

    def _add(self, name: str, stretch: Ints, values: Floats) -> None:
        counted = stretch >= 0
        self.sums[name] += np.bincount(stretch[counted], values[counted], minlength=self.count)

    def _answered(self, stretch: Ints, response: Floats, queue: Floats) -> None:
        late = response > self._late_after_ms
        one = np.ones(len(stretch))
        self._add("ended", stretch, one)
        self._add("late", stretch, late.astype(np.float64))
        self._add("answered", stretch, one)
        self._add("response", stretch, response)
        self._add("response_squared", stretch, response**2)
        self._add("queue", stretch, queue)
        counted = stretch >= 0
        self.responses.add(response[counted], stretch[counted])

    def _count_batches(self, part: LogPart) -> None:
        batches = part.batches
        if not len(part.request):
            return
        firsts = part.request[np.cumsum(batches.requests) - batches.requests]
        stretch = self._stretch(firsts)
        counted = stretch >= 0
        self.sizes += np.bincount(batches.rows[counted], minlength=len(self.sizes))
        self.reasons += np.bincount(batches.reason[counted], minlength=len(self.reasons))
        counted &= batches.at <= self._last_arrival  # afterwards the line gets shorter in any case
        np.minimum.at(self.least_waiting, stretch[counted], batches.waiting[counted])
        np.maximum.at(self.most_waiting, stretch[counted], batches.waiting[counted])

    @property
    def is_growing(self) -> bool:
        """Whether the line never became as short again, in the last quarter of the run, as it was at its longest in the first.

        Or whether most were not even begun when the last one arrived.
        """
        seen = np.flatnonzero(np.isfinite(self.least_waiting))
        if len(seen) and seen[-1] < self.count // 4:
            return True
        quarter = len(seen) // 4
        if not quarter:
            return False
        shortest, longest = self.least_waiting[seen[-quarter:]].min(), self.most_waiting[seen[:quarter]].max()
        return bool(shortest > longest + self._profile.max_batch_size)
