"""The protocols, which read requests and write responses and errors without I/O, and the exchange, which connects a protocol, a channel and a model.

Here are the settings of HTTP, and of the Open Inference Protocol at every frontend.
"""

import re
from dataclasses import dataclass

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, Checked, Rule, check, one_of, setting
from weir.errors import SettingsError
from weir.wire.status import TIMEOUTS

MODE: Rule = (
    lambda value: re.fullmatch("0?[0-7]{3}", value) is not None,
    "must be three octal digits, such as 600 or 660",
)
PORT: Rule = (lambda value: 0 <= value <= 65535, "must be a port number, 0 to 65535 (0: any free one)")


@dataclass(frozen=True)
class HttpSettings:
    """The settings of HTTP. Durations are in seconds, sizes in bytes."""

    host: str = setting("127.0.0.1", "address to listen on; '::' means every address, IPv6 and IPv4")
    port: int = setting(8000, "port to listen on; 0 picks a free one", rule=PORT)
    uds: str | None = setting(None, "Unix socket to listen on, instead of host and port", metavar="PATH")
    uds_mode: str = setting(
        "600", "octal permissions of the Unix socket; whoever can write to it controls the server", rule=MODE
    )
    max_body_size: int = setting(
        16 << 20, "largest request body in bytes, before and after decompression", rule=AT_LEAST_ONE
    )
    max_header_size: int = setting(64 << 10, "largest request header section in bytes", rule=AT_LEAST_ONE)
    idle_timeout: float = setting(75.0, "seconds after which an idle connection is closed", rule=POSITIVE)
    header_timeout: float = setting(10.0, "seconds within which a request's headers must arrive", rule=POSITIVE)
    body_timeout: float = setting(
        60.0, "seconds within which a request's body must arrive; as many again for each MiB of it", rule=POSITIVE
    )
    max_connections: int = setting(
        10_000,
        "maximum number of open connections of all kinds; beyond it, only health and metrics are answered",
        rule=AT_LEAST_ONE,
    )
    max_waiting_bytes: int | None = setting(
        None,
        "memory for all requests and responses in bytes; a number read from JSON counts 16 (default: an eighth of the process's memory)",
        rule=AT_LEAST_ONE,
    )
    stream_keep_alive: float = setting(
        3.0, "seconds of silence after which an event stream sends a comment", rule=POSITIVE
    )
    websocket_in_flight: int = setting(
        64,
        "running requests at which reading from a WebSocket pauses; 16 times as many if they have a timeout",
        rule=AT_LEAST_ONE,
    )
    websocket_ping: float = setting(20.0, "seconds between pings on a WebSocket", rule=POSITIVE)
    compress_above: int = setting(
        1024,
        "response size in bytes above which responses are compressed, if the client accepts it",
        rule=AT_LEAST_ZERO,
    )
    protocols: list[str] = setting([], "additional protocol from an installed package", metavar="NAME")
    cors_origins: list[str] = setting([], "origins whose web pages may call this server; * allows any")
    tls_certfile: str | None = setting(None, "TLS certificate (PEM); enables TLS", metavar="PATH", guards=True)
    tls_keyfile: str | None = setting(
        None, "TLS private key (PEM), if it is not in the certificate file", metavar="PATH", guards=True
    )
    liveness: str = setting(
        "process",
        "what /health/live checks: process (the server responds) or models (every model can also start workers)",
        rule=one_of("process", "models"),
    )
    timeout_status: int = setting(
        504,
        "HTTP status of requests that time out: 504, or 408, which alerts on 5xx miss and many clients retry",
        rule=one_of(*TIMEOUTS),
    )
    explain: bool = setting(False, "describe the batch in the headers of every response")
    development: bool = setting(False, "send tracebacks to callers; do not use on a public server")

    def __post_init__(self) -> None:
        check(self)
        if self.tls_keyfile is not None and self.tls_certfile is None:
            raise SettingsError(f"tls_keyfile={self.tls_keyfile!r}: needs tls_certfile too")


@dataclass(frozen=True)
class KserveSettings(Checked):
    """The server's name in its metadata, and whether clients may share memory with it."""

    server_name: str = setting("weir", "server name in the metadata")
    allow_shared_memory: bool = setting(
        False, "allow clients on this machine to register shared memory (/dev/shm) for tensors"
    )
