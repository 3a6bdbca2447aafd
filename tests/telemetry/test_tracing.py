"""Spans of requests and batches, as they are handed to OpenTelemetry."""

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace as api
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, StatusCode
from tests.rings import subcases
from tests.streaming_models import Count
from tests.waiting import until
from tests.workers.models import Square

from weir.batching.request_state import RequestBase
from weir.errors import DeadlineExceeded, ModelError, Overloaded, SettingsError
from weir.messages import Form, child_of
from weir.serving.service import Service
from weir.telemetry import TelemetrySettings, open_metric_exporters, open_tracing
from weir.telemetry.tracing import Tracing, make_tracing
from weir.testing import FakeExecutor

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"


class Kept(SpanProcessor):
    """Keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.closed = False

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def shutdown(self) -> None:
        self.closed = True

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


class Asking(RequestBase):
    """A request of some frontend."""

    def finish(self, output: Any, dispatch: Any) -> None: ...

    def fail(self, error: Any) -> None: ...


def ids(span: ReadableSpan) -> tuple[int, int]:
    context: Any = span.context
    return context.trace_id, context.span_id


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def settled(request: Asking) -> None:
    await until(lambda: request.settled)


async def test_a_request_has_queue_and_compute_as_children_and_its_batch_linked() -> None:
    kept = Kept()
    async with Service(Square, observers=[Tracing(kept)], executor="inline") as service:
        await asyncio.gather(*[service.infer(x) for x in range(3)])
    requests, batches = kept.named("infer square"), kept.named("batch square")
    assert len(requests) == 3
    for request in requests:
        (queue,) = [each for each in kept.named("queue") if each.parent == request.context]
        (compute,) = [each for each in kept.named("compute") if each.parent == request.context]
        assert times(request) == (times(queue)[0], times(compute)[1]) and times(queue)[1] == times(compute)[0]
        assert request.kind is SpanKind.INTERNAL and request.status.status_code is StatusCode.UNSET
        (link,) = request.links
        (batch,) = [each for each in batches if each.context == link.context]
        assert ids(request) in [(each.context.trace_id, each.context.span_id) for each in batch.links]
        assert attributes(batch)["weir.rows"] == len(batch.links)
        assert attributes(batch)["weir.predict_seconds"] > 0


async def test_a_span_names_the_frontend_of_its_request() -> None:
    kept = Kept()
    async with Service(Square, observers=[Tracing(kept)], executor="inline") as service:
        for trace in ({"traceparent": CALLER}, {"traceparent": CALLER[:-1] + "0"}, None):
            request = Asking(Form(10.0, frontend="grpc"), 3, service.now(), trace)
            service.submit(request)
            await settled(request)
    within, own = kept.named("infer square")  # of the one that is not sampled there is none
    assert within.parent is not None and within.parent.is_remote and f"{within.parent.span_id:x}" == "cd" * 8
    assert f"{ids(within)[0]:x}" == "ab" * 16 and within.kind is SpanKind.SERVER
    assert own.parent is None and len(kept.named("batch square")) == 2


async def test_what_vendors_add_to_a_trace_goes_on_with_each_of_its_spans() -> None:
    kept = Kept()
    tracing = Tracing(kept)
    async with Service(Square, observers=[tracing], executor="inline") as service:
        whole = tracing.new({"traceparent": CALLER, "tracestate": "a=1,b=2"})
        for origin in (whole, child_of(whole)):
            request = Asking(Form(10.0, frontend="grpc"), 3, service.now(), origin)
            service.submit(request)
            await settled(request)
    requests = kept.named("infer square")
    assert len(requests) == 2 and len({ids(each)[0] for each in kept.spans if "batch" not in each.name}) == 1
    assert requests[1].parent is not None and requests[1].parent.span_id == ids(requests[0])[1]
    spans: list[Any] = [*requests, *kept.named("queue"), *kept.named("compute")]
    contexts = [context for span in spans for context in (span.context, span.parent)]
    assert [context.trace_state.to_header() for context in contexts] == ["a=1,b=2"] * 12


@subcases(
    "carrier",
    [
        {}, {"traceparent": ""}, {"traceparent": "nonsense"}, {"traceparent": f"{CALLER}-more"}, {"tracestate": "a=1"},
        {"traceparent": CALLER.replace("00-", "ff-", 1)}, {"traceparent": CALLER.replace("ab", "00")},
        {"traceparent": CALLER.replace("cd", "00")}, {"traceparent": f"{CALLER},{CALLER}"}, {"traceparent": "cc-" + "a" * 9999},
    ],
)  # fmt: skip
def test_a_trace_begins_where_no_caller_can_be_read(carrier: dict[str, str]) -> None:
    tracing = Tracing(Kept())
    first, other = tracing.new(carrier), tracing.new(carrier)
    assert first.parent_id == 0 and first.sampled and first.trace_id != other.trace_id and not first.state


PROPAGATOR = """
from opentelemetry import trace
from opentelemetry.propagators.textmap import TextMapPropagator

