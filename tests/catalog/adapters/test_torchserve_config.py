"""TorchServe's config.properties gives a server the settings that it has in TorchServe."""

import json
from pathlib import Path

import pytest
from tests.catalog.adapters.archives import archive

from weir.catalog.adapters.torchserve import read_configuration
from weir.errors import SettingsError
from weir.settings import read_settings


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    root.mkdir()
    for name in ("a", "b", "c_v2"):
        archive(root / f"{name}.mar", {"handler.py": ""})
    return root


def written(store: Path, text: str) -> Path:
    path = store.parent / "config.properties"
    path.write_text(f"model_store=store\n{text}")
    return path


def test_the_settings_of_a_server(store: Path) -> None:
    versions = {
        "1.0": {"marName": "a.mar", "batchSize": 2},
        "2.0": {
            "defaultVersion": True,
            "marName": "c_v2.mar",
            "minWorkers": 2,
            "batchSize": 8,
            "maxBatchDelay": 50,
            "responseTimeout": 9,
        },
    }
    stated = json.dumps({"c": versions}, indent=1).replace("\n", "\\\n")
    path = written(
        store,
        "# of a user\n! too\ninference_address=http://0.0.0.0:9090\nmanagement_address: https://127.0.0.1:9091\n"
        "load_models=b.mar, c_v2.mar, \\\n    other=a.mar\ndefault_workers_per_model 3\nmax_request_size=1000\n"
        f"number_of_netty_threads=32\nmodels={stated}",
    )
    settings = read_settings([], {}, {}, str(path))
    assert (settings.http.host, settings.http.port, settings.http.max_body_size) == ("0.0.0.0", 9090, 1000)
    assert settings.frontends.frontends == {"torchserve": "127.0.0.1:9091"}
    assert settings.http.protocols == ["torchserve"]
    assert (settings.repository.model_repository, settings.repository.load) == (str(store), ["b", "c", "other"])
    assert {model.name: (Path(model.target).name, model.platform, model.settings) for model in settings.models} == {
        "c": (
            "c_v2.mar",
            "torchserve",
            {
                "workers": 2,
                "max_batch_size": 8,
                "policy": "size-or-delay:delay=0.05",
                "max_queue_delay": 0.05,
                "predict_timeout": 9.0,
            },
        ),
        "other": ("a.mar", "torchserve", {"workers": 3}),
    }
    assert read_configuration(path)[1] == ["number_of_netty_threads"]


def test_what_a_short_one_leaves_to_defaults(store: Path) -> None:
    settings = read_settings([], {"port": ["7000"]}, {}, str(written(store, "load_models=all")))
    assert (settings.http.host, settings.http.port) == ("127.0.0.1", 7000)  # a flag goes first
    assert settings.frontends.frontends == {"torchserve": "127.0.0.1:8081"}
    assert settings.repository.load == ["a", "b", "c_v2"]
    assert read_settings([], {}, {}, str(written(store, ""))).repository.load == ["none"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("inference_address=nowhere", "inference_address='nowhere': must be http://HOST:PORT"),
        ("inference_address=http://a:99999", "port=99999: must be"),
        ("default_response_timeout=soon", "default_response_timeout='soon': must be a number from 0 on"),
        ("max_request_size=1k", "max_body_size='1k': must be a whole number"),
        ("max_request_size=-1", "max_body_size=-1: must be 1 or more"),
        ("models={", "models: must be JSON"),
        ("models=[]", "models: must be a JSON object"),
        ('models={"a": {"1.0": {"marName": "../a.mar"}}}', "marName='../a.mar': must be the name of a file in"),
        ('models={"a": {"1.0": {"marName": "a.mar", "batchSize": "x"}}}', "batchSize='x': must be a number from 0 on"),
        ("load_models=lost.mar", "load='lost': unknown model; available: "),
        ("model_store=none", "/none': no such directory"),
    ],
)
def test_what_is_wrong_is_named(store: Path, text: str, why: str) -> None:
    from weir.app import App

    with pytest.raises(SettingsError) as raised:
        App(read_settings([], {"port": ["0"]}, {}, str(written(store, text))))
    assert why in raised.value.message
