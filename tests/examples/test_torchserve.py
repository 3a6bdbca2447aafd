"""The example of a protocol is spoken by a real server that finds it by its entry point, beside the protocols that Weir has."""

from pathlib import Path

import httpx
from tests.served import Served

ENTRY_POINTS = "[weir.protocols]\ntorchserve = examples.torchserve:TorchServe\n"


def test_predictions_beside_the_protocols_of_the_server(tmp_path: Path) -> None:
    info = tmp_path / "torchserve-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchserve\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root}:{root / 'src'}:{tmp_path}"}
    with Served("examples.square:Square", "--protocols", "torchserve", env=environment) as served:
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


def test_a_server_without_the_package_says_so() -> None:
    with Served("examples.square:Square", "--protocols", "torchserve") as served:
        assert served.wait() == 2
        served.until_logged(r"unknown protocols 'torchserve'; available: none")
