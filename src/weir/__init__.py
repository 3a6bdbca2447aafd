"""Serve models with dynamic batching: requests pool behind the weir; at the control limit, a batch flows over.

    class Square(weir.Model):
        def predict(self, batch):
            return [x * x for x in batch]

`weir serve module:Class` serves a model over HTTP, and so does `weir.serve(Square)` in a program, and `weir.asgi(Square)` in any ASGI
server. `weir.Service` and `weir.BlockingService` serve it in the program itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weir._version import __version__
from weir.errors import (
    Cancelled,
    CapacityError,
    Conflict,
    DeadlineExceeded,
    Draining,
    Forbidden,
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
    Unauthorized,
    Unsupported,
    UnsupportedMediaType,
    ValidationFailed,
    WeirError,
    WorkerLost,
)
from weir.model import Example, External, Last, Measure, Model, Tensor, model

if TYPE_CHECKING:
    from weir.app import asgi, lifespan
    from weir.catalog.chains import Branch, Chain, Step, Switch
    from weir.catalog.loading import device_group, profile
    from weir.catalog.registry import Registry
    from weir.hosting import running, serve
    from weir.messages import BULK, Reason
    from weir.policy.cost import Prices, Profile
    from weir.policy.decision import Decision, Observation, Policy
    from weir.policy.online.adaptive import SolvedPolicy
    from weir.policy.solve.bank import Bank
    from weir.serving.blocking import BlockingService
    from weir.serving.service import Service
    from weir.simulation.banks import solve
    from weir.simulation.simulator import simulate
    from weir.workers.settings import Ray

__all__ = [
    # what most programs need
    "Model", "model", "Service", "BlockingService", "External", "Ray",
    # what a model's class may use
    "Example", "Last", "Measure", "Tensor",
    # the class of work of a request
    "BULK",
    # a server from a program
    "serve", "running",
    # several models, chains of models, and any ASGI server
    "Registry", "Chain", "Step", "Branch", "Switch", "asgi", "lifespan", "device_group",
    # solved policies
    "profile", "solve", "simulate", "Profile", "Prices", "Bank",
    # your own policies
    "Decision", "Observation", "Policy", "Reason", "SolvedPolicy",
    # errors
    "Cancelled", "CapacityError", "Conflict", "DeadlineExceeded", "Draining", "Forbidden", "InvalidRequest", "MethodNotAllowed",
    "ModelCrashed", "ModelError", "ModelNotFound", "ModelNotReady", "Overloaded", "RequestError", "SettingsError",
    "TooLarge", "Unauthorized", "Unsupported", "UnsupportedMediaType", "ValidationFailed", "WeirError", "WorkerLost",
    "__version__",
]  # fmt: skip

# Imported at their first use: worker processes and clients need neither asyncio nor the rest of the server.
_LAZY = {
    "BULK": "weir.messages",
    "Bank": "weir.policy.solve.bank",
    "BlockingService": "weir.serving.blocking",
    "Branch": "weir.catalog.chains",
    "Chain": "weir.catalog.chains",
    "Decision": "weir.policy.decision",
    "Observation": "weir.policy.decision",
    "Policy": "weir.policy.decision",
    "Prices": "weir.policy.cost",
    "Profile": "weir.policy.cost",
    "Reason": "weir.messages",
    "Registry": "weir.catalog.registry",
    "Service": "weir.serving.service",
    "Ray": "weir.workers.settings",
    "SolvedPolicy": "weir.policy.online.adaptive",
    "Step": "weir.catalog.chains",
    "Switch": "weir.catalog.chains",
    "asgi": "weir.app",
    "device_group": "weir.catalog.loading",
    "lifespan": "weir.app",
    "profile": "weir.catalog.loading",
    "running": "weir.hosting",
    "serve": "weir.hosting",
    "simulate": "weir.simulation.simulator",
    "solve": "weir.simulation.banks",
}


def __getattr__(name: str) -> Any:
    if name == "ray":
        return import_module("weir.ray")
    if name not in _LAZY:
        raise AttributeError(f"module 'weir' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
