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


@pytest.mark.parametrize("token", [True, False])
def test_a_server_ends_for_whom_it_obeys(folder: Path, token: bool) -> None:
    with reserve_ports(2) as (port, port_out):
        flags = ("--cache", folder / "cache", "--cpu", "--threads", "1", "--no-calibrate")
        ports = ("--zmq-port", port, "--zmq-port-out", port_out)
        guard = ("--control-token-file", folder / "token") if token else ()
        with Served(folder / "model", *flags, *ports, *guard, command="embed serve") as served:
            url = served.until_printed(r"curl .*?(http://\S+)/encode")[1]
            zeromq = ("-ip", "127.0.0.1", "-port", port, "-port_out", port_out)
            key = ("--token-file", folder / "token")
            if token:
                for where in ((url,), zeromq):
                    refused = weir_here("embed", "terminate", *where)
                    assert refused.returncode != 0 and refused.stderr.count("\n") == 1
                    assert "control token" in refused.stderr
                refused = weir_here("embed", "terminate", *zeromq, *key)
                assert refused.returncode == 2 and "over ZeroMQ no token can be sent" in refused.stderr
            done = weir_here("embed", "terminate", *((url, *key) if token else zeromq))
            assert done.returncode == 0 and "finishes what it has accepted, and stops" in done.stdout
            assert served.wait() == 0


def test_where_nobody_listens() -> None:
    done = weir_here("embed", "terminate", "http://localhost:1", "--port", "5555")
    assert done.returncode == 2 and "give either a URL, or --ip and --port" in done.stderr
    done = weir_here("embed", "terminate", "http://127.0.0.1:9", "--timeout", "1")
    assert done.returncode != 0 and "127.0.0.1:9" in done.stderr and done.stderr.count("\n") == 1
    done = weir_here("embed", "terminate", "-ip=127.0.0.1", "-port=9", "-timeout=100")  # milliseconds, as there
    assert done.returncode != 0 and "no response in time" in done.stderr and done.stderr.count("\n") == 1
