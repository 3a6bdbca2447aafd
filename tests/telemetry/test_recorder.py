import asyncio
import gc
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.served_models import Square

from weir.batching.request_state import RequestBase
from weir.errors import Cancelled, DeadlineExceeded, ModelNotFound, Overloaded, ValidationFailed, WeirError
from weir.messages import Dispatch, Kind, Reason, Request, Timing, Wakeup
from weir.serving.service import Service
from weir.telemetry.exposition import Exposition, Levels
from weir.telemetry.recorder import SECONDS, Histogram, Metrics, Recorder
from weir.testing import FakeRequest

Labels = dict[str, str]


class Ask(RequestBase):
    def finish(self, output: object, dispatch: Dispatch) -> None: ...

    def fail(self, error: WeirError) -> None: ...


def ask(arrival: float, frontend: str = "http") -> Request:
    return Ask(b"3", arrival, 30.0, frontend=frontend)


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
    metrics: Metrics, levels: dict[str, Levels] | None = None
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = Exposition(metrics, code_of, lambda: levels or {}).render()[0].decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return shown(metrics).get((name, tuple(sorted(labels.items()))), 0.0)


def test_requests_are_counted_by_model_frontend_and_code() -> None:
    metrics = Metrics()
    metrics.own("square").answered("square", [ask(0.0), ask(0.0), ask(0.0, "python")], None, 1.0)
    metrics.refused("square", "http", Overloaded("full"))
    assert value(metrics, "weir_requests_total", model="square", frontend="http", code="200") == 2
    assert value(metrics, "weir_requests_total", model="square", frontend="python", code="200") == 1
    assert value(metrics, "weir_requests_total", model="square", frontend="http", code="429") == 1
    assert value(metrics, "weir_requests_rejected_total", model="square", frontend="http", error="Overloaded") == 1


def test_errors_of_one_code_share_a_series() -> None:
    metrics = Metrics()
    metrics.own("square").answered("square", [ask(0.0)], ValidationFailed("a"), 1.0)
    metrics.own("square").answered("square", [ask(0.0)], Cancelled("b"), 1.0)
    assert value(metrics, "weir_requests_total", model="square", frontend="http", code="400") == 2


def test_expired_cancelled_and_invalid_requests_have_counts_of_their_own() -> None:
    metrics = Metrics()
    metrics.own("square").answered("square", [ask(0.0), ask(0.0)], DeadlineExceeded("late"), 1.0)
    metrics.refused("square", "http", DeadlineExceeded("too late"))
    metrics.own("square").answered("square", [ask(0.0)], Cancelled("left"), 1.0)
    metrics.own("square").answered("square", [ask(0.0)], ValidationFailed("wrong"), 1.0)
    where = {"model": "square", "frontend": "http"}
    assert value(metrics, "weir_requests_expired_total", **where) == 3
    assert value(metrics, "weir_requests_cancelled_total", **where) == 1
    assert value(metrics, "weir_validation_errors_total", **where) == 1


def test_unknown_names_of_models_do_not_become_labels() -> None:
    metrics = Metrics()
    for name in ("a", "b", "c"):
        metrics.refused(name, "http", ModelNotFound("no"))
    assert value(metrics, "weir_requests_total", model="", frontend="http", code="400") == 3


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


def test_bytes_in_and_out() -> None:
    metrics = Metrics()
    metrics.transferred("square", "http", 10, 20)
    metrics.transferred("square", "http", 1, 2)
    assert value(metrics, "weir_received_bytes_total", model="square", frontend="http") == 11
    assert value(metrics, "weir_sent_bytes_total", model="square", frontend="http") == 22


def test_levels_are_read_when_somebody_asks() -> None:
    metrics = Metrics()
    metrics.worker_changed("square", 0, "lost", "killed")
    levels = Levels(7, 5, 2, {"ready": 1, "lost": 1}, 4, 3, 1 << 20, 1 << 19)
    samples = shown(metrics, {"square": levels})
    model = (("model", "square"),)
    assert samples["weir_waiting_rows", model] == 7
    assert samples["weir_waiting_requests", model] == 5
    assert samples["weir_running_batches", model] == 2
    assert samples["weir_worker_restarts_total", model] == 3
    assert samples["weir_workers_wanted", model] == 4
    assert samples["weir_arena_bytes", model] == 1 << 20
    assert samples["weir_arena_free_bytes", model] == 1 << 19
    assert samples["weir_workers", (("model", "square"), ("state", "lost"))] == 1


