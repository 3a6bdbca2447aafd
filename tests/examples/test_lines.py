"""The example of a frontend is opened by a real server that finds it by its entry point."""

import signal
import socket
from pathlib import Path

import pytest
from tests.served import Served

ENTRY_POINTS = "[weir.frontends]\nlines = examples.lines:LineFrontend\n"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which the example is an installed package."""
    info = tmp_path / "lines-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{root}:{root / 'src'}:{tmp_path}"}


def test_lines_in_lines_out_until_the_server_has_drained(installed: dict[str, str]) -> None:
    with Served("examples.square:Square", "--frontend", "lines=0", env=installed) as served:
        port = int(served.until_logged(r"listening.*tcp://127\.0\.0\.1:(\d+)")[1])
        served.until_ready()
        with socket.create_connection(("127.0.0.1", port)) as caller, caller.makefile("rwb") as lines:
            lines.write(b"3\n4\n'\n")
            lines.flush()
            assert [lines.readline() for _ in range(2)] == [b"9\n", b"16\n"]
            assert lines.readline().startswith(b'{"error": ')
            served.signal(signal.SIGTERM)
            assert served.wait() == 0
            assert lines.readline() == b""


def test_a_server_without_the_package_says_so() -> None:
    with Served("examples.square:Square", "--frontend", "lines=0") as served:
        assert served.wait() == 2
        served.until_logged(r"unknown frontend 'lines'; available: none")
