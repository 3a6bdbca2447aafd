import json
from pathlib import Path

import numpy as np
import pytest
from tests.rings import subcases

from weir.bench import target
from weir.errors import SettingsError


def test_data_is_the_body_itself_or_a_file_or_the_lines_of_one(tmp_path: Path) -> None:
    whole, lines = tmp_path / "a.json", tmp_path / "a.jsonl"
    whole.write_text("[1,\n2]\n")
    lines.write_text('1\n\n"two"\n{"three": 3}\n')
    assert target.read_payloads("3") == [b"3"]
    assert target.read_payloads(f"@{whole}") == [b"[1,\n2]\n"]
    assert target.read_payloads(f"@{lines}") == [b"1", b'"two"', b'{"three": 3}']
    assert target.read_payloads([1, "two"]) == [b"1", b'"two"']
    assert target.decode_items([b"1", b'"two"']) == [1, "two"]


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.ndjson"
    empty.write_text("\n")
    for data, wrong in (
        (f"@{empty}", "must have at least one value"), ("@nowhere.json", "cannot be read: No such file"),
        ([], "must have at least one value"), ([object()], "data: .*object"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=wrong):
            target.read_payloads(data)
    with pytest.raises(SettingsError, match="must be JSON for a model in this process"):
        target.decode_items([b"three"])


# What a URL means.


@subcases(
    ("url", "endpoint"),
    [
        ("http://localhost:8000/infer/square", target.TargetEndpoint("http")),
        ("http://unix:/run/weir.sock:/infer/square", target.TargetEndpoint("http")),
        ("http://host/v2/models/a%20b/infer", target.TargetEndpoint("kserve", "a b")),
        (
            "http://host/v2/models/sums/versions/2/infer#binary",
            target.TargetEndpoint("kserve", "sums", "2", binary=True),
        ),
        ("http://unix:weir.sock:/v2/models/sums/infer", target.TargetEndpoint("kserve", "sums")),
        ("grpc://localhost:8001/sums", target.TargetEndpoint("grpc", "sums", "", "localhost:8001")),
        ("grpcs://[::1]:8001/sums/3", target.TargetEndpoint("grpc", "sums", "3", "[::1]:8001", tls=True)),
        ("ws://localhost:8000/sums", target.TargetEndpoint("ws", "sums", "", "localhost:8000")),
        (
            "wss://localhost:8000/sums/1#binary",
            target.TargetEndpoint("ws", "sums", "1", "localhost:8000", tls=True, binary=True),
        ),
    ],
)
def test_a_url_names_an_endpoint(url: str, endpoint: target.TargetEndpoint) -> None:
    assert target.endpoint_of(url) == endpoint


@subcases(
    ("url", "message"),
    [
        ("grpc://localhost/sums", "must be like grpc://HOST:PORT/MODEL"),
        ("grpc://localhost:8001", "must be like grpc://HOST:PORT/MODEL"),
        ("grpc://localhost:99999/sums", "Port out of range"),
        ("ws://localhost:8000/a/b/c", "must be like"),
        ("ws://localhost:8000/sums#raw", "only #binary may follow"),
        ("http://localhost:8000/infer/square#binary", "only #binary may follow, and only where"),
        ("grpc://localhost:8001/sums#binary", "only #binary may follow"),
    ],
)
def test_what_means_nothing_is_refused(url: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        target.endpoint_of(url)


# The inference requests that are sent.


ENDPOINT = target.TargetEndpoint("kserve", "sums", "2")
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.5]}


def test_a_request_is_made_of_ones() -> None:
    request = target.made_request(
        ENDPOINT, [target.DeclaredInput("x", "FP32", (-1, -1, 3)), target.DeclaredInput("n", "INT64", (-1,))], rows=2
    )
    assert (request.model, request.version) == ("sums", "2")
    first, second = request.inputs
    assert (first.array.shape, first.array.dtype, second.array.shape) == ((2, 1, 3), np.float32, (2,))
    assert first.array.all() and second.array.all()


def test_nobody_knows_what_bytes_are() -> None:
    with pytest.raises(
        SettingsError, match="model 'sums': its metadata do not say what 'input' is; give it with --data"
    ):
        target.made_request(ENDPOINT, [target.DeclaredInput("input", "BYTES", (-1,))], rows=1)


def test_what_is_given_is_sent() -> None:
    (request,) = target.given_requests(json.dumps({"inputs": [TENSOR]}), ENDPOINT)
    assert request.inputs[0].array.tolist() == [[1.5, 2.5]]


@subcases("metadata", [None, {}, {"inputs": []}, {"inputs": [{"name": "x"}]}, {"inputs": 3}])
def test_metadata_without_inputs_are_of_no_use(metadata: object) -> None:
    with pytest.raises(SettingsError, match="model 'sums': the server has no metadata about its inputs"):
        target.declared_inputs("sums", metadata)
