"""The table of the calls of the Open Inference Protocol (KServe v2) that are not inference. All frontends and clients share it.

It needs nothing but the standard library: the rules for models' names follow from its paths.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple


class DataPlaneCall(NamedTuple):
    """One call of the protocol that is not inference.

    Attributes:
        name: of the method of DataPlane that responds to it, and of the clients' methods.
        http: the methods and paths, with the arguments of that method in braces.
        grpc: the names of the methods of GRPCInferenceService. Clients use the first.
        controls: whether a caller must be allowed to control the server.
        asks: for a question, the field of a gRPC response that is true or false. Over HTTP, the status 200 is yes, and an error is no.
        wrapped: the field of a gRPC response that holds what is the whole response over HTTP; "" if both have the same fields.
    """

    name: str
    http: tuple[str, ...]
    grpc: tuple[str, ...] = ()
    controls: bool = False
    asks: str = ""
    wrapped: str = ""

    @property
    def subject(self) -> str:
        """The name in the paths, besides a version: of a model, worker or region; "" if none. gRPC has it in the field `name`."""
        found = re.search(r"{(\w+)}", " ".join(self.http))
        return found[1] if found else ""

    def routes(self) -> Iterator[tuple[str, str]]:
        """Yield each method and path. A path of a model is followed by that of one version of it."""
        for route in self.http:
            method, _, path = route.partition(" ")
            yield method, path
            if _OF_MODEL in path:
                yield method, path.replace(_OF_MODEL, _OF_VERSION)


_OF_MODEL, _OF_VERSION = "/models/{model}", "/models/{model}/versions/{version}"
_MEMORY, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
# The routes are tried in this order.
_CALLS = (
    DataPlaneCall("server_metadata", ("GET /v2", "GET /v2/"), ("ServerMetadata",)),
    DataPlaneCall("server_live", ("GET /v2/health/live",), ("ServerLive",), asks="live"),
    DataPlaneCall("server_ready", ("GET /v2/health/ready",), ("ServerReady",), asks="ready"),
    DataPlaneCall("models", ("GET /v2/models",), ("ModelList",)),
    DataPlaneCall("statistics", ("GET /v2/models/stats", "GET /v2/models/{model}/stats"), ("ModelStatistics",)),
    DataPlaneCall("model_metadata", ("GET /v2/models/{model}",), ("ModelMetadata",)),
    DataPlaneCall("model_ready", ("GET /v2/models/{model}/ready",), ("ModelReady",), asks="ready"),
    DataPlaneCall("model_config", ("GET /v2/models/{model}/config",), ("ModelConfig",), wrapped="config"),
    DataPlaneCall("index", ("POST /v2/repository/index",), ("RepositoryIndex",), wrapped="models"),
    DataPlaneCall(
        "load_model", ("POST /v2/repository/models/{model}/load",), ("ModelLoad", "RepositoryModelLoad"), controls=True
    ),
    DataPlaneCall(
        "unload_model",
        ("POST /v2/repository/models/{model}/unload",),
        ("ModelUnload", "RepositoryModelUnload"),
        controls=True,
    ),
    DataPlaneCall(
        "load_worker", ("POST /v2/workers/{worker}/load",), ("WorkerLoad",), controls=True, wrapped="endpoint"
    ),
    DataPlaneCall("unload_worker", ("POST /v2/workers/{worker}/unload",), ("WorkerUnload",), controls=True),
    DataPlaneCall("hardware", ("GET /v2/hardware",)),
    DataPlaneCall("has_hardware", ("POST /v2/hardware",), ("HasHardware",), asks="found"),
    DataPlaneCall(
        "memory_status",
        (f"GET {_MEMORY}/status", f"GET {_MEMORY}/region/{{region}}/status"),
        ("SystemSharedMemoryStatus",),
        controls=True,
        wrapped="regions",
    ),
    DataPlaneCall(
        "register_memory",
        (f"POST {_MEMORY}/region/{{region}}/register",),
        ("SystemSharedMemoryRegister",),
        controls=True,
    ),
    DataPlaneCall(
        "unregister_memory",
        (f"POST {_MEMORY}/unregister", f"POST {_MEMORY}/region/{{region}}/unregister"),
        ("SystemSharedMemoryUnregister",),
        controls=True,
    ),
    DataPlaneCall("cuda_memory_status", (f"GET {_CUDA}/status",), ("CudaSharedMemoryStatus",), wrapped="regions"),
    DataPlaneCall(
        "unregister_cuda_memory",
        (f"POST {_CUDA}/unregister", f"POST {_CUDA}/region/{{region}}/unregister"),
        ("CudaSharedMemoryUnregister",),
    ),
    DataPlaneCall(
        "share_cuda_memory",
        (f"POST {_CUDA}/region/{{region}}/register", f"GET {_CUDA}/region/{{region}}/status"),
        ("CudaSharedMemoryRegister",),
    ),
    DataPlaneCall(
        "trace_settings",
        tuple(f"{method} /v2{path}/trace/setting" for path in ("", _OF_MODEL) for method in ("GET", "POST")),
        ("TraceSetting",),
    ),
    DataPlaneCall("log_settings", ("GET /v2/logging", "POST /v2/logging"), ("LogSettings",)),
)
DATA_PLANE: Mapping[str, DataPlaneCall] = MappingProxyType({call.name: call for call in _CALLS})
# The segments that follow a model's name in their paths.
MODEL_WORDS = {path.partition("{model}/")[2].partition("/")[0] for call in _CALLS for _, path in call.routes()} - {""}
