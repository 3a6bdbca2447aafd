"""The flags of `bert-serving-start`, with the one dash that they have there or with two, for what they are called here. docs/reference has the table."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import typer

from weir.commands.options import parameter, text_of
from weir.errors import SettingsError


class Old(NamedTuple):
    """A flag: the setting that it is now, and for one without a value of its own, the value. `drop` is a value that says
    nothing: the default holds."""

    setting: str
    value: str | None = None
    drop: str | None = None


# By name. Commands take underscores for dashes, so `-max_seq_len` is looked for as `-max-seq-len`.
OLD: Mapping[str, Old] = {
    "max_seq_len": Old("max_length", drop="NONE"),
    "cased_tokenization": Old("cased", "true"),
    "pooling_layer": Old("layers"),
    "pooling_strategy": Old("pooling"),
    "mask_cls_sep": Old("mask_special", "true"),
    "no_special_token": Old("special_tokens", "false"),
    "no_position_embeddings": Old("positions", "false"),
    "show_tokens_to_client": Old("zmq_show_tokens", "true"),
    "fixed_embed_length": Old("fixed_length", "true"),
    "graph_tmp_dir": Old("cache"),
    "port_in": Old("zmq_port"),
    "port_data": Old("zmq_port"),
    "port_out": Old("zmq_port_out"),
    "port_result": Old("zmq_port_out"),
    "http_port": Old("port"),
    "http_max_connect": Old("max_connections"),
    "cors": Old("cors_origins"),
    "num_worker": Old("workers"),
    "priority_batch_size": Old("small_request_size"),
    "device": Old("device_map"),
    "cpu": Old("device_map", "cpu"),
    "fp16": Old("precision", "fp16"),
    "xla": Old("compile", "true"),
    "verbose": Old("log_level", "debug"),
}
# Known with one dash alone: with two they are settings of today, --port another one.
ONE_DASH: Mapping[str, Old] = {
    "port": Old("zmq_port"),
    "max_batch_size": Old("max_batch_size"),
    "device_map": Old("device_map"),
    "gpu_memory_fraction": Old("gpu_memory_fraction"),
}
MODEL_DIRECTORY, PREFETCH = "model_dir", ("prefetch", "prefetch_size")
# What is said elsewhere now, by name.
ELSEWHERE: Mapping[str, str] = {
    "tuned_model_dir": "name the fine-tuned model's directory instead; weir embed convert takes the classifier of a checkpoint along",
    "ckpt_name": "weir embed convert has it, as --checkpoint",
    "config_name": "the model's directory must have a config.json; weir embed convert writes it",
    "num_labels": "it is read from the model's files",
    "version": "weir --version shows it",
}
_ONE_DASH = "one_dash_"  # before the names of their parameters


def old_parameters() -> list[inspect.Parameter]:
    """Return a parameter for each, which `--help` does not show."""
    switches = {"version", *(name for name, old in OLD.items() if old.value is not None)}
    both = [
        parameter(name, bool if name in switches else list[str], _hidden(f"-{name}", f"--{name}"))
        for name in (MODEL_DIRECTORY, *PREFETCH, *OLD, *ELSEWHERE)
    ]
    return [*both, *[parameter(_ONE_DASH + name, list[str], _hidden(f"-{name}")) for name in ONE_DASH]]


def _hidden(*flags: str) -> Any:
    return typer.Option(None, *[flag.replace("_", "-") for flag in flags], hidden=True)


def translated(
    directories: list[str] | None, said: Mapping[str, list[Any] | bool | None]
) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the directories, and what was said by today's names. Raises SettingsError for a value that cannot be, and for what is said
    elsewhere."""
    known = {**OLD, **{_ONE_DASH + name: old for name, old in ONE_DASH.items()}}
    found = list(directories or [])
    today: dict[str, list[Any]] = {}
    for name, value in said.items():
        if not value:
            continue
        values: list[Any] = [value] if isinstance(value, bool) else value
        if name in ELSEWHERE:
            raise SettingsError(f"-{name}: is not taken here: {ELSEWHERE[name]}")
        if name == MODEL_DIRECTORY:
            found += values
        elif name in PREFETCH:
            today.setdefault("pipeline_depth", []).extend(_depth(name, value) for value in values)
        elif name in known:
            old = known[name]
            kept = [value if old.value is None else old.value for value in values if value != old.drop]
            today.setdefault(old.setting, []).extend(kept)
        else:
            today.setdefault(name, []).extend(map(text_of, values))
    return found, today


def _depth(name: str, value: str) -> str:
    """A worker of bert-as-service had so many batches in its queue; ours has one beside the one that it computes, or none."""
    if not value.isdecimal():
        raise SettingsError(f"--{name.replace('_', '-')}={value!r}: must be a whole number; 0 fetches nothing ahead")
    return "1" if int(value) == 0 else "2"
