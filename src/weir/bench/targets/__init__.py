"""Targets of load: any HTTP server, a model at the endpoints of the Open Inference Protocol, and a model in this process.

payloads.py     what is sent: `--data`, or the model's own example; and the endpoint that a URL names
connection.py   addresses, and one connection of HTTP
http.py         a pool of connections; any path that accepts POST, and the Open Inference Protocol
grpc.py, websocket.py   the same protocol over gRPC and WebSocket
inprocess.py    a model in this process
"""

from collections.abc import Sequence
from typing import Any

from weir.bench.target import Target
from weir.bench.targets.http import HttpOptions, HttpTarget
from weir.bench.targets.payloads import endpoint_of
from weir.errors import SettingsError


def make_target(url: str, data: str | Sequence[Any] | None = None, options: HttpOptions | None = None) -> Target:
    """Return the target that `url` names; `data` is described in payloads.py. Raises SettingsError, also for a missing library."""
    endpoint = endpoint_of(url)
    if endpoint.kind == "http":
        return HttpTarget(url, data, options)
    if endpoint.kind == "kserve":
        from weir.bench.targets.http import KserveTarget

        return KserveTarget(url, endpoint, data, options)
    if endpoint.kind == "ws":
        from weir.bench.targets.websocket import WebSocketTarget

        return WebSocketTarget(url, endpoint, data, options)
    try:
        from weir.bench.targets.grpc import GrpcTarget
    except ImportError as error:
        raise SettingsError(f"target {url!r}: needs {error.name}: pip install weir-serving[grpc]") from error
    return GrpcTarget(url, endpoint, data, options)
