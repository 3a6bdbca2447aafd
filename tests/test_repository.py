"""A model repository, served by the real command: what is loaded at the start, and what callers load and unload."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
from tests.catalog.repository.shelf import plain, write
from tests.served import MODELS, Served, serving, weir

from weir import SettingsError
from weir.app import App
from weir.settings import read_settings

EXAMPLES = Path(__file__).parents[1] / "examples" / "repository"


def post(client: httpx.Client, path: str, expected: int = 200, **document: object) -> httpx.Response:
    answer = client.post(path, json=document)
    assert answer.status_code == expected, answer.text
    return answer


def test_models_are_loaded_and_unloaded_over_http(tmp_path: Path) -> None:
    write(tmp_path, {"one/1/model.py": plain("a"), "two/1/model.py": plain("z")})
    with serving("--model-repository", tmp_path, f"{MODELS}:Square", "--load", "one", "--load", "square") as (
        _,
        client,
    ):
        index = post(client, "/v2/repository/index").json()
        assert [(each["name"], each["state"]) for each in index] == [
            ("one", "READY"), ("square", "READY"), ("two", "UNAVAILABLE"),
        ]  # fmt: skip
        assert client.post("/infer/two", content="0").status_code == 404
        post(client, "/v2/repository/models/two/load")
        assert client.post("/infer/two", content="0").json() == "z"
        write(tmp_path, {"one/2/model.py": plain("b")})
        post(client, "/v2/repository/models/one/load")
        assert client.post("/infer/one", content="0").json() == "b"
        write(tmp_path, {"one/2/model.py": "raise ValueError('broken')"})
        assert "broken" in post(client, "/v2/repository/models/one/load", 400).json()["error"]
        assert client.post("/infer/one", content="0").json() == "b"
        post(client, "/v2/repository/models/square/unload")
        assert client.post("/infer/square", content="3").status_code == 404
        assert post(client, "/v2/workers/square/load").text == "square"
        assert client.post("/infer/square", content="3").json() == 9
        post(client, "/v2/repository/models/..%2Fone/load", 404)
        assert 'version="2"' in client.get("/metrics").text


def test_the_examples_are_a_repository() -> None:
    app = App(read_settings([], {"model_repository": [str(EXAMPLES)], "port": ["0"]}, {}))
    assert {"simple", "simple_identity", "simple_string"} <= set(app.registry.services)
    app = App(read_settings([], {"model_repository": [str(EXAMPLES)], "load": ["none"], "port": ["0"]}, {}))
    assert app.registry.services == {} and app.registry.ready


def test_what_holds_for_every_model_holds_for_those_of_the_repository(tmp_path: Path) -> None:
    write(tmp_path, {"one/1/model.py": plain(), "one/config.toml": "max_batch_size = 4\nworkers = 2"})
    config = tmp_path / "weir.toml"
    config.write_text(f"model_repository = {str(tmp_path)!r}\nmax_batch_size = 9\ntimeout = 3\n")
    app = App(read_settings([], {"workers": ["1"]}, {}, str(config)))
    service = app.registry.get("one")
    assert (service.facts.batching.max_batch_size, service.workers.workers, service.facts.settings.timeout) == (
        4,
        1,
        3.0,
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model_repository": ["nowhere"]}, "model_repository='nowhere': no such directory"),
        ({"load": ["three"]}, "load='three': unknown model; available: square, one"),
        ({"load": ["none", "one"]}, "none must be the only value"),
        ({"name": ["one"]}, "name='one': is both a TARGET and a model of the repository"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(tmp_path: Path, flags: dict[str, list[str]], message: str) -> None:
    write(tmp_path, {"one/1/model.py": plain()})
    with pytest.raises(SettingsError) as refused:
        App(read_settings([f"{MODELS}:Square"], {"model_repository": [str(tmp_path)], **flags}, {}))
    assert message in refused.value.message


def test_there_must_be_something_to_serve() -> None:
    with pytest.raises(SettingsError, match="nothing to watch without --model-repository"):
        App(read_settings([f"{MODELS}:Square"], {"watch": ["true"]}, {}))


def test_a_chain_of_the_examples_asks_its_steps() -> None:
    first, second = list(range(16)), [3] * 16
    inputs = [
        {"name": name, "datatype": "INT32", "shape": [1, 16], "data": data}
        for name, data in (("INPUT0", first), ("INPUT1", second))
    ]
    with serving("--model-repository", EXAMPLES) as (_, client):
        answer = client.post("/v2/models/simple_twice/infer", json={"inputs": inputs}).json()
    data = {output["name"]: output["data"] for output in answer["outputs"]}
    assert data == {"OUTPUT0": [2 * x for x in first], "OUTPUT1": [2 * x for x in second]}


def test_all_that_is_wrong_with_a_repository_is_reported_at_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "one/1/model.py": plain(), "one/config.toml": "max_batch_size = -1",
            "two/1/model.py": "raise ValueError('broken')", "three/config.pbtxt": "max_batch_size: 4",
            "four/1/model.py": plain(),
        },
    )  # fmt: skip
    with pytest.raises(SettingsError) as refused:
        App(read_settings([], {"model_repository": [str(tmp_path)], "port": ["0"]}, {}))
    lines = refused.value.message.splitlines()
    assert [name in line for name, line in zip(("one", "three", "two"), lines, strict=True)] == [True] * 3
    run = weir("serve", "--model-repository", tmp_path, "--port", "0")
    assert (run.returncode, run.stdout) == (2, "") and all(line in run.stderr for line in lines)


@pytest.mark.parametrize("where", [".", "one", "one/1"])
def test_what_cannot_be_read_is_refused(where: str) -> None:
    with TemporaryDirectory(prefix="weir-test-") as folder:  # pytest's are readable for their owner alone
        root = Path(folder)
        write(root, {"one/1/model.py": plain()})
        for path in (root, root / "one", root / "one" / "1"):
            path.chmod(0o755)
        settings = read_settings([], {"model_repository": [str(root)], "port": ["0"]}, {})
        (root / where).chmod(0o000)
        superuser = os.geteuid() == 0
        try:
            if superuser:  # who may read everything
                os.seteuid(65534)
            with pytest.raises(SettingsError, match="cannot be read: Permission denied"):
                App(settings)
        finally:
            if superuser:
                os.seteuid(0)
            (root / where).chmod(0o755)


def test_a_repository_without_models_is_served_with_a_warning(tmp_path: Path) -> None:
    with Served("--model-repository", tmp_path) as served:
        served.until_logged(r"\[warning.* has no model; each folder in it is one")
