from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from weir.catalog.sources import ALL_FORMS, ModelToServe, default_name
from weir.errors import SettingsError
from weir.jobs import JobSettings
from weir.policy.scaling import RANGE_RULE
from weir.settings import MODEL_PARTS, MODELS, SERVER_PARTS, ServerKind, Settings, declared_settings, read_settings
from weir.text_server.server_settings import TEXTS


def read(
    *targets: str, flags: dict[str, list[str]] | None = None, env: dict[str, str] | None = None, config: Any = None
) -> Settings:
    return read_settings(targets, flags or {}, env or {}, None if config is None else str(config))


def sole(*targets: str, **said: Any) -> ModelToServe:
    (model,) = read(*targets, **said).models
    return model


def refused(*targets: str, **said: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        read(*targets, **said)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        file = tmp_path / "weir.toml"
        file.write_text(text)
        return file

    return write


def test_each_setting_is_stated_once() -> None:
    stated = Counter(field.name for kind in (*MODEL_PARTS.values(), *SERVER_PARTS.values()) for field in fields(kind))
    assert [name for name, count in stated.items() if count > 1] == []
    flags = Counter(declared.flag for declared in declared_settings().values())
    assert [flag for flag, count in flags.items() if count > 1] == []


@pytest.mark.parametrize(
    ("target", "name"), [("a.b:Square", "square"), ("dir/a.py:Outer.Inner", "inner"), ("c:\\x.py:MiniLM", "minilm")]
)
def test_the_name_is_the_class_name_in_lower_case(target: str, name: str) -> None:
    assert default_name(target) == name


def test_precedence(toml: Any) -> None:
    file = toml(
        "workers = 2\nmax_batch_size = 2\ntimeout = 2\nport = 2\n[models.square]\nmax_batch_size = 3\ntimeout = 3\n"
    )
    said: dict[str, Any] = {"config": file}
    assert sole("square:Square", **said).settings == {"workers": 2, "max_batch_size": 3, "timeout": 3.0}
    said["env"] = {"WEIR_TIMEOUT": "4", "WEIR_PORT": "4", "HOME": "/root"}
    assert sole("square:Square", **said).settings["timeout"] == 4.0
    assert read("square:Square", **said).http.port == 4
    said["flags"] = {"timeout": ["5"], "port": ["5"]}
    assert sole("square:Square", **said).settings["timeout"] == 5.0
    assert read("square:Square", **said).http.port == 5


def test_params_are_merged_key_by_key(toml: Any) -> None:
    file = toml("params = {a = 1, b = 1, c = 1, d = 1}\n[models.square.params]\nb = 2\nc = 2\nd = 2\n")
    model = sole("m:Square", config=file, env={"WEIR_PARAMS": "c=3 d=3"}, flags={"params": ["d=4"]})
    assert model.params == {"a": 1, "b": 2, "c": 3, "d": 4}


def test_a_file_may_say_what_is_served(toml: Any) -> None:
    file = toml(
        '[models.fast]\ntarget = "m:Square"\nroute = "/fast"\n'
        '[models.slow]\ntarget = "m:Square"\nroute = ["/slow", "/v1/slow"]\npolicy = "full"\n'
    )
    models = read("m:Other", config=file).models
    assert [(model.name, model.target, model.routes) for model in models] == [
        ("other", "m:Other", []), ("fast", "m:Square", ["/fast"]), ("slow", "m:Square", ["/slow", "/v1/slow"]),
    ]  # fmt: skip
    assert models[2].settings == {"policy": "full"}
    assert read(env={"WEIR_CONFIG": str(file)}).models == models[1:]


def test_one_model_may_be_named_and_routed_by_flags(toml: Any) -> None:
    model = sole("m:Square", flags={"name": ["sq"], "route": ["/a", "/b"]})
    assert (model.name, model.routes) == ("sq", ["/a", "/b"])
    assert "is for one model, but" in refused("m:One", "m:Two", flags={"route": ["/a"]})
    assert "is taken by m:One" in refused("m:One", "m:Two", flags={"name": ["x"]})
    file = toml('[models.other]\ntarget = "m:Other"\n')
    assert "--name or WEIR_NAME: 'x' is for one model, but x, other are served" in refused(
        "m:One", flags={"name": ["x"]}, config=file
    )


@pytest.mark.parametrize("kind", [MODELS, TEXTS])
def test_an_empty_variable_is_not_set(kind: ServerKind) -> None:
    catalog = declared_settings(kind)
    empty = {declared.variable: "" for declared in catalog.values() if not declared.guards} | {"WEIR_CONFIG": ""}
    assert read_settings(["m:A"], {}, empty, None, kind) == read_settings(["m:A"], {}, {}, None, kind)
    assert read_settings(["m:A"], {"host": ["::1"]}, empty, None, kind).http.host == "::1"


@pytest.mark.parametrize(
    "name", ["api_key", "api_key_file", "control_token_file", "tls_certfile", "tls_keyfile"]
)  # fmt: skip
def test_an_empty_variable_that_should_keep_callers_away_is_refused(name: str) -> None:
    variable = declared_settings()[name].variable
    assert f"{variable}: is empty, and without it the server is open to more callers" in refused(
        "m:A", env={variable: ""}
    )


def test_an_empty_text_is_no_value_of_a_setting(toml: Any) -> None:
    for name, declared in declared_settings().items():
        if declared.secret or declared.hint not in (str, str | None, int | str):
            continue
        assert f"{declared.flag}=''" in refused("m:A", flags={name: [""]})
    assert refused("m:A", flags={"host": [""]}) == "--host='': must not be empty"
    assert refused("m:A", config=toml('uds = ""')).endswith("weir.toml: uds='': must not be empty")
    with pytest.raises(SettingsError, match="batch_dir='': must not be empty"):
        JobSettings(batch_dir="")


def test_the_file_of_the_variable_is_named_by_it(tmp_path: Path, toml: Any) -> None:
    assert refused("m:A", env={"WEIR_CONFIG": "no.toml"}).startswith("WEIR_CONFIG=no.toml: cannot be read")
    assert read("m:A", env={"WEIR_CONFIG": str(toml("port = 3"))}).http.port == 3


def test_a_file_may_begin_with_a_byte_order_mark(toml: Any) -> None:
    assert read("m:A", config=toml("\ufeffport = 3")).http.port == 3


def test_unknown_keys_name_the_nearest(toml: Any) -> None:
    assert "WEIR_MAX_BATCHSIZE: unknown setting; did you mean WEIR_MAX_BATCH_SIZE?" in refused(
        "m:A", env={"WEIR_MAX_BATCHSIZE": "3"}
    )
    assert "weir.toml: max-batch-size: unknown setting; did you mean max_batch_size?" in refused(
        "m:A", config=toml("max-batch-size = 3")
    )
    assert "weir.toml: models.a: worker: unknown setting; did you mean workers?" in refused(
        "m:A", config=toml("[models.a]\nworker = 3")
    )
    assert "there are " in refused("m:A", config=toml("[models.a]\nqqq = 3"))


def test_keys_in_the_wrong_place_are_refused(toml: Any) -> None:
    assert "is a setting of the whole server" in refused("m:A", config=toml("[models.a]\nport = 3"))
    assert "set it in [models.NAME], as NAME" in refused("m:A", config=toml('name = "x"'))
    assert "set it in [models.NAME]" in refused("m:A", config=toml('route = "/x"'))
    assert "must be tables" in refused("m:A", config=toml("models = 3"))


def test_a_value_against_its_rule_names_where_it_was_set(toml: Any) -> None:
    assert refused("m:A", flags={"workers": ["0"]}) == f"--workers=0: {RANGE_RULE}"
    assert refused("m:A", env={"WEIR_WORKERS": "0"}) == f"WEIR_WORKERS=0: {RANGE_RULE}"
    assert "weir.toml: models.a: workers=0: must be 1 or more" in refused("m:A", config=toml("[models.a]\nworkers = 0"))
    assert "--port=70000: must be a port number" in refused("m:A", flags={"port": ["70000"]})


def test_the_same_setting_given_twice_is_refused(toml: Any) -> None:
    assert "--policy: given 2 times (full, greedy)" in refused("m:A", flags={"policy": ["full", "greedy"]})
    assert "must be given once" in refused("m:A", flags={"params": ["a=1", "a=2"]})
    assert "is taken by m:A" in refused("m:A", "n:A")
    assert "it must be given once" in refused("m:A", config=toml('[models.a]\ntarget = "n:A"'))
    assert "must be TOML" in refused("m:A", config=toml("workers = 1\nworkers = 2"))
    assert sole("m:A", config=toml('[models.a]\ntarget = "m:A"')).target == "m:A"


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refused("m:A", config=tmp_path / "missing.toml")
    (tmp_path / "odd.toml").write_bytes(b"\xff")
    assert "cannot be read" in refused("m:A", config=tmp_path / "odd.toml")


def test_what_kubernetes_says_of_a_service_called_weir_is_not_for_us() -> None:
    env = {
        "WEIR_SERVICE_HOST": "10.0.0.1", "WEIR_SERVICE_PORT": "80", "WEIR_SERVICE_PORT_HTTP": "80",
        "WEIR_PORT": "tcp://10.0.0.1:80", "WEIR_PORT_80_TCP": "tcp://10.0.0.1:80", "WEIR_PORT_80_TCP_ADDR": "10.0.0.1",
    }  # fmt: skip
    assert read("m:A", env=env).http.port == 8000


DEVICES = """
[models.slow]
target = "m:Slow"
[models.quick]
target = "m:Quick"
[models.other]
target = "m:Other"
"""


def test_a_table_names_the_models_of_a_device(toml: Any) -> None:
    file = toml(DEVICES + '[devices.gpu0]\nmodels = ["slow", "quick"]\norder = "longest"\n')
    found = {model.name: model.settings for model in read(config=file).models}
    grouped = {"device_group": "gpu0", "device_order": "longest"}
    assert found == {"slow": grouped, "quick": grouped, "other": {}}
    every = read(config=file, flags={"device_order": ["oldest"]}).models
    assert [model.settings["device_order"] for model in every] == ["oldest"] * 3
    assert sole("m:A", config=toml('[devices.cpu]\nmodels = "a"\n')).settings == {"device_group": "cpu"}


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ('[devices.gpu0]\nmodels = ["slow", "slow"]', "devices.gpu0: models=['slow', 'slow']: 'slow' is named twice; a model is on one device"),
        ('[devices.a]\nmodels = ["slow"]\n[devices.b]\nmodels = ["slow"]', "devices.b: models=['slow']: 'slow' is named here and in [devices.a]; a model is on one device"),
        ('[devices.gpu0]\nmodels = ["slwo"]', "devices.gpu0: models: unknown model 'slwo'; there are slow, quick, other"),
        ('[devices.gpu0]\nmodels = []', "devices.gpu0: no models; must be models = [NAME, ...]"),
        ('[devices.gpu0]\norder = "oldest"', "devices.gpu0: no models; must be models = [NAME, ...]"),
        ('[devices.gpu0]\nmodels = [3]', "devices.gpu0: models=[3]: must be a list, each element text"),
        ('[devices.gpu0]\nmodel = ["slow"]', "devices.gpu0: model: unknown; a device has models and order"),
        ('[devices.gpu0]\nmodels = ["slow"]\norder = "lifo"', "devices.gpu0: device_order='lifo': must be one of fair, oldest, longest, solved"),
        ('[devices."a b"]\nmodels = ["slow"]', "devices.a b: device_group='a b': must be letters, digits, - and _"),
        ('[devices]\ngpu0 = ["slow"]', "devices={'gpu0': ['slow']}: must be tables, [devices.NAME] for each device"),
    ],
)  # fmt: skip
def test_a_wrong_table_of_a_device_is_refused_by_one_line(toml: Any, table: str, error: str) -> None:
    found = refused(config=toml(DEVICES + table))
    assert found.partition("weir.toml: ")[2] == error


