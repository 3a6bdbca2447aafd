"""Models on demand, served by the real command: loaded by their first requests, and evicted when others need their memory."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from benchmarks.parts import demand
from tests.catalog.repository.shelf import write
from tests.client.kit import MAKE, Running
from tests.rings import subcases
from tests.served import Served, serving, weir_here

from weir.client import GrpcClient, HttpClient
from weir.client.methods import Client
from weir.inprocess import InProcess

NAMED = """
import weir

class Named(weir.Model):
    def predict(self, batch):
        return [[{name!r}, item] for item in batch]
"""
CONFIG = 'needs_memory = "1GB"\narena_bytes = 0\n'


def fill(folder: Path, count: int, config: str = CONFIG) -> list[str]:
    """Write so many models, each of which answers with its name and the item; return their names."""
    names = [f"m{number}" for number in range(count)]
    for name in names:
        write(folder, {f"{name}/1/model.py": NAMED.format(name=name), f"{name}/config.toml": config})
    return names


def states(client: httpx.Client) -> dict[str, str]:
    return {each["name"]: each["state"] for each in client.get("/models").json()["models"]}


@pytest.mark.parametrize(
    ("models", "room", "seconds", "flags"),
    [
        pytest.param(24, 4, 2.0, (), marks=pytest.mark.nightly),
        (24, 4, 2.0, ("--fronts", "2")),
        pytest.param(1000, 50, 300.0, (), marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
def test_traffic_that_drifts_gets_every_answer_while_workers_are_killed(
    tmp_path: Path, models: int, room: int, seconds: float, flags: tuple[str, ...]
) -> None:
    demand.fill(tmp_path, [f"m{number}" for number in range(models)], f'needs_memory = "{demand.NEEDS}MB"\n')
    with demand.on_demand(tmp_path, room, *flags) as server:
        with demand.killing(server.front, 0.3) as killed:
            came = demand.send(server.port, models, demand.CALLERS, seconds)
        loads = len(demand.loads(server))
    assert came.wrong == []
    assert came.answers >= demand.CALLERS
    assert loads > room
    assert killed


UNLOADABLE = """
import weir

class Unloadable(weir.Model):
    def load(self):
        raise FileNotFoundError("weights.bin is not there")

    def predict(self, batch):
        return batch
"""


def test_a_model_that_cannot_be_loaded_is_not_called_ready(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    write(tmp_path, {"unloadable/1/model.py": UNLOADABLE, "unreadable/1/model.py": "(", "large/1/model.py": UNLOADABLE})
    write(tmp_path, {"large/config.toml": 'needs_memory = "6GB"\n'})
    broken = {"large": "it takes 6GB", "unloadable": "weights.bin is not there", "unreadable": "SyntaxError"}
    flags = ("--model-repository", tmp_path, "--model-control", "on-demand", "--model-memory", "5GB")
    with serving(*flags) as (_, client):

        def listed() -> dict[str, dict[str, Any]]:
            return {each["name"]: each for each in client.get("/models").json()["models"]}

        def ready(name: str) -> int:
            return client.get(f"/v2/models/{name}/ready").status_code

        assert [ready(name) for name in (*broken, "m0")] == [200] * 4  # nobody has tried,
        assert set(states(client).values()) == {"available"}  # and these questions read none
        for name, reason in broken.items():
            assert client.post(f"/infer/{name}", json=1).status_code == 503
            assert ready(name) == 503
            assert (listed()[name]["ready"], listed()[name]["state"]) == (False, "failed")
            assert reason in listed()[name]["reason"]
        index = {each["name"]: each for each in client.post("/v2/repository/index").json()}
        assert all(reason in index[name]["reason"] for name, reason in broken.items())
        assert client.get("/v2/health/ready").status_code == client.get("/health/ready").status_code == 200
        assert client.post("/infer/m0", json=1).json() == ["m0", 1]
        write(tmp_path, {"unreadable/1/model.py": NAMED.format(name="mended")})
        while client.post("/infer/unreadable", json=1).status_code == 503:
            pass
        assert (ready("unreadable"), listed()["unreadable"]["state"]) == (200, "loaded")


DOUBLE = """
import numpy as np
import weir

class Double(weir.Model):
    inputs = (weir.Tensor("x", "FP32", [-1, 3]),)
    outputs = (weir.Tensor("y", "FP32", [-1, 3]),)

    def predict(self, batch):
        return {"y": 2 * batch["x"]}
