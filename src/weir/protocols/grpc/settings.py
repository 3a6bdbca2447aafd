"""The settings of the gRPC door. Its certificate is that of HTTP."""

from dataclasses import dataclass

from weir.fields import AT_LEAST_ONE, POSITIVE, check, setting
from weir.protocols.settings import PORT


@dataclass(frozen=True)
class GrpcSettings:
    """Where and how gRPC is served. Durations are in seconds, sizes in bytes."""

    grpc_port: int | None = setting(
        None, "port that gRPC listens on, beside HTTP; 0 takes any free one; without it there is no gRPC", rule=PORT
    )
    grpc_host: str | None = setting(None, "address that gRPC listens on, if not that of HTTP")
    grpc_max_message_size: int = setting(16 << 20, "largest message that a client may send", rule=AT_LEAST_ONE)
    grpc_keepalive: float = setting(
        30.0, "a client that has been silent for this long is asked whether it is still there", rule=POSITIVE
    )
    grpc_keepalive_timeout: float = setting(
        20.0, "longest time for it to answer; its calls are cancelled then", rule=POSITIVE
    )
    grpc_stream_requests: int = setting(
        256, "requests of one stream that may be under way; more are not read until some have ended", rule=AT_LEAST_ONE
    )

    def __post_init__(self) -> None:
        check(self)
