import gc
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes import FakeRequest

from weir.batching.request_state import RequestBase
from weir.errors import Cancelled, DeadlineExceeded, ModelNotFound, Overloaded, ValidationFailed, WeirError
from weir.messages import Dispatch, Form, Kind, Reason, Request, Timing, Wakeup
from weir.policy.cost import Prices, Profile
from weir.telemetry.exposition import Exposition, State
from weir.telemetry.recorder import HALF, SECONDS, Histogram, Metrics, Recorder, RollingWindow
from weir.testing import FakeClock


class Ask(RequestBase):
    def finish(self, output: object, dispatch: Dispatch) -> None: ...

    def fail(self, error: WeirError) -> None: ...


def ask(arrival: float, frontend: str = "http") -> Request:
    return Ask(Form(30.0, frontend=frontend), b"3", arrival)


def dispatch(
    requests: Sequence[Request], at: float, reason: Reason = Reason.IDLE, attempt: int = 0,
    slices: list[tuple[int, int] | None] | None = None,
) -> Dispatch:  # fmt: skip
    return Dispatch(
        1, 0, list(requests), slices, len(requests), 1.0, reason, len(requests), 0.1, None, Wakeup.ARRIVAL, at, attempt
    )


def code_of(frontend: str, kind: type[WeirError] | None) -> str:
    return "200" if kind is None else {"Overloaded": "429", "DeadlineExceeded": "504"}.get(kind.__name__, "400")


