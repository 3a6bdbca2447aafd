"""Frontends that packages bring are found, made and refused by name."""

import socket
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
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
    points = EntryPoints(
        EntryPoint(name, f"{__name__}:{target}", group)
        for name, target, group in (
            ("hatch", "hatch", "weir.frontends"), ("jammed", "jammed", "weir.frontends"),
            ("broken", "nothing", "weir.frontends"),
        )
    )  # fmt: skip
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points.select(group=group))


def test_a_frontend_without_keys_is_refused_where_the_server_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = CONTEXT._replace(access=Access(AccessSettings(api_key="k3y")))
    with pytest.raises(SettingsError, match=r"frontend='hatch': does not check API keys"):
        open_frontends({"hatch": 1}, keyed)
    assert open_frontends({"hatch": None}, keyed) == []
    monkeypatch.setattr(Hatch, "asks_for_key", True, raising=False)
    assert len(open_frontends({"hatch": 1}, keyed)) == 1


def test_each_is_made_with_its_options() -> None:
    (made,) = open_frontends({"hatch": {"port": 3}}, CONTEXT)
    assert isinstance(made, Hatch) and made.options == {"port": 3}


def test_one_may_be_switched_off_by_its_options() -> None:
    assert open_frontends({"hatch": ""}, CONTEXT) == []


def test_a_name_that_nobody_brings_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"unknown frontend 'gate'; available: broken, hatch, jammed"):
        open_frontends({"gate": 1}, CONTEXT)


def test_what_a_factory_says_is_passed_on() -> None:
    with pytest.raises(SettingsError, match="hatch=5: must be open"):
        open_frontends({"jammed": 5}, CONTEXT)


def test_one_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(SettingsError, match=r"frontend='broken': .*:nothing: AttributeError"):
        open_frontends({"broken": 5}, CONTEXT)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::", "0::0"])
def test_every_address_is_one_of_ipv4_too_in_all_frontends(host: str) -> None:
    with Served(f"{MODELS}:Square", "--host", host, "--grpc-port", "0", "--no-metrics") as served:
        http = served.until_logged(r"listening.*address=http://\[\S+\]:(\d+)")[1]
        grpc = served.until_grpc().grpc.rpartition(":")[2]
        for port in (int(http), int(grpc)):
            for address in ("127.0.0.1", "::1"):
                socket.create_connection((address, port), timeout=60).close()
