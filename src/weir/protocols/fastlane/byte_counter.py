"""Counts the bytes of one model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weir.serving.service import Service


class Tally:
    """Bytes of one model since the observers last heard of them."""

    __slots__ = ("received", "sent", "service")

    def __init__(self, service: "Service") -> None:
        self.service = service
        self.received = 0
        self.sent = 0
