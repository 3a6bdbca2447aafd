"""TorchServe's management API, spoken to a real server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.catalog.adapters.archives import archive
from tests.rings import subcases

import weir

HANDLER = "def handle(data, context):\n    return [context.system_properties['batch_size'] for row in data or ()]\n"
FOLDER = "import weir\nclass Folder(weir.Model):\n    def predict(self, batch): return batch\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    for name in ("first", "second"):
        archive(root / f"{name}.mar", {"handler.py": HANDLER})
    (root / "folder" / "1").mkdir(parents=True)
    (root / "folder" / "1" / "model.py").write_text(FOLDER)
    return root


class Server:
    """A client of each of a server's two ports."""

    def __init__(self, addresses: list[str]) -> None:
        self.inference, self.management = [httpx.Client(base_url=each, timeout=60) for each in addresses]

    def asked(self, method: str, path: str, **headers: str) -> tuple[int, Any]:
        answer = self.management.request(method, path, headers=headers)
        return answer.status_code, answer.json()


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with weir.running(model_repository=str(store), load=["first"], frontends={"torchserve": 0}, spin=0.0) as running:
        server = Server(running.addresses)
        yield server
        server.inference.close()
        server.management.close()


def test_models_come_change_and_go(server: Server) -> None:
    url = "/models?url=second.mar&model_name=other&batch_size=4&max_batch_delay=20&synchronous=true"
    assert server.asked("POST", url) == (
        200,
        {"status": 'Model "other" Version: 1.0 registered with 1 initial workers'},
    )
    assert server.asked("POST", url)[0] == 409
    assert server.inference.post("/predictions/other/1.0", content=b"").json() == 4
    assert server.asked("GET", "/models") == (
        200,
        {"models": [{"modelName": "first", "modelUrl": "first.mar"}, {"modelName": "other", "modelUrl": "second.mar"}]},
    )

    assert server.asked("PUT", "/models/other?min_worker=2") == (
        200,
        {"status": "Workers scaled to 2 for model: other"},
    )
    (told,) = server.asked("GET", "/models/other/1.0")[1]
    assert [each["status"] for each in told["workers"]] == ["READY", "READY"]
    assert (told["modelVersion"], told["batchSize"], told["maxBatchDelay"], told["minWorkers"]) == ("1.0", 4, 20, 2)
    assert server.asked("PUT", "/models/other/1.0?min_worker=1")[0] == 200
    assert server.asked("GET", "/models/other/all")[1][0]["minWorkers"] == 1

    assert server.asked("DELETE", "/models/other/1.0") == (200, {"status": 'Model "other" unregistered'})
    assert server.inference.post("/predictions/other", content=b"").status_code == 404


@subcases(
    ("method", "path", "status", "message"),
    [
        ("POST", "/models", 404, "url='': must be the name of a file"),
        ("POST", "/models?url=../first.mar", 404, "url='../first.mar': must be the name of a file in the model store"),
        ("POST", "/models?url=http://example.com/a.mar", 404, "nothing is downloaded"),
        ("POST", "/models?url=lost.mar", 404, "unknown model 'lost'"),
        ("POST", "/models?url=lost.mar&model_name=x", 404, "unknown model 'x'"),
        ("POST", "/models?url=second.mar&model_name=a%20b", 404, "model 'a b': must be of letters"),
        ("POST", "/models?url=second.mar&model_name=folder", 400, "folder/1: file='second.mar': there is no such file"),
        ("POST", "/models?url=second.mar&batch_size=many", 400, "batch_size='many': must be a number from 0 on"),
        ("PUT", "/models/first?min_worker=0", 400, "min_worker=0: must be a number from 1 to"),
        ("PUT", "/models/lost?min_worker=1", 404, "unknown model 'lost'"),
        ("GET", "/models/first/9.0", 404, "unknown version '9.0'"),
        ("DELETE", "/models/first/9.0", 404, "unknown version '9.0'"),
        ("PATCH", "/models/first", 405, "PATCH /models/first: takes DELETE, GET, PUT only"),
    ],
)
def test_what_is_refused(server: Server, method: str, path: str, status: int, message: str) -> None:
    code, answer = server.asked(method, path)
    assert (code, answer["code"]) == (status, status)
    assert message in answer["message"]


def test_a_target_of_another_name_comes_again(store: Path, tmp_path: Path) -> None:
    (tmp_path / "weir.toml").write_text(f"[models.'own/er']\ntarget = '{store}/first.mar'\n")
    with weir.running(config=str(tmp_path / "weir.toml"), frontends={"torchserve": 0}, spin=0.0) as running:
        server = Server(running.addresses)
        assert server.asked("DELETE", "/models/own/er/1.0")[0] == 200
        assert server.asked("POST", "/models?url=first.mar&model_name=own/er")[0] == 200
        assert server.inference.put("/predictions/own/er/1.0").json() == 1
        server.inference.close()
        server.management.close()


@subcases(
    ("method", "path"),
    [("POST", "/models?url=second.mar"), ("PUT", "/models/first?min_worker=2"), ("DELETE", "/models/first")],
)
def test_a_caller_behind_a_proxy_changes_nothing(server: Server, method: str, path: str) -> None:
    code, answer = server.asked(method, path, **{"X-Forwarded-For": "1.2.3.4"})
    assert (code, answer["type"]) == (403, "BadRequestException")


def test_a_server_with_keys_asks_for_them(store: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    with weir.running(
        model_repository=str(store),
        load=["first"],
        frontends={"torchserve": "127.0.0.1:0"},
        api_key="k",
        control_token_file=str(tmp_path / "token"),
        spin=0.0,
    ) as running:
        server = Server(running.addresses)
        assert server.asked("GET", "/models")[0] == 401
        assert server.asked("GET", "/models", Authorization="Bearer k")[0] == 200
        assert server.asked("DELETE", "/models/first", Authorization="Bearer k")[0] == 401
        assert server.asked("DELETE", "/models/first", Authorization="Bearer t")[0] == 200
        server.inference.close()
        server.management.close()
