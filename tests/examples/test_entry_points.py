"""The example of a frontend, and a protocol, are opened and spoken by real servers that find them by their entry points."""

import signal
import socket
from pathlib import Path

import httpx
from tests.documentation.pages import ROOT
from tests.rings import subcases
from tests.served import Served, weir_here


def installed(folder: Path, kind: str, name: str, value: str) -> dict[str, str]:
    """Return the environment of a process in which the example is an installed package."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[weir.{kind}]\n{name} = {value}\n")
    return {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}:{folder}"}


def test_lines_in_lines_out_until_the_server_has_drained(tmp_path: Path) -> None:
    environment = installed(tmp_path, "frontends", "lines", "examples.lines:LineFrontend")
    with Served("examples.square:Square", "--frontend", "lines=0", env=environment) as served:
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


def test_predictions_beside_the_protocols_of_the_server(tmp_path: Path) -> None:
    environment = installed(tmp_path, "protocols", "mine", "weir.frontends.torchserve:TorchServe")
    with Served("examples.square:Square", "--protocols", "mine", env=environment) as served:
        served.until_ready()
        with httpx.Client(base_url=served.url) as client:
            answer = client.post("/predictions/square", content=b"3", headers={"X-Request-Id": "7"})
            assert (answer.status_code, answer.json(), answer.headers["x-request-id"]) == (200, 9, "7")
            assert client.post("/infer/square", content=b"3").json() == 9
            wrong = client.post("/predictions/square", content=b"")
            assert (wrong.status_code, wrong.json()["code"]) == (400, 400)
            missing = client.post("/predictions/cube", content=b"3")
            assert missing.status_code == 404
            assert missing.json()["type"] == "ModelNotFoundException"
            assert "unknown model 'cube'; available: square" in missing.json()["message"]
            assert client.get("/predictions/square").status_code == 405


@subcases(
    ("flags", "said"),
    [
        (("--frontend", "lines=0"), "unknown frontend 'lines'; available: torchserve"),
        (("--protocols", "mine"), "unknown protocols 'mine'; available: torchserve"),
    ],
)
def test_a_server_without_the_package_says_so(flags: tuple[str, ...], said: str) -> None:
    refused = weir_here("serve", "examples.square:Square", *flags)
    assert refused.returncode == 2 and said in refused.stderr
