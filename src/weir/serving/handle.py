"""Declares what protocols, channels and products know of a running model: a ModelHandle. In this process a Service is one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypedDict

from weir.batching import BatchingSettings
from weir.errors import WeirError
from weir.messages import Block, Request, label_of, parts_of
from weir.model import Measure, Model, is_tensor_model, overrides
from weir.policy.decision import Policy
from weir.serving import ServiceSettings
from weir.serving.calls import measure
from weir.serving.delivery import Tracer
from weir.telemetry.recorder import Recorder
from weir.workers.settings import WorkerSettings


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """The facts of a model that stay until it is reloaded. A generation makes it, so each reload has another object.

    Attributes:
        name, version: as the registry has them; "" for a model without versions.
        model: the class, which declares inputs, outputs, content types and examples.
        platform: the kind of model, for the metadata.
        batching: the limits of its queue and of its batches.
        settings: its timeouts, and how callers are treated.
        hooked: whether hooks of the service change items or responses, for which these must be decoded.
    """

    name: str
    version: str
    model: type[Model]
    platform: str
    batching: BatchingSettings
    settings: ServiceSettings
    hooked: bool = False

    @cached_property
    def label(self) -> str:
        """The name that observers and logs know: the name, followed by a slash and the version if there is one."""
        return label_of(self.name, self.version)

    @cached_property
    def writes_bodies(self) -> bool:
        """Whether workers can write the bodies of responses: no hook needs them decoded, and the label says what the model's name is."""
        return not self.hooked and parts_of(self.label) == (self.name, self.version)

    @cached_property
    def streaming(self) -> bool:
        """Whether a request may have several responses."""
        return self.model.streaming

    @cached_property
    def takes_tensors(self) -> bool:
        """Whether a request has named tensors, rather than one item."""
        return is_tensor_model(self.model)

    @cached_property
    def needs_measure(self) -> bool:
        """Whether the model measures each item."""
        return overrides(self.model, "measure")

    def measure(self, item: Any) -> Measure:
        """Return the rows, cost and key that the model's `measure` gives for `item`. Raises InvalidRequest if it fails."""
        return measure(self.model, item)


class ExampleHealth(TypedDict):
    """The result of one of a model's examples, and the seconds that it took; `error` says what is wrong, or is ""."""

    ok: bool
    seconds: float
    error: str


class ModelHealth(TypedDict):
    """Whether a model is ready and its examples have the expected responses; `reason` says why it is not ready, or is ""."""

    healthy: bool
    model: str
    reason: str
    examples: list[ExampleHealth]


class ResidencyView(TypedDict):
    """The state of a model on demand and the reason, whether it stays, what it takes, the mean time to load it, the rate of its requests in rows per
    second, and, while it waits or loads, in about how many seconds it is ready. None is unknown."""

    state: str
    reason: str
    pinned: bool
    memory_bytes: int
    gpu_memory_bytes: int
    load_seconds: float | None
    rate: float
    ready_in_seconds: float | None


class ModelHandle(Protocol):
    """A running model, as all that takes requests for it from outside knows it. It stays the same across reloads.

    `inference` is for the edge alone: how a product handles the model's requests, an `Inference` (protocols/exchange.py), or None.
    """

    inference: Any

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model that serves now."""

    @property
    def not_ready_reason(self) -> str:
        """The reason why requests are not accepted or not run; "" if they are."""

    @property
    def tracing(self) -> Tracer | None:
        """The maker of requests' spans; None if they are not traced."""

    @property
    def control(self) -> "ModelControl":
        """The part of the model that operators see and may change."""

    def submit(self, request: Request, now: float | None = None) -> None:
        """Put `request` into the queue. `now` is the present time of the model's clock, if the caller has just read it.

        Raises ModelNotReady, Draining, Overloaded, or DeadlineExceeded when the deadline could not be met. The request was not
        accepted then, and a Block that is its payload still belongs to the caller. An accepted request releases its Block when
        it has ended.
        """

    def cancel(self, request: Request) -> None:
        """Cancel a request whose caller has left; nothing happens if it has already ended."""

    def has_room(self, rows: int, *, bulk: bool = False) -> bool:
        """Return whether the queue, or that of `bulk` work, has room for a request of `rows` rows now."""

    def reserve(self, size_bytes: int) -> Block | None:
        """Return a place of `size_bytes` bytes in shared memory, to receive a payload into; None if none is free."""

    def now(self) -> float:
        """Return the present time of the model's clock in seconds, as in the `arrival` of a request."""

    def notify(self, frontend: str, error: WeirError) -> None:
        """Notify the observers of an error that ends a request of the frontend `frontend`, unless they know it."""

    def transferred(self, frontend: str, received_bytes: int, sent_bytes: int) -> None:
        """Notify the observers of the sizes of requests of the frontend `frontend` and of their responses."""


