"""Translates configurations of Triton and of the AMD Inference Server into ours. A key that Weir does not support is refused by
name, or ignored with a warning if it only affects speed.

Numbers may be strings, and keys may be in camel case, as in the JSON form of protocol buffers. A value that is the default of
its field is ignored.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from weir.errors import SettingsError, brief
from weir.model import FORMATS, NONE, REQUIRED
from weir.serving.delivery import logger

# Keys of files of Triton and of the AMD Inference Server that Weir does not support, and what to do instead.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "models": "ensembles in the AMD server's form are not read",
        "ensemble_scheduling": "ensembles in Triton's form are not read",
        "sequence_batching": "sequences of requests are not kept together",
        "model_warmup": "set `examples` and `warmup_sizes` in config.toml",
        "model_operations": "libraries of operations are not loaded",
        "model_repository_agents": "there are no agents",
        "response_cache": "responses are not cached",
        "cc_model_filenames": "files are not chosen by compute capability",
        "runtime": "backends are chosen by `platform`",
        "batch_input": "input tensors that describe the whole batch are not made",
        "batch_output": "output tensors that describe the whole batch are not divided",
    }
)

# Keys that change no result, only its speed or what is reported in addition: they are ignored with a warning.
WARNED: Mapping[str, str] = MappingProxyType(
    {
        "optimization": "the platform decides how it optimises",
        "metric_tags": "the labels of metrics are fixed",
        "model_metrics": "the set of metrics is fixed",
        "model_control_mode": "the server's own flags decide what is loaded",
        "default_priority_level": "each request states its priority",
    }
)

PLATFORMS = {"onnx_onnxv1": "onnx", "onnxruntime_onnx": "onnx", "onnxruntime": "onnx", "amdinfer_python": "python"}
# Backends of the AMD server and Triton that Weir does not run.
FOREIGN = (
    "tensorflow_graphdef",
    "tensorflow_savedmodel",
    "pytorch_torchscript",
    "pytorch_libtorch",
    "tensorrt_plan",
    "vitis_xmodel",
    "migraphx_mxr",
    "amdinfer_cpp",
)
_DATATYPES = {"TYPE_STRING": "BYTES"}

# Parameters of Triton's onnxruntime backend that are arguments of our own model.
_OF_ONNX = {"intra_op_thread_count": "intra_op", "inter_op_thread_count": "inter_op"}
# Parameters that Weir's own configurations carry for information only.
_OURS = ("allowed_batch_sizes", "max_queue_delay", "max_queue_size", "policy", "unbatched")

_TENSOR_KEYS = {"name", "datatype", "data_type", "shape", "dims", "reshape", "optional", "format", "allow_ragged_batch"}
_REFUSED_OF_TENSORS = {
    "is_shape_tensor": "shapes are not given as tensors",
    "is_non_linear_format_io": "tensors are linear",
}
_OF_INPUTS = dict.fromkeys(("allow_ragged_batch", "format", "optional"), "is for inputs")
_REFUSED_OF_INSTANCES = {
    "gpus": 'set the device of each worker in its environment: env = [{ CUDA_VISIBLE_DEVICES = "0" }]',
    "rate_limiter": "workers take batches as they become free",
    "passive": "every worker is used",
    "profile": "files are not chosen by profile",
    "secondary_devices": "there are no other devices",
    "host_policy": "set cpu_affinity",
}
_REFUSED_OF_BATCHING = "is not supported; use the settings for policy, priorities and timeouts"

_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_FREE = ("parameters", "params", "metric_tags", "cc_model_filenames")  # tables whose keys are names, not fields

Table = Mapping[str, Any]


def translated(given: Table, source: str) -> dict[str, Any]:
    """Return the configuration `given` with Weir's own keys and values. Raises one SettingsError that names every key that is
    not supported or has an invalid value."""
    own: dict[str, Any] = {}
    wrong: list[str] = []
    python = given.get("backend") == "python"  # whose models read the parameters themselves
    for key, value in sorted(in_snakes(given).items(), key=_rank):
        if key == "parameters" and python:
            continue
        try:
            own |= _translated(key, value, source)
        except SettingsError as error:
            wrong.append(error.message)
    if wrong:
        raise SettingsError("; ".join(wrong))
    return own


def _rank(each: tuple[str, Any]) -> int:
    """Return the sort key: Weir's own and more specific keys come last, so that they override the others."""
    return {"backend": 0, "dynamic_batching": 0, "params": 2, "batch_dimension": 2}.get(each[0], 1)


