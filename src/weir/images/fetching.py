"""Images at URLs. A server fetches only from hosts that its settings name, and only from public addresses.

The address that is checked is the one that is connected to, so a name that later means another address gains nothing. Every
redirect is checked as the first URL is.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit
from weakref import WeakValueDictionary

from weir.client.http_connection import HttpReply, ResponseReader, tls_context
from weir.errors import InvalidRequest, reason_of
from weir.images import ImageLimits, check_bytes

SCHEMES = ("http://", "https://")
TIMEOUT = 10.0  # seconds for an image, redirects included
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REQUESTS = 4  # for an image: three redirects
_AT_ONCE = 16  # images that are fetched at the same time
_FROM_ONE = 8  # of them, those from one host: a slow one must not stop all
_PIECE = 1 << 16
# The most of a response that is not its body (head, framing and trailers), besides an eighth of the body.
_OTHER_BYTES = 1 << 16
_LONGEST_URL = 8192  # characters; what a storage service signs has up to 2,000
_SAFE = "%/:=&?~+!$,;'@()*[]"  # is not escaped in the path and the query of a URL
# Networks of addresses that stand for others, NAT64 (RFC 6052, RFC 8215), 6to4 (RFC 3056) and Teredo (RFC 4380); and of sites, once (RFC 3879).
_NOT_PUBLIC = tuple(map(IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "fec0::/10")))


class _Target(NamedTuple):
    """The target of a URL. `authority` is HOST:PORT, and `path` has the query, too."""

    scheme: str
    host: str
    port: int
    authority: str
    path: str


@dataclass(eq=False)
class Fetcher:
    """Fetches images for the callers of a server from the hosts in `limits.allow_url`.

    `charge` is called with the number of bytes of each piece that has arrived, and may raise an error that ends the call. `tls` is as for HttpClient.
    """

    limits: ImageLimits
    charge: Callable[[int], object]
    timeout: float = TIMEOUT
    tls: bool | ssl.SSLContext = True

    def __post_init__(self) -> None:
        self._allowed = frozenset(host.lower() for host in self.limits.allow_url)
        self._endings = tuple(each[1:] for each in self._allowed if each.startswith("*."))
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._turns_of = WeakValueDictionary[str, asyncio.Semaphore]()  # by host and port

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return tls_context(self.tls)  # reads all certificates of the system

    async def fetch(self, url: str) -> bytes:
        """Return the image at `url`.

        Raises InvalidRequest for a host or an address that is not allowed, and if no file within the limits comes back in time.
        """
        try:
            own = self._turns_of.setdefault(self._target(url).authority, asyncio.Semaphore(_FROM_ONE))
            async with own, self._turns, asyncio.timeout(self.timeout):
                return await self._followed(url)
        except TimeoutError:
            rule = f"no response within {self.timeout:g} s"
        except InvalidRequest as error:
            rule = error.message
        except OSError as error:
            rule = f"no response ({reason_of(error)})"
        except ValueError as error:  # of a redirect, or of a name that cannot be looked up
            rule = f"is no URL, or leads to none: {error}"
        raise InvalidRequest(f"{url!r:.200}: {rule}")

    async def _followed(self, url: str) -> bytes:
        for _ in range(_MOST_REQUESTS):
            reply = await self._get(self._target(url))
            if reply.status not in _REDIRECTS:
                break
            url = urljoin(url, reply.headers.get("location", ""))
        if reply.status != 200:
            raise InvalidRequest(f"the server responded with status {reply.status}")
        return reply.body

    def _target(self, url: str) -> _Target:
        """Return what `url` points to. Raises InvalidRequest if that is not allowed."""
        if len(url) > _LONGEST_URL:
            raise InvalidRequest(f"has {len(url):,} characters, must have at most {_LONGEST_URL:,}")
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").encode("idna").decode()
            port = parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError as error:
            raise InvalidRequest(f"is no URL: {error}") from None
        if parts.scheme not in _PORTS or not host or "@" in parts.netloc:
            raise InvalidRequest("must be http://HOST/PATH or https://HOST/PATH, without a user")

        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        is_usual = port == _PORTS[parts.scheme]
        is_allowed = authority in self._allowed or (is_usual and host.endswith(self._endings))
        if not is_allowed and (not is_usual or self._allowed.isdisjoint(("*", host))):
            raise InvalidRequest(f"{authority} is not allowed on this server (allow_url)")
        path = quote(f"{parts.path or '/'}?{parts.query}".removesuffix("?"), safe=_SAFE)
        return _Target(parts.scheme, host, port, authority, path)

    async def _get(self, target: _Target) -> HttpReply:
        """Return the response; of a redirect, only its head. Raises OSError, and InvalidRequest for a body beyond the limits."""
        tls, name = (self._tls, target.host) if target.scheme == "https" else (None, None)
        address = await self._address(target)
        reader, writer = await asyncio.open_connection(address, target.port, ssl=tls, server_hostname=name)
        try:
            head = f"GET {target.path} HTTP/1.1\r\nhost: {target.authority}\r\nconnection: close\r\n\r\n"
            writer.write(head.encode())
            response, body, others = ResponseReader(), bytearray(), 0
            while not response.is_complete and response.status not in _REDIRECTS:
                piece = await reader.read(_PIECE)
                self.charge(len(piece))
                response.feed(piece)
                part = response.take()
                body += part
                others += len(piece) - len(part)
                check_bytes(len(body), self.limits)
                if others > (most := _OTHER_BYTES + len(body) // 8):
                    raise InvalidRequest(f"{others:,} bytes of the response are not the image; at most {most:,}")
            return HttpReply(response.status, response.headers, bytes(body))
        finally:
            writer.transport.abort()

    async def _address(self, target: _Target) -> str:
        """Return a public address of the host, or the host itself if it is an address that is allowed by itself. Raises OSError, and InvalidRequest
        if it has no such address."""
        found = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        addresses = [str(address[0]) for *_, address in found]
        if target.host in addresses and not self._allowed.isdisjoint((target.host, target.authority)):
            return target.host
        public = [address for address in addresses if is_public(ip_address(address))]
        if not public:
            raise InvalidRequest(f"{target.host} has no public address")
        return public[0]


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address is one of the public internet, and does not stand for another."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in network for network in _NOT_PUBLIC):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)
