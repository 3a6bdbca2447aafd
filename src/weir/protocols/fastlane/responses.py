"""Heads of answers as bytes. What is the same for a second is put together once a second."""

from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Heads:
    """The heads of answers, with the Date of this second."""

    def __init__(self) -> None:
        self.date = b""
        # Content type -> everything of a 200 answer's head up to the value of Content-Length, which is last.
        self.plain: dict[str, bytes] = {}

    def tick(self, wall_time: float) -> None:
        """Take `wall_time`, in seconds since 1970, as the date."""
        self.date = formatdate(wall_time, usegmt=True).encode()
        self.plain.clear()

    def plain_head(self, content_type: str) -> bytes:
        """Return (and keep in `plain`) the head of a 200 answer up to the value of Content-Length."""
        head = b"HTTP/1.1 200 OK\r\ndate: %b\r\ncontent-type: %b\r\ncontent-length: " % (
            self.date,
            content_type.encode("latin-1"),
        )
        self.plain[content_type] = head
        return head

    def head(self, status: int, headers: Iterable[tuple[bytes, bytes]], length: int, *, close: bool) -> bytes:
        """Return the complete head of an answer with a body of `length` bytes."""
        lines = [_STATUS_LINES[status], b"date: %b\r\n" % self.date]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(b"content-length: %d\r\n%b\r\n" % (length, b"connection: close\r\n" if close else b""))
        return b"".join(lines)