def _translated(key: str, value: Any, source: str) -> dict[str, Any]:
    if key in REFUSED:
        if is_default(value):
            return {}
        raise SettingsError(f"{source}: {key}: {REFUSED[key]}")
    if key in WARNED:
        _warn(f"{source}: {key}", value, WARNED[key])
        return {}
    translate = _TRANSLATORS.get(key)
    return {key: value} if translate is None else translate(value, f"{source}: {key}")


def is_default(value: Any) -> bool:
    """Return whether `value` is the default of its field, so that it means the same as no value."""
    if isinstance(value, Mapping):
        return all(map(is_default, value.values()))
    if isinstance(value, str):
        return value in ("", "0") or value.endswith(("_NONE", "_DEFAULT", "_UNSPECIFIED"))
    return not value


def _warn(what: str, value: Any, why: str) -> None:
    if not is_default(value):
        logger.warning("%s: %s", what, why)


def in_snakes(given: Table) -> dict[str, Any]:
    """Return the configuration `given` with all field names of Triton in snake case, as its files have them; Weir's own keys stay as they are."""
    known = {**_TRANSLATORS, **REFUSED, **WARNED}
    named = [(_snake(key), key, value) for key, value in given.items()]
    return {
        snake if snake in known else key: value if snake in _FREE or snake not in known else _renamed(value)
        for snake, key, value in named
    }


def _snake(key: str) -> str:
    return _CAMEL.sub(lambda found: f"_{found[1].lower()}", key)


