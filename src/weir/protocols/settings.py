"""The settings of HTTP, and of the Open Inference Protocol at every frontend."""

import re
from dataclasses import dataclass

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, Rule, check, one_of, setting
from weir.errors import SettingsError
from weir.protocols.status import TIMEOUTS

MODE: Rule = (
    lambda value: re.fullmatch("0?[0-7]{3}", value) is not None, "must be three octal digits, such as 600 or 660",
)  # fmt: skip
PORT: Rule = (lambda value: 0 <= value <= 65535, "must be a port number, 0 to 65535 (0: any free one)")


@dataclass(frozen=True)
class HttpSettings:
    """Where and how HTTP is served. Durations are in seconds, sizes in bytes."""

    host: str = setting("127.0.0.1", "address to listen on; ::: every address, of IPv6 and IPv4")
    port: int = setting(8000, "port to listen on; 0: any free one", rule=PORT)
    uds: str | None = setting(None, "Unix socket to listen on, instead of host and port", metavar="PATH")
    uds_mode: str = setting(
        "600", "octal permissions of that socket; who may write to it controls the server", rule=MODE
    )
    max_body_size: int = setting(16 << 20, "largest request body in bytes, also after decompression", rule=AT_LEAST_ONE)
    max_header_size: int = setting(64 << 10, "largest head of a request, in bytes", rule=AT_LEAST_ONE)
    idle_timeout: float = setting(75.0, "time after which an idle connection is closed", rule=POSITIVE)
    header_timeout: float = setting(10.0, "longest time to receive a request's head", rule=POSITIVE)
    body_timeout: float = setting(60.0, "longest time to receive a request's body", rule=POSITIVE)
    max_connections: int = setting(10_000, "open connections of every kind", rule=AT_LEAST_ONE)
    max_waiting_bytes: int | None = setting(
        None,
        "bytes that all requests and answers may hold (default: an eighth of the process's memory)",
        rule=AT_LEAST_ONE,
    )
    stream_keep_alive: float = setting(
        3.0, "silence after which a stream of events gets a comment",
        rule=POSITIVE,
    )  # fmt: skip
    websocket_in_flight: int = setting(
        64,
        "running requests at which a WebSocket is read no further; 16 times as many with a timeout",
        rule=AT_LEAST_ONE,
    )
    websocket_ping: float = setting(20.0, "time between two pings on a WebSocket", rule=POSITIVE)
    compress_above: int = setting(1024, "bytes above which answers are compressed on request", rule=AT_LEAST_ZERO)
    protocols: list[str] = setting([], "also speak a protocol of an installed package", metavar="NAME")
    cors_origins: list[str] = setting([], "origins whose pages may call this server; * for any")
    tls_certfile: str | None = setting(None, "certificate (PEM); switches TLS on", metavar="PATH", guards=True)
    tls_keyfile: str | None = setting(
        None, "private key (PEM), if not with the certificate", metavar="PATH", guards=True
    )
    liveness: str = setting(
        "process",
        "what /health/live checks: process, that the server answers; models, also that every model can start workers",
        rule=one_of("process", "models"),
    )
    timeout_status: int = setting(
        408, "HTTP status of a request that timed out: 408, or 504, which alerts on 5xx count and clients do not retry",
        rule=one_of(*TIMEOUTS),
    )  # fmt: skip
    explain: bool = setting(False, "explain the batch in every answer's headers")
    development: bool = setting(False, "show callers tracebacks; never where strangers can call")

    def __post_init__(self) -> None:
        check(self)
        if self.tls_keyfile is not None and self.tls_certfile is None:
            raise SettingsError(f"tls_keyfile={self.tls_keyfile!r}: needs tls_certfile too")


@dataclass(frozen=True)
class KserveSettings:
    """The server's name in its metadata, and whether clients may share memory with it."""

    server_name: str = setting("weir", "name of the server in its metadata")
    allow_shared_memory: bool = setting(
        False, "let clients on this machine register shared memory (/dev/shm) for tensors"
    )

    def __post_init__(self) -> None:
        check(self)
