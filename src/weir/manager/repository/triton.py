"""Configurations in the words of Triton and of the AMD Inference Server, put into ours; what has no meaning is refused by
name."""

from collections.abc import Callable, Mapping
from typing import Any

from weir.errors import SettingsError
from weir.manager.repository.keys import REFUSED
from weir.model import NONE, REQUIRED

PLATFORMS = {"onnx_onnxv1": "onnx", "onnxruntime_onnx": "onnx", "onnxruntime": "onnx", "amdinfer_python": "python"}
# Of the AMD server and Triton: nobody here runs them.
FOREIGN = (
    "tensorflow_graphdef", "tensorflow_savedmodel", "pytorch_torchscript", "pytorch_libtorch", "tensorrt_plan",
    "vitis_xmodel", "migraphx_mxr", "amdinfer_cpp",
)  # fmt: skip
_DATATYPES = {"TYPE_STRING": "BYTES"}
# Said by nearly every file, and true of every model here.
_HARMLESS = ("parameters", "model_control_mode", "default_priority_level")


def translated(said: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return what `said` says in our keys. Raises SettingsError naming the key that means nothing here, or its value."""
    own: dict[str, Any] = {}
    for key, value in sorted(
        said.items(), key=lambda each: each[0] == "batch_dimension"
    ):  # which goes before max_batch_size
        if key in REFUSED:
            raise SettingsError(f"{source}: {key}: {REFUSED[key]}")
        translate = _TRANSLATORS.get(key)
        if translate is not None:
            own.update(translate(value, f"{source}: {key}"))
        elif key not in _HARMLESS or value:
            own[key] = value
    return own


def _platform(value: Any, source: str) -> dict[str, Any]:
    if value in FOREIGN:
        raise SettingsError(
            f"{source}={value!r}: there is no such platform here; python and onnx are built in, packages may bring others"
        )
    return {"platform": PLATFORMS.get(value, value)} if value else {}


def _tensors(key: str) -> Callable[[Any, str], dict[str, Any]]:
    def translate(value: Any, source: str) -> dict[str, Any]:
        tables = value if isinstance(value, list) else [value]
        return {key: [_tensor(table, source) for table in tables]}

    return translate


def _tensor(table: Any, source: str) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise SettingsError(f"{source}: must be tables with name, datatype and shape, not {table!r:.80}")
    datatype = str(table.get("datatype", table.get("data_type", "")))
    shape = table.get("shape", table.get("dims", []))
    named = {"name": table.get("name", ""), "datatype": _DATATYPES.get(datatype, datatype.removeprefix("TYPE_"))}
    return {**named, "shape": shape if isinstance(shape, list) else [shape], "batched": "dims" in table}


def _max_batch_size(value: Any, source: str) -> dict[str, Any]:
    if type(value) is int and value == 0:
        return {"max_batch_size": 1, "batch_dimension": NONE}  # models of items too run them one by one
    return {"max_batch_size": value, "batch_dimension": REQUIRED}


def _instances(value: Any, source: str) -> dict[str, Any]:
    groups = value if isinstance(value, list) else [value]
    return {"workers": sum(int(group.get("count", 1)) for group in groups if isinstance(group, Mapping)) or 1}


def _batching(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SettingsError(f"{source}: must be a table, not {value!r:.80}")
    known = {"preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering"}
    for key in value.keys() - known:
        raise SettingsError(f"{source}.{key}: has no meaning here; say a policy, priorities and timeouts as settings")
    delay = value.get("max_queue_delay_microseconds", 0) / 1e6
    preferred = value.get("preferred_batch_size", [])
    sizes = preferred if isinstance(preferred, list) else [preferred]
    if not sizes:
        return {"max_queue_delay": delay} if delay else {}
    return {"policy": f"size-or-delay:size={max(sizes)},delay={delay}", "max_queue_delay": delay}


def _versions(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or len(value) != 1:
        raise SettingsError(f"{source}: must be latest, all or specific, not {value!r:.80}")
    ((kind, said),) = value.items()
    if kind == "all":
        return {"versions": "all"}
    if kind == "latest":
        return {"versions": int(said.get("num_versions", 1))}
    if kind == "specific":
        versions = said.get("versions", [])
        return {"versions": [str(each) for each in (versions if isinstance(versions, list) else [versions])]}
    raise SettingsError(f"{source}: must be latest, all or specific, not {kind!r}")


def _file(value: Any, source: str) -> dict[str, Any]:
    return {"file": value} if value else {}


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
}
