"""`weir embed terminate` against a server that a command has started."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.served import Served, weir_here
from tests.text_models import tiny

from weir.bench.vectors import reserve_ports


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("served")
    tiny.model(folder / "model", layers=2)
    (folder / "token").write_text("secret\n")
    yield folder


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """Two that nobody else gets, for requests and answers over ZeroMQ."""
    with reserve_ports(2) as (port, port_out):
        yield port, port_out


@pytest.mark.parametrize("protocol", ["http", "zeromq"])
def test_a_server_ends_for_whom_it_obeys(folder: Path, ports: tuple[int, int], protocol: str) -> None:
    port, port_out = ports
    flags = (
        "--cache",
        folder / "cache",
        "--cpu",
        "--threads",
        "1",
        "--no-calibrate",
        "--zmq-port",
        port,
        "--zmq-port-out",
        port_out,
    )
    with Served(
        folder / "model", *flags, "--control-token-file", folder / "token", command="embed serve"
    ) as served:  # fmt: skip
        url = served.until_printed(r"curl .*?(http://\S+)/encode")[1]
        where = (url,) if protocol == "http" else ("-ip", "127.0.0.1", "-port", port, "-port_out", port_out)
        refused = weir_here("embed", "terminate", *where)
        assert refused.returncode != 0 and "control token" in refused.stderr and refused.stderr.count("\n") == 1
        if protocol == "zeromq":
            refused = weir_here("embed", "terminate", *where, "--token-file", folder / "token")
            assert refused.returncode == 2 and "over ZeroMQ no token can be sent" in refused.stderr
        done = weir_here("embed", "terminate", url, "--token-file", folder / "token")
        assert done.returncode == 0 and "finishes what it has accepted, and stops" in done.stdout
        assert served.wait() == 0


def test_a_server_without_a_token_ends_over_zeromq(folder: Path, ports: tuple[int, int]) -> None:
    port, port_out = ports
    flags = (
        "--cache",
        folder / "cache",
        "--cpu",
        "--threads",
        "1",
        "--no-calibrate",
        "--zmq-port",
        port,
        "--zmq-port-out",
        port_out,
    )
    with Served(folder / "model", *flags, command="embed serve") as served:
        served.until_printed(r"curl .*?(http://\S+)/encode")
        done = weir_here("embed", "terminate", "-ip", "127.0.0.1", "-port", port, "-port_out", port_out)
        assert done.returncode == 0 and "finishes what it has accepted, and stops" in done.stdout
        assert served.wait() == 0


def test_a_url_and_a_port_are_one_too_many() -> None:
    done = weir_here("embed", "terminate", "http://localhost:1", "--port", "5555")
    assert done.returncode == 2 and "give either a URL, or --ip and --port" in done.stderr


def test_where_nobody_listens() -> None:
    done = weir_here("embed", "terminate", "http://127.0.0.1:9", "--timeout", "1")
    assert done.returncode != 0 and "127.0.0.1:9" in done.stderr and done.stderr.count("\n") == 1
    done = weir_here("embed", "terminate", "-ip=127.0.0.1", "-port=9", "-timeout=100")  # milliseconds, as there
    assert done.returncode != 0 and "no response in time" in done.stderr and done.stderr.count("\n") == 1
