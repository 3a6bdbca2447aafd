"""The flags of bert-serving-start, each for what it is called here."""

import re
from functools import cache, partial
from typing import Any

import pytest
from tests.rings import subcases
from tests.served import weir_here
from typer.core import TyperGroup
from typer.main import get_command

from weir.commands.embed import _with_stock_ports, embed, foreign_parameters
from weir.errors import SettingsError
from weir.settings import declared_settings, read_settings, value_of
from weir.text_server.server_settings import BERT_FLAGS, ONE_DASH, TEXTS, translated

TABLE: list[tuple[str, object, str, object]] = [
    ("max_seq_len", "40", "max_length", 40),
    ("cased_tokenization", True, "cased", True),
    ("pooling_layer", "-4,-3", "layers", [-4, -3]),
    ("pooling_strategy", "REDUCE_MEAN_MAX", "pooling", "REDUCE_MEAN_MAX"),
    ("mask_cls_sep", True, "mask_special", True),
    ("no_special_token", True, "word_special_tokens", False),
    ("no_position_embeddings", True, "positions", False),
    ("show_tokens_to_client", True, "zmq_show_tokens", True),
    ("fixed_embed_length", True, "fixed_length", True),
    ("graph_tmp_dir", "/tmp/graphs", "cache", "/tmp/graphs"),
    ("port_in", "5555", "zmq_port", 5555),
    ("port_data", "5555", "zmq_port", 5555),
    ("port_out", "5556", "zmq_port_out", 5556),
    ("port_result", "5556", "zmq_port_out", 5556),
    ("http_port", "8125", "port", 8125),
    ("http_max_connect", "10", "max_connections", 10),
    ("cors", "*", "cors_origins", ["*"]),
    ("num_worker", "2", "workers", 2),
    ("priority_batch_size", "16", "small_request_size", 16),
    ("cpu", True, "device_map", ["cpu"]),
    ("fp16", True, "precision", "fp16"),
    ("verbose", True, "log_level", "debug"),
    ("prefetch", "10", "pipeline_depth", 2),
    ("prefetch_size", "0", "pipeline_depth", 1),
]  # fmt: skip

text_settings = partial(read_settings, kind=TEXTS)


REFUSED = {name: flag.remedy for name, flag in BERT_FLAGS.items() if flag.remedy}


def test_no_flag_is_forgotten_here() -> None:
    elsewhere = {*REFUSED, "model_dir", "version", "xla"}
    one_dash = {name for name in BERT_FLAGS if name.startswith(ONE_DASH)}
    assert {flag for flag, *_ in TABLE} == BERT_FLAGS.keys() - elsewhere - one_dash
    assert BERT_FLAGS.keys() <= {each.name for each in foreign_parameters()}


@cache
def group() -> TyperGroup:
    """Return the commands of `weir embed`, which take longer to make than to use."""
    made = get_command(embed)
    assert isinstance(made, TyperGroup)
    return made


def parsed(*words: str) -> dict[str, Any]:
    """Return what `weir embed serve` reads."""
    with group().make_context("embed", ["serve"]) as context:
        params = group().commands["serve"].make_context("serve", [*words], parent=context).params
    return {name: value for name, value in params.items() if value}


@subcases(
    ("flag", "setting"),
    [("-port", "zmq_port"), ("--port", "port"), ("-max_batch_size", "max_batch_size"), ("--max_batch_size", "max_batch_size"),
     ("-device_map", "device_map"), ("-gpu_memory_fraction", "gpu_memory_fraction")],
)  # fmt: skip
def test_what_is_a_flag_of_today_too(flag: str, setting: str) -> None:
    assert translated(None, parsed("-model_dir", "dir", flag, "1"))[:2] == (["dir"], {setting: ["1"]})


@subcases("flag", REFUSED)
def test_what_is_set_elsewhere_is_refused_with_where(flag: str) -> None:
    for dashes in ("-", "--"):
        with pytest.raises(SettingsError, match=f"-{flag}: is not supported: {re.escape(REFUSED[flag])}"):
            translated(None, parsed(f"{dashes}{flag}", "value"))


def test_none_as_a_length_leaves_it_to_the_model() -> None:
    found = translated(["dir"], {"max_seq_len": ["NONE"], "model_dir": ["other"]})
    assert found[:2] == (["dir", "other"], {})


def test_both_names_at_once_are_one_too_many() -> None:
    today = translated(None, {"pooling": ["cls"], "pooling_strategy": ["REDUCE_MAX"]}).today
    with pytest.raises(SettingsError, match="--pooling: given 2 times"):
        value_of(declared_settings(TEXTS)["pooling"], today["pooling"])


