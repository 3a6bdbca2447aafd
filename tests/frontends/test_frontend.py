"""Frontends that packages bring are found, made and refused by name."""

import socket
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
from tests.rings import subcases
from tests.served import MODELS, Served

from weir.catalog.registry import Registry
from weir.errors import SettingsError
from weir.frontends.frontend import FrontendContext, open_frontends
from weir.protocols import HttpSettings
from weir.protocols.access import Access, AccessSettings


class Settings:
    """What frontends know of the server."""

    http = HttpSettings()


class Hatch:
    """A frontend that never opens."""

    address = "hatch:"

    def __init__(self, options: Any) -> None:
        self.options = options

    async def start(self) -> None: ...

    def refuse(self) -> None: ...

    async def drain(self, drain_timeout: float | None = None) -> bool:
        return True

    async def stop(self) -> None: ...


def hatch(context: FrontendContext) -> Hatch | None:
    return Hatch(context.options) if context.options else None


def jammed(context: FrontendContext) -> Hatch:
    raise SettingsError(f"hatch={context.options!r}: must be open")


CONTEXT = FrontendContext(Registry([]), Settings(), [])


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"hatch": "hatch", "jammed": "jammed", "broken": "nothing"}.items()
    points = EntryPoints(EntryPoint(name, f"{__name__}:{target}", "weir.frontends") for name, target in targets)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points.select(group=group))


def test_a_frontend_without_keys_is_refused_where_the_server_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = CONTEXT._replace(access=Access(AccessSettings(api_key="k3y")))
    with pytest.raises(SettingsError, match=r"frontend='hatch': does not check API keys"):
        open_frontends({"hatch": 1}, keyed)
    assert open_frontends({"hatch": None}, keyed) == []
    monkeypatch.setattr(Hatch, "asks_for_key", True, raising=False)
    assert len(open_frontends({"hatch": 1}, keyed)) == 1


def test_each_is_made_with_its_options_or_switched_off_by_them() -> None:
    (made,) = open_frontends({"hatch": {"port": 3}}, CONTEXT)
    assert isinstance(made, Hatch) and made.options == {"port": 3}
    assert open_frontends({"hatch": ""}, CONTEXT) == []


@subcases(
    ("name", "refusal"),
    [
        ("gate", r"unknown frontend 'gate'; available: torchserve, broken, hatch, jammed"),
        ("jammed", "hatch=5: must be open"),  # what a factory says is passed on
        ("broken", r"frontend='broken': .*:nothing: AttributeError"),
    ],
)
def test_what_cannot_be_made_is_named(name: str, refusal: str) -> None:
    with pytest.raises(SettingsError, match=refusal):
        open_frontends({name: 5}, CONTEXT)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::", "0::0"])
def test_every_address_is_one_of_ipv4_too_in_all_frontends(host: str) -> None:
    with Served(f"{MODELS}:Square", "--host", host, "--grpc-port", "0", "--no-metrics") as served:
        http = served.until_logged(r"listening.*address=http://\[\S+\]:(\d+)")[1]
        grpc = served.until_grpc().grpc.rpartition(":")[2]
        for port in (int(http), int(grpc)):
            for address in ("127.0.0.1", "::1"):
                socket.create_connection((address, port), timeout=60).close()
