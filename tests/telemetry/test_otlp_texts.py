"""A real server of texts sends the spans of a call to a real OTLP receiver, each a process of its own."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from tests.embedding.tiny import sentence_model
from tests.served import Served
from tests.telemetry.test_otlp import RECEIVER

CALLER = f"00-{'e' * 32}-{'f' * 16}-01"
TENSORS = {"inputs": [{"name": "input", "datatype": "BYTES", "shape": [3], "data": ["d", "e", "f"]}]}
# By the door that the span names and the texts of a call: where, and what.
CALLS: dict[tuple[str, int], tuple[str, Any]] = {
    ("openai", 2): ("/v1/embeddings", {"input": ["a", "b"]}),
    ("encode", 1): ("/encode", {"texts": ["c"]}),
    ("http", 3): ("/v2/models/tiny/infer", TENSORS),
    ("http", 1): ("/infer/tiny", "g"),
    ("http", 2): ("/infer/tiny/batch", ["h", "i"]),
}


def test_a_call_at_each_door_of_texts_is_one_trace(tmp_path: Path) -> None:
    directory = sentence_model(tmp_path / "tiny", "bert")
    with subprocess.Popen([sys.executable, str(RECEIVER)], stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        endpoint = f"http://127.0.0.1:{int(receiver.stdout.readline())}"
        said = ("--trace-endpoint", endpoint, "--cache", tmp_path / "cache", "--no-calibrate", "--executor", "thread")
        try:
            with Served(directory, *said, command="embed serve") as served:
                url = served.until_printed(r"\bcurl .*?(https?://\S+?)/encode")[1]
                headers = {"traceparent": CALLER}
                answers = {
                    call: httpx.post(url + path, json=body, headers=headers, timeout=30)
                    for call, (path, body) in CALLS.items()
                }
                wrong = {"inputs": [{"name": "input", "datatype": "BYTES", "shape": [2], "data": ["fine", ""]}]}
                refused = [
                    httpx.post(url + path, json=body, headers=headers, timeout=30)
                    for path, body in (
                        ("/encode", {"texts": ["x " * 1000], "truncate": False}),
                        ("/v2/models/tiny/infer", wrong),
                        ("/v2/models/tiny/infer_stream", wrong),
                    )
                ]
                served.signal(signal.SIGTERM)
                assert served.wait() == 0
        finally:
            receiver.terminate()
        spans = [json.loads(line) for line in receiver.stdout]
    faults = [span for span in spans if span["name"] == "encode tiny" and "error.type" in span["attributes"]]
    assert [answer.status_code for answer in refused] == [400] * 3
    named = [answer.headers["traceparent"] for answer in refused]
    assert named == [f"00-{'e' * 32}-{fault['span']}-01" for fault in faults]
    spans = [span for span in spans if span not in faults]
    calls = [span for span in spans if span["name"] == "encode tiny"]
    for (door, texts), answer in answers.items():
        about = {"weir.door": door, "weir.texts": texts}
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
