"""Translates configurations of Triton and of the AMD Inference Server into ours. A key that Weir does not support is refused by
name, or ignored with a warning if it only affects speed.

Numbers may be strings, and keys may be in camel case, as in the JSON form of protocol buffers. A value that is the default of
its field is ignored.
"""

import ast
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy

from weir.errors import SettingsError, add_extra, brief
from weir.model import FORMATS, NONE, REQUIRED
from weir.serving.delivery import logger
from weir.wire.tensors import DTYPES

# Keys of files of Triton and of the AMD Inference Server that Weir does not support, and what to do instead.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "models": "ensembles in the AMD server's form are not read",
        "sequence_batching": "sequences of requests are not kept together",
        "model_operations": "libraries of operations are not loaded",
        "model_repository_agents": "there are no agents",
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
        "response_cache": "responses are not cached",
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
    "passive": "every worker is used",
    "profile": "files are not chosen by profile",
    "secondary_devices": "there are no other devices",
    "host_policy": "set cpu_affinity",
}
_REFUSED_OF_STEPS = {"model_namespace": "all models of a server share one namespace"}
_INSTANCE_KEYS = {"count", "gpus", "kind", "name", "rate_limiter"}
_STEP_KEYS = {"input_map", "model_name", "model_version", "output_map"}
_LEVELS = "priority_queue_policy"
_POLICY_KEYS = {"allow_timeout_override", "default_timeout_microseconds", "max_queue_size", "timeout_action"}
_BATCHING_KEYS = {
    "default_priority_level",
    "default_queue_policy",
    "max_queue_delay_microseconds",
    "preferred_batch_size",
    "preserve_ordering",
    "priority_levels",
    _LEVELS,
}
_MAX_INSTANCES = 1 << 10  # of a group
_MAX_WARMUP = 1 << 24  # elements of a tensor

_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_FREE = ("parameters", "params", "metric_tags", "cc_model_filenames")  # tables whose keys are names, not fields
_MAPS = (*_FREE, "input_map", "output_map", "inputs")  # the same, also within others

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
    if "dynamic_batching" in given and own.get("max_queue_size", math.inf) < own.get("max_batch_size", 1):
        logger.warning("%s: max_queue_size: counts rows: a request with more rows is refused", source)
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
    return {_snake(key): each if _snake(key) in _MAPS else _renamed(each) for key, each in value.items()}


