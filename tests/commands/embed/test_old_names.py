"""The flags of bert-serving-start, each for what it is called here."""

import re
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from weir.commands.embed import embed
from weir.commands.embed.old_names import (
    ELSEWHERE,
    MODEL_DIRECTORY,
    OLD,
    ONE_DASH,
    PREFETCH,
    old_parameters,
    translated,
)
from weir.errors import SettingsError
from weir.settings import declared_settings, value_of
from weir.textserver import TEXTS

TABLE: list[tuple[str, object, str, object]] = [
    ("max_seq_len", "40", "max_length", 40),
    ("cased_tokenization", True, "cased", True),
    ("pooling_layer", "-4,-3", "layers", [-4, -3]),
    ("pooling_strategy", "REDUCE_MEAN_MAX", "pooling", "REDUCE_MEAN_MAX"),
    ("mask_cls_sep", True, "mask_special", True),
    ("no_special_token", True, "special_tokens", False),
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
    ("device", "1", "device_map", ["1"]),
    ("cpu", True, "device_map", ["cpu"]),
    ("fp16", True, "precision", "fp16"),
    ("xla", True, "compile", True),
    ("verbose", True, "log_level", "debug"),
    ("prefetch", "10", "pipeline_depth", 2),
    ("prefetch_size", "0", "pipeline_depth", 1),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "value", "setting", "meant"), TABLE)
def test_a_flag_is_the_setting_that_it_is_now(flag: str, value: object, setting: str, meant: object) -> None:
    directories, today = translated(None, {flag: value if value is True else [value]})
    assert directories == [] and list(today) == [setting]
    assert value_of(declared_settings(TEXTS)[setting], today[setting]) == meant


def test_no_flag_is_forgotten_here() -> None:
    tried = {flag for flag, *_ in TABLE}
    assert tried == {*OLD, *PREFETCH}
    assert len(old_parameters()) == len({*tried, MODEL_DIRECTORY, *ELSEWHERE}) + len(ONE_DASH)


def parsed(*words: str) -> dict[str, Any]:
    """Return what `weir embed serve` reads."""
    group = get_command(embed)
    assert isinstance(group, TyperGroup)
    with group.make_context("embed", ["serve"]) as context:
        params = group.commands["serve"].make_context("serve", [*words], parent=context).params
    return {name: value for name, value in params.items() if value}


@pytest.mark.parametrize(("flag", "value", "setting", "meant"), TABLE)
@pytest.mark.parametrize("dashes", ["-", "--"])
def test_one_dash_says_what_two_say(dashes: str, flag: str, value: object, setting: str, meant: object) -> None:
    words = [f"{dashes}{flag}"] if value is True else [f"{dashes}{flag}={value}"]
    assert translated(None, parsed(*words)) == translated(None, parsed(*words[0].split("=")))
    _, today = translated(None, parsed(*words))
    assert list(today) == [setting]
    assert value_of(declared_settings(TEXTS)[setting], today[setting]) == meant


@pytest.mark.parametrize(
    ("flag", "setting"),
    [("-port", "zmq_port"), ("--port", "port"), ("-max_batch_size", "max_batch_size"), ("--max_batch_size", "max_batch_size"),
     ("-device_map", "device_map"), ("-gpu_memory_fraction", "gpu_memory_fraction")],
)  # fmt: skip
def test_what_is_a_flag_of_today_too(flag: str, setting: str) -> None:
    assert translated(None, parsed("-model_dir", "dir", flag, "1")) == (["dir"], {setting: ["1"]})


@pytest.mark.parametrize("flag", ELSEWHERE)
@pytest.mark.parametrize("dashes", ["-", "--"])
def test_what_is_said_elsewhere_is_refused_with_where(flag: str, dashes: str) -> None:
    words = parsed(f"{dashes}{flag}", *([] if flag == "version" else ["value"]))
    with pytest.raises(SettingsError, match=f"-{flag}: is not taken here: {re.escape(ELSEWHERE[flag])}"):
        translated(None, words)


def test_none_as_a_length_leaves_it_to_the_model() -> None:
    assert translated(["dir"], {"max_seq_len": ["NONE"], "model_dir": ["other"]}) == (
        ["dir", "other"],
        {"max_length": []},
    )


def test_both_names_at_once_are_one_too_many() -> None:
    _, today = translated(None, {"pooling": ["cls"], "pooling_strategy": ["REDUCE_MAX"]})
    with pytest.raises(SettingsError, match="--pooling: given 2 times"):
        value_of(declared_settings(TEXTS)["pooling"], today["pooling"])


def test_a_prefetch_that_is_no_number_is_refused() -> None:
    with pytest.raises(SettingsError, match="--prefetch-size='x': must be a whole number"):
        translated(None, {"prefetch_size": ["x"]})