def test_names_follow_the_conventions_and_the_format_is_as_requested() -> None:
    exposition = Exposition(Metrics(), code_of)
    text, content_type = exposition.render()
    assert content_type.startswith("text/plain")
    assert exposition.render("application/openmetrics-text")[1].startswith("application/openmetrics-text")
    names = re.findall(r"^# TYPE (\S+) ", text.decode(), re.MULTILINE)
    assert all(re.fullmatch(r"(weir|process)_[a-z_]+", name) for name in names)
    counters = re.findall(r"^# TYPE (weir_\S+) counter", text.decode(), re.MULTILINE)
    assert counters and all(name.endswith("_total") for name in counters)


def test_two_servers_may_live_in_one_process() -> None:
    one, other = Metrics(), Metrics()
    one.transferred("square", "http", 1, 1)
    assert value(other, "weir_received_bytes_total", model="square", frontend="http") == 0
    assert value(one, "weir_received_bytes_total", model="square", frontend="http") == 1


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


async def test_a_service_counts_each_event_once_for_all_views() -> None:
    metrics = Metrics()
    async with Service(Square, observers=[metrics], executor="inline") as square:
        await asyncio.gather(*[square.infer(x) for x in range(5)])
        recorder = square.statistics
        assert metrics.of("square") is recorder
        assert square.generation.window.read().requests == recorder.success.count == sum(metrics.ended.values()) == 5
        assert metrics not in square.generation.observers


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


def test_a_batch_of_ages_spans_buckets() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.observe_ages([1.0, 6.5, 8.5, 9.5, 9.75], 10.0)
    assert histogram.counts == [2, 1, 1, 1]


def batch(*requests: FakeRequest, slices: list[tuple[int, int] | None] | None = None, attempt: int = 0) -> Dispatch:
    rows = sum(request.rows for request in requests)
    return Dispatch(
        1, 0, list(requests), slices, rows, 1.0, Reason.SIZE, rows, 0.0, None, Wakeup.ARRIVAL, 11.0, attempt
    )


def test_nothing_has_happened() -> None:
    said = Recorder().to_dict()
    assert (said["last_inference"], said["inference_count"], said["execution_count"], said["batch_stats"]) == (
        0,
        0,
        0,
        [],
    )
    assert set(said["inference_stats"]) == {
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
    }  # fmt: skip


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


def test_failures_are_counted_and_those_who_left_are_not() -> None:
    statistics = Recorder()
    statistics.refused("m", "http", Overloaded("full"))
    statistics.answered("m", [FakeRequest(1, arrival=1.0)], Overloaded("full"), 3.0)
    statistics.answered("m", [FakeRequest(1)], Cancelled("left"), 3.0)
    assert statistics.to_dict()["inference_stats"]["fail"] == {"count": 2, "ns": 2_000_000_000}
    assert statistics.success.count == 0


@pytest.mark.parametrize(("attempt", "counted"), [(0, 2), (1, 0)])
def test_a_wait_counts_once(attempt: int, counted: int) -> None:
    statistics = Recorder()
    parts = [FakeRequest(list(range(9)), kind=Kind.ITEMS, rows=9) for _ in range(3)]
    statistics.dispatched("m", batch(*parts, slices=[(0, 4), (4, 9), None], attempt=attempt))
    assert statistics.queue.count == counted


def test_without_details_the_same_is_counted_but_for_histograms() -> None:
    both = [Recorder(lambda: 7.0, detailed=detailed) for detailed in (True, False)]
    for recorder in both:
        first, second = FakeRequest(1, arrival=1.0), FakeRequest(1, arrival=2.0)
        dispatch = batch(first, second)
        recorder.dispatched("m", dispatch)
        recorder.computed("m", dispatch, Timing(0.1, 0.5, 0.2), 3.0)
        recorder.answered("m", [first, second], None, 4.0)
        recorder.answered("m", [FakeRequest(1, arrival=1.0)], Overloaded("full"), 4.0)
        recorder.answered("m", [FakeRequest(1, arrival=1.0)], Cancelled("left"), 4.0)
    detailed, plain = both
    assert plain.to_dict() == detailed.to_dict()
    assert plain.success.seconds == 5.0
    assert plain.batches == detailed.batches
    assert plain.ran
    assert detailed.queue.count == 2
    assert plain.queue.count == plain.total.count == plain.predict.count == plain.rows.count == 0
