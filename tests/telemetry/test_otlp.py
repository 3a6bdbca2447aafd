"""A real server sends its spans and metrics to a real OTLP receiver, each a process of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import grpc
import httpx
import numpy as np
from prometheus_client.openmetrics import parser as openmetrics
from tests.rings import subcases
from tests.served import Served, serving, until, weir
from tests.text_models.tiny import sentence_model
from websockets.sync.client import connect

from weir.wire.inference import InferenceRequest, TensorValue
from weir.wire.kserve_grpc import read_response, write_request

RECEIVER = Path(__file__).parent / "receiver.py"
SIMPLE = Path(__file__).parents[2] / "examples" / "repository" / "simple" / "1" / "model.py"
CALLERS = {
    name: f"00-{digit * 32}-{digit * 16}-01"
    for name, digit in (("native", "a"), ("kserve", "b"), ("grpc", "c"), ("websocket", "d"), ("events", "e"))
}
ROUTES = {
    "native": "/infer/{model}",
    "kserve": "/v2/models/{model}/infer",
    "events": "/v2/models/{model}/infer_stream",
}
ROW = list(range(16))


def caller(name: str) -> list[tuple[str, str]]:
    """Return the headers of the caller of that name; one of them comes twice."""
    return [("traceparent", CALLERS[name]), ("tracestate", f"of={name}"), ("tracestate", "more=1")]


def ask(url: str, address: str) -> dict[str, str]:
    """Ask at each frontend with a trace context; return the one that came back."""
    rows = {"INPUT0": [ROW], "INPUT1": [ROW]}
    inputs = [{"name": name, "datatype": "INT32", "shape": [1, 16], "data": ROW} for name in rows]
    answered: dict[str, str] = {}
    with httpx.Client(base_url=url, timeout=60) as client:
        for name, path, body in (
            ("native", "/infer/simple", rows),
            ("kserve", "/v2/models/simple/infer", {"inputs": inputs}),
            ("events", "/v2/models/simple/infer_stream", {"inputs": inputs}),
        ):
            response = client.post(path, json=body, headers=caller(name))
            assert response.status_code == 200
            answered[name] = response.headers["traceparent"]
        refused = client.post("/v2/models/simple/infer", json={"inputs": []}, headers=caller("kserve"))
        assert refused.status_code == 400
    channel: Any = grpc.insecure_channel(address)
    with channel:
        tensors = [TensorValue(name, "INT32", np.array([ROW], np.int32)) for name in rows]
        message = write_request(InferenceRequest("simple", tensors))
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        response, ended = call.with_call(message, metadata=caller("grpc"), timeout=30)
        assert read_response(response).outputs
        answered["grpc"] = dict(ended.trailing_metadata())["traceparent"]
    asked = {
        "model_name": "simple",
        "inputs": inputs,
        "parameters": {"traceparent": CALLERS["websocket"], "tracestate": "of=websocket,more=1"},
    }
    with connect(f"{url.replace('http', 'ws', 1)}/v2/ws") as socket:
        socket.send(json.dumps(asked))
        answered["websocket"] = json.loads(socket.recv(30))["parameters"]["traceparent"]
    return answered


@contextmanager
def receiving(spans: list[dict[str, Any]], protocol: str = "http/protobuf") -> Iterator[str]:
    """Run a receiver, and give its address for `protocol`; afterwards `spans` are the spans and metrics that it got."""
    with subprocess.Popen([sys.executable, str(RECEIVER)], stdout=subprocess.PIPE, text=True) as receiver:
        output: Any = receiver.stdout
        port = output.readline().split()[protocol == "grpc"]
        reading = threading.Thread(target=lambda: spans.extend(map(json.loads, output)))  # the pipe may become full
        reading.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            receiver.terminate()
            reading.join()


def test_spans_of_every_frontend_arrive() -> None:
    spans: list[dict[str, Any]] = []
    with (
        receiving(spans) as endpoint,
        Served(f"{SIMPLE}:Simple", "--grpc-port", "0", "--trace-endpoint", endpoint) as served,
    ):
        address = served.until_grpc().grpc
        answered = ask(served.until_ready().url, address)
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
    assert {span["service"] for span in spans} == {"weir"}
    assert {span["path"] for span in spans} == {"/v1/traces"}
    for name, caller in CALLERS.items():
        trace, parent, _ = caller.split("-")[1:]
        found = answered[name].split("-")
        assert found[1] == trace
        (request,) = [span for span in spans if span["span"] == found[2]]
        assert request["state"] == f"of={name},more=1"
        assert (request["name"], request["trace"], request["parent"]) == ("infer simple", trace, parent)
        assert request["attributes"]["weir.frontend"] == (name if name in ("grpc", "websocket") else "http")
        assert request["attributes"].get("http.route") == ROUTES.get(name)
        children = {span["name"]: span for span in spans if span["parent"] == request["span"]}
        assert children.keys() == {"queue", "compute"}
        assert request["start"] == children["queue"]["start"] <= children["queue"]["end"]
        assert children["queue"]["end"] == children["compute"]["start"] <= children["compute"]["end"] == request["end"]
        (link,) = request["links"]
        (batch,) = [span for span in spans if [span["trace"], span["span"]] == link]
        assert [trace, request["span"]] in batch["links"] and batch["name"] == "batch simple"


@subcases(("fronts", "protocol"), [("1", "http/protobuf"), ("2", "grpc")])
def test_metrics_arrive_once_with_the_numbers_that_are_shown(fronts: str, protocol: str) -> None:
    lines: list[dict[str, Any]] = []
    with (
        receiving(lines, protocol) as endpoint,
        Served(
            f"{SIMPLE}:Simple", "--fronts", fronts, "--trace-endpoint", endpoint, "--triton-metrics",
            env={"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_METRIC_EXPORT_INTERVAL": "300",
                 "OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED": "true"},
        ) as served,
        httpx.Client(base_url=served.until_ready().url, timeout=60) as client,
    ):  # fmt: skip
        good = [client.post("/infer/simple", json={"INPUT0": [ROW], "INPUT1": [ROW]}) for _ in range(5)]
        bad = client.post("/infer/simple", content=b"no JSON")
        assert [each.status_code for each in [*good, bad]] == [200] * 5 + [400]
        shown = client.get("/metrics", headers={"accept": "application/openmetrics-text"}).text
        families = {each.name: each for each in openmetrics.text_string_to_metric_families(shown)}
        filled = {name for name, each in families.items() if each.samples}
        assert len(filled) > 20
        while not filled <= {each["name"] for each in lines}:  # those of fronts are not pushed when these have ended
            assert client.get("/health/live").status_code == 200
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
    metrics = {each["name"]: each for each in lines if each["path"] == "/v1/metrics"}  # the last of each name
    requests = {each["labels"]["code"]: each["value"] for each in metrics["weir_requests"]["points"]}
    assert requests == {"200": 5, "400": 1} and metrics["weir_requests"]["kind"] == "sum"
    (times,), samples = metrics["weir_total_time_seconds"]["points"], families["weir_total_time_seconds"].samples
    assert list(accumulate(times["counts"])) == [each.value for each in samples if each.name.endswith("_bucket")]
    assert times["labels"] == {"model": "simple"} and times["sum"] == samples[-1].value
    spans = {each["trace"] for each in lines if each["path"] == "/v1/traces"}
    exemplars = {each.exemplar.labels["trace_id"] for each in samples if each.exemplar}
    assert exemplars == set(times["traces"]) and exemplars and exemplars <= spans
    units = [metrics[name]["unit"] for name in ("weir_total_time_seconds", "weir_held_bytes", "weir_requests")]
    assert units == ["s", "By", ""] and metrics["nv_inference_count"]["kind"] == "gauge"
    answered = metrics["http.server.request.duration"]["points"]
    assert {each["labels"]["http.response.status_code"]: sum(each["counts"]) for each in answered} == {200: 5, 400: 1}
    assert {each["labels"].get("http.route") for each in answered} == {"/infer/{model}", None}  # None: it was refused
    assert len({each["resource"]["service.instance.id"] for each in lines}) == 1
    assert metrics["process.uptime"]["points"][0]["value"] > 0


def test_a_gauge_that_is_gone_is_sent_as_zero(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    os.mkfifo(fifo := tmp_path / "fifo")
    model = tmp_path / "late.py"
    model.write_text(
        f"import weir\n\n\nclass Late(weir.Model):\n    def load(self):\n        open({str(fifo)!r}).close()\n\n"
        "    def predict(self, batch):\n        return batch\n"
    )

    def workers() -> dict[str, float]:
        points = [point for each in list(lines) if each["name"] == "weir_workers" for point in each["points"]]
        return {point["labels"]["state"]: point["value"] for point in points}  # the last of each state

    with receiving(lines) as endpoint:
        env = {
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
        }
        with Served(f"{model}:Late", env=env) as served:
            until(lambda: workers() == {"starting": 1})
            fifo.write_text("")  # the worker waits for it
            until(lambda: workers() == {"starting": 0, "ready": 1})
            served.signal(signal.SIGTERM)
            assert served.wait() == 0


class Refusing(BaseHTTPRequestHandler):
    """Refuses the first three posts to each path, and takes all others."""

    posts: ClassVar = Counter[str]()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.posts[self.path] += 1
        self.send_response(400 if self.posts[self.path] <= 3 else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_an_outage_of_the_receiver_is_logged_in_two_lines() -> None:
    with HTTPServer(("127.0.0.1", 0), Refusing) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{receiver.server_port}"
        env = {
            "OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_METRIC_EXPORT_INTERVAL": "50", "OTEL_BSP_SCHEDULE_DELAY": "50",
        }  # fmt: skip
        with serving(f"{SIMPLE}:Simple", "--trace-endpoint", endpoint, env=env) as (served, client):
            while min(Refusing.posts["/v1/traces"], Refusing.posts["/v1/metrics"]) <= 4:
                assert client.post("/infer/simple", json={"INPUT0": [ROW], "INPUT1": [ROW]}).status_code == 200
            served.signal(signal.SIGTERM)
            served.until_logged("stopped")
        receiver.shutdown()
    said = [line for line in served.log.splitlines() if re.search("sent|export|Exception", line)]
    for name in ("metrics", "traces"):
        began, ended = (line for line in said if f" {name} " in line)
        assert re.search(f"warning .* {name} cannot be sent .*reason=.*400.*Bad Request", began)
        assert re.search(f"info .* {name} are sent again .*failures=3", ended)
    assert len(said) == 4, said


def test_a_second_signal_is_heard_while_a_receiver_of_spans_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it connects, and nobody reads
        receiver = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {"OTEL_BSP_SCHEDULE_DELAY": "600000", "OTEL_EXPORTER_OTLP_TIMEOUT": "60"}  # sent at the end alone
        with serving(f"{SIMPLE}:Simple", "--trace-endpoint", receiver, env=env) as (served, client):
            assert client.post("/infer/simple", json={"INPUT0": [ROW], "INPUT1": [ROW]}).status_code == 200
            served.signal(signal.SIGTERM)
            sending, _ = silent.accept()
            with sending:
                served.signal(signal.SIGTERM)
                assert served.process.wait(15) == 128 + signal.SIGTERM


def test_a_wrong_interval_is_refused_by_name_and_no_header_is_shown() -> None:
    env = {
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_METRIC_EXPORT_INTERVAL": "0",
        "OTEL_EXPORTER_OTLP_HEADERS": "Key: s3cret",
    }
    done = weir("serve", f"{SIMPLE}:Simple", "--port", "0", env=env)
    assert done.returncode == 2 and "OTEL_METRIC_EXPORT_INTERVAL: OpenTelemetry refuses" in done.stderr, done.stderr
    assert "Header format invalid" in done.stderr and "s3cret" not in done.stderr


# A real server of texts sends the spans of a call to a real OTLP receiver, each a process of its own.


CALLER = f"00-{'e' * 32}-{'f' * 16}-01"
TENSORS = {"inputs": [{"name": "input", "datatype": "BYTES", "shape": [3], "data": ["d", "e", "f"]}]}
# By the frontend that the span names and the texts of a call: where, and what.
CALLS: dict[tuple[str, int], tuple[str, Any]] = {
    ("openai", 2): ("/v1/embeddings", {"input": ["a", "b"]}),
    ("encode", 1): ("/encode", {"texts": ["c"]}),
    ("http", 3): ("/v2/models/tiny/infer", TENSORS),
    ("http", 1): ("/infer/tiny", "g"),
    ("http", 2): ("/infer/tiny/batch", ["h", "i"]),
}


def test_a_call_at_each_endpoint_of_texts_is_one_trace(tmp_path: Path) -> None:
    directory = sentence_model(tmp_path / "tiny", "bert")
    flags = ("--cache", tmp_path / "cache", "--no-calibrate", "--executor", "thread")
    wrong = {"inputs": [{"name": "input", "datatype": "BYTES", "shape": [2], "data": ["fine", ""]}]}
    long = {"texts": ["x " * 1000], "truncate": False}
    lines: list[dict[str, Any]] = []
    with (
        receiving(lines) as endpoint,
        Served(
            directory, *flags, "--trace-endpoint", endpoint, command="embed serve",
            env={"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint},
        ) as served,
    ):  # fmt: skip
        url = served.until_printed(r"\bcurl .*?(https?://\S+?)/encode")[1]
        with httpx.Client(base_url=url, headers={"traceparent": CALLER}, timeout=30) as client:
            answers = {call: client.post(path, json=body) for call, (path, body) in CALLS.items()}
            refused = [client.post("/encode", json=long)]
            refused += [client.post(f"/v2/models/tiny/{call}", json=wrong) for call in ("infer", "infer_stream")]
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
    spans = [each for each in lines if each["path"] == "/v1/traces"]
    times = {each["name"]: each for each in lines}["gen_ai.server.request.duration"]["points"]
    tiny = {"gen_ai.operation.name": "embeddings", "gen_ai.provider.name": "weir", "gen_ai.request.model": "tiny"}
    assert [(sum(each["counts"]), each["labels"]) for each in times] == [(2, tiny)]
    faults = [span for span in spans if span["name"] == "encode tiny" and "error.type" in span["attributes"]]
    assert [answer.status_code for answer in refused] == [400] * 3
    named = [answer.headers["traceparent"] for answer in refused]
    assert named == [f"00-{'e' * 32}-{fault['span']}-01" for fault in faults]
    calls = [span for span in spans if span["name"] == "encode tiny" and span not in faults]
    for (frontend, texts), answer in answers.items():
        about = {"weir.frontend": frontend, "weir.texts": texts}
        (call,) = [span for span in calls if about.items() <= span["attributes"].items()]
        path = {"openai": "/v1/embeddings", "encode": "/encode"}.get(frontend)
        assert call["attributes"].get("http.route") == path
        assert answer.status_code == 200 and answer.headers["traceparent"] == f"00-{call['trace']}-{call['span']}-01"
        assert (call["trace"], call["parent"]) == ("e" * 32, "f" * 16)
        children = [span for span in spans if span["parent"] == call["span"]]
        assert sorted(span["name"] for span in children) == ["infer tiny"] * texts + ["tokenize"]
        assert {span["trace"] for span in children} == {"e" * 32}
        for text in children:
            if text["name"] == "infer tiny":
                below = {span["name"] for span in spans if span["parent"] == text["span"]}
                assert below == {"queue", "compute"}
