"""The settings of the Open Inference Protocol, at whichever door."""

from dataclasses import dataclass

from weir.config import check, setting


@dataclass(frozen=True)
class KserveSettings:
    """What the server says of itself, and whether clients may share memory with it."""

    server_name: str = setting("weir", "name of the server in its metadata")
    allow_shared_memory: bool = setting(
        False, "let clients on this machine register regions of shared memory (/dev/shm) for inputs and outputs"
    )

    def __post_init__(self) -> None:
        check(self)