"""


def test_workers_are_forked_from_a_process_that_has_loaded_what_all_need(tmp_path: Path) -> None:
    fill(tmp_path, 2, "arena_bytes = 0\n")
    flags = ("--model-repository", tmp_path, "--model-control", "on-demand", "--model-memory", "5GB")
    with serving(*flags) as (served, client):
        workers = []
        for name in ("m0", "m1"):
            assert client.post(f"/infer/{name}", json=1).json() == [name, 1]
            (worker,) = client.get(f"/models/{name}").json()["workers"]
            workers.append(psutil.Process(worker["pid"]))
        first, second = (worker.ppid() for worker in workers)
        assert first == second
        assert psutil.Process(first).ppid() == served.process.pid


def test_every_channel_waits_for_a_model_that_was_not_read(tmp_path: Path) -> None:
    for name in (f"{kind}{number}" for kind in MAKE for number in (1, 2)):
        write(tmp_path, {f"{name}/1/model.py": DOUBLE, f"{name}/config.toml": CONFIG + 'executor = "thread"\n'})
    flags = ("--model-repository", tmp_path, "--model-control", "on-demand", "--model-memory", "1GB", "--grpc-port", 0)
    x = np.ones((1, 3), np.float32)
    with Served(*flags) as served:
        served.until_grpc().until_ready()
        for kind in ("http", "grpc", "websocket"):
            with MAKE[kind](Running(served, served.url, served.grpc)) as client:
                assert client.model_ready(f"{kind}1") is True
                for number in (1, 2, 1):
                    assert client.infer(f"{kind}{number}", {"x": x})["y"].tolist() == [[2.0, 2.0, 2.0]]
                assert client.model_metadata(f"{kind}1")["inputs"][0]["name"] == "x"


@subcases(
    ("flags", "error"),
    [
        (["--model-memory", "16GB"], "model_memory='16GB': is for model_control='on-demand'"),
        (["--model-control", "on-demand", "--model-memory", "lots"], "must be a size such as 16GB or 512MiB"),
        (["--model-control", "on-demand", "--model-memory", "0"], "must be a size such as 16GB or 512MiB"),
        (["--model-control", "sometimes"], "must be one of start, on-demand"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(tmp_path: Path, flags: list[str], error: str) -> None:
    done = weir_here("serve", "--model-repository", tmp_path, *flags)
    assert done.returncode != 0
    assert error in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = weir_here("serve", "tests.served_models:Square", "--model-control", "on-demand")
    assert "model_control='on-demand': is for the models of a --model-repository; give one" in done.stderr


NOTED = """
from pathlib import Path

import weir

Path(__file__).with_name("read").touch()

class Noted(weir.Model):
    def predict(self, batch):
        return batch
"""


@pytest.mark.parametrize("fronts", [0, 2])
def test_questions_about_a_model_read_it_alike_on_every_channel(tmp_path: Path, fronts: int) -> None:
    names = ("http", "grpc", "python")
    write(tmp_path, {f"{name}/1/model.py": NOTED for name in names})
    flags = ("--model-repository", tmp_path, "--model-control", "on-demand", "--model-memory", "5GB", "--grpc-port", 0)
    with (
        Served(*flags, *(("--fronts", fronts) if fronts else ())) as served,
        GrpcClient(served.until_grpc().grpc) as grpc,
        HttpClient(served.until_ready().url) as http,
        InProcess(model_repository=str(tmp_path), model_control="on-demand", model_memory="5GB") as python,
    ):
        clients: dict[str, Client] = dict(zip(names, (http, grpc, python), strict=True))
        for client in clients.values():
            assert client.server_ready() and client.models() == []
            assert [client.model_ready(each) for each in (*names, "none")] == [True, True, True, False]
            assert [client.has_hardware(each) for each in ("CPU", "TPU")] == [True, False]
            assert not list(tmp_path.rglob("read"))
        for name, client in clients.items():
            assert client.model_metadata(name)["versions"] == ["1"]
            assert [path.parts[-3] for path in tmp_path.rglob("read")] == [name]
            assert [client.model_ready(name, version) for version in ("1", "2")] == [True, False]
            (tmp_path / name / "1" / "read").unlink()
