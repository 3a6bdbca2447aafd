"""What is sent to a target: `--data`, or the model's own example; and the endpoint that a URL names."""

import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np

from weir.errors import InvalidRequest, SettingsError
from weir.model import DATATYPES
from weir.wire.inference import InferenceRequest, TensorValue
from weir.wire.kserve_json import read_request

_LINES = (".jsonl", ".ndjson")


def read_payloads(data: str | Sequence[Any]) -> list[bytes]:
    """Return the bodies to send in turn.

    `data` is either the body itself; or `@PATH` for the content of a file, each line of which is a body if its name ends with
    .jsonl or .ndjson; or a sequence of values, each of which is sent as JSON. Raises SettingsError for a file that cannot be read
    or has no lines, and for values that JSON cannot represent.
    """
    if not isinstance(data, str):
        try:
            bodies = [msgspec.json.encode(value) for value in data]
        except TypeError as error:
            raise SettingsError(f"data: {error}") from error
        return _some(bodies, "data")
    if not data.startswith("@"):
        return [data.encode()]
    path = Path(data[1:])
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"data={data!r}: cannot be read: {error.strerror}") from error
    if path.suffix in _LINES:
        return _some([line for line in content.removeprefix(BOM_UTF8).splitlines() if line.strip()], f"data={data!r}")
    return [content]


def _some(bodies: list[bytes], source: str) -> list[bytes]:
    if not bodies:
        raise SettingsError(f"{source}: must have at least one value")
    return bodies


def decode_items(bodies: Sequence[bytes]) -> list[Any]:
    """Return the values of JSON bodies, for a model in this process. Raises SettingsError."""
    try:
        return [msgspec.json.decode(body) for body in bodies]
    except msgspec.DecodeError as error:
        raise SettingsError(f"data: must be JSON for a model in this process: {error}") from error


_INFER = re.compile(r"/v2/models/(?P<model>[^/?]+)(?:/versions/(?P<version>[^/?]+))?/infer")
_SHARED = ("grpc", "grpcs", "ws", "wss")
_RULE = "must be like grpc://HOST:PORT/MODEL or ws://HOST:PORT/MODEL, perhaps with /VERSION"


class TargetEndpoint(NamedTuple):
    """The endpoint that a URL names.

    Attributes:
        kind: "http" (any path and body), "kserve" (the Open Inference Protocol over HTTP), "grpc" or "ws".
        model: the model, unless the kind is "http".
        version: its version, or "".
        place: HOST:PORT for gRPC and WebSocket.
        tls: whether gRPC or WebSocket use TLS.
        binary: whether tensors travel as raw bytes after the JSON.
    """

    kind: str
    model: str = ""
    version: str = ""
    place: str = ""
    tls: bool = False
    binary: bool = False


def endpoint_of(url: str) -> TargetEndpoint:
    """Return the endpoint that `url` names; `#binary` at its end means raw tensors. Raises SettingsError."""
    plain, _, fragment = url.partition("#")
    scheme = plain.partition(":")[0]
    if scheme in _SHARED:
        endpoint = _shared(url, plain)
    else:
        found = _INFER.search(plain)
        endpoint = (
            TargetEndpoint("http")
            if found is None
            else TargetEndpoint("kserve", unquote(found["model"]), found["version"] or "")
        )
    if fragment not in ("", "binary") or (fragment and endpoint.kind not in ("kserve", "ws")):
        rule = (
            "only #binary may follow, and only where tensors would travel as JSON: after /v2/models/MODEL/infer and ws:"
        )
        raise SettingsError(f"target {url!r}: {rule}")
    return endpoint._replace(binary=bool(fragment))


def _shared(url: str, plain: str) -> TargetEndpoint:
    try:
        parts = urlsplit(plain)
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"target {url!r}: {error}; {_RULE}") from error
    names = [unquote(name) for name in parts.path.split("/")[1:]]
    if not parts.hostname or port is None or not 1 <= len(names) <= 2 or not all(names):
        raise SettingsError(f"target {url!r}: {_RULE}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    kind = "grpc" if parts.scheme.startswith("grpc") else "ws"
    tls = parts.scheme in ("grpcs", "wss")
    return TargetEndpoint(kind, names[0], names[1] if names[1:] else "", f"{host}:{port}", tls)


class DeclaredInput(NamedTuple):
    """An input of a model, from its metadata."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def given_requests(data: str | Sequence[Any], endpoint: TargetEndpoint) -> list[InferenceRequest]:
    """Return the requests whose JSON is `data` (see read_payloads). Raises SettingsError."""
    try:
        return [read_request(body, endpoint.model, endpoint.version) for body in read_payloads(data)]
    except InvalidRequest as error:
        raise SettingsError(f"data: must be inference requests as JSON: {error.message}") from error


def made_request(
    endpoint: TargetEndpoint, inputs: Sequence[DeclaredInput], rows: int, example: Any = None
) -> InferenceRequest:
    """Return a request of `rows` rows. Its tensors consist of ones, or of the item `example` for a model of items.

    Dimensions of any length get length 1. Raises SettingsError for a BYTES input without an example.
    """
    tensors = [_made(endpoint, tensor, rows, example) for tensor in inputs]
    return InferenceRequest(endpoint.model, tensors, version=endpoint.version)


def _made(endpoint: TargetEndpoint, tensor: DeclaredInput, rows: int, example: Any) -> TensorValue:
    # A model without a batch dimension may have a fixed first dimension, or no dimensions.
    first = [rows if length == -1 else length for length in tensor.shape[:1]]
    shape = (*first, *(1 if length == -1 else length for length in tensor.shape[1:]))
    if tensor.datatype != "BYTES":
        return TensorValue(tensor.name, tensor.datatype, np.ones(shape, DATATYPES[tensor.datatype]))
    if example is None:
        raise SettingsError(
            f"model {endpoint.model!r}: its metadata do not say what {tensor.name!r} is; give it with --data"
        )
    array = np.empty(shape, object)
    array[...] = msgspec.json.encode(example)
    return TensorValue(tensor.name, tensor.datatype, array)


def declared_inputs(model: str, metadata: Any) -> list[DeclaredInput]:
    """Return the inputs in the metadata of `model`. Raises SettingsError if there are none, or none that can be sent."""
    try:
        inputs = [DeclaredInput(each["name"], each["datatype"], tuple(each["shape"])) for each in metadata["inputs"]]
    except (KeyError, TypeError):
        inputs = []
    if not inputs or any(each.datatype not in DATATYPES for each in inputs):
        raise SettingsError(
            f"model {model!r}: the server has no metadata about its inputs. Check the model's name, or give a request with --data"
        )
    return inputs
