"""Declares what can be added to a server: a Frontend, which listens for callers, and a Product, which offers something built on the server's models.

HTTP and gRPC are frontends. A package adds a frontend with an entry point of the group `weir.frontends`; `--frontend NAME=OPTIONS` opens it. A package adds a
protocol over HTTP with an entry point of the group `weir.protocols`; `--protocols NAME` serves it. Text embedding is a product.
"""

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import iglob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weir.config import Checked, setting
from weir.errors import SettingsError, printable, reason_of
from weir.messages import Observer
from weir.plugins import Plugins
from weir.protocols import HttpSettings
from weir.protocols.access import Access, Control

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from weir.catalog.manager import Manager
    from weir.frontends.grpc.services import AddedCalls
    from weir.frontends.http.application import AddedEndpoints
    from weir.frontends.http.fast.plan import RouteHandler
    from weir.protocols.exchange import HttpProtocol
    from weir.protocols.kserve import KserveContext
    from weir.serving.handle import ModelHandle, Models


async def listen(connect: Callable[[], asyncio.BaseProtocol], host: str, port: int, *, backlog: int) -> asyncio.Server:
    """Return a server at a TCP address. The host `::` is every address of this machine, those of IPv4 too, as it is for gRPC.

    Raises OSError.
    """
    loop = asyncio.get_running_loop()
    if not _is_any(host):
        return await loop.create_server(connect, host, port, backlog=backlog)
    listening = socket.create_server((host, port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    try:
        return await loop.create_server(connect, sock=listening, backlog=backlog)
    except BaseException:
        listening.close()
        raise


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host) == ipaddress.IPv6Address("::") and socket.has_dualstack_ipv6()
    except ValueError:  # a name
        return False


FRONTENDS = Plugins("frontend", "weir.frontends", {"torchserve": "weir.frontends.torchserve:make_management"})
PROTOCOLS = Plugins("protocols", "weir.protocols", {"torchserve": "weir.frontends.torchserve:TorchServe"})


class Frontend(Protocol):
    """Listens for callers.

    The server calls `start`, and at its end `refuse`, `drain` and `stop`. If another frontend fails to start, it calls only `stop`. For each
    request a frontend finds the model in the registry, makes an `Exchange`, and calls its `submit`, or awaits its `infer_item`. When the caller leaves, it
    calls `Exchange.cancel`.
    """

    @property
    def address(self) -> str:
        """The address where the frontend listens, for the log and for people: a URL, or `unix:PATH`."""

    async def start(self) -> None:
        """Listen. Models may still be loading; their services then refuse requests.

        Raises SettingsError naming an address that is taken or unusable; then nothing is left open.
        """

    def refuse(self) -> None:
        """Refuse new requests with Draining from now on. Accepted requests continue."""

    async def drain(self, drain_timeout: float | None = None) -> bool:
        """Accept no more connections. Return True when all responses have been sent, or False after `drain_timeout` seconds (None: no limit)."""

    async def stop(self) -> None:
        """Close everything at once. It may be called twice, and before `start`."""


class FrontendSettings(Protocol):
    """The server's settings that a frontend may read."""

    @property
    def http(self) -> HttpSettings:
        """The settings of HTTP: address, limits, certificate."""


def cannot_listen(where: str, error: OSError, port: int = 0) -> SettingsError:
    """Return the error for an address, of which `where` says the settings, at which nothing can listen. `port` is its TCP port, if it has one."""
    holder = taken(port) if port and error.errno == errno.EADDRINUSE else ""
    return SettingsError(f"{where}: cannot listen there: {reason_of(error)}{holder}")


def taken(port: int) -> str:
    """Return what to say of a TCP port that is taken: by which process, as far as this user may know, and the way out."""
    sockets, holder = set[str](), ""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()]
            sockets |= {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    for link in iglob("/proc/[0-9]*/fd/*") if sockets else ():
        with suppress(OSError):  # of another user, or gone meanwhile
            if os.readlink(link) in sockets:
                process = Path(link).parents[1]
                name = (process / "comm").read_text(errors="replace").strip()  # the kernel cuts a name anywhere
                holder = f" by process {process.name} ({printable(name)})"
                break
    return f"{holder}; choose another port, or 0 for any that is free"


def nothing() -> None:
    """Do nothing: there is no server to end."""


class FrontendContext(NamedTuple):
    """The parts of the server that a frontend is made from."""

    registry: "Models"
    settings: FrontendSettings
    observers: Sequence[Observer]  # the frontend calls their `refused` and `transferred`; services call the rest
    control: Control = Control()  # who may load and unload models
    kserve: "KserveContext | None" = None  # what the frontends of the Open Inference Protocol share
    manager: "Manager | None" = None  # loads and unloads models; a server always has one
    end: Callable[[], None] = nothing  # drains and ends the server, as SIGTERM does; call it on the event loop
    access: Access = Access()  # who may call
    options: Any = None  # its own options: a value read from JSON, or else a plain text


class Turns(Protocol):
    """Gives texts of fronts their turns among those of the dispatcher. A turn is a tag, and whether it lets virtual time stand still."""

    def enter(self, ahead: float, cost: float) -> tuple[float, bool]:
        """Return the turn of a text, whose caller has had `ahead` tokens more than others of its front."""

    def leave(self, turn: tuple[float, bool]) -> None:
        """Note that the text with this turn has ended."""


class FrontProduct(Protocol):
    """The part of a product in a front. The dispatcher makes it, and it is pickled."""

    def load(self) -> None:
        """Load what all fronts share; called once, before they are forked."""

    def routes(
        self, models: "Models", http: HttpSettings, fronts: int, send: Callable[[bytes], None]
    ) -> "Sequence[RouteHandler]":
        """Return the handlers of its routes, in one of the `fronts`; the dispatcher handles all others. `send` is called with what `reported` gets."""

    def report(self) -> None:
        """Send what was counted."""

    async def drain(self) -> None:
        """Return when all requests have ended that were accepted; some may not have sent all to the dispatcher yet. No more come."""


class DispatcherProduct(Protocol):
    """The part of a product in the dispatcher."""

    def turns(self, handle: "ModelHandle") -> Turns | None:
        """Return what gives texts of fronts their turns; None for a model that takes none of them."""

    def reported(self, data: bytes) -> None:
        """Add the counts of a front. Raises ValueError or msgspec.MsgspecError for anything else."""


class ProductInFronts(NamedTuple):
    """The parts of a product in a server with several fronts."""

    front: FrontProduct
    dispatcher: DispatcherProduct


class Product(Protocol):
    """Something that a server offers besides its models. A product finds its own models in the registry, by name; the server runs them like all others.

    Before anything starts, the server collects the product's parts, the observers first. Then it calls `start`, `drain` and, whatever happened,
    `stop`.
    """

    def observers(self) -> Sequence[Observer]:
        """Return the product's observers of requests."""

    def added(self, context: FrontendContext) -> "AddedEndpoints":
        """Return what the product adds to HTTP. Raises SettingsError for a setting that cannot be served."""

    def fast_routes(self, context: FrontendContext) -> "Sequence[RouteHandler]":
        """Return handlers that answer some of those routes on the fast path. The routes answer what the handlers do not. Called after `added`."""

    def in_fronts(self) -> ProductInFronts | None:
        """Return its parts for a server with several fronts; None if it has one front only."""

    def grpc_calls(self, context: FrontendContext, most: int) -> "AddedCalls":
        """Return the calls that the product adds to gRPC; a stream may have `most` requests under way. Called after `added`, and only if gRPC is served."""

    def frontends(self, context: FrontendContext) -> Sequence[Frontend]:
        """Return the product's own frontends, not started. The server starts, drains and stops them."""

    def to_try(self, curl: str, url: str) -> Sequence[str]:
        """Return example commands for people who want to try the product. Each begins with `curl`, which is set up for this server at `url`."""

    def collectors(self) -> "Sequence[Collector]":
        """Return the collectors of the product's metrics, for /metrics."""

    def clients(self) -> Sequence[Mapping[str, Any]]:
        """Return a row for each caller that the product distinguishes, by column name. The first column names the caller; others are texts or numbers."""

    async def start(self) -> None:
        """Begin. The models are loaded. The server is ready when this returns."""

    async def drain(self) -> bool:
        """Accept no more requests. Return True when all accepted requests have been answered, or False if that took longer than the drain may.

        The frontends refuse requests already. The models still run, and are drained after this.
        """

    async def stop(self) -> None:
        """End the product. The models have been drained. It may be called twice, and before `start`."""


@dataclass(frozen=True)
class FrontendsSettings(Checked):
    """Frontends that installed packages bring."""

    frontends: dict[str, Any] = setting(
        {}, "frontend from an installed package, with its options as JSON or plain text", metavar="NAME=OPTIONS"
    )


def open_frontends(wanted: Mapping[str, Any], context: FrontendContext) -> list[Frontend]:
    """Return the frontends `wanted`, which maps the name of an entry point to the frontend's options. None of them has started.

    Raises SettingsError for a name that no installed package brings, for one whose factory fails, and, where callers need the server's key, for a frontend
    that does not have a true attribute `asks_for_key`.
    """
    made: dict[str, Frontend | None] = {
        name: FRONTENDS.make(name, context._replace(options=options)) for name, options in wanted.items()
    }
    for name, frontend in made.items():
        if context.access.required and frontend is not None and not getattr(frontend, "asks_for_key", False):
            raise SettingsError(
                f"frontend={name!r}: does not check API keys, which this server requires (asks_for_key)"
            )
    return [frontend for frontend in made.values() if frontend is not None]


def open_protocols(registry: "Models", settings: HttpSettings) -> "list[HttpProtocol]":
    """Return the protocols that the settings name. Each entry point is called with the registry and the settings.

    Raises SettingsError for a name that no installed package brings, and for a protocol that cannot be made.
    """
    return [PROTOCOLS.make(name, registry, settings) for name in settings.protocols]
