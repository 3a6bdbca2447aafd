"""Where workers attach: unix:PATH or tcp:HOST:PORT."""

import ipaddress
from typing import NamedTuple

from weir.errors import SettingsError


class WorkerAddress(NamedTuple):
    """A Unix socket's `path`, or if that is "" a TCP `host` and `port`."""

    path: str
    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


def is_address(text: str) -> bool:
    """Tell whether `text` is one: the rule of a setting."""
    try:
        parse_address(text, "")
    except SettingsError:
        return False
    return True


def parse_address(text: str, name: str) -> WorkerAddress:
    """Return the address that `text` is. Raises SettingsError naming the setting `name`, the value and the rule."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        return WorkerAddress(rest, "", 0)
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if kind == "tcp" and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return WorkerAddress("", host, int(port))
    raise SettingsError(f"{name}={text!r}: {RULE}")


RULE = "must be unix:PATH or tcp:HOST:PORT"
