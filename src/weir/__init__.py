"""Serve models with dynamic batching: requests pool behind the weir; at the control limit, a batch flows over.

    class Square(weir.Model):
        def predict(self, batch):
            return [x * x for x in batch]

In process, `weir.Service` and its blocking twin `weir.BlockingService`; over HTTP, `weir serve module:Class` or
`weir.asgi(...)` in a server of your own.
"""

from weir._version import __version__
from weir.errors import (
    Cancelled,
    CapacityError,
    Conflict,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    MethodNotAllowed,
    ModelCrashed,
    ModelError,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    RequestError,
    SettingsError,
    TooLarge,
    Unsupported,
    UnsupportedMediaType,
    ValidationFailed,
    WeirError,
    WorkerLost,
)
from weir.model import Example, Measure, Model, Tensor

__all__ = [
    "Cancelled",
    "CapacityError",
    "Conflict",
    "DeadlineExceeded",
    "Draining",
    "Example",
    "InvalidRequest",
    "Measure",
    "MethodNotAllowed",
    "Model",
    "ModelCrashed",
    "ModelError",
    "ModelNotFound",
    "ModelNotReady",
    "Overloaded",
    "RequestError",
    "SettingsError",
    "Tensor",
    "TooLarge",
    "Unsupported",
    "UnsupportedMediaType",
    "ValidationFailed",
    "WeirError",
    "WorkerLost",
    "__version__",
]