def shown(
    metrics: Metrics, states: dict[str, State] | None = None
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = Exposition(metrics, code_of, lambda: states or {}).render()[0].decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return shown(metrics).get((name, tuple(sorted(labels.items()))), 0.0)


def test_requests_are_counted_by_model_frontend_and_code() -> None:
    metrics, other = Metrics(), Metrics()
    own = metrics.own("square")
    own.answered("square", [ask(0.0), ask(0.0), ask(0.0, "python")], None, 1.0)
    for error in (DeadlineExceeded("late"), Cancelled("left"), ValidationFailed("wrong"), ValidationFailed("a")):
        own.answered("square", [ask(0.0)], error, 1.0)
    metrics.refused("square", "http", Overloaded("full"))
    metrics.refused("square", "http", DeadlineExceeded("too late"))
    for name in ("a", "b", "c"):
        metrics.refused(name, "http", ModelNotFound("no"))  # such names become no labels
    for received, sent in ((10, 20), (1, 2)):
        metrics.transferred("square", "http", received, sent)
    where = {"model": "square", "frontend": "http"}
    for code, count in (("200", 2), ("429", 1), ("504", 2), ("400", 3)):
        assert value(metrics, "weir_requests_total", **where, code=code) == count
    assert value(metrics, "weir_requests_total", model="square", frontend="python", code="200") == 1
    assert value(metrics, "weir_requests_total", model="", frontend="http", code="400") == 3
    assert value(metrics, "weir_requests_rejected_total", **where, error="Overloaded") == 1
    assert value(metrics, "weir_requests_expired_total", **where) == 2
    assert value(metrics, "weir_requests_cancelled_total", **where) == 1
    assert value(metrics, "weir_validation_errors_total", **where) == 2
    assert value(metrics, "weir_received_bytes_total", **where) == 11
    assert value(metrics, "weir_sent_bytes_total", **where) == 22
    assert value(other, "weir_received_bytes_total", **where) == 0


def test_reasons_add_up_to_the_batches() -> None:
    metrics = Metrics()
    for reason in (*Reason, Reason.SIZE):
        metrics.own("square").dispatched("square", dispatch([ask(0.0)] * 3, 0.5, reason))
    samples = shown(metrics)
    by_reason = {dict(labels)["reason"]: n for (name, labels), n in samples.items() if name == "weir_batches_total"}
    assert by_reason == {**dict.fromkeys((reason.name.lower() for reason in Reason), 1.0), "size": 2.0}
    assert sum(by_reason.values()) == value(metrics, "weir_batch_size_count", model="square")
    assert value(metrics, "weir_batch_size_sum", model="square") == 3 * len([*Reason, Reason.SIZE])


def test_queue_time_is_counted_once_for_each_request() -> None:
    metrics = Metrics()
    first, second = ask(0.0), ask(0.3)
    metrics.own("square").dispatched("square", dispatch([first, second], 0.5, slices=[None, (0, 4)]))
    metrics.own("square").dispatched("square", dispatch([second], 0.7, slices=[(4, 8)]))
    metrics.own("square").dispatched("square", dispatch([first], 0.9, Reason.RETRY, attempt=1))
    assert value(metrics, "weir_queue_time_seconds_count", model="square") == 2
    assert abs(value(metrics, "weir_queue_time_seconds_sum", model="square") - 0.7) < 1e-9


def test_times_of_a_batch_and_of_its_requests() -> None:
    metrics = Metrics()
    requests = [ask(1.0), ask(0.0)]  # priorities may have put a later one first
    metrics.own("square").computed("square", dispatch(requests, 1.5), Timing(0.001, 0.02, 0.003), 2.0)
    metrics.own("square").answered("square", requests, None, 2.0)
    metrics.own("square").answered("square", [], None, 2.0)
    sums = {step: value(metrics, f"weir_{step}_time_seconds_sum", model="square") for step in ("predict", "total")}
    assert sums == {"predict": 0.02, "total": 3.0}
    assert value(metrics, "weir_total_time_seconds_bucket", model="square", le="1.0") == 1
    assert value(metrics, "weir_preprocess_time_seconds_count", model="square") == 1
    assert value(metrics, "weir_postprocess_time_seconds_sum", model="square") == 0.003


def test_levels_are_read_when_somebody_asks() -> None:
    metrics = Metrics()
    metrics.worker_changed("square", 0, "lost", "killed")
    workers = [{"state": state, "bulk": False, "node": ""} for state in ("ready", "lost")]
    state = {
        "version": "", "waiting": 7, "waiting_bulk": 0, "waiting_requests": 5, "in_flight_batches": 2, "workers": workers, "wanted_workers": 4,
        "gauges": {"restarts": 3, "arena_bytes": 1 << 20, "arena_free_bytes": 1 << 19}, "kinds": [], "device": None, "policy": {"rate": None},
    }  # fmt: skip
    samples = shown(metrics, {"square": state})
    expected = {
        "waiting_rows": 7, "waiting_requests": 5, "running_batches": 2, "worker_restarts_total": 3, "workers_wanted": 4,
        "arena_bytes": 1 << 20, "arena_free_bytes": 1 << 19,
    }  # fmt: skip
    assert {name: samples[f"weir_{name}", (("model", "square"),)] for name in expected} == expected
    assert samples["weir_workers", (("model", "square"), ("state", "lost"))] == 1
    assert "weir_policy_rate" not in {name for name, _ in samples}


def test_names_follow_the_conventions_and_the_format_is_as_requested() -> None:
    exposition = Exposition(Metrics(), code_of)
    text, content_type = exposition.render()
    assert content_type.startswith("text/plain")
    assert exposition.render("application/openmetrics-text")[1].startswith("application/openmetrics-text")
    names = re.findall(r"^# TYPE (\S+) ", text.decode(), re.MULTILINE)
    assert all(re.fullmatch(r"(weir|process)_[a-z_]+", name) for name in names)
    counters = re.findall(r"^# TYPE (weir_\S+) counter", text.decode(), re.MULTILINE)
    assert counters and all(name.endswith("_total") for name in counters)


def test_names_may_begin_with_another_word() -> None:
    metrics = Metrics()
    metrics.own("square").answered("square", [ask(0.0)], None, 1.0)
    text = Exposition(metrics, code_of, namespace="mosec_service").render()[0].decode()
    assert 'mosec_service_requests_total{code="200",frontend="http",model="square"} 1.0' in text
    assert "process_open_fds" in text
    assert "weir" not in text
    openmetrics = Exposition(metrics, code_of, namespace="own").render("application/openmetrics-text; version=1.0.0")[0]
    assert b"# TYPE own_requests counter" in openmetrics


OTHER_PROCESS = """
import os, sys
from tests.telemetry.test_recorder import ask, code_of
from weir.telemetry.exposition import Exposition
from weir.telemetry.recorder import Metrics

metrics = Metrics()
shared = Exposition(metrics, code_of).share(sys.argv[1])
metrics.own("square").answered("square", [ask(0.0), ask(0.5)], None, 1.0)
shared.write()
print("written", flush=True)
sys.stdin.read()
os._exit(1)
"""


def test_several_processes_are_shown_together(tmp_path: Path) -> None:
    metrics = Metrics()
    exposition = Exposition(metrics, code_of)
    shared = exposition.share(str(tmp_path))
    metrics.own("square").answered("square", [ask(0.75)], None, 1.0)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)], stdin=PIPE, stdout=PIPE, text=True, env=environment
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "written\n"
        both = exposition.render()[0].decode()
        other.communicate()
    assert {f'process_open_fds{{pid="{pid}"}}' in both for pid in (os.getpid(), other.pid)} == {True}
    one = exposition.render()[0].decode()
    assert f'pid="{other.pid}"' not in one  # it has ended without a word, and has no levels
    for text in (both, one):
        assert 'weir_requests_total{code="200",frontend="http",model="square"} 3.0' in text
        assert 'weir_total_time_seconds_count{model="square"} 3.0' in text
        assert 'weir_total_time_seconds_sum{model="square"} 1.75' in text
        assert 'weir_total_time_seconds_bucket{le="0.1",model="square"} 0.0' in text
        assert 'weir_total_time_seconds_bucket{le="0.5",model="square"} 2.0' in text
        assert 'weir_total_time_seconds_bucket{le="+Inf",model="square"} 3.0' in text
    shared.close()
    assert not list(tmp_path.glob("weir/gauge*"))