class B3(TextMapPropagator):
    fields = {"b3"}

    def extract(self, carrier, context=None, getter=None):
        trace_id, span_id = (int(each, 16) for each in carrier["b3"].split("-"))
        span = trace.NonRecordingSpan(trace.SpanContext(trace_id, span_id, True, trace.TraceFlags(1)))
        return trace.set_span_in_context(span, context)

    def inject(self, *_, **__): ...
"""


def test_the_environment_says_which_headers_name_a_caller(tmp_path: Path) -> None:
    (tmp_path / "own_b3.py").write_text(PROPAGATOR)
    info = tmp_path / "own_b3-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-b3\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[opentelemetry_propagator]\nb3 = own_b3:B3\n")
    carrier = {"traceparent": CALLER, "b3": f"{'11' * 16}-{'22' * 8}"}
    code = (
        "from opentelemetry.sdk.trace import SpanProcessor; from weir.telemetry.tracing import Tracing;"
        f"print(Tracing(SpanProcessor()).new({carrier}).name)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OTEL_PROPAGATORS": "b3"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "11" * 16


def test_a_propagator_that_is_not_installed_is_refused_by_name() -> None:
    words = [sys.executable, "-m", "weir", "serve", "examples.square:Square", "--trace-endpoint", "http://localhost:1"]
    environment = {**os.environ, "OTEL_PROPAGATORS": "tracecontext,nowhere"}
    run = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 2 and "OTEL_PROPAGATORS='tracecontext,nowhere': Propagator nowhere not found" in run.stderr


async def test_calls_in_process_are_within_the_span_that_is_current_there(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    async with (
        Service(Square, observers=[Tracing(kept)], executor="inline") as service,
        Service(Count, observers=[Tracing(kept)], executor="inline") as streaming,
    ):
        with TracerProvider().get_tracer("caller").start_as_current_span("caller") as caller:
            await service.infer(3)
        assert not api.get_current_span().get_span_context().is_valid
        with pytest.raises(ModelError), caplog.at_level(logging.WARNING):
            await service.infer("x")
        assert [answer async for answer in streaming.infer_stream(3)] == [1, 2, 3]
    request, failed = kept.named("infer square")
    context = caller.get_span_context()
    assert request.parent is not None
    assert (request.parent.trace_id, request.parent.span_id) == (context.trace_id, context.span_id)
    assert failed.status.status_code is StatusCode.ERROR and attributes(failed)["error.type"] == "ModelError"
    assert f"{ids(failed)[0]:032x}" in str(caplog.records[0].__dict__)
    assert len(kept.named("infer count")) == 1


async def test_what_never_runs_has_no_compute() -> None:
    kept = Kept()
    settings: dict[str, Any] = {"max_queue_size": 1, "max_batch_size": 1, "executor": FakeExecutor()}
    async with Service(Square, observers=[Tracing(kept)], **settings) as service:
        running = Asking(Form(60.0, frontend="grpc"), 1, service.now())
        service.submit(running)
        await asyncio.sleep(0)
        service.submit(Asking(Form(60.0, frontend="grpc"), 2, service.now()))
        with pytest.raises(Overloaded):
            service.submit(Asking(Form(60.0, frontend="grpc"), 3, service.now()))
        with pytest.raises((DeadlineExceeded, Overloaded)):
            service.submit(Asking(Form(1.0, frontend="grpc"), 3, service.now() - 2))
        service.cancel(running)
        await service.stop(0.0)
    errors = [attributes(each)["error.type"] for each in kept.named("infer square")]
    assert errors[0] == "Overloaded" and errors[2:] == ["Cancelled", "Draining"]
    assert len(kept.named("queue")) == 4 and len(kept.named("compute")) == 1
    assert kept.named("infer square")[2].status.status_code is StatusCode.UNSET


async def test_a_batch_that_is_lost_with_its_worker_says_so() -> None:
    kept, executor = Kept(), FakeExecutor()
    tracing = Tracing(kept)
    async with Service(Square, observers=[tracing], executor=executor) as service:
        call = service.infer(3)
        await until(lambda: executor.pending)
        tracing.worker_changed("square", 1, "lost", "killed")  # another one
        tracing.worker_changed("square", 0, "ready", "")
        assert not kept.spans
        tracing.worker_changed("square", 0, "lost", "killed")
        call.cancel()
        await service.stop(0.0)
    (batch,) = kept.named("batch square")
    assert batch.status.status_code is StatusCode.ERROR and batch.status.description == "worker lost: killed"


@subcases(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://there/otlp/v1/traces", "https://there/otlp/v1/traces"),
    ],
)
def test_where_spans_go(endpoint: str, url: str) -> None:
    with make_tracing(endpoint, 1.0, "weir") as tracing:
        processor: Any = tracing._processor
        assert processor.span_exporter._endpoint == url


@pytest.mark.parametrize(
    ("variables", "ratio", "recorded"),
    [  # without a caller, with one that records, and with one that does not
        ({}, None, (True, True, False)),
        ({}, 0.0, (False, True, False)),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, None, (False, False, False)),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, None, (True, True, True)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, None, (False, True, False)),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, None, (False, False, False)),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, 1.0, (True, True, False)),
        ({"OTEL_SDK_DISABLED": "true"}, 1.0, (False, False, False)),
    ],
)
def test_the_environment_decides_as_for_any_program(
    variables: dict[str, str], ratio: float | None, recorded: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracing = Tracing(Kept(), ratio=ratio)
    assert (
        tuple(tracing.new(each).sampled for each in (None, {"traceparent": CALLER}, {"traceparent": CALLER[:-1] + "0"}))
        == recorded
    )
    assert tracing._resource.attributes["service.name"] == "weir"


def test_the_ratio_is_a_share_of_all_requests() -> None:
    tracing = Tracing(Kept(), ratio=0.3)
    assert 200 < sum(tracing.new(None).sampled for _ in range(1000)) < 400


def test_the_service_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "squares")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision")
    attributes = Tracing(Kept(), service_name="mine")._resource.attributes
    assert (attributes["service.name"], attributes["team"]) == ("squares", "vision")


def test_nothing_is_sent_where_it_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracing(TelemetrySettings(trace_endpoint="http://localhost:4318"), "weir") == []


@subcases("names", [None, "", "none", "prometheus", "none, prometheus"])
def test_metrics_are_sent_only_where_an_exporter_is_named(names: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if names is not None:
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", names)
    assert open_metric_exporters() == []


@subcases(
    ("names", "protocol", "missing"),
    [("nowhere", "", "nowhere"), ("console,x", "", "x"), ("otlp", "http/json", "otlp_json_http")],
)
def test_an_exporter_that_is_not_installed_is_refused_by_name(
    names: str, protocol: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", names)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with pytest.raises(SettingsError, match=f"OTEL_METRICS_EXPORTER='{names}': .* exporter '{missing}'"):
        open_metric_exporters()


def test_an_unknown_protocol_of_otlp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "udp")
    with pytest.raises(SettingsError, match="OTLP_PROTOCOL='udp': must be one of grpc, http/json, http/protobuf"):
        open_tracing(TelemetrySettings(trace_endpoint="http://localhost:4318"), "weir")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http")  # which comes first
    with pytest.raises(SettingsError, match="OTLP_METRICS_PROTOCOL='http': must be one of"):
        open_metric_exporters()
    with pytest.raises(SettingsError, match="trace_endpoint='collector:4318': must begin with http:// or https://"):
        TelemetrySettings(trace_endpoint="collector:4318")


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.resources", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]
)
def test_without_its_library_the_setting_is_refused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    if "sdk" in missing:
        monkeypatch.delitem(sys.modules, "weir.telemetry.tracing")  # it has loaded it
    with pytest.raises(SettingsError, match=r"needs opentelemetry-sdk and its OTLP .*pip install 'weir-serving\[otel"):
        open_tracing(TelemetrySettings(trace_endpoint="http://localhost:1"), "weir")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    monkeypatch.delitem(sys.modules, "weir.telemetry.otlp", raising=False)
    with pytest.raises(SettingsError, match=r"OTEL_METRICS_EXPORTER='otlp': needs .*'weir-serving\[otel"):
        open_metric_exporters()
    for pulled in ("", "none, prometheus"):  # which need no library
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", pulled)
        assert open_metric_exporters() == []
