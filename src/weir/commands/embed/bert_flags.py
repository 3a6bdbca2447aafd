"""The flags of `bert-serving-start`, with the one dash that they have there or with two, for what they are called here. docs/reference has the table."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

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
    "no_special_token": Old("word_special_tokens", "false"),
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
VERSION, XLA = "version", "xla"
PORT, PORT_OUT = 5555, 5556  # that its server opens and its client looks for where nobody says it
# Several values may stand behind these, with spaces between; behind the others of TESTS none too.
SEVERAL = ("pooling_layer", "device_map")
TESTS = ("client_batch_size", "max_batch_size", "max_seq_len", "num_client", "pooling_layer")
# What is said elsewhere now, by name.
ELSEWHERE: Mapping[str, str] = {
    "tuned_model_dir": "name the fine-tuned model's directory instead; weir embed convert takes the classifier of a checkpoint along",
    "ckpt_name": "weir embed convert has it, as --checkpoint",
    "config_name": "the model's directory must have a config.json; weir embed convert writes it",
    "num_labels": "it is read from the model's files",
}
_ONE_DASH = "one_dash_"  # before the names of their parameters
_PORTS = ("port_in", "port_data", _ONE_DASH + "port")
_NUMBERS = re.compile(r"-?\d+(,-?\d+)*,?")


def old_parameters() -> list[inspect.Parameter]:
    """Return a parameter for each, which `--help` does not show."""
    switches = {VERSION, XLA, *(name for name, old in OLD.items() if old.value is not None)}
    both = [
        parameter(name, bool if name in switches else list[str], _hidden(f"-{name}", f"--{name}"))
        for name in (MODEL_DIRECTORY, *PREFETCH, VERSION, XLA, *OLD, *ELSEWHERE)
    ]
    return [*both, *[parameter(_ONE_DASH + name, list[str], _hidden(f"-{name}")) for name in ONE_DASH]]


def _hidden(*flags: str) -> Any:
    return typer.Option(None, *[flag.replace("_", "-") for flag in flags], hidden=True)


class Translated(NamedTuple):
    """What was said, by today's names. With `stock`, some of it by old ones; `old_port`: the port for requests too. `xla`: that was asked for."""

    directories: list[str]
    today: dict[str, list[Any]]
    stock: bool = False
    old_port: bool = False
    xla: bool = False


def translated(directories: list[str] | None, said: Mapping[str, list[Any] | bool | None]) -> Translated:
    """Return what was said by today's names. Raises SettingsError for a value that cannot be, and for what is said elsewhere."""
    known = {**OLD, **{_ONE_DASH + name: old for name, old in ONE_DASH.items()}}
    found = list(directories or [])
    today: dict[str, list[Any]] = {}
    there: dict[str, list[Any]] = {
        name: [value] if isinstance(value, bool) else value for name, value in said.items() if value
    }
    old = [name for name in there if name in {*known, MODEL_DIRECTORY, *PREFETCH, XLA}]
    for name, values in there.items():
        if name in ELSEWHERE:
            raise SettingsError(f"-{name}: is not taken here: {ELSEWHERE[name]}")
        if name == MODEL_DIRECTORY:
            found += values
        elif name in PREFETCH:
            today.setdefault("pipeline_depth", []).extend(_depth(name, value) for value in values)
        elif name in known:
            meant = known[name]
            kept = [value if meant.value is None else meant.value for value in values if value != meant.drop]
            today.setdefault(meant.setting, []).extend(kept)
        elif name not in (VERSION, XLA):
            today.setdefault(name, []).extend(map(text_of, values))
    if there.get("pooling_strategy") == ["NONE"] and today.get("max_length"):
        today.setdefault("fixed_length", ["true"])  # a length that was chosen is that of every answer there
    if "mask_cls_sep" in there:
        today.setdefault("hide_special", ["true"])
    if XLA in there and today.get("runtime") == ["torch"]:
        today.setdefault("compile", ["true"])
    return Translated(found, today, bool(old), any(name in there for name in _PORTS), XLA in there)


class StockCommand(TyperCommand):
    """A command that also takes words as the commands of bert-as-service do: several values with spaces between, and for
    `benchmark` the flags of the server among its own."""

    def parse_args(self, context: Any, words: list[str]) -> list[str]:
        """Read `words`. Raises SettingsError naming an option that there is not."""
        said = list(_with_commas(words))
        try:
            return super().parse_args(context, _server_last(said) if self.name == "benchmark" else said.copy())
        except typer.TyperException as error:
            unknown = getattr(error, "option_name", "")
            # Of an unknown one with one dash the parser names the first letter.
            whole = [word for word in said if len(unknown) == 2 and re.match(rf"{re.escape(unknown)}[^-\W\d]", word)]
            if not whole:
                raise
            message = f"{whole[0].partition('=')[0]}: there is no such option; weir embed {self.name} --help lists those there are"
            raise SettingsError(message) from None


def _with_commas(words: Sequence[str]) -> Iterator[str]:
    """Put commas between the values of a flag that has several, as options of today have them."""
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            yield from (word, *left)
            return
        name = _old_name(word)
        several = name in SEVERAL and not (name == "device_map" and word.startswith("--"))
        takes = several or name in {f"test_{each}" for each in TESTS}
        if not takes or "=" in word:
            yield word
            continue
        values: list[str] = []
        while left and _NUMBERS.fullmatch(left[0]):
            values.append(left.pop(0).strip(","))
        if name == "device_map" and values:  # names, each given by itself
            yield from (part for value in values for part in (word, value))
            continue
        yield word
        if values or name.startswith("test_"):
            yield ",".join(values)


def _server_last(words: Sequence[str]) -> list[str]:
    """Put the flags of bert-serving-start, which bert-serving-benchmark takes too, where those of the server stand: behind two dashes.

    The directory comes first, and ports are left out, for the servers that are measured have ports of their own.
    """
    own: list[str] = []
    servers: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            servers += left
            break
        name = _old_name(word)
        old = OLD.get(name) or (ONE_DASH.get(name) if not word.startswith("--") else None)
        if old is None and name not in (MODEL_DIRECTORY, *PREFETCH, XLA):
            own.append(word)
            continue
        flag, equals, value = word.partition("=")
        has_value = name != XLA and (old is None or old.value is None)
        given = [value] if equals else [left.pop(0)] if has_value and left else []
        if name == MODEL_DIRECTORY:
            own[:0] = given
        elif not name.startswith(("port", "http_port")):
            servers += ["=".join((flag, *given))]
    return [*own, "--", *servers] if servers else own


def _old_name(word: str) -> str:
    """Return what the flag in `word` is called in bert-as-service; "" if it is none."""
    return word.partition("=")[0].lstrip("-").replace("-", "_") if word.startswith("-") else ""


def _depth(name: str, value: str) -> str:
    """A worker of bert-as-service had so many batches in its queue; ours has one beside the one that it computes, or none."""
    if not value.isdecimal():
        raise SettingsError(f"--{name.replace('_', '-')}={value!r}: must be a whole number; 0 fetches nothing ahead")
    return "1" if int(value) == 0 else "2"
