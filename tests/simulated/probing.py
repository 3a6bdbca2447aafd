"""What watches a simulated server from outside, as orchestrators and Prometheus do: probes of its readiness, and its metrics."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from tests.simulated.asking import Ask
from tests.simulated.channels import Line

from weir.telemetry.exposition import Exposition
from weir.telemetry.recorder import End

if TYPE_CHECKING:
    from tests.simulated.world import World

INTERVALS = (5.0, 10.0, 10.0, 30.0)  # seconds between two probes
FOLLOWS = 1.0  # seconds within which readiness follows what it depends on
_PROBE = b"GET /v2/health/ready HTTP/1.1\r\nHost: simulated\r\n\r\n"
_SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: simulated\r\n\r\n"
_SAMPLE = re.compile(r"^weir_requests_total\{([^}]*)\} (\S+)$", re.MULTILINE)


class Prober:
    """Asks every `interval` seconds whether the server is ready; the answer must be what `site.ready` has been for a second. Every `scrapes` probes it
    reads the metrics, whose counts must not fall. The server closes its connection when it has been idle for too long, and it connects again.
    """

    def __init__(self, site: "World", *, interval: float, scrapes: int) -> None:
        self.site = site
        self._interval = interval
        self._scrapes = scrapes
        self._line: Line | None = None
        self._probes = 0
        self._counted: Counter[str] = Counter()
        self.done = False

    def begin(self) -> None:
        """Probe for the first time after one interval."""
        self.site.loop.call_later(self._interval, self._probe)

    def stop(self) -> None:
        """Probe no more, and leave."""
        self.done = True
        if self._line is not None:
            self._line.hang_up()

    def _probe(self) -> None:
        if self.done:
            return
        line = self._line
        if line is None or not line.usable:
            line = self._line = Line(self, None)
        if line.transport is None:
            self._line = None  # nothing listens, or not yet again
            self.site.loop.call_later(self._interval, self._probe)
            return
        late = bool(line.waiting) and self.site.loop.now > line.waiting[0].since + FOLLOWS
        if late and not self.site.stood_still(line.waiting[0].since):
            self.site.broken(f"a probe has had no answer for {self.site.loop.now - line.waiting[0].since:.1f} s")
        self._probes += 1
        scrape = self._probes % self._scrapes == 0
        ask = Ask(0, _SCRAPE if scrape else _PROBE, False, 0, FOLLOWS, "")
        ask.sent = ask.since = self.site.loop.now
        if line.usable:
            line.add([ask])
            line.transport.send(ask.data)
        self.site.loop.call_later(self._interval, self._probe)

    # What its line calls.

    def note(self, data: bytes) -> None:
        """Probes are no part of the trace: the metrics have times of the real clock."""

    def answered(self, line: Line, status: int) -> None:
        """The answer to a probe has come."""
        ask, body = line.answers(status), bytes(line.body)
        if ask is None:
            return
        if ask.data is _SCRAPE:
            self._read_metrics(status, body)
            return
        if status == 429:  # memory is short, or the connections are
            return
        ready = self.site.ready
        if ready is not None and status != (200 if ready else 503):
            self.site.broken(f"a probe got {status} although ready is {ready}: {body[:200]!r}")

    def broken(self, what: str) -> None:
        """Something is wrong."""
        self.site.broken(f"a prober: {what}")

    def _read_metrics(self, status: int, body: bytes) -> None:
        if status != 200:
            if self.site.ready and status != 429:
                self.site.broken(f"the metrics got {status}: {body[:200]!r}")
            return
        counted = Counter({labels: float(value) for labels, value in _SAMPLE.findall(body.decode())})
        for labels, before in self._counted.items():
            if counted[labels] < before:
                self.site.broken(f"weir_requests_total{{{labels}}} fell from {before:g} to {counted[labels]:g}")
        self._counted = counted

    def lost(self, line: Line) -> None:
        """The connection has gone: right if it was idle."""
        if line.waiting and not (line.ending or line.excused):
            self.site.broken("the connection closed without an answer to a probe")
        line.waiting.clear()


def wrong_counts(metrics: Any, accepted: int, ended: Counter[End]) -> str:
    """Return what is wrong with the counts of a server at rest of which `accepted` requests ended so; "" if nothing is."""
    counted: Counter[End] = Counter()
    for table, sign in ((metrics.ended, 1), (metrics.refused_requests, -1)):
        for (_, frontend, kind), count in table.items():
            counted[frontend, kind] += sign * count
    if wrong := {end: (counted[end], ended[end]) for end in counted | ended if counted[end] != ended[end]}:
        return f"the metrics count ends of requests so, and these are so many: {wrong}"
    times = sum(record.total.count + record.bulk_total.count for record in metrics.models.values())
    return f"{accepted} requests were accepted, and the metrics have {times} times" if times != accepted else ""


def counted_requests(exposition: Exposition, accept: str) -> tuple[bytes, str]:
    """Render the metrics that depend on nothing but the seed: they count requests, and no seconds of the real clock."""
    return generate_latest(_Requests(exposition)), "text/plain"


class _Requests(CollectorRegistry):
    def __init__(self, exposition: Exposition) -> None:
        super().__init__()
        self._exposition = exposition

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._exposition.collect() if family.name.startswith("weir_requests"))
