"""Clients of a server: `HttpClient`, `GrpcClient`, `WebSocketClient`, and for an event loop the same with the prefix `Async`.

    with weir.client.HttpClient("http://localhost:8000") as client:
        sums = client.infer("sums", {"x": array})["sum"]

All have the same methods, and so has `weir.inprocess`, which serves the models in the program itself. `EmbeddingClient` and
`ConcurrentEmbeddingClient` are for servers of text vectors. Importing this module loads no library; using a class loads the library
that it needs: httptools, grpcio or websockets.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weir.errors import add_extra

if TYPE_CHECKING:
    from weir.client.calls import NEVER, ConnectionLost, Result, Retry, Unreachable
    from weir.client.embedding import ConcurrentEmbeddingClient, EmbeddingClient
    from weir.client.grpc import AsyncGrpcClient, GrpcClient
    from weir.client.http import AsyncHttpClient, HttpClient
    from weir.client.methods import AsyncClient, Client
    from weir.client.websocket import AsyncWebSocketClient, WebSocketClient
    from weir.wire.inference import TensorValue

__all__ = [
    "HttpClient", "AsyncHttpClient", "GrpcClient", "AsyncGrpcClient", "WebSocketClient", "AsyncWebSocketClient",
    "EmbeddingClient", "ConcurrentEmbeddingClient",
    "Client", "AsyncClient", "Result", "TensorValue", "Retry", "NEVER", "Unreachable", "ConnectionLost",
]  # fmt: skip

_WHERE = {
    "HttpClient": "weir.client.http", "AsyncHttpClient": "weir.client.http",
    "GrpcClient": "weir.client.grpc", "AsyncGrpcClient": "weir.client.grpc",
    "WebSocketClient": "weir.client.websocket", "AsyncWebSocketClient": "weir.client.websocket",
    "EmbeddingClient": "weir.client.embedding", "ConcurrentEmbeddingClient": "weir.client.embedding",
    "Client": "weir.client.methods", "AsyncClient": "weir.client.methods",
    "Result": "weir.client.calls", "TensorValue": "weir.wire.inference",
    "Retry": "weir.client.calls", "NEVER": "weir.client.calls",
    "Unreachable": "weir.client.calls", "ConnectionLost": "weir.client.calls",
}  # fmt: skip

_GRPC = add_extra("grpc")
_ADDED_BY = {
    "httptools": "pip install httptools",
    "grpc": _GRPC,
    "google": _GRPC,
    "websockets": "pip install websockets",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'weir.client' has no attribute {name!r}")
    try:
        module = import_module(_WHERE[name])
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _ADDED_BY:
            raise
        raise ModuleNotFoundError(
            f"weir.client.{name} needs {library}, which is not installed; {_ADDED_BY[library]}", name=error.name
        ) from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