class Owner:
    """What a recorder belongs to."""


def test_counts_stay_when_the_recorder_that_made_them_is_gone() -> None:
    metrics, before, after = Metrics(), Recorder(), Recorder()
    first, second = Owner(), Owner()
    metrics.attach("square", before, first)
    before.answered("square", [ask(0.0)], None, 1.0)
    metrics.attach("square", after, second)
    after.answered("square", [ask(0.0), ask(0.0)], None, 1.0)
    after.refused("square", "http", ModelNotFound("no such version"))
    before.transferred("square", "http", 1, 2)
    where = {"model": "square", "frontend": "http", "code": "200"}
    for _ in range(2):
        assert value(metrics, "weir_requests_total", **where) == 3
        assert value(metrics, "weir_total_time_seconds_sum", model="square") == 3.0
        assert metrics.bytes == {("square", "http"): [1, 2]}
        assert metrics.refused_requests == {("", "http", ModelNotFound): 1}
        first = Owner()  # the one before is gone
        gc.collect()
    assert metrics.of("square") is not after
    before.answered("square", [ask(0.0)], None, 1.0)  # nobody looks at it any more
    assert value(metrics, "weir_requests_total", **where) == 3


AGES = st.lists(st.floats(0, 100), min_size=1, max_size=70)


@given(AGES, st.floats(0, 1e6))
def test_a_batch_counts_like_its_values_one_by_one(ages: list[float], now: float) -> None:
    together, alone = Histogram(SECONDS), Histogram(SECONDS)
    instants = sorted(now - age for age in ages)
    together.observe_ages(instants, now)
    for instant in instants:
        alone.observe(now - instant)
    assert sum(together.counts) == len(ages)
    assert abs(together.sum - alone.sum) < 1e-6
    # An age within rounding of a bound may fall on either side of it.
    edges = sum(any(abs(now - instant - bound) < 1e-9 for bound in SECONDS) for instant in instants)
    assert sum(abs(a - b) for a, b in zip(together.counts, alone.counts, strict=True)) <= 2 * edges


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == 8.0


def batch(*requests: FakeRequest, slices: list[tuple[int, int] | None] | None = None, attempt: int = 0) -> Dispatch:
    rows = sum(request.form.rows for request in requests)
    return Dispatch(
        1, 0, list(requests), slices, rows, 1.0, Reason.SIZE, rows, 0.0, None, Wakeup.ARRIVAL, 11.0, attempt
    )


def test_batches_are_counted_by_their_rows_and_requests_one_by_one() -> None:
    statistics = Recorder(lambda: 1234.5678)
    one, two = FakeRequest(1, arrival=10.0), FakeRequest([1, 2], arrival=10.5, kind=Kind.ITEMS, rows=2)
    timing = Timing(0.001, 0.01, 0.002)
    for dispatch in (batch(one, two), batch(FakeRequest(1, arrival=11.0))):
        statistics.dispatched("m", dispatch)
        statistics.computed("m", dispatch, timing, 12.0)
        statistics.answered("m", dispatch.requests, None, 12.0)
    said = statistics.to_dict()
    assert (said["last_inference"], said["inference_count"], said["execution_count"]) == (1234568, 4, 2)
    stats = said["inference_stats"]
    assert stats["queue"] == {"count": 3, "ns": 1_500_000_000}
    assert stats["success"] == {"count": 3, "ns": 4_500_000_000}
    assert stats["compute_infer"] == {"count": 3, "ns": 30_000_000}
    assert [(each["batch_size"], each["compute_input"]) for each in said["batch_stats"]] == [
        (1, {"count": 1, "ns": 1_000_000}), (3, {"count": 1, "ns": 1_000_000}),
    ]  # fmt: skip