class Models(Protocol):
    """The models of a server, as all that takes requests for them knows them. In the process of the models a Registry is one."""

    changed: list[Callable[[], None]]
    aliases: Mapping[str, str]
    # Models that are loaded when requests come, by name, not all of which need be known otherwise: why one could not be read; "" if it was not tried.
    on_demand: Mapping[str, str]

    @property
    def services(self) -> Mapping[str, ModelHandle]:
        """The default version of each model, by name."""

    @property
    def routes(self) -> Mapping[str, ModelHandle]:
        """The models that have paths of their own, by path."""

    @property
    def sole(self) -> ModelHandle | None:
        """The model, if there is exactly one."""

    @property
    def all(self) -> Sequence[ModelHandle]:
        """Every model, in all versions."""

    @property
    def ready(self) -> bool:
        """Whether every model takes requests."""

    @property
    def not_ready_reasons(self) -> dict[str, str]:
        """The reason why a model takes no requests, by label, for each such model."""

    def get(self, name: str, version: str = "") -> ModelHandle:
        """Return the model of that name and version; without a version, the default one. Raises ModelNotFound or ModelNotReady."""

    def versions(self, name: str) -> Mapping[str, ModelHandle]:
        """Return the models of that name by version, the lowest version first. Raises ModelNotFound."""

    def knows(self, name: str) -> bool:
        """Return whether a model that runs or is being loaded answers to `name`."""

    def reserve(self, segments: Iterable[str]) -> None:
        """Let no route begin with one of these segments. Raises SettingsError if one does."""


class ModelControl(Protocol):
    """Lets pages, metrics and estimates read a running model, and operators change it."""

    @property
    def policy(self) -> Policy:
        """The policy that decides when a batch is dispatched."""

    @property
    def workers(self) -> WorkerSettings:
        """The settings of the workers; their field `workers` is the present number of workers, or its range as a text."""

    @property
    def worker_count(self) -> int:
        """The present number of workers, whatever their state."""

    @property
    def ready_workers(self) -> int:
        """The number of workers that take batches now."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of shared memory for payloads. If it is 0, `ModelHandle.reserve` always returns None."""

    @property
    def failed(self) -> str:
        """The reason why no worker can be started, although that is tried again and again; "" if one can."""

    @property
    def statistics(self) -> Recorder:
        """Counts of requests and batches since the model was loaded."""

    def best_rate(self, now: float) -> float:
        """Return how many rows per second all workers together can serve, for rows like the recent ones; infinity while too
        little is known."""

    def state(self, *, brief: bool = False) -> dict[str, Any]:
        """Return the state of the model as a JSON-able dict; with `brief`, only what changes from moment to moment."""

    def explain_policy(self) -> dict[str, Any]:
        """Return what the policy decides and what was measured under it, as a JSON-able dict."""

    async def set_prices(self, /, **changes: Any) -> dict[str, Any]:
        """Solve the policy for other weights, and return its explanation once it is in use. See Service.set_prices."""

    async def deep_health(self) -> ModelHealth:
        """Run the model's examples, and compare the responses with the expected ones where these are known."""
