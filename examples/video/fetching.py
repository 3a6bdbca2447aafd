"""Fetches what strangers name, from hosts that the operator names: nothing else may be reached through this server."""

import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import urljoin, urlsplit

from weir import InvalidRequest

PIECE = 1 << 16


@dataclass(frozen=True)
class Rules:
    """`hosts` may be asked, each as `name` or `name:port`; none: nothing is fetched."""

    hosts: Sequence[str] = ()
    max_bytes: int = 64 << 20
    max_seconds: float = 10.0
    max_redirects: int = 3

    def check(self, address: Any) -> str:
        """Return `address` if it may be asked. Raises InvalidRequest."""
        try:
            parts = urlsplit(address)
            host, port = parts.hostname or "", parts.port
        except (ValueError, TypeError, AttributeError):
            raise InvalidRequest(f"address {address!r:.200}: must be a URL") from None
        if parts.scheme not in ("http", "https"):
            raise InvalidRequest(f"address {address!r:.200}: must begin with http:// or https://")
        if parts.username is not None or parts.password is not None:
            raise InvalidRequest("address: must have no user and no password")
        default = 443 if parts.scheme == "https" else 80
        names = {f"{host}:{port or default}"} | ({host} if port in (None, default) else set())
        if not names & {name.lower() for name in self.hosts}:
            raise InvalidRequest(
                f"address {address!r:.200}: videos are read from {', '.join(self.hosts) or 'no host'} only"
            )
        return str(address)


def fetch(address: Any, rules: Rules) -> IO[bytes]:
    """Return what is at `address`, as a temporary file. Raises InvalidRequest, also for what is too large or too slow."""
    end = time.monotonic() + rules.max_seconds
    try:
        with _open(rules.check(address), rules, end) as response:
            return _saved(response, rules, end)
    except (OSError, ValueError) as error:  # urllib's errors are OSErrors
        raise InvalidRequest(f"address {address!r:.200}: cannot be read ({error})") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Leave it to us."""


def _open(address: str, rules: Rules, end: float) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    for _ in range(rules.max_redirects + 1):
        try:
            return opener.open(address, timeout=max(0.001, end - time.monotonic()))
        except urllib.error.HTTPError as error:
            with error:
                place = error.headers.get("Location")
                if error.code not in (301, 302, 303, 307, 308) or place is None:
                    raise
            address = rules.check(urljoin(address, place))  # the next host has to be allowed too
    raise InvalidRequest(f"address {address!r:.200}: redirects more than {rules.max_redirects} times")


def _saved(response: Any, rules: Rules, end: float) -> IO[bytes]:
    with ExitStack() as closing:
        file = closing.enter_context(tempfile.TemporaryFile())
        size = 0
        while piece := response.read1(PIECE):
            size += len(piece)
            if size > rules.max_bytes:
                raise InvalidRequest(f"video: is larger than {rules.max_bytes} bytes")
            if time.monotonic() > end:
                raise InvalidRequest(f"video: took longer than {rules.max_seconds:g} s to arrive")
            file.write(piece)
        file.seek(0)
        closing.pop_all()  # it is the caller's now
        return file
