"""What is put under load: any HTTP server, a model at the doors of the Open Inference Protocol, a model in this process.

http.py        with address, dialling, connection, pool, answers, fetching: whatever takes POST
payloads.py       what a URL means
http.py, grpc.py, websocket.py   inference requests (payloads.py), to a server that says of itself what it takes (http.py)
inprocess.py   no network
payloads.py    what --data says
"""

from collections.abc import Sequence
from typing import Any

from weir.bench.target import Target
from weir.bench.targets.http import HttpOptions, HttpTarget
from weir.bench.targets.payloads import door_of
from weir.errors import SettingsError


def make_target(url: str, data: str | Sequence[Any] | None = None, options: HttpOptions | None = None) -> Target:
    """Return what `url` means. Raises SettingsError, also where a library is missing."""
    door = door_of(url)
    if door.kind == "http":
        return HttpTarget(url, data, options)
    if door.kind == "kserve":
        from weir.bench.targets.http import KserveTarget

        return KserveTarget(url, door, data, options)
    if door.kind == "ws":
        from weir.bench.targets.websocket import WebSocketTarget

        return WebSocketTarget(url, door, data, options)
    try:
        from weir.bench.targets.grpc import GrpcTarget
    except ImportError as error:
        raise SettingsError(f"target {url!r}: needs {error.name}: pip install weir-serving[grpc]") from error
    return GrpcTarget(url, door, data, options)
