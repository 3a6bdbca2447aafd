"""Where a target is: what its URL says."""

import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from weir.errors import SettingsError

_RULE = "must be like http://HOST:PORT/PATH, https://HOST/PATH or http://unix:SOCKET:/PATH"


class Address(NamedTuple):
    """A server and a path on it (with its query). `uds` is the path of a Unix socket, or "" for TCP."""

    url: str
    host: str
    port: int
    path: str
    uds: str
    tls: bool

    @property
    def authority(self) -> str:
        """The value of the header Host."""
        if self.uds:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def at(self, path: str) -> "Address":
        """Return another path of the same server."""
        return self._replace(path=path)


def parse_address(url: str) -> Address:
    """Read a URL; `http://unix:/run/weir.sock:/infer/square` is a path on a Unix socket. Raises SettingsError."""
    if url.startswith("http://unix:"):
        uds, colon, path = url.removeprefix("http://unix:").partition(":")
        if not (uds and colon and path.startswith("/")):
            raise SettingsError(f"target {url!r}: {_RULE}")
        return Address(url, "", 0, path, uds, False)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"target {url!r}: {error}; {_RULE}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"target {url!r}: {_RULE}")
    tls = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or any(character <= " " for character in path):
        raise SettingsError(f"target {url!r}: the path must be percent-encoded")
    return Address(url, parts.hostname, port or (443 if tls else 80), path, "", tls)


def tls_context(insecure: bool) -> ssl.SSLContext:
    """Return the context for https; `insecure` takes any certificate."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
