"""A real server sends its spans to a real OTLP receiver, each a process of its own."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
from tests.served import Served
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
def receiving(spans: list[dict[str, Any]]) -> Iterator[str]:
    """Run a receiver, and give its address; afterwards `spans` are those that it got."""
    with subprocess.Popen([sys.executable, str(RECEIVER)], stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(receiver.stdout.readline())}"
        finally:
            receiver.terminate()
        spans += [json.loads(line) for line in receiver.stdout]


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
        children = {span["name"]: span for span in spans if span["parent"] == request["span"]}
        assert children.keys() == {"queue", "compute"}
        assert request["start"] == children["queue"]["start"] <= children["queue"]["end"]
        assert children["queue"]["end"] == children["compute"]["start"] <= children["compute"]["end"] == request["end"]
        (link,) = request["links"]
        (batch,) = [span for span in spans if [span["trace"], span["span"]] == link]
        assert [trace, request["span"]] in batch["links"] and batch["name"] == "batch simple"


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
    spans: list[dict[str, Any]] = []
    with (
        receiving(spans) as endpoint,
        Served(directory, *flags, "--trace-endpoint", endpoint, command="embed serve") as served,
    ):
        url = served.until_printed(r"\bcurl .*?(https?://\S+?)/encode")[1]
        with httpx.Client(base_url=url, headers={"traceparent": CALLER}, timeout=30) as client:
            answers = {call: client.post(path, json=body) for call, (path, body) in CALLS.items()}
            refused = [client.post("/encode", json=long)]
            refused += [client.post(f"/v2/models/tiny/{call}", json=wrong) for call in ("infer", "infer_stream")]
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
    faults = [span for span in spans if span["name"] == "encode tiny" and "error.type" in span["attributes"]]
    assert [answer.status_code for answer in refused] == [400] * 3
    named = [answer.headers["traceparent"] for answer in refused]
    assert named == [f"00-{'e' * 32}-{fault['span']}-01" for fault in faults]
    calls = [span for span in spans if span["name"] == "encode tiny" and span not in faults]
    for (frontend, texts), answer in answers.items():
        about = {"weir.frontend": frontend, "weir.texts": texts}
        (call,) = [span for span in calls if about.items() <= span["attributes"].items()]
        assert answer.status_code == 200 and answer.headers["traceparent"] == f"00-{call['trace']}-{call['span']}-01"
        assert (call["trace"], call["parent"]) == ("e" * 32, "f" * 16)
        children = [span for span in spans if span["parent"] == call["span"]]
        assert sorted(span["name"] for span in children) == ["infer tiny"] * texts + ["tokenize"]
        assert {span["trace"] for span in children} == {"e" * 32}
        for text in children:
            if text["name"] == "infer tiny":
                below = {span["name"] for span in spans if span["parent"] == text["span"]}
                assert below == {"queue", "compute"}
