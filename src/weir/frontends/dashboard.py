"""A web page that shows a running server: its samples, its routes and its files. It changes nothing.

A sample has what was counted since the last one, the state now, and what was counted since the start. An open page gets the samples that it
does not have yet. It uses only files of this server. Its Content-Security-Policy forbids everything else: files of other servers, and
scripts inside the page.
"""

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from weir._version import __version__
from weir.errors import WeirError
from weir.frontends.http.application import AddedEndpoints, code_of
from weir.frontends.http.asgi import HttpEndpoint, answered, as_response
from weir.messages import Reason, label_of
from weir.protocols.response import Headers, HttpResponse, encode_safely
from weir.telemetry.recorder import ROWS, SECONDS, Histogram, Metrics, Recorder
from weir.workers.timer import Cancellable

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle, Models


# Counters since the start (the numbers of /metrics), and their changes, by label of the model: numbers in dicts and lists.
# The label "" is for requests to unknown models.
Counts = dict[str, dict[str, Any]]
CodeOf = Callable[[str, type[WeirError] | None], str]

# Counters of products that the dashboard shows, by their name in /metrics.
_OF_PRODUCTS = {"weir_tokens_total": "tokens", "weir_padding_tokens_total": "padding"}
_HISTOGRAMS = ("queue", "preprocess", "predict", "postprocess", "first_part", "total")


def count(metrics: Metrics, code_of: CodeOf, collectors: Sequence[Collector] = ()) -> Counts:
    """Return the counts of `metrics`, and the tokens and padding tokens that `collectors` have counted.

    `ends` counts requests by frontend and code; the name of an error follows its code. `rows` and the times are histograms: the count of each bucket, and
    the sum at the end.
    """
    counts: Counts = {label: _counts_of(record) for label, record in list(metrics.models.items())}
    for (label, frontend, kind), ended in list(metrics.ended.items()):
        code = code_of(frontend, kind)
        name = code if kind is None or code == kind.__name__ else f"{code} {kind.__name__}"
        frontends = counts.setdefault(label, {}).setdefault("ends", {})
        frontends.setdefault(frontend, {})[name] = ended
    for (label, frontend), transferred in list(metrics.bytes.items()):
        counts.setdefault(label, {}).setdefault("bytes", {})[frontend] = list(transferred)
    for label, name, value in _of_products(collectors):
        counts.setdefault(label, {})[name] = value
    return counts


def change(now: Any, before: Any) -> Any:
    """Return how much higher the numbers in `now` are than those in `before`. Unchanged numbers are left out; None if nothing has changed.

    Lists keep their length, so that each bucket keeps its index.
    """
    if now == before:
        return None
    if isinstance(now, dict):
        changes = {key: change(value, before and before.get(key)) for key, value in now.items()}
        return {key: value for key, value in changes.items() if value is not None} or None
    if isinstance(now, list):
        return [value - earlier for value, earlier in zip(now, before or [0] * len(now), strict=True)]
    return now - (before or 0) or None


def _counts_of(record: Recorder) -> dict[str, Any]:
    times: dict[str, Any] = {name: _buckets(getattr(record, name)) for name in _HISTOGRAMS}
    batches = {reason.name.lower(): record.batches[reason] for reason in Reason}
    return {"batches": batches, "rows": _buckets(record.rows), "parts": record.parts, "bulk": record.bulk_rows, **times}


def _buckets(histogram: Histogram) -> list[float]:
    return [*histogram.counts, histogram.sum]


def _of_products(collectors: Iterable[Collector]) -> Iterator[tuple[str, str, float]]:
    for collector in collectors:
        for family in collector.collect():
            for sample in family.samples:
                if sample.name in _OF_PRODUCTS:
                    version = sample.labels.get("version")
                    model = sample.labels.get("model", "")
                    yield label_of(model, version or ""), _OF_PRODUCTS[sample.name], sample.value


# Memory and processor time of processes: from /proc on Linux, unknown elsewhere.


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat, counted from 0 behind the name: utime and stime of proc_pid_stat(5), which counts from 1 and with the name.
_USER_TIME, _SYSTEM_TIME = 11, 12


class Use(NamedTuple):
    """Resident memory of one process, shared pages included, and its processor time since its start, in seconds."""

    memory_bytes: int
    cpu: float