@subcases(
    ("words", "layers"),
    [
        (("-pooling_layer", "-1", "-2"), [-1, -2]), (("--pooling_layer", "-1", "-2", "dir"), [-1, -2]),
        (("-pooling_layer", "-4,-3"), [-4, -3]), (("-pooling_layer=-4,-3", "dir"), [-4, -3]), (("-pooling-layer", "-12"), [-12]),
    ],
)  # fmt: skip
def test_several_layers_may_have_spaces_between_them(words: tuple[str, ...], layers: list[int]) -> None:
    found = translated(None, parsed("-num_worker", "2", *words, "-cpu"))
    assert value_of(declared_settings(TEXTS)["layers"], found.today["layers"]) == layers
    assert found.today["workers"] == ["2"] and found.today["device_map"] == ["cpu"]


def test_several_devices_may_have_spaces_between_them() -> None:
    found = translated(None, parsed("-device_map", "0", "1", "2", "-model_dir", "dir"))
    assert value_of(declared_settings(TEXTS)["device_map"], found.today["device_map"]) == [
        "0",
        "1",
        "2",
    ]
    assert found.directories == ["dir"]
    said = parsed("--device-map", "cpu", "0")
    assert said == {"device_map": ["cpu"], "directories": ["0"]}
    assert parsed("-device_map", "cpu") == {"one_dash_device_map": ["cpu"]}


def test_vectors_of_tokens_have_the_length_that_was_chosen() -> None:
    there = {"pooling_strategy": ["NONE"], "max_seq_len": ["25"]}
    assert translated(None, there).today["fixed_length"] == ["true"]
    assert "fixed_length" not in translated(None, there | {"max_seq_len": ["NONE"]}).today
    assert "fixed_length" not in translated(None, there | {"pooling_strategy": ["CLS_TOKEN"]}).today


def test_old_flags_pool_the_layer_that_bert_serving_start_pooled() -> None:
    assert translated(None, {"num_worker": ["2"]}).settings == {"workers": ["2"], "bare_layer": ["-2"]}
    assert translated(None, {"num_worker": ["2"], "bare_layer": ["-1"]}).settings["bare_layer"] == ["-1"]
    assert "bare_layer" not in translated(None, {"workers": ["2"]}).settings


def test_xla_compiles_with_torch_and_changes_nothing_else() -> None:
    xla = frozenset({"xla"})
    assert translated(None, {"xla": True, "runtime": ["torch"]}) == (
        [],
        {"runtime": ["torch"], "compile": ["true"]},
        xla,
    )
    assert translated(None, {"xla": True}) == ([], {}, xla)


@subcases(
    ("words", "environment", "ports"),
    [
        (("-model_dir=dir", "-num_worker=4"), {}, (5555, 5556)),
        (("dir", "-port", "4000", "-port_out", "4001"), {}, (4000, 4001)),
        (("dir", "-port_in=4000"), {}, (4000, 5556)),  # as there: each has a default of its own
        (("dir", "-port_out=4001"), {}, (5555, 4001)),
        (("dir", "-cpu", "--zmq-port", "4000"), {}, (4000, None)),  # today's: the one after
        (("dir", "-cpu", "--zmq-port", "0"), {}, (0, None)),
        (("dir", "-cpu"), {"WEIR_ZMQ_PORT": "4000"}, (4000, None)),
        (("dir",), {}, (None, None)),
        (("dir", "--max-batch-size", "8"), {}, (None, None)),
    ],
)
def test_old_flags_open_the_ports_that_old_clients_look_for(
    words: tuple[str, ...], environment: dict[str, str], ports: tuple[int | None, int | None]
) -> None:
    said = parsed(*words)
    stock = translated(said.pop("directories", None), said)
    settings = text_settings(
        stock.directories, {name: list(map(str, values)) for name, values in stock.today.items()}, environment
    )
    settings = _with_stock_ports(settings, stock) if stock.bert else settings
    zeromq = settings.more["ZeroMQ"]
    assert (zeromq.zmq_port, zeromq.zmq_port_out) == ports


def test_the_version_is_shown() -> None:
    for flag in ("-version", "--version"):
        done = weir_here("embed", "serve", flag)
        assert done.returncode == 0 and re.fullmatch(r"weir \S+, for clients of bert-as-service 1.10.0\n", done.stdout)


@subcases("flag", ["-foo", "-num_workers", "-q", "-modeldir=x"])
def test_an_unknown_flag_is_named_whole(flag: str) -> None:
    for command in ("serve", "benchmark", "convert"):
        done = weir_here("embed", command, flag, "3")
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert re.search(r"(unknown option|No such option).*", done.stderr) and flag.partition("=")[0] in done.stderr


@subcases(("flag", "value", "setting", "meant"), TABLE)
def test_a_flag_is_the_setting_that_it_is_now(flag: str, value: object, setting: str, meant: object) -> None:
    for dashes in ("-", "--"):
        words = [f"{dashes}{flag}"] if value is True else [f"{dashes}{flag}={value}"]
        seen = translated(None, parsed(*words))
        assert seen == translated(None, parsed(*words[0].split("=")))
        assert seen.directories == [] and seen.bert
        assert list(seen.today) == [setting, *(["hide_special"] if flag == "mask_cls_sep" else [])]
        assert value_of(declared_settings(TEXTS)[setting], seen.today[setting]) == meant
