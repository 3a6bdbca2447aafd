"""The endpoints of the Open Inference Protocol under load: a real server, real sockets."""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.rings import subcases
from tests.served import MODELS, Served

from weir.bench import HttpOptions, Report, ServerTarget, bench
from weir.errors import SettingsError

# Whether nothing is left cannot be asked here: gRPC keeps threads and descriptors for as long as a process lives.

SIMPLE = Path(__file__).parents[2] / "examples" / "repository" / "simple" / "1" / "model.py"
URLS = [
    "{http}/v2/models/simple/infer", "{http}/v2/models/simple/infer#binary", "{ws}/simple", "{ws}/simple#binary",
    "{grpc}/simple",
]  # fmt: skip
ANY_LAG = 1e9  # milliseconds: how late requests leave on a busy machine is not what is tested here


GIVEN = json.dumps({"inputs": [{"name": "input", "datatype": "BYTES", "shape": [1], "data": ["3"]}]})


class Running:
    """A server, and where its endpoints are."""

    def __init__(self, served: Served, address: str) -> None:
        self.served = served
        self.places = {"http": served.url, "ws": served.url.replace("http", "ws"), "grpc": f"grpc://{address}"}

    def at(self, url: str) -> str:
        return url.format(**self.places)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Served(f"{SIMPLE}:Simple", f"{MODELS}:Square", "--grpc-port", "0") as served:
        address = served.until_logged(r"listening.*address=\S*?grpc://(\S+:\d+)")[1]
        yield Running(served.until_ready(), address)


def put_load(running: Running, url: str, data: str | None = None, rows: int = 1) -> Report:
    options = HttpOptions(channels=2, rows=rows)
    target = ServerTarget(running.at(url), data, options)
    return bench(target, rate=400, duration=0.2, max_lag_ms=ANY_LAG)


@pytest.mark.parametrize("url", URLS)
def test_a_model_is_sent_what_its_metadata_declare(running: Running, url: str) -> None:
    outcome = put_load(running, url, rows=3).outcome
    assert outcome.target == running.at(url)
    assert outcome.answered == outcome.requests > 50 and not outcome.errors
    if outcome.batches is not None:  # gRPC has no page where batches are counted
        rows = outcome.batches.count * outcome.batches.mean_rows
        assert round(rows) % 3 == 0 and rows >= 3 * outcome.requests


@subcases(
    ("url", "data"),
    [
        ("{http}/v2/models/square/infer", None),
        ("{ws}/square", None),
        ("{http}/v2/models/square/infer#binary", GIVEN),
        ("{ws}/square", GIVEN),
        ("{grpc}/square", GIVEN),
    ],
)
def test_an_item_model_is_sent_its_example_or_what_is_given(running: Running, url: str, data: str | None) -> None:
    outcome = put_load(running, url, data).outcome
    assert outcome.answered == outcome.requests > 50


@subcases("place", ["{http}/v2/models/{model}/infer", "{ws}/{model}", "{grpc}/{model}"])
def test_what_the_model_refuses_is_reported_before_anything_is_measured(running: Running, place: str) -> None:
    tensor = {"name": "other", "datatype": "BYTES", "shape": [1], "data": ["3"]}
    with pytest.raises(SettingsError, match="other"):
        put_load(running, place.replace("{model}", "square"), json.dumps({"inputs": [tensor]}))
    with pytest.raises(SettingsError, match="nobody"):
        put_load(running, place.replace("{model}", "nobody"))


@pytest.mark.parametrize("url", ["ws://localhost:1/simple", "grpc://localhost:1/simple"])
def test_no_server(url: str) -> None:
    with pytest.raises(SettingsError, match="localhost:1"):
        bench(ServerTarget(url, options=HttpOptions(timeout=2.0)), rate=10)


def test_grpc_takes_no_certificate_unseen_and_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="gRPC accepts no certificate that it cannot check"):
        ServerTarget("grpcs://localhost:1/simple", options=HttpOptions(insecure=True))
    monkeypatch.setitem(sys.modules, "weir.client.grpc", None)
    with pytest.raises(SettingsError, match="add Weir's extra 'grpc'"):
        ServerTarget("grpc://localhost:1/simple")


@pytest.fixture
def silent() -> Iterator[str]:
    """Listen, and neither read nor write."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"grpc://127.0.0.1:{listening.getsockname()[1]}/simple"


def test_a_grpc_server_that_is_silent_is_no_target(silent: str) -> None:
    with pytest.raises(SettingsError, match="DeadlineExceeded"):
        bench(ServerTarget(silent, options=HttpOptions(channels=2, timeout=0.3)), rate=20, duration=0.2)


@pytest.fixture(autouse=True)
def no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