def use_of(pid: int) -> Use | None:
    """Return what the process uses; None if that is unknown, for example because the process has ended."""
    process = Path("/proc", str(pid))
    try:
        resident = int((process / "statm").read_bytes().split()[1])
        times = (process / "stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, IndexError, ValueError):
        return None
    return Use(resident * _PAGE_BYTES, (int(times[_USER_TIME]) + int(times[_SYSTEM_TIME])) / _TICKS)


_SETTINGS = ("max_batch_size", "max_queue_size", "padded")
_MOST_CLIENTS = 20  # that are shown

ListClients = Callable[[], Sequence[Mapping[str, Any]]]  # returns a row for each client, see Product.clients


# Returns batch jobs: `counts` by state and `jobs`; None if there are none to show.
ListJobs = Callable[[], Mapping[str, Any] | None]


# Returns what the models on demand take, of what there is; None if no model is on demand.
ShowMemory = Callable[[], Mapping[str, Any] | None]


# Returns the processes in front of the server, each with its `pid`.
ListFronts = Callable[[], Sequence[Mapping[str, Any]]]


def no_clients() -> Sequence[Mapping[str, Any]]:
    """Return no rows."""
    return []


class Sections(NamedTuple):
    """The parts that a dashboard shows besides the models and their metrics. Empty parts are left out.

    `collectors` count what a product does. `clients` returns the clients that a product distinguishes, `jobs` the batch jobs, `fronts` the server's fronts, whose use
    is the server's own, and `memory` what models on demand take.
    """

    collectors: Sequence[Collector] = ()
    clients: ListClients = no_clients
    jobs: ListJobs = lambda: None
    fronts: ListFronts = no_clients
    memory: ShowMemory = lambda: None


ONLY_MODELS = Sections()


class DashboardSampler:
    """Takes samples of the services of `registry`, of what `metrics` have counted, and of `sections`. It changes nothing.

    Without `metrics` a sample has levels and no counts. `clock` returns seconds, `time_of_day` seconds since 1970.
    """

    def __init__(
        self,
        registry: "Models",
        metrics: Metrics | None,
        sections: Sections = ONLY_MODELS,
        *,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._sections = sections
        self._clock = clock
        self._time_of_day = time_of_day
        self._before: Counts = {}
        self._total: dict[str, float | None] = {}
        self._at: float | None = None

    def sample(self, late: float = 0.0) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return what has changed since the last sample (None the first time), and the state now.

        In both, `models` is by label. The changes leave out zeros and models in which nothing happened. `late` is the delay of this call by the event loop,
        in seconds.
        """
        now, sections = self._clock(), self._sections
        counts = count(self._metrics, code_of, sections.collectors) if self._metrics is not None else {}
        services = {service.facts.label: service for service in self._registry.all}
        states = {label: service.control.state(brief=True) for label, service in services.items()}
        levels = {label: _levels(state) for label, state in states.items()}
        uses = _uses(states)
        fronts = [{**each, **_use(use_of(each["pid"]))} for each in sections.fronts()]
        at, total = (
            self._time_of_day(),
            _total(uses, any(worker["node"] for state in states.values() for worker in state["workers"]), fronts),
        )
        changes = None
        if self._at is not None:
            changed: dict[str, dict[str, Any]] = change(counts, self._before) or {}
            for label, level in levels.items():
                if there := {name: value for name, value in level.items() if value}:
                    changed[label] = changed.get(label, {}) | there
            machine = {
                **total,
                "cpu": _used(total, self._total, "cpu"),
                "workers_cpu": _used(total, self._total, "workers_cpu"),
            }
            changes = {"at": at, "seconds": now - self._at, "late": late, "machine": machine, "models": changed}
        self._before, self._total, self._at = counts, total, now
        models = {label: _model(services[label], state, levels[label], uses) for label, state in states.items()}
        for label, counted in counts.items():
            models.setdefault(label, {})["counts"] = counted
        present = {"at": at, "models": models, "machine": total, "clients": list(sections.clients()[:_MOST_CLIENTS])}
        if fronts:
            present["fronts"] = fronts
        if (memory := sections.memory()) is not None:
            present["on_demand"] = {**memory, "models": len(self._registry.on_demand)}
        if (jobs := sections.jobs()) is not None:
            present["jobs"] = jobs
        return changes, present


def _levels(state: Mapping[str, Any]) -> dict[str, Any]:
    workers = state["workers"]
    return {
        "waiting": state["waiting"],
        "waiting_requests": state["waiting_requests"],
        "waiting_bulk": state["waiting_bulk"],
        "oldest": state["oldest_age"] or 0.0,
        "running": state["in_flight"],
        "busy": sum(1 for worker in workers if worker["in_flight"]),
        "restarts": state["gauges"].get("restarts", 0),
    }


def _model(
    service: "ModelHandle", state: Mapping[str, Any], levels: dict[str, Any], uses: Mapping[int, Use]
) -> dict[str, Any]:
    workers = [worker | _use(None if worker["node"] else uses.get(worker["pid"])) for worker in state["workers"]]
    gauges = state["gauges"]
    return {
        "ready": state["ready"],
        "reason": state["reason"],
        "levels": levels,
        "workers": workers,
        "scaling": state["scaling"],
        "device": state["device"],
        "residency": state["residency"],
        "arena": [gauges.get("arena_bytes", 0), gauges.get("arena_free_bytes", 0)],
        "settings": {name: getattr(service.facts.batching, name) for name in _SETTINGS},
        "texts": service.facts.model.plain_texts,
    }


def _use(use: Use | None) -> dict[str, Any]:
    return {} if use is None else use._asdict()


def _uses(states: Mapping[str, Any]) -> dict[int, Use]:
    """Return the use of this process and of all workers, by process id."""
    workers = [worker for state in states.values() for worker in state["workers"]]
    # A process of another machine has a number of its own.
    pids = {worker["pid"] for worker in workers if not worker["node"]} - {None}
    uses = {pid: use_of(pid) for pid in (os.getpid(), *pids)}
    return {pid: use for pid, use in uses.items() if use is not None}


def _used(now: Mapping[str, float | None], before: Mapping[str, float | None], name: str) -> float | None:
    """Return the processor time since the last sample: at least 0, although the time of a worker that has ended is missing now."""
    used = now[name]
    return None if used is None else max(0.0, used - (before[name] or 0.0))


def _total(
    uses: Mapping[int, Use], elsewhere: bool, fronts: Sequence[Mapping[str, Any]] = ()
) -> dict[str, float | None]:
    """Return memory and processor time of this process and its `fronts`, and of its workers together: None if all are on other
    machines, or `elsewhere`, whose use is unknown."""
    own = uses.get(os.getpid())
    others = [use for pid, use in uses.items() if pid != os.getpid()]
    if elsewhere and not others:
        return _total(uses, False, fronts) | {"workers_memory_bytes": None, "workers_cpu": None}
    return {
        "memory_bytes": (own.memory_bytes if own else 0) + sum(front.get("memory_bytes", 0) for front in fronts),
        "cpu": (own.cpu if own else 0.0) + sum(front.get("cpu", 0.0) for front in fronts),
        "workers_memory_bytes": sum(use.memory_bytes for use in others),
        "workers_cpu": sum(use.cpu for use in others),
    }


# The last samples, encoded: each is encoded once for all pages.


KEPT = 900  # samples: fifteen minutes of one a second
KEPT_BYTES = 16 << 20
SENT_BYTES = 1 << 20  # in one response; the page requests the rest at once, and others are served in between


class Ring:
    """Keeps at most `kept` samples with at most `kept_bytes` in total, and drops the oldest first. Samples are numbered from 1."""

    def __init__(self, kept: int = KEPT, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept = kept
        self._kept_bytes = kept_bytes
        self._samples: deque[bytes] = deque()
        self.size_bytes = 0
        self.last = 0  # number of the newest sample

    def put(self, sample: bytes) -> None:
        """Add the newest sample."""
        self._samples.append(sample)
        self.size_bytes += len(sample)
        self.last += 1
        while len(self._samples) > self._kept or self.size_bytes > self._kept_bytes:
            self.size_bytes -= len(self._samples.popleft())

    def since(self, number: int, size_bytes: int = SENT_BYTES) -> tuple[int, list[bytes]]:
        """Return the number of the last returned sample, and the samples after `number` in order.

        They have at most `size_bytes` in total, but there is at least one if there is any.
        """
        first = self.last - len(self._samples)  # the number before the oldest
        begin = min(max(number, first), self.last)
        taken: list[bytes] = []
        for sample in islice(self._samples, begin - first, None):
            size_bytes -= len(sample)
            if taken and size_bytes < 0:
                break
            taken.append(sample)
        return begin + len(taken), taken


SECOND = 1.0  # seconds between samples while a page is open
PATIENCE = 60.0  # seconds after the last request of a page until it counts as closed
REST = 5.0  # seconds between samples while no page is open


Later = Callable[[float, Callable[[], None]], Cancellable]  # calls a function after that many seconds


class SamplingTimer:
    """Calls `sample` with its delay in seconds: every REST seconds from `begin` on, and every second until `patience` seconds after the last `look`.

    Without `begin` there is no timer while no page is open. Nothing needs to end it: a loop that closes drops its timer.
    """

    def __init__(
        self,
        sample: Callable[[float], None],
        *,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
        later: Later | None = None,
    ) -> None:
        self._sample = sample
        self._patience = patience
        self._clock = clock
        self._later = later
        self._looked = 0.0
        self._due = 0.0
        self._always = False
        self._timer: Cancellable | None = None

    @property
    def running(self) -> bool:
        """Whether there is a timer."""
        return self._timer is not None

    def begin(self) -> None:
        """Call `sample` from now on, even while no page is open. Idempotent."""
        self._always = True
        if self._timer is None:
            self._looked = self._clock() - self._patience - SECOND
            self._sample_now()

    def look(self) -> None:
        """Note that a page is open. The first time, and after a pause, call `sample` at once."""
        before, self._looked = self._looked, self._clock()
        if self._timer is None or self._looked - before > self._patience:
            self.stop()
            self._sample_now()

    def _sample_now(self) -> None:
        self._due = self._clock()
        self._fire()

    def stop(self) -> None:
        """Stop until the next `look` or `begin`. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        now = self._clock()
        self._timer = None
        is_watched = now - self._looked <= self._patience
        if not is_watched and not self._always:
            return
        late, pause = now - self._due, SECOND if is_watched else REST
        self._sample(late)
        self._due = now + pause if late >= SECOND else self._due + pause  # missed calls are not made up for
        later = self._later or asyncio.get_running_loop().call_later
        self._timer = later(max(0.0, self._due - self._clock()), self._fire)


class Watch:
    """Samples a server every second while a page is open, and every few seconds otherwise, so that a new page shows the past. It keeps fifteen minutes."""

    def __init__(
        self,
        sampler: DashboardSampler,
        ring: Ring,
        *,
        counted: bool,
        clock: Callable[[], float] = time.monotonic,
        later: Later | None = None,
    ) -> None:
        self.timer = SamplingTimer(self.take, clock=clock, later=later)
        self._sampler = sampler
        self._ring = ring
        self._life = secrets.token_hex(8)  # identifies this process: another one numbers its samples from the start
        self._server = {"version": __version__, "counted": counted, "buckets": {"seconds": SECONDS, "rows": ROWS}}
        self._present = b"null"

    def take(self, late: float) -> None:
        """Take a sample."""
        changes, present = self._sampler.sample(late)
        if changes is not None:
            self._ring.put(encode_safely({"number": self._ring.last + 1, **changes}))
        self._present = encode_safely(present)

    def look(self, life: str = "", since: int = 0) -> bytes:
        """Return a JSON document with the samples after number `since`, or with all samples if `life` does not identify this process.

        In it, `last` is the `since` of the next request, and `more` says whether there are more samples already.
        """
        self.timer.look()
        last, samples = self._ring.since(since if life == self._life else 0)
        document: dict[str, Any] = {
            "life": self._life,
            "server": self._server,
            "last": last,
            "more": last < self._ring.last,
            "now": msgspec.Raw(self._present),
            "samples": [msgspec.Raw(sample) for sample in samples],
        }
        return msgspec.json.encode(document)


_TYPES = {
    "svg": b"image/svg+xml",
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY: Headers = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
_PAGE = "page.html"


# The page alone: what it reads is not an API for others.
_DESCRIBED = {
    "operationId": "get_dashboard",
    "tags": ["server"],
    "summary": "Show the dashboard",
    "responses": {"200": {"description": "The response", "content": {"text/html": {}}}},
}


def make_dashboard(registry: "Models", metrics: Metrics | None, sections: Sections = ONLY_MODELS) -> AddedEndpoints:
    """Return the dashboard of the services of `registry`, to be added to the HTTP frontend.

    `metrics` must be one of their observers. Without it the page shows queues and workers, and a note that nothing is counted.
    """
    return pages_of(Watch(DashboardSampler(registry, metrics, sections), Ring(), counted=metrics is not None))


def pages_of(watch: Watch) -> AddedEndpoints:
    """Return the endpoints of a dashboard whose data come from `watch`."""
    found = {"data": _data(watch), **{name: _asset(name) for name in assets() if name != _PAGE}}
    endpoints = [HttpEndpoint("GET", f"/dashboard/{name}", answered(page)) for name, page in found.items()]
    return AddedEndpoints(
        [HttpEndpoint("GET", "/dashboard", answered(_asset(_PAGE)), _DESCRIBED), *endpoints], watch.timer.begin
    )


def assets() -> list[str]:
    """Return the names of the page's files."""
    return sorted(each.name for each in (files("weir.frontends") / "assets").iterdir())


def _asset(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        body = (files("weir.frontends") / "assets" / name).read_bytes()
        kind = (b"content-type", _TYPES[name.rpartition(".")[2]])
        return as_response(HttpResponse(200, [kind, (b"cache-control", b"no-cache"), *_SECURITY], body))

    return endpoint


def _data(watch: Watch) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        since = request.query_params.get("since", "")
        number = int(since) if since.isdecimal() and len(since) < 16 else 0
        body = watch.look(request.query_params.get("life", ""), number)
        headers: Headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store"), *_SECURITY]
        return as_response(HttpResponse(200, headers, body))

    return endpoint
