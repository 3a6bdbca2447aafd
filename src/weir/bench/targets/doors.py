"""Which door of a server a URL means, and which model behind it."""

import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from weir.errors import SettingsError

_INFER = re.compile(r"/v2/models/(?P<model>[^/?]+)(?:/versions/(?P<version>[^/?]+))?/infer")
_SHARED = ("grpc", "grpcs", "ws", "wss")
_RULE = "must be like grpc://HOST:PORT/MODEL or ws://HOST:PORT/MODEL, perhaps with /VERSION"


class Door(NamedTuple):
    """`kind` is "http" (any path, any body), "kserve" (the Open Inference Protocol over HTTP), "grpc" or "ws"; the others name a model.

    `place` is host:port of gRPC and WebSocket. With `binary`, tensors travel as raw bytes after the JSON.
    """

    kind: str
    model: str = ""
    version: str = ""
    place: str = ""
    tls: bool = False
    binary: bool = False


def door_of(url: str) -> Door:
    """Return what `url` means; `#binary` at its end asks for raw tensors. Raises SettingsError."""
    plain, _, fragment = url.partition("#")
    scheme = plain.partition(":")[0]
    if scheme in _SHARED:
        door = _shared(url, plain)
    else:
        found = _INFER.search(plain)
        door = Door("http") if found is None else Door("kserve", unquote(found["model"]), found["version"] or "")
    if fragment not in ("", "binary") or (fragment and door.kind not in ("kserve", "ws")):
        rule = "only #binary may follow, and only where tensors travel as JSON otherwise: /v2/models/MODEL/infer, ws"
        raise SettingsError(f"target {url!r}: {rule}")
    return door._replace(binary=bool(fragment))


def _shared(url: str, plain: str) -> Door:
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
    return Door(kind, names[0], names[1] if names[1:] else "", f"{host}:{port}", tls)
