"""What is made of the server beside its models: a service on its public surface, with routes and doors of its own.

The embedding of texts is one. A product knows its models by name, in the registry; the server runs them like all others.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from prometheus_client.registry import Collector
from starlette.routing import BaseRoute

from weir.messages import Observer
from weir.protocols.auth_middleware import Refuse
from weir.protocols.door import Door, DoorContext
from weir.protocols.fastlane.plan import RouteHandler


class Product(Protocol):
    """Its parts are asked for before anything is started, the observers first; then come `prepare`, `start`, `drain` and, whatever
    happened, `stop`."""

    def observers(self) -> Sequence[Observer]:
        """Return who of it wants to hear what happens."""

    def routes(self, context: DoorContext) -> Sequence[BaseRoute]:
        """Return the routes that it adds to the HTTP door. Raises SettingsError for what cannot be served."""

    def manners(self, context: DoorContext) -> Sequence[RouteHandler]:
        """Return how the fast lane answers requests for some of those routes, after `routes` has been asked; whatever a manner leaves, the
        routes answer."""

    def paths(self) -> Mapping[str, Any]:
        """Return the paths of its routes as OpenAPI describes them."""

    def refusals(self) -> Mapping[str, Refuse]:
        """Return, after `routes`, how a request without the server's key is refused, by what its routes' paths begin with."""

    def doors(self, context: DoorContext) -> Sequence[Door]:
        """Return its own doors, none of them open; the server opens, drains and closes them."""

    def to_try(self, curl: str, url: str) -> Sequence[str]:
        """Return lines for people who want to try it; `curl` is how it is called for this server at `url`."""

    def collectors(self) -> Sequence[Collector]:
        """Return what /metrics shows of it."""

    def clients(self) -> Sequence[Mapping[str, Any]]:
        """Return a row for each caller that it tells apart, by column: the first names the caller, the others are texts or numbers.
        None are told apart: no rows."""

    async def prepare(self) -> None:
        """Make what its models need, before they are loaded; the doors are open already. Raises SettingsError."""

    async def start(self) -> None:
        """Go to work: the models are loaded, and the server says that it is ready when this returns."""

    async def drain(self) -> bool:
        """Take no more, and return when all that it has accepted has its end; False if that took longer than it may. The doors refuse
        already; the models still work, and are drained after this."""

    async def stop(self) -> None:
        """End it; the models have been drained. Idempotent, and harmless before `start`."""
