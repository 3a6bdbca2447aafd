"""Who may control a server: load and unload models, change policies, share memory, attach workers.

Without more being said that is whoever calls from this machine. A token, if there is one, is asked of everybody.
"""

import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from weir.errors import Forbidden, SettingsError, Unauthorized
from weir.fields import check, setting

# A request with one of these was passed on by a proxy: it may come from anywhere, wherever the proxy is.
_PASSED_ON = frozenset((b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"))


@dataclass(frozen=True)
class ControlSettings:
    """Who may control the server."""

    allow_control: bool = setting(False, "let callers from other machines control this server, without a token")
    control_token_file: str | None = setting(
        None, "file with the token that whoever controls this server must send, also from this machine", metavar="PATH"
    )
    allow_model_files: bool = setting(
        False, "let those who may load models send code, files and variables with them, which run on this machine"
    )

    def __post_init__(self) -> None:
        check(self)
        if self.allow_control and self.control_token_file is not None:
            raise SettingsError(
                f"allow_control, control_token_file={self.control_token_file!r}: one lets anybody, the other only who "
                "has the token; say one of them"
            )


class Control:
    """Decides who may control. Raises SettingsError for a token's file that cannot be used.

    `trusts_local` False asks the same of callers from this machine as of all others: where another server than Weir's own
    takes the connections, they may come from anywhere.
    """

    def __init__(self, settings: ControlSettings | None = None, *, trusts_local: bool = True) -> None:
        self.settings = settings or ControlSettings()
        self._trusts_local = trusts_local
        path = self.settings.control_token_file
        self._token = None if path is None else read_token(path)

    def require(self, peer: str | None, token: str | None) -> None:
        """Return if whoever calls may control this server.

        `peer` is an address as sockets or gRPC write it; None or "" for a Unix socket. `token` is what came with the call.
        Raises Unauthorized if a token is asked for and it is not that one, Forbidden if calls from there are not allowed.
        """
        if self._token is not None:
            if token is None or not self.knows(token):
                said = "came without it" if token is None else "came with another one"
                raise Unauthorized(f"this call needs the server's control token, but {said}")
        elif not (self.settings.allow_control or (self._trusts_local and is_local(peer))):
            others = "only from the machine that it runs on, unless it" if self._trusts_local else "unless it"
            raise Forbidden(
                f"calls that control this server are not allowed from {peer or 'there'}: {others} is started with a "
                "token (control_token_file) or with allow_control"
            )

    def knows(self, token: str) -> bool:
        """Tell whether this is the token, where there is one. Takes as long for every other."""
        return self._token is not None and hmac.compare_digest(token.encode("utf-8", "backslashreplace"), self._token)

    def require_http(self, peer: str | None, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Do the same for an HTTP request with these headers (names in lower case), whose token is `Authorization: Bearer`.

        Without a token, what a page in a browser or a proxy sends counts as from elsewhere: both make calls from this
        machine for somebody who is not on it.
        """
        said = list(headers)
        token = bearer_in(said)
        passed_on = any(name in _PASSED_ON or name == b"origin" for name, _ in said)
        self.require("elsewhere (a proxy or a page)" if passed_on and self._token is None else peer, token)


def bearer_in(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return what `Authorization: Bearer` says among headers with names in lower case; None if nothing does."""
    token = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            token = value[7:].strip().decode("latin-1")
    return token


def is_local(peer: str | None) -> bool:
    """Tell whether `peer` is on this machine: a loopback address, however it is written, or a Unix socket."""
    if not peer or peer.startswith("unix"):
        return True
    host = unquote(peer).removeprefix("ipv4:").removeprefix("ipv6:")
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def is_loopback(host: str) -> bool:
    """Tell whether who listens at `host` is reached from this machine alone."""
    return host == "localhost" or (bool(host) and not host.startswith("unix") and is_local(host))


def read_token(path: str) -> bytes:
    """Return the control token in a file. Raises SettingsError if there is none."""
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"control_token_file={path!r}: cannot be read: {error.strerror}") from None
    if not token or b"\n" in token:
        raise SettingsError(f"control_token_file={path!r}: must hold one token, on one line")
    return token
