"""What the Open Inference Protocol shows of a server and its models; its doors write it in their own ways."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weir._version import __version__
from weir.errors import Forbidden, InvalidRequest, ModelNotFound, brief
from weir.model import NONE, RAGGED, Tensor, is_batched
from weir.policy.rules import SizeOrDelay
from weir.protocols.access import Control
from weir.wire.kserve_json import parse
from weir.wire.values import decode_json

if TYPE_CHECKING:
    from weir.catalog.registry import Registry
    from weir.profiling.machine import Hardware
    from weir.serving.service import Service


# What a server offers beyond what the protocol requires, as its metadata lists it. Shared memory only where it is allowed.
EXTENSIONS = (
    "binary_tensor_data", "compression", "model_configuration", "model_repository",
    "model_repository(unload_dependents)", "schedule_policy", "statistics",
)  # fmt: skip
SHARED_MEMORY = "system_shared_memory"

_BACKENDS = {"onnx": "onnxruntime", "ensemble": ""}  # the others are called as the platform
_MICROSECONDS = 1e6
_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}  # the others are called as in the protocol


def find(registry: "Registry", name: str, version: str = "") -> "Service":
    """Return the service of a model; `version` "" is the default one.

    Raises ModelNotFound in the words that clients of the protocol look for.
    """
    try:
        return registry.get(name, version)
    except ModelNotFound:
        there_are = ", ".join(registry.services) or "no models"
        which = f" version {version!r}" if version else ""
        raise ModelNotFound(f"Request for unknown model: {name!r}{which} is not found; there are {there_are}") from None


def server_metadata(name: str, extensions: Sequence[str] = EXTENSIONS) -> dict[str, Any]:
    """Return the metadata of a server of that `name` which offers `extensions`."""
    return {"name": name, "version": __version__, "extensions": list(extensions)}


def metadata(service: "Service", versions: Sequence[str] = ()) -> dict[str, Any]:
    """Return the metadata of a model; `versions` are those that are served."""
    return {
        "name": service.name,
        "versions": list(versions),
        "platform": service.platform,
        "inputs": [_tensor(tensor) for tensor in service.inference.inputs(service)],
        "outputs": [_tensor(tensor) for tensor in service.inference.outputs(service)],
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def config(service: "Service") -> dict[str, Any]:
    """Return the configuration of a model in the words of Triton's `ModelConfig`, as far as they say what is so here."""
    batching = service.batching
    said = {
        "policy": str(batching.policy), "max_queue_size": str(batching.max_queue_size),
        "max_queue_delay": str(batching.max_queue_delay),
    }  # fmt: skip
    if sizes := service.model.allowed_batch_sizes:
        said["allowed_batch_sizes"] = ", ".join(map(str, sorted(sizes)))
    said |= {"unbatched": reason} if (reason := service.model.unbatched) else {}
    return {
        "name": service.name,
        "platform": service.platform,
        "backend": _BACKENDS.get(service.platform, service.platform),
        "max_batch_size": batching.max_batch_size if is_batched(service.model) else 0,
        "input": [_declared(tensor) for tensor in service.inference.inputs(service)],
        "output": [_declared(tensor) for tensor in service.inference.outputs(service)],
        "instance_group": [{"name": service.name, "kind": "KIND_CPU", "count": service.workers.workers}],
        "model_transaction_policy": {"decoupled": service.streaming},
        "dynamic_batching": _waits(service.policy),
        "parameters": {name: {"string_value": value} for name, value in said.items()},
    }


def _waits(policy: Any) -> dict[str, Any]:
    """Return what `policy` waits for, as far as Triton has words for it."""
    if not isinstance(policy, SizeOrDelay):
        return {}
    size = {} if policy.size is None else {"preferred_batch_size": [policy.size]}
    return {"max_queue_delay_microseconds": round(policy.delay * _MICROSECONDS), **size}


def _declared(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor as a configuration says it: without the batch, if it has one."""
    kind = _CONFIG_TYPES.get(tensor.datatype, f"TYPE_{tensor.datatype}")
    dims = list(tensor.shape if tensor.batch == NONE else tensor.shape[1:])
    more: dict[str, Any] = {"allow_ragged_batch": True} if tensor.varying == RAGGED else {}
    more |= {"optional": True} if tensor.optional else {}
    more |= {"format": tensor.format} if tensor.format else {}
    more |= {"reshape": {"shape": list(tensor.reshape)}} if tensor.reshape is not None else {}
    return {"name": tensor.name, "data_type": kind, "dims": dims, **more}


def statistics(service: "Service") -> dict[str, Any]:
    """Return what a model has done since it was loaded, as the statistics extension writes it."""
    return {"name": service.name, "version": service.version, **service.statistics.to_dict()}


def device_count(hardware: "Sequence[Hardware]", name: str) -> int:
    """Return how many devices are called `name`, as a kind (CPU, GPU) or as a part of their own name."""
    wanted = name.lower()
    return sum(each.count for each in hardware if wanted == each.kind.lower() or wanted in each.name.lower())


# What a call to load a model says, at whichever door it comes in.


_FILE = "file:"


def is_of_repository(name: str) -> bool:
    """Tell whether a parameter of that name says what the model is, rather than being one of the model's own."""
    return name == "config" or name.startswith(_FILE)


class LoadArguments(NamedTuple):
    """What Manager.load_model takes beside the name: the configuration instead of the repository's, files by path, and the
    parameters of AMD's clients."""

    config: dict[str, Any] | None
    files: dict[str, bytes] | None
    parameters: dict[str, Any]


def load_arguments(parameters: Mapping[str, Any], control: Control, own: Mapping[str, Any]) -> LoadArguments:
    """Read the parameters of a call that loads a model: `config` is a JSON text, `file:<version>/<name>` bytes or base64. `own`
    are those of the model itself, as AMD's clients send them: texts, numbers, true and false.

    Raises InvalidRequest naming parameter, value and rule, and Forbidden for files unless they are allowed.
    """
    config, files = None, {}
    for name, value in own.items():
        if not isinstance(value, (str, int, float)):
            raise InvalidRequest(f"parameter {brief(name)}={brief(value)}: must be a text, a number, true or false")
    for name, value in parameters.items():
        if name == "config":
            config = _config(value)
        elif name.startswith(_FILE):
            files[name.removeprefix(_FILE)] = _content(name, value)
        else:
            raise InvalidRequest(f"parameter {brief(name)}: must be config or file:<version>/<name>")
    if files and not control.settings.allow_model_files:
        raise Forbidden("files in a call that loads a model: not allowed on this server (allow_model_files)")
    if files and config is None:
        raise InvalidRequest(f"parameter {brief(_FILE + next(iter(files)))}: needs the parameter config too")
    return LoadArguments(config, files or None, dict(own))


def _config(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise InvalidRequest(f"parameter 'config'={brief(value)}: must be a JSON object as text")
    config = parse(decode_json, value.encode(), "a configuration")
    if not isinstance(config, dict):
        raise InvalidRequest(f"parameter 'config'={brief(value)}: must be a JSON object as text")
    return config


def _content(name: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise InvalidRequest(f"parameter {brief(name)}: must be base64 ({error})") from None
