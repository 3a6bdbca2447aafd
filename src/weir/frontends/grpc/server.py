"""The gRPC frontend: address, TLS, limits, draining."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from weir.errors import SettingsError
from weir.frontends.frontend import taken
from weir.frontends.grpc import GrpcSettings
from weir.frontends.grpc.call import IncomingCall
from weir.frontends.grpc.services import NO_CALLS, AddedCalls, Services
from weir.frontends.http.server import tls_context
from weir.protocols import HttpSettings
from weir.protocols.kserve import KserveContext

if TYPE_CHECKING:
    from weir.frontends.grpc.aio import AioCore
    from weir.frontends.grpc.core import Core

Admit = Callable[[str, IncomingCall], bool]

_LONGEST = 1e8  # seconds: no limit
_MOST_STREAMS = 1024  # calls in flight of one connection


class GrpcServer:
    """Serves the models of `context` over gRPC. TLS and the default address are those of `http`.

    `core` is the class of the server underneath: core.Core, or aio.AioCore as a fallback. For `added` see make_frontend.
    """

    shares_port = False  # with others of its kind
    own_address = ""  # where it listens instead of host and port
    has_clients = True  # rather than servers before it, which count them

    def __init__(
        self,
        context: KserveContext,
        settings: GrpcSettings,
        http: HttpSettings,
        core: "type[Core | AioCore]",
        added: Callable[[int], AddedCalls] | None = None,
    ) -> None:
        self._added = added
        self._make_core = core
        self._settings = settings
        self._http = http
        self._context = context
        self._host = settings.grpc_host or http.host
        self._services: Services | None = None
        self._core: Core | AioCore | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """The address of the server, as a URL."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"grpc{'s' if self._http.tls_certfile else ''}://{host}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises SettingsError when the address is in use or invalid, or the certificate unreadable."""
        credentials = self.credentials()
        self._services = services = self.make_services()
        most = self._context.account.max_connections
        options = channel_options(self._settings, self._http, most, shares_port=self.shares_port)
        core = self._make_core(
            services.handlers,
            options,
            self.admission(services),
            services.refuse_with,
            self._context.account,
            max_message_size=self._settings.grpc_max_message_size,
            patience=self._http.body_timeout,
            has_clients=self.has_clients,
        )
        host = f"[{self._host}]" if ":" in self._host else self._host
        found = core.listen(self.own_address or f"{host}:{self._settings.grpc_port}", credentials)
        if not found:
            core.discard()
            raise self.taken()
        if not self.own_address:
            self.port = found
        await core.start()
        self._core = core

    def credentials(self) -> Any:
        """Return the credentials for TLS, or None if TLS is off. Raises SettingsError naming the unusable file."""
        return credentials_of(certificate_of(self._http))

    def make_services(self) -> Services:
        """Return the services, with the product's own calls."""
        most = self._settings.grpc_stream_requests
        added = NO_CALLS if self._added is None else self._added(most)
        return Services(self._context, most, development=self._http.development, added=added)

    def admission(self, services: Services) -> Admit:
        """Return what admits calls to a path: it returns whether a call may be answered; one that may not has been refused."""
        return services.admit

    def taken(self) -> SettingsError:
        """Return the error for an address at which nothing can listen."""
        return SettingsError(
            f"host={self._host!r}, grpc_port={self._settings.grpc_port}: cannot listen there: the address is taken "
            f"or unusable{taken(self._settings.grpc_port or 0)}"
        )

    def refuse(self) -> None:
        """Refuse new requests with UNAVAILABLE. A stream ends when its requests have been answered."""
        if self._services is not None:
            self._services.refuse()

    async def drain(self, drain_timeout: float | None = None) -> bool:
        """Accept no more calls, and return when the calls in flight have ended.

        Returns False if some were cancelled after `drain_timeout` seconds (None: no limit).
        """
        if self._core is None:
            return True
        self.refuse()
        loop = asyncio.get_running_loop()
        limit = math.inf if drain_timeout is None else drain_timeout
        begun = loop.time()
        await self._core.stop(min(limit, _LONGEST))
        return loop.time() - begun < limit

    async def stop(self) -> None:
        """Close everything. Idempotent."""
        core, self._core = self._core, None
        if core is not None:
            self.refuse()
            await core.stop(0)


def channel_options(
    settings: GrpcSettings, http: HttpSettings, max_connections: int, *, shares_port: bool = False
) -> list[tuple[str, int]]:
    """Return the server's limits as options of gRPC (grpc/include/grpc/impl/channel_arg_names.h)."""
    keepalive_ms, timeout_ms = int(1000 * settings.grpc_keepalive), int(1000 * settings.grpc_keepalive_timeout)
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", _MOST_STREAMS),  # a client keeps further calls back
        # gRPC also counts calls that have ended and that it has not freed yet, and would refuse a client that keeps to the limit. The
        # limit of calls in core.py refuses with a reason.
        ("grpc.http.overload_protection", 0),
        # Calls that wait to be accepted, those included whose clients have reset them: gRPC keeps each, with some 20 KB, until its turn. Without
        # a limit, clients that open and reset streams take gigabytes. By default gRPC cancels some from 1,000 on.
        ("grpc.server.max_pending_requests", max_connections),
        ("grpc.server.max_pending_requests_hard_limit", max_connections),
        ("grpc.so_reuseport", int(shares_port)),  # otherwise two servers could share one port, which must be an error
        ("grpc.enable_channelz", 1),  # tells how many clients are connected; see core.Connected
        ("grpc.max_receive_message_length", settings.grpc_max_message_size),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),  # otherwise gRPC waits a minute whatever keepalive_timeout is
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_connection_idle_ms", int(1000 * http.idle_timeout)),  # a client connects again with its next call
        ("grpc.server_handshake_timeout_ms", int(1000 * http.header_timeout)),
        ("grpc.max_metadata_size", http.max_header_size),
        ("grpc.absolute_max_metadata_size", http.max_header_size),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),  # a client may send pings this often
    ]


class Certificate(NamedTuple):
    """A certificate and its key, as in their files."""

    key: bytes
    chain: bytes


def certificate_of(settings: HttpSettings) -> Certificate | None:
    """Return the certificate for TLS, or None if TLS is off. Raises SettingsError naming the unusable file."""
    if tls_context(settings) is None or settings.tls_certfile is None:
        return None
    certificate = Path(settings.tls_certfile).read_bytes()
    key = certificate if settings.tls_keyfile is None else Path(settings.tls_keyfile).read_bytes()
    return Certificate(key, certificate)


def credentials_of(certificate: Certificate | None) -> Any:
    """Return gRPC's credentials, or None without a certificate."""
    return None if certificate is None else grpc.ssl_server_credentials([certificate])
