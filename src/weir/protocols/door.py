"""What a door is: it takes requests from outside, puts them into the line of a model, and brings the answers back.

HTTP and gRPC are doors. A package adds another by an entry point of the group `weir.doors`; `--door NAME=OPTIONS` opens it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weir.errors import SettingsError, WeirError
from weir.fields import check, setting
from weir.messages import Observer
from weir.protocols.access import Access, Control
from weir.protocols.settings import HttpSettings

if TYPE_CHECKING:
    from weir.catalog.manager import Manager
    from weir.catalog.registry import Registry
    from weir.protocols.exchange import HttpProtocol
    from weir.protocols.kserve.context import KServeContext

ENTRY_POINTS = "weir.doors"
PROTOCOLS = "weir.protocols"


class Door(Protocol):
    """Opens at `start`. At the end come `refuse`, `drain` and `stop`; `stop` alone when the start of another failed.

    What it does with a request: makes a `RequestBase` of it that knows how to `finish` and `fail`, finds the
    service in the registry, and calls `service.submit`. When the caller leaves, `service.cancel`.
    """

    @property
    def address(self) -> str:
        """Where it is open, for the log and for people: a URL, or `unix:PATH`."""

    async def start(self) -> None:
        """Listen. Models may still be loading: they refuse by themselves. Raises SettingsError naming an address that is
        taken or unusable; nothing is left open then."""

    def refuse(self) -> None:
        """Refuse what is new from now on with Draining; what was accepted goes on."""

    async def drain(self, drain_timeout: float | None = None) -> bool:
        """Accept nothing more and return when all answers have left; False if that took longer than `drain_timeout`
        seconds (None: wait for ever)."""

    async def stop(self) -> None:
        """Close everything at once. Idempotent, and harmless before `start`."""


class DoorSettings(Protocol):
    """What a door may know of the server's settings."""

    @property
    def http(self) -> HttpSettings:
        """Of the HTTP door: address, limits, certificate."""


def nothing() -> None:
    """Where there is no server that could end."""


class DoorContext(NamedTuple):
    """What a door is made from: the models, the server's settings, those who want to hear, who may control the server, what
    loads and unloads models for them, what has the server drain and end, and the door's own options."""

    registry: "Registry"
    settings: DoorSettings
    observers: Sequence[Observer]  # `refused` and `transferred` are the door's to tell; the services tell the rest
    control: Control = Control()
    site: "KServeContext | None" = None  # what the doors of the Open Inference Protocol share
    manager: "Manager | None" = None  # there always is one in a server
    end: Callable[[], None] = nothing  # as the first signal does; called on the loop
    access: Access = Access()  # who may call
    options: Any = None  # what was said for it: JSON, or else plain text


class DoorFactory(Protocol):
    """What an entry point names."""

    def __call__(self, context: DoorContext, /) -> Door | None:
        """Return a door that is not open yet, or None if the settings switch it off. Raises SettingsError."""


@dataclass(frozen=True)
class DoorsSettings:
    """Doors beside those that Weir has."""

    doors: dict[str, Any] = setting(
        {}, "open a door that an installed package brings, with its options: JSON, or else plain text",
        metavar="NAME=OPTIONS",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


def open_doors(wanted: Mapping[str, Any], context: DoorContext) -> list[Door]:
    """Return the doors `wanted`, by entry point's name, each with its options; none is open yet.

    Raises SettingsError for a name that no installed package brings, one whose factory fails, and, where callers need the server's key, one that
    does not say by `asks_for_key` that it asks for it.
    """
    made = {name: _make(name, context._replace(options=options)) for name, options in wanted.items()}
    for name, door in made.items():
        if context.access.required and door is not None and not getattr(door, "asks_for_key", False):
            raise SettingsError(
                f"door={name!r}: does not ask for the API key that this server is to ask for (asks_for_key)"
            )
    return [door for door in made.values() if door is not None]


def _make(name: str, context: DoorContext) -> Door | None:
    made: Door | None = make_named("door", ENTRY_POINTS, name, context)
    return made


def open_protocols(registry: "Registry", settings: HttpSettings) -> "list[HttpProtocol]":
    """Return the protocols that the settings name, by entry point: what that names is called with the registry and the settings. Raises SettingsError for
    a name that no installed package brings, and one that cannot be made."""
    return [make_named("protocols", PROTOCOLS, name, registry, settings) for name in settings.protocols]


def make_named(kind: str, group: str, name: str, *arguments: Any) -> Any:
    """Return what the entry point `name` of `group` makes of `arguments`. Raises SettingsError, which calls it a `kind`."""
    found = {entry.name: entry for entry in entry_points(group=group)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise SettingsError(f"{kind}={name!r}: no installed package brings it (entry points {group}: {known})")
    try:
        return found[name].load()(*arguments)
    except WeirError:
        raise
    except Exception as error:
        raise SettingsError(f"{kind}={name!r}: {found[name].value}: {type(error).__name__}: {error}") from error