def test_a_model_of_a_device_has_no_other_group_of_its_own_and_is_served(toml: Any, tmp_path: Path) -> None:
    own = DEVICES + 'device_group = "gpu1"\n[devices.gpu0]\nmodels = ["other"]\n'
    assert "devices.gpu0: models: 'other' has device_group='gpu1'; it must be given once" in refused(config=toml(own))
    slip = DEVICES + 'device_group = "gpuO"\n[devices.gpu0]\nmodels = ["slow"]\n'
    unknown = "devices: 'other' has device_group='gpuO', an unknown device; there are gpu0; add [devices.gpuO]"
    assert refused(config=toml(slip)).endswith(unknown)
    file = toml('[devices.gpu0]\nmodels = ["a"]\n')
    error = refused(str(tmp_path), config=file)
    assert error.endswith(
        "unknown model 'a'; there are none; a model of the repository names its device_group in its own file"
    )


def test_a_target_that_names_nothing_is_refused() -> None:
    assert refused("") == f"TARGET '': must be {ALL_FORMS}"
    assert refused(" ") == f"TARGET ' ': must be {ALL_FORMS}"


@pytest.mark.parametrize(
    "table", ["[model.square]\nworkers = 2", '[Models.square]\ntarget = "m:A"', "[model]\nworkers = 2"]
)
def test_a_misspelt_table_of_models_is_named(toml: Any, table: str) -> None:
    assert "there is no such table; did you mean [models.NAME]?" in refused("m:A", config=toml(table))


def test_a_folder_among_the_targets_is_the_repository(tmp_path: Path) -> None:
    found = read(str(tmp_path), "tests.served_models:Square")
    assert found.repository.model_repository == str(tmp_path) and [model.name for model in found.models] == ["square"]
    with pytest.raises(SettingsError, match="is a folder: there can be one"):
        read(str(tmp_path), env={"WEIR_MODEL_REPOSITORY": str(tmp_path)})
    with pytest.raises(SettingsError, match="--name 'x': is for a TARGET that is not a folder"):
        read(str(tmp_path), flags={"name": ["x"]})
