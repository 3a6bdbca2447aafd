"""The settings of the ZeroMQ door, and all settings of a server of texts that are not a model's."""

from dataclasses import dataclass

from weir.embedding.settings import CallerSettings
from weir.fields import AT_LEAST_ONE, POSITIVE, check, setting
from weir.protocols.settings import PORT


@dataclass(frozen=True)
class ZeroMqSettings:
    """Where and how ZeroMQ is served. Durations are in seconds, sizes in bytes. What is not here is that of HTTP: the address, how
    many connections, how long a handshake may take."""

    zmq_port: int | None = setting(
        None, "port that takes requests over ZeroMQ, 5555 in bert-as-service; 0 takes any free one; without it there is no ZeroMQ",
        rule=PORT,
    )  # fmt: skip
    zmq_port_out: int | None = setting(
        None, "port that the answers leave by; without it the one after zmq_port", rule=PORT
    )
    zmq_max_message_size: int = setting(256 << 20, "largest request, with all its frames", rule=AT_LEAST_ONE)
    zmq_max_answer_size: int = setting(2 << 30, "largest answer: the vectors of one request", rule=AT_LEAST_ONE)
    zmq_max_in_flight: int = setting(
        256 << 20,
        "requests under way; while they are more than this, nothing is read from any client",
        rule=AT_LEAST_ONE,
    )
    zmq_max_unread: int = setting(
        64 << 20, "answers that a client may leave unread before its next requests wait; all together four times that, and more are dropped",
        rule=AT_LEAST_ONE,
    )  # fmt: skip
    zmq_grace: float = setting(
        5.0, "a client that listens no more may come back within this time and find its answers; what it asked is cancelled then",
        rule=POSITIVE,
    )  # fmt: skip
    zmq_show_tokens: bool = setting(
        False, "send the tokens of each text with the vectors, as -show_tokens_to_client did"
    )

    def __post_init__(self) -> None:
        check(self)


SERVER_PARTS = {"Callers": CallerSettings, "ZeroMQ": ZeroMqSettings}