def _whole(value: Any, source: str) -> int:
    """Return `value`, a number or a string of digits, as an int."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingsError(f"{source}={brief(value)}: must be a whole number")
    return value


def _list(value: Any) -> list[Any]:
    """Return the values of a repeated field as a list; a field that occurs once may be written without one."""
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
        rule = f"{source}={value!r}: unknown platform; python and onnx are built in, and packages can add others"
        raise SettingsError(rule)
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
    _only(table, _TENSOR_KEYS | _REFUSED_OF_TENSORS.keys() | {"label_filename"}, source)
    datatype = str(table.get("datatype", table.get("data_type", "")))
    key = "shape" if "shape" in table else "dims"
    made = {
        "name": table.get("name", ""),
        "datatype": _DATATYPES.get(datatype, datatype.removeprefix("TYPE_")),
        "shape": _lengths(table.get(key, []), f"{source}.{key}"),
        "batched": "shape" not in table,  # as for `dims`, which the text form leaves out if there are none
        "optional": _flag(table.get("optional", False), f"{source}.optional"),
        "ragged": _flag(table.get("allow_ragged_batch", False), f"{source}.allow_ragged_batch"),
    }
    if not is_default(table.get("format")):
        if table["format"] not in FORMATS:
            rule = f"{source}.format={brief(table['format'])}: must be {', '.join(FORMATS[1:])} or FORMAT_NONE"
            raise SettingsError(rule)
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
    env: list[dict[str, str]] = []  # of each worker
    for group in _list(value):
        table = _table(group, source)
        _refuse(table, _REFUSED_OF_INSTANCES, source)
        _only(table, _INSTANCE_KEYS | _REFUSED_OF_INSTANCES.keys(), source)
        _warn(f"{source}.rate_limiter", table.get("rate_limiter"), "workers take batches as they become free")
        devices = [{"CUDA_VISIBLE_DEVICES": str(_whole(gpu, f"{source}.gpus"))} for gpu in _list(table.get("gpus", []))]
        kind = table.get("kind", "KIND_CPU")
        if kind == "KIND_GPU" and not devices:
            _warn(
                f"{source}.kind", kind, "the platform and the worker's environment decide on which device a model runs"
            )
        elif kind not in ("KIND_AUTO", "KIND_CPU", "KIND_GPU", "KIND_MODEL"):
            raise SettingsError(f"{source}.kind={brief(kind)}: must be KIND_AUTO, KIND_CPU, KIND_GPU or KIND_MODEL")
        count = _whole(table.get("count", 1), f"{source}.count")
        if count > _MAX_INSTANCES:
            raise SettingsError(f"{source}.count={count}: must be at most {_MAX_INSTANCES}")
        env += (devices or [{}]) * count
    return ({"workers": len(env)} if env else {}) | ({"env": env} if any(env) else {})


def _only(table: Table, known: Collection[str], source: str) -> None:
    for key in table.keys() - known:
        raise SettingsError(f"{source}.{key:.80}: unknown field; available: {', '.join(sorted(known))}")


def _batching(value: Any, source: str) -> dict[str, Any]:
    given = _table(value, source)
    _only(given, _BATCHING_KEYS, source)
    delay = _whole(given.get("max_queue_delay_microseconds", 0), f"{source}.max_queue_delay_microseconds") / 1e6
    sizes = [_whole(size, f"{source}.preferred_batch_size") for size in _list(given.get("preferred_batch_size", []))]
    levels = _whole(given.get("priority_levels", 0), f"{source}.priority_levels")
    if _whole(given.get("default_priority_level", 0), f"{source}.default_priority_level") != levels:
        logger.warning("%s.default_priority_level: requests without a priority come after those with one", source)
    made = _queue_policy(given.get("default_queue_policy", {}), f"{source}.default_queue_policy")
    for level, policy in _table(given.get(_LEVELS, {}), f"{source}.{_LEVELS}").items():
        if _queue_policy(policy, f"{source}.{_LEVELS}[{level}]") != made:
            raise SettingsError(
                f"{source}.{_LEVELS}[{level}]: must be as default_queue_policy: all priorities share one bound and one timeout"
            )
    if not sizes and not delay:
        return made
    # Without a preferred size, batches wait until they have the largest size.
    size = f"size={max(sizes)}," if sizes else ""
    return made | {"policy": f"size-or-delay:{size}delay={delay}", "max_queue_delay": delay}


def _queue_policy(value: Any, source: str) -> dict[str, Any]:
    """Return the bound and the timeout of a queue. A request may always state its own timeout, whatever `allow_timeout_override` says."""
    given = _table(value, source)
    _only(given, _POLICY_KEYS, source)
    rows = _whole(given.get("max_queue_size", 0), f"{source}.max_queue_size")
    timeout = _whole(given.get("default_timeout_microseconds", 0), f"{source}.default_timeout_microseconds") / 1e6
    override = _flag(given.get("allow_timeout_override", False), f"{source}.allow_timeout_override")
    if (timeout or override) and given.get("timeout_action", "REJECT") != "REJECT":
        rule = f"{source}.timeout_action={brief(given['timeout_action'])}: must be REJECT: late requests are not kept"
        raise SettingsError(rule)
    return ({"max_queue_size": rows} if rows else {}) | ({"timeout": timeout} if timeout else {})


def _ensemble(value: Any, source: str) -> dict[str, Any]:
    """Return the steps in an order in which each has its tensors."""
    given = _table(value, source)
    _only(given, ("max_inflight_requests", "step"), source)
    _warn(
        f"{source}.max_inflight_requests",
        given.get("max_inflight_requests"),
        "the queue of each step's model bounds it",
    )
    steps = [_step(table, f"{source}.step") for table in _list(given.get("step", []))]
    makers = {name: index for index, step in enumerate(steps) for name in step["outputs"].values()}
    needs = {
        index: {makers[name] for name in step["inputs"].values() if name in makers} for index, step in enumerate(steps)
    }
    try:
        order = list(TopologicalSorter(needs).static_order())
    except CycleError:
        raise SettingsError(f"{source}.step: the steps need each other's outputs") from None
    return {"platform": "ensemble", "steps": [steps[index] for index in order]} if steps else {}


def _step(value: Any, source: str) -> dict[str, Any]:
    table = _table(value, source)
    _refuse(table, _REFUSED_OF_STEPS, source)
    _only(table, _STEP_KEYS | _REFUSED_OF_STEPS.keys(), source)
    version = _whole(table.get("model_version", -1), f"{source}.model_version")
    maps = [dict(_table(table.get(key, {}), f"{source}.{key}")) for key in ("input_map", "output_map")]
    return {
        "model": table.get("model_name", ""),
        "version": str(version) if version > 0 else "",
        "inputs": maps[0],
        "outputs": maps[1],
    }


def _warmup(value: Any, source: str) -> dict[str, Any]:
    examples, sizes = [], set()
    for each in _list(value):
        table = _table(each, source)
        _only(table, ("batch_size", "count", "inputs", "name"), source)
        size = _whole(table.get("batch_size", 0), f"{source}.batch_size")
        inputs = _table(table.get("inputs", {}), f"{source}.inputs")
        examples.append(
            {name: _data(data, bool(size), f"{source}.inputs[{name!r:.80}]") for name, data in inputs.items()}
        )
        sizes.add(size)
    return {"examples": examples, "warmup_sizes": sorted(sizes - {0})} if examples else {}


def _data(value: Any, batched: bool, source: str) -> numpy.ndarray[Any, Any]:
    """Return an array for the warm-up: of zeros, or of random numbers from 0 to 1 if it is of floats."""
    table = _renamed(_table(value, source))
    if table.get("input_data_file"):
        raise SettingsError(f"{source}.input_data_file: files of data are not read: set `examples` in config.toml")
    kind, shape = str(table.get("data_type", "")), [1] * batched + _lengths(table.get("dims", []), f"{source}.dims")
    datatype = _DATATYPES.get(kind, kind.removeprefix("TYPE_"))
    if datatype not in DTYPES:
        raise SettingsError(f"{source}.data_type={brief(kind)}: must be a type of tensors")
    if not (all(length > 0 for length in shape) and math.prod(shape) <= _MAX_WARMUP):
        raise SettingsError(f"{source}.dims={brief(shape)}: must be 1 or more each, and at most {_MAX_WARMUP} in all")
    if datatype == "BYTES":
        return numpy.full(shape, b"", object)
    drawn = numpy.random.default_rng(0).random(shape) if table.get("random_data") else numpy.zeros(shape)
    return drawn.astype(DTYPES[datatype])


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
    for name, each in _table(value, source).items():
        text = each.get("string_value", each.get("stringValue", "")) if isinstance(each, Mapping) else each
        if name in _OF_ONNX:
            params[_OF_ONNX[name]] = _whole(text, f"{source}.{name}")
        elif name not in _OURS:
            logger.warning("%s: %s: is not supported and ignored", source, brief(name))
    return {"params": params} if params else {}


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
    "ensemble_scheduling": _ensemble,
    "model_warmup": _warmup,
    "version_policy": _versions,
    "default_model_filename": _file,
    "model_transaction_policy": _transactions,
    "parameters": _parameters,
}


def read_pbtxt(text: str, source: str) -> dict[str, Any]:
    """Return the model configuration `text`, in the text form of protocol buffers, with the fields that it has. Raises SettingsError
    naming `source` and what is wrong, or the extra if protobuf is not installed."""
    try:
        from google.protobuf import text_format

        from weir.wire.kserve_grpc import message
    except ImportError:
        raise SettingsError(
            f"{source}: needs protobuf, which is not installed; {add_extra('grpc')}, or write config.toml"
        ) from None
    try:
        return _plain(text_format.Parse(text, message("inference.ModelConfig")()))
    except text_format.ParseError as error:
        what = str(error).partition(" : ")[2]
        raise SettingsError(f"{source}: line {error.GetLine()}: {what:.300}") from None


def _plain(message: Any) -> dict[str, Any]:
    return {field.name: _value(field, value) for field, value in message.ListFields()}


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _value(field.message_type.fields_by_name["value"], each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_value(field, each) for each in value]
    if field.message_type is not None:
        return _plain(value)
    # A number stays one if the enumeration does not have it.
    return getattr(field.enum_type and field.enum_type.values_by_number.get(value), "name", value)


CLASS = "TritonPythonModel"  # of Triton's Python backend


def triton_class_in(path: Path) -> ast.ClassDef | None:
    """Return the class TritonPythonModel as the file defines it; None if it does not. The file is read, not run."""
    try:
        module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    return next((each for each in module.body if isinstance(each, ast.ClassDef) and each.name == CLASS), None)
