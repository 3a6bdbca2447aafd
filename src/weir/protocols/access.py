"""Decides who may call a server, and who may control it: load and unload models, change policies, share memory, attach workers.

By default anybody may call the server, and callers from this machine may control it. If an API key is set, every call needs it. If a control token is set,
every call that controls the server needs it.
"""

import base64
import binascii
import hmac
import ipaddress
import secrets
from codecs import BOM_UTF8
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

from weir.config import check, setting
from weir.errors import Forbidden, SettingsError, Unauthorized

# A request with one of these headers came through a proxy, so its caller may be on any machine.
_PASSED_ON = frozenset((b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"))


@dataclass(frozen=True)
class ControlSettings:
    """Decides who may control the server."""

    allow_control: bool = setting(False, "allow admin calls from other machines without a token")
    control_token_file: str | None = setting(None, "file with the token for admin calls", metavar="PATH", guards=True)
    allow_model_files: bool = setting(
        False, "allow load calls to upload code, files and environment variables, which run on this server"
    )

    def __post_init__(self) -> None:
        check(self)
        if self.allow_control and self.control_token_file is not None:
            raise SettingsError(
                f"allow_control, control_token_file={self.control_token_file!r}: the first allows admin calls without "
                "a token, the second requires one; set only one of them"
            )


class Control:
    """Decides who may control the server. Raises SettingsError for a token file that cannot be used.

    With `trusts_local` False, callers from this machine have no special rights. That is for servers other than Weir's own: a caller that seems to be local
    may then be a proxy.
    """

    def __init__(self, settings: ControlSettings | None = None, *, trusts_local: bool = True) -> None:
        self.settings = settings or ControlSettings()
        self._trusts_local = trusts_local
        path = self.settings.control_token_file
        self._token = None if path is None else read_token(path)

    def require(self, peer: str | None, token: str | None) -> None:
        """Return if the caller may control this server.

        `peer` is an address as sockets or gRPC write it; None or "" for a Unix socket. `token` is the one that the call carries, or None.
        Raises Unauthorized if a token is required and `token` is another, and Forbidden if calls from `peer` are not allowed.
        """
        if self._token is not None:
            if token is None or not self.knows(token):
                which = "came without it" if token is None else "came with another one"
                raise Unauthorized(f"this call needs the server's control token, but {which}")
        elif not (self.settings.allow_control or (self._trusts_local and is_local(peer))):
            others = "only from the machine that it runs on, unless it" if self._trusts_local else "unless it"
            raise Forbidden(
                f"calls that control this server are not allowed from {peer or 'there'}: {others} is started with a "
                "token (control_token_file) or with allow_control"
            )

    def knows(self, token: str) -> bool:
        """Return whether `token` is the control token; False if there is none. The comparison takes the same time for every wrong token."""
        return self._token is not None and hmac.compare_digest(token.encode("utf-8", "backslashreplace"), self._token)

    def require_http(self, peer: str | None, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Do what `require` does for an HTTP request. `headers` have names in lower case; the token is that of `Authorization: Bearer`.

        If the server has no token, a request from a web page or a proxy counts as coming from another machine: both make calls from this machine for
        a person who may be elsewhere.
        """
        listed = list(headers)
        token = bearer_in(listed)
        passed_on = any(name in _PASSED_ON or name == b"origin" for name, _ in listed)
        self.require("elsewhere (a proxy or a page)" if passed_on and self._token is None else peer, token)


def bearer_in(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the token of `Authorization: Bearer` (RFC 6750, section 2.1), or None. `headers` have names in lower case."""
    token = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            token = value[7:].strip().decode("latin-1")
    return token


def is_local(peer: str | None) -> bool:
    """Return whether `peer` is on this machine: a loopback address in any notation, or a Unix socket."""
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
    """Return whether a server that listens at `host` can be reached from this machine only."""
    return host == "localhost" or (bool(host) and not host.startswith("unix") and is_local(host))


def read_token(path: str) -> bytes:
    """Return the control token in the file `path`. Raises SettingsError if the file cannot be read or holds no token."""
    try:
        token = Path(path).read_bytes().removeprefix(BOM_UTF8).strip()
    except OSError as error:
        raise SettingsError(f"control_token_file={path!r}: cannot be read: {error.strerror}") from None
    if not token or b"\n" in token:
        raise SettingsError(f"control_token_file={path!r}: must hold one token, on one line")
    return token


def allowed(origins: Sequence[str], host: str, cors_origins: Sequence[str]) -> bool:
    """Return whether a caller with these `Origin` headers may open a connection.

    Allowed are clients other than browsers (they send no origin), pages of this server, and pages of `cors_origins`. Browsers do not check this for
    WebSockets, so the server must (RFC 6455, section 10.2).
    """
    if not origins or "*" in cors_origins:
        return True
    return len(origins) == 1 and (origins[0] in cors_origins or urlsplit(origins[0]).netloc.lower() == host.lower())


Headers = Iterable[tuple[bytes, bytes]]

BULK_KEY = " bulk"  # behind a key whose requests are bulk work
CLASS_HEADER = b"x-weir-class"
CALLER_HEADER = b":caller"  # whose key a request has; nobody can send a header with this name
_CALLER_LENGTH = 16
_RULE = "must be printable ASCII without spaces"


@dataclass(frozen=True)
class AccessSettings:
    """Decides who may call the server."""

    api_key: str | None = setting(
        None,
        "key that every caller must send; process lists show flags, so prefer WEIR_API_KEY or a file",
        metavar="KEY",
        secret=True,
        guards=True,
    )
    api_key_file: str | None = setting(None, "file with API keys, one per line", metavar="PATH", guards=True)

    def __post_init__(self) -> None:
        check(self)
        if self.api_key is not None and not _is_key(self.api_key):
            raise SettingsError(f"api_key: {_RULE}; the value is not shown")
        if self.api_key is not None and self.api_key_file is not None:
            raise SettingsError(
                f"api_key, api_key_file={self.api_key_file!r}: set one of them; the file may have several"
            )


class Access:
    """Decides who may call the server. Raises SettingsError for a key file that cannot be used.

    The control token is accepted as an API key too, because a call can carry only one of the two.
    """

    def __init__(self, settings: AccessSettings | None = None, control: Control | None = None) -> None:
        settings = settings or AccessSettings()
        path = settings.api_key_file
        keys = [settings.api_key] if settings.api_key is not None else [] if path is None else read_keys(path)
        self._digests = [_digest(key.partition(" ")[0]) for key in keys]
        self._bulk = frozenset(
            digest for digest, key in zip(self._digests, keys, strict=True) if key.endswith(BULK_KEY)
        )
        self._control = control
        self.own_key = secrets.token_urlsafe(32)  # of the server itself, for calls of its own application

    @property
    def required(self) -> bool:
        """Whether a call needs a key."""
        return bool(self._digests)

    def require(self, key: str | None) -> None:
        """Return if a call with this `key` may go on. Raises Unauthorized. The comparison takes the same time for every wrong key."""
        if not self.required:
            return
        if key is not None:
            given = _digest(key)
            known = [hmac.compare_digest(given, digest) for digest in self._digests]
            known.append(hmac.compare_digest(given, _digest(self.own_key)))
            if any(known) or (self._control is not None and self._control.knows(key)):
                return
        which = "came without it" if key is None else "came with another one"
        raise Unauthorized(f"this server asks for its API key (Authorization: Bearer KEY), but the call {which}")

    def require_http(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Do what `require` does for an HTTP request, and return its headers, which have names in lower case. If a key is required, the first says whose
        it is (CALLER_HEADER). With a key of bulk work they state that class, whatever class the caller stated.

        A browser may send the key as the password of Basic authentication (RFC 7617). That does not count for pages of other origins: the browser adds
        the password to every request to this server, whichever page makes the request.
        """
        listed = list(headers)
        if self.required:
            token = bearer_in(listed)
            key = _password_in(listed) if token is None else token
            self.require(key)
            digest = _digest(key or "")
            if digest in self._bulk:
                listed = [*(header for header in listed if header[0] != CLASS_HEADER), (CLASS_HEADER, b"bulk")]
            return [(CALLER_HEADER, digest.hex()[:_CALLER_LENGTH].encode()), *listed]
        return listed


def caller_in(headers: Headers) -> str:
    """Return whose key a request has, as `Access.require_http` says; "" if none was required."""
    return next((value.decode() for name, value in headers if name == CALLER_HEADER), "")


def read_keys(path: str) -> list[str]:
    """Return the keys in the file `path`, those of bulk work with BULK_KEY behind them.

    Raises SettingsError if the file cannot be read, holds no key, or holds one that cannot be sent in a header.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(BOM_UTF8).splitlines()
    except OSError as error:
        raise SettingsError(f"api_key_file={path!r}: cannot be read: {error.strerror}") from None
    keys = {row: line.strip().decode("latin-1") for row, line in enumerate(lines, start=1) if line.strip()}
    if not keys:
        raise SettingsError(f"api_key_file={path!r}: must hold one or more keys, one per line")
    for row, key in keys.items():
        if not _is_key(key.removesuffix(BULK_KEY)):
            raise SettingsError(f"api_key_file={path!r}: line {row}: {_RULE}, with or without {BULK_KEY!r} behind it")
    return list(keys.values())


def _is_key(text: str) -> bool:
    return bool(text) and all("!" <= character <= "~" for character in text)


def _digest(key: str) -> bytes:
    """Return the digest of `key`. All digests have one length, so the time of a comparison does not reveal the length of a key."""
    return sha256(key.encode("utf-8", "backslashreplace")).digest()


def _password_in(headers: list[tuple[bytes, bytes]]) -> str | None:
    found = dict(headers)
    value = found.get(b"authorization", b"")
    if value[:6].lower() != b"basic ":
        return None
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    if not allowed(origins, found.get(b"host", b"").decode("latin-1"), ()):
        return None
    try:
        return base64.b64decode(value[6:].strip(), validate=True).decode("latin-1").partition(":")[2]
    except binascii.Error:
        return None