def _renamed(value: Any) -> Any:
    if isinstance(value, list):
        return [_renamed(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {_snake(key): each if _snake(key) in _FREE else _renamed(each) for key, each in value.items()}


def _whole(value: Any, source: str) -> int:
    """Return `value`, a number or a string of digits, as an int."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingsError(f"{source}={brief(value)}: must be a whole number")
    return value


def _list(value: Any) -> list[Any]:
    """Return the values of a repeated field as a list: in text form, a field that occurs once is no list."""
    return value if isinstance(value, list) else [value]


def _table(value: Any, source: str) -> Table:
    if not isinstance(value, Mapping):
        raise SettingsError(f"{source}: must be a table, not {brief(value)}")
    return value


def _flag(value: Any, source: str) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(f"{source}={brief(value)}: must be true or false")
    return value


def _refuse(table: Table, refused: Table, source: str) -> None:
    for key, why in refused.items():
        if not is_default(table.get(key)):
            raise SettingsError(f"{source}.{key}: {why}")


def _platform(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, str):
        raise SettingsError(f"{source}={brief(value)}: must be text")
    if value in FOREIGN:
        raise SettingsError(
            f"{source}={value!r}: unknown platform; python and onnx are built in, and packages can add others"
        )
    return {"platform": PLATFORMS.get(value, value)} if value else {}


def _tensors(key: str) -> Callable[[Any, str], dict[str, Any]]:
    return lambda value, source: {key: [_tensor(table, source) for table in _list(value)]}


def _tensor(table: Any, source: str) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise SettingsError(f"{source}: must be tables with name, datatype and shape, not {brief(table)}")
    is_output = source.rpartition(" ")[2].startswith("output")
    source = f"{source}[{table.get('name', '')!r:.80}]"
    _refuse(table, _REFUSED_OF_TENSORS, source)
    if is_output:
        _refuse(table, _OF_INPUTS, source)
    _warn(f"{source}.label_filename", table.get("label_filename"), "classes are not named")
    for key in table.keys() - _TENSOR_KEYS - _REFUSED_OF_TENSORS.keys() - {"label_filename"}:
        raise SettingsError(f"{source}.{key:.80}: unknown field; available: {', '.join(sorted(_TENSOR_KEYS))}")
    datatype = str(table.get("datatype", table.get("data_type", "")))
    key = "shape" if "shape" in table else "dims"
    made = {
        "name": table.get("name", ""),
        "datatype": _DATATYPES.get(datatype, datatype.removeprefix("TYPE_")),
        "shape": _lengths(table.get(key, []), f"{source}.{key}"),
        "batched": "dims" in table,
        "optional": _flag(table.get("optional", False), f"{source}.optional"),
        "ragged": _flag(table.get("allow_ragged_batch", False), f"{source}.allow_ragged_batch"),
    }
    if not is_default(table.get("format")):
        if table["format"] not in FORMATS:
            raise SettingsError(
                f"{source}.format={brief(table['format'])}: must be {', '.join(FORMATS[1:])} or FORMAT_NONE"
            )
        made["format"] = table["format"]
    if table.get("reshape") is not None:
        reshape = _table(table["reshape"], f"{source}.reshape")
        made["reshape"] = _lengths(reshape.get("shape", []), f"{source}.reshape.shape")
    return made


def _lengths(value: Any, source: str) -> list[int]:
    return [_whole(each, source) for each in _list(value)]


def _max_batch_size(value: Any, source: str) -> dict[str, Any]:
    size = _whole(value, source)
    if size == 0:
        return {"max_batch_size": 1, "batch_dimension": NONE}  # the size also makes models of items run them one by one
    return {"max_batch_size": size, "batch_dimension": REQUIRED}


def _instances(value: Any, source: str) -> dict[str, Any]:
    workers = 0
    for group in _list(value):
        table = _table(group, source)
        _refuse(table, _REFUSED_OF_INSTANCES, source)
        for key in table.keys() - _REFUSED_OF_INSTANCES.keys() - {"name", "kind", "count"}:
            raise SettingsError(f"{source}.{key:.80}: unknown field; available: count, kind, name")
        kind = table.get("kind", "KIND_CPU")
        if kind == "KIND_GPU":
            _warn(
                f"{source}.kind", kind, "the platform and the worker's environment decide on which device a model runs"
            )
        elif kind not in ("KIND_AUTO", "KIND_CPU", "KIND_MODEL"):
            raise SettingsError(f"{source}.kind={brief(kind)}: must be KIND_AUTO, KIND_CPU, KIND_GPU or KIND_MODEL")
        workers += _whole(table.get("count", 1), f"{source}.count")
    return {"workers": workers} if workers else {}


def _batching(value: Any, source: str) -> dict[str, Any]:
    given = _table(value, source)
    for key in given.keys() - {"preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering"}:
        if not is_default(given[key]):
            raise SettingsError(f"{source}.{key:.80}: {_REFUSED_OF_BATCHING}")
    delay = _whole(given.get("max_queue_delay_microseconds", 0), f"{source}.max_queue_delay_microseconds") / 1e6
    sizes = [_whole(size, f"{source}.preferred_batch_size") for size in _list(given.get("preferred_batch_size", []))]
    if not sizes and not delay:
        return {}
    # Without a preferred size, batches wait until they have the largest size.
    size = f"size={max(sizes)}," if sizes else ""
    return {"policy": f"size-or-delay:{size}delay={delay}", "max_queue_delay": delay}


def _versions(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or len(value) != 1:
        raise SettingsError(f"{source}: must be latest, all or specific, not {brief(value)}")
    ((kind, given),) = value.items()
    if kind == "all":
        return {"versions": "all"}
    if kind == "latest":
        return {"versions": _whole(_table(given, source).get("num_versions", 1), f"{source}.latest.num_versions")}
    if kind == "specific":
        versions = _list(_table(given, source).get("versions", []))
        return {"versions": [str(_whole(each, f"{source}.specific.versions")) for each in versions]}
    raise SettingsError(f"{source}: must be latest, all or specific, not {brief(kind)}")


def _file(value: Any, source: str) -> dict[str, Any]:
    return {"file": value} if value else {}


def _transactions(value: Any, source: str) -> dict[str, Any]:
    return {"decoupled": _flag(_table(value, source).get("decoupled", False), f"{source}.decoupled")}


def _parameters(value: Any, source: str) -> dict[str, Any]:
    """Read the parameters for onnxruntime; ignore others with a warning."""
    params: dict[str, Any] = {}
    for name, each in _named(value, source):
        text = each.get("string_value", each.get("stringValue", "")) if isinstance(each, Mapping) else each
        if name in _OF_ONNX:
            params[_OF_ONNX[name]] = _whole(text, f"{source}.{name}")
        elif name not in _OURS:
            logger.warning("%s: %s: is not supported and ignored", source, brief(name))
    return {"params": params} if params else {}


def _named(value: Any, source: str) -> list[tuple[str, Any]]:
    """Return the entries of a map. In the text form of protocol buffers, a map is a list of tables with `key` and `value`."""
    if isinstance(value, Mapping) and not (value.keys() <= {"key", "value"} and isinstance(value.get("key"), str)):
        return [(str(name), each) for name, each in value.items()]
    tables = [_table(each, source) for each in _list(value)]
    return [(str(table.get("key", "")), table.get("value", "")) for table in tables]


_TRANSLATORS: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "platform": _platform,
    "backend": _platform,
    "input": _tensors("inputs"),
    "inputs": _tensors("inputs"),
    "output": _tensors("outputs"),
    "outputs": _tensors("outputs"),
    "max_batch_size": _max_batch_size,
    "instance_group": _instances,
    "dynamic_batching": _batching,
    "version_policy": _versions,
    "default_model_filename": _file,
    "model_transaction_policy": _transactions,
    "parameters": _parameters,
}


_TOKEN = re.compile(
    r"""(?P<space>[\s]+|\#[^\n]*) | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*') | (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?f?)
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*) | (?P<sign>[{}\[\]<>:,;])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_CLOSING = {"{": "}", "<": ">"}
MAX_DEPTH = 32  # of nested messages and lists


class _TextToken(NamedTuple):
    kind: str
    text: str
    line: int


def read_pbtxt(text: str, source: str) -> dict[str, Any]:
    """Parse `text`, a message in the text form of protocol buffers. Raises SettingsError naming `source`, the line and what is
    wrong there."""
    return _MessageReader([*_tokens(text, source)], source).message("", 0)


def _tokens(text: str, source: str) -> Iterator[_TextToken]:
    at, line = 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise SettingsError(f"{source}: line {line}: cannot be read: {text[at : at + 20]!r}")
        if found.lastgroup != "space":
            yield _TextToken(str(found.lastgroup), found[0], line)
        line += found[0].count("\n")
        at = found.end()
    yield _TextToken("end", "", line)


class _MessageReader:
    """A recursive-descent parser of the text form of protocol buffers."""

    def __init__(self, tokens: list[_TextToken], source: str) -> None:
        self._tokens = tokens
        self._source = source
        self._at = 0

    def message(self, closing: str, depth: int) -> dict[str, Any]:
        """Read fields up to the token `closing` ("": the end of the text). Raises SettingsError."""
        if depth > MAX_DEPTH:
            raise self._error(f"messages are nested more than {MAX_DEPTH} deep")
        fields: dict[str, Any] = {}
        while True:
            token = self._next()
            if token.text == closing and token.kind in ("sign", "end"):
                return fields
            if token.kind != "word":
                raise self._error(f"expected the name of a field, found {token.text!r}")
            value = self._field(depth)
            if token.text in fields:
                before = fields[token.text]
                more = value if isinstance(value, list) else [value]
                fields[token.text] = [*(before if isinstance(before, list) else [before]), *more]
            else:
                fields[token.text] = value
            if self._peek().text in (",", ";"):
                self._next()

    def _field(self, depth: int) -> Any:
        if self._peek().text in _CLOSING:
            return self.message(_CLOSING[self._next().text], depth + 1)
        if self._peek().text == "[":
            return self._value(depth)
        if self._next().text != ":":
            raise self._error("a field's name must be followed by a colon and its value")
        return self._value(depth)

    def _value(self, depth: int) -> Any:
        token = self._next()
        if token.text in _CLOSING and token.kind == "sign":
            return self.message(_CLOSING[token.text], depth + 1)
        if token.text == "[" and token.kind == "sign":
            return self._list(depth)
        if token.kind == "text":
            return self._text(token)
        if token.kind == "number":
            number = token.text.removesuffix("f")
            return int(number) if number.lstrip("+-").isdigit() else float(number)
        if token.kind == "word":
            return {"true": True, "True": True, "false": False, "False": False}.get(token.text, token.text)
        raise self._error(f"expected a value, found {token.text!r}")

    def _list(self, depth: int) -> list[Any]:
        if depth > MAX_DEPTH:
            raise self._error(f"lists are nested more than {MAX_DEPTH} deep")
        values: list[Any] = []
        while self._peek().text != "]":
            values.append(self._value(depth + 1))
            if self._peek().text == ",":
                self._next()
            elif self._peek().text != "]":
                raise self._error("the values of a list must be separated by commas")
        self._next()
        return values

    def _text(self, token: _TextToken) -> str:
        pieces = [token.text]
        while self._peek().kind == "text":  # adjacent strings are one string
            pieces.append(self._next().text)
        return "".join(_ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[1]), piece[1:-1]) for piece in pieces)

    def _peek(self) -> _TextToken:
        return self._tokens[min(self._at, len(self._tokens) - 1)]

    def _next(self) -> _TextToken:
        token = self._peek()
        self._at += 1
        return token

    def _error(self, what: str) -> SettingsError:
        line = self._tokens[min(max(self._at - 1, 0), len(self._tokens) - 1)].line
        return SettingsError(f"{self._source}: line {line}: {what}")


CLASS = "TritonPythonModel"  # of Triton's Python backend


def triton_class_in(path: Path) -> ast.ClassDef | None:
    """Return the class TritonPythonModel as the file defines it; None if it does not. The file is read, not run."""
    try:
        module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    return next((each for each in module.body if isinstance(each, ast.ClassDef) and each.name == CLASS), None)
