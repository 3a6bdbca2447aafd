"""The settings of ZeroMQ, and the flags of `bert-serving-start` with the settings that they stand for.

A flag may have one dash, as in bert-as-service, or two. docs/reference/bert-as-service.md has the table.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weir.config import AT_LEAST_ONE, POSITIVE, check, setting
from weir.errors import SettingsError
from weir.protocols.settings import PORT
from weir.text_server.settings import CallerSettings


@dataclass(frozen=True)
class ZeroMqSettings:
    """The ports and limits of ZeroMQ. Durations are in seconds, sizes in bytes.

    The settings of HTTP hold for its address, the number of connections, and the time for a handshake.
    """

    zmq_port: int | None = setting(
        None,
        "port for ZeroMQ requests, 5555 in bert-as-service; 0 picks a free one (default: no ZeroMQ)",
        rule=PORT,
    )
    zmq_port_out: int | None = setting(None, "port for ZeroMQ responses (default: the request port plus 1)", rule=PORT)
    zmq_max_message_size: int = setting(256 << 20, "largest request in bytes, over all its frames", rule=AT_LEAST_ONE)
    zmq_max_answer_size: int = setting(
        2 << 30, "largest response in bytes: the vectors of one request", rule=AT_LEAST_ONE
    )
    zmq_max_in_flight: int = setting(
        256 << 20,
        "bytes of running requests at which reading pauses",
        rule=AT_LEAST_ONE,
    )
    zmq_max_unread: int = setting(
        64 << 20,
        "unread response bytes at which a client's requests wait; at four times that over all clients, responses are dropped",
        rule=AT_LEAST_ONE,
    )
    zmq_grace: float = setting(
        5.0,
        "seconds that a disconnected client has to reconnect",
        rule=POSITIVE,
    )
    zmq_show_tokens: bool = setting(False, "return each text's tokens with its vectors")

    def __post_init__(self) -> None:
        check(self)


SERVER_PARTS = {"Callers": CallerSettings, "ZeroMQ": ZeroMqSettings}


class OldFlag(NamedTuple):
    """A flag of bert-serving-start.

    Attributes:
        setting: the name of the setting that the flag sets.
        value: the value that the flag sets if it takes no value itself.
        drop: a value of the flag that leaves the default.
    """

    setting: str
    value: str | None = None
    drop: str | None = None


# The flags by name. The command line replaces underscores by dashes, so `-max_seq_len` is parsed as `-max-seq-len`.
OLD: Mapping[str, OldFlag] = {
    "max_seq_len": OldFlag("max_length", drop="NONE"),
    "cased_tokenization": OldFlag("cased", "true"),
    "pooling_layer": OldFlag("layers"),
    "pooling_strategy": OldFlag("pooling"),
    "mask_cls_sep": OldFlag("mask_special", "true"),
    "no_special_token": OldFlag("word_special_tokens", "false"),
    "no_position_embeddings": OldFlag("positions", "false"),
    "show_tokens_to_client": OldFlag("zmq_show_tokens", "true"),
    "fixed_embed_length": OldFlag("fixed_length", "true"),
    "graph_tmp_dir": OldFlag("cache"),
    "port_in": OldFlag("zmq_port"),
    "port_data": OldFlag("zmq_port"),
    "port_out": OldFlag("zmq_port_out"),
    "port_result": OldFlag("zmq_port_out"),
    "http_port": OldFlag("port"),
    "http_max_connect": OldFlag("max_connections"),
    "cors": OldFlag("cors_origins"),
    "num_worker": OldFlag("workers"),
    "priority_batch_size": OldFlag("small_request_size"),
    "cpu": OldFlag("device_map", "cpu"),
    "fp16": OldFlag("precision", "fp16"),
    "verbose": OldFlag("log_level", "debug"),
}
# Flags with one dash only: with two dashes these are names of Weir's settings, and --port has another meaning.
ONE_DASH: Mapping[str, OldFlag] = {
    "port": OldFlag("zmq_port"),
    "max_batch_size": OldFlag("max_batch_size"),
    "device_map": OldFlag("device_map"),
    "gpu_memory_fraction": OldFlag("gpu_memory_fraction"),
}
MODEL_DIRECTORY, PREFETCH = "model_dir", ("prefetch", "prefetch_size")
VERSION, XLA = "version", "xla"
BERT_PORT, BERT_PORT_OUT = 5555, 5556  # the default ports of bert-as-service's server and client
# Flags that take several values separated by spaces; `test_` before a name of TESTS makes a flag that takes any number of values, also none.
SEVERAL = ("pooling_layer", "device_map")
TESTS = ("client_batch_size", "max_batch_size", "max_seq_len", "num_client", "pooling_layer")
# Flags that are refused, with the way to reach the same.
ELSEWHERE: Mapping[str, str] = {
    "tuned_model_dir": "name the fine-tuned model's directory instead; weir embed convert takes the classifier of a checkpoint along",
    "ckpt_name": "weir embed convert has it, as --checkpoint",
    "config_name": "the model's directory must have a config.json; weir embed convert writes it",
    "num_labels": "it is read from the model's files",
}
ONE_DASH_PREFIX = "one_dash_"  # the beginning of the parameter names of the flags in ONE_DASH
_PORTS = ("port_in", "port_data", ONE_DASH_PREFIX + "port")
_NUMBERS = re.compile(r"-?\d+(,-?\d+)*,?")


class Translated(NamedTuple):
    """Settings from a command line, by the names of Weir's settings.

    Attributes:
        directories: the directories of the models.
        today: the values of each setting, as text.
        stock: whether flags of bert-serving-start were used.
        old_port: whether one of them was the port for requests.
        xla: whether the flag -xla was used.
    """

    directories: list[str]
    today: dict[str, list[Any]]
    stock: bool = False
    old_port: bool = False
    xla: bool = False

    @property
    def settings(self) -> dict[str, list[Any]]:
        """`today`, with a default of bert-serving-start if its flags were used: a model whose files state no pooling has its second-to-last layer pooled."""
        return {"bare_layer": ["-2"], **self.today} if self.stock else self.today


def translated(
    directories: list[str] | None,
    given: Mapping[str, list[Any] | bool | None],
    check: Callable[[str, Sequence[tuple[str, Any]]], None] = lambda source, meant: None,
) -> Translated:
    """Translate the parameters of a command line, flags of bert-serving-start among them, to Weir's settings.

    `check` takes an old flag as it was given, and what it stands for: settings and values. Raises SettingsError for an invalid value, what `check` raises,
    and SettingsError for a flag in ELSEWHERE.
    """
    known = {**OLD, **{ONE_DASH_PREFIX + name: old for name, old in ONE_DASH.items()}}
    found = list(directories or [])
    today: dict[str, list[Any]] = {}
    used: dict[str, list[Any]] = {
        name: [value] if isinstance(value, bool) else value for name, value in given.items() if value
    }
    old = [name for name in used if name in {*known, MODEL_DIRECTORY, *PREFETCH, XLA}]
    for name, values in used.items():
        if name in ELSEWHERE:
            raise SettingsError(f"-{name}: is not supported: {ELSEWHERE[name]}")
        if name == MODEL_DIRECTORY:
            found += values
        elif name in PREFETCH:
            today.setdefault("pipeline_depth", []).extend(_depth(name, value) for value in values)
        elif name in known:
            flag = known[name]
            kept = [value if flag.value is None else flag.value for value in values if value != flag.drop]
            check(f"-{name.removeprefix(ONE_DASH_PREFIX)}", [(flag.setting, value) for value in kept])
            today.setdefault(flag.setting, []).extend(kept)
        elif name not in (VERSION, XLA):
            today.setdefault(name, []).extend(
                str(value).lower() if isinstance(value, bool) else str(value) for value in values
            )
    if used.get("pooling_strategy") == ["NONE"] and today.get("max_length"):
        today.setdefault("fixed_length", ["true"])  # bert-as-service then pads every answer to that length
    if "mask_cls_sep" in used:
        today.setdefault("hide_special", ["true"])
    if XLA in used and today.get("runtime") == ["torch"]:
        today.setdefault("compile", ["true"])
    return Translated(found, today, bool(old), any(name in used for name in _PORTS), XLA in used)


def with_commas(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command line with the values of a flag that has several joined by commas, as Weir's options have them."""
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
        if name == "device_map" and values:  # the option for devices is repeated for each value
            yield from (part for value in values for part in (word, value))
            continue
        yield word
        if values or name.startswith("test_"):
            yield ",".join(values)


def server_last(words: Sequence[str]) -> list[str]:
    """Return the words of a command line of bert-serving-benchmark with the flags of the server after two dashes, where the benchmark expects them.

    The directory is put first. Flags for ports are removed, as the servers that are measured have ports of their own.
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
    """Return the name of the flag in `word`, as bert-as-service writes it; "" if the word is not a flag."""
    return word.partition("=")[0].lstrip("-").replace("-", "_") if word.startswith("-") else ""


def _depth(name: str, value: str) -> str:
    """Return the pipeline_depth for a prefetch size: 1 for none, else 2. bert-as-service kept that many batches in a worker's queue."""
    if not value.isdecimal():
        raise SettingsError(f"--{name.replace('_', '-')}={value!r}: must be a whole number; 0 fetches nothing ahead")
    return "1" if int(value) == 0 else "2"