# The window of what came of the last batches.


class Rig:
    """A window of a service whose largest batch is 8, and its clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.arrivals = 0
        self.measured = RollingWindow(self.clock, lambda: self.arrivals)

    def serve(self, *ages: float, slices: list[Any] | None = None, **request: Any) -> None:
        requests = [FakeRequest([0] * 4, arrival=self.clock() - age, **request) for age in ages]
        self.come_back(requests, slices)

    def come_back(self, requests: list[Any], slices: list[Any] | None = None) -> None:
        parts = zip(requests, slices or [None] * len(requests), strict=True)
        rows = sum(_rows(request, part) for request, part in parts)
        self.arrivals += rows
        batch = Dispatch(
            1, 0, requests, slices, rows, float(rows), Reason.IDLE, rows, 0.0, None, Wakeup.ARRIVAL, self.clock()
        )
        self.measured.computed("m", batch, Timing(0.0, 0.0, 0.0), self.clock())


def _rows(request: Request, part: tuple[int, int] | None) -> int:
    if part is None:
        return request.form.rows
    per_item = request.form.rows // len(request.payload) if request.form.kind is Kind.ITEMS else 1
    return (part[1] - part[0]) * per_item


def test_means_are_over_rows() -> None:
    rig = Rig()
    rig.serve(0.010, 0.030)
    rig.serve(0.050, rows=2, kind=Kind.TENSORS)
    rig.clock.advance(2.0)
    reading = rig.measured.read()
    assert (reading.batches, reading.requests, reading.rows) == (2, 3, 4)
    assert reading.response_time_ms == pytest.approx((10 + 30 + 2 * 50) / 4)
    assert reading.seconds == pytest.approx(2.0)
    assert reading.rate == pytest.approx(2.0)


def test_a_divided_request_counts_once_and_its_rows_where_they_were() -> None:
    rig = Rig()
    whole = FakeRequest([0] * 4, arrival=rig.clock() - 0.010, rows=8, kind=Kind.ITEMS)
    rig.come_back([whole], [(0, 3)])
    rig.clock.advance(0.010)
    rig.come_back([whole], [(3, 4)])
    reading = rig.measured.read()
    assert (reading.requests, reading.rows, reading.batches) == (1, 8, 2)
    assert reading.response_time_ms == pytest.approx((6 * 10 + 2 * 20) / 8)


def test_power_and_cost_are_those_of_the_sizes_served() -> None:
    rig = Rig()
    profile = Profile.linear(alpha_ms=1.0, tau0_ms=1.0, beta_mj=10.0, zeta0_mj=20.0, max_batch_size=4)
    rig.serve(0.010)
    rig.serve(*[0.010] * 6)  # more than the profile knows of: counted as its largest
    rig.clock.advance(0.5)
    reading = rig.measured.read()
    assert reading.power_w(profile) == pytest.approx((30.0 + 60.0) / 500.0)
    assert reading.cost(profile, Prices(2.0, 3.0)) == pytest.approx(2.0 * 10.0 + 3.0 * 0.18)


def test_percentiles_are_right_to_a_tenth() -> None:
    rig = Rig()
    ages = np.random.default_rng(1).exponential(0.02, 10_000)
    for batch in ages.reshape(-1, 8):
        rig.serve(*batch)
    p99 = rig.measured.read().p99_ms
    assert p99 == pytest.approx(1000.0 * float(np.quantile(ages, 0.99)), rel=0.1)


def test_old_batches_are_forgotten_half_by_half() -> None:
    rig = Rig()
    for age in (0.010, 0.020, 0.030):
        rig.serve(age)
        rig.clock.advance(HALF)
    reading = rig.measured.read()  # turns the window: the first two halves are forgotten
    assert reading.batches == 1
    assert reading.response_time_ms == pytest.approx(30.0)
    assert reading.seconds == pytest.approx(HALF)
