"""Server-Sent Events (HTML Living Standard, 9.2): events as bytes, and bytes as events."""

from typing import NamedTuple

CONTENT_TYPE = "text/event-stream"
MAX_EVENT_BYTES = 64 << 20


class Event(NamedTuple):
    """One event. `name` is "message" when the server gave none."""

    data: bytes
    name: str = "message"
    id: str = ""


def write_event(data: bytes, name: str = "") -> bytes:
    """Return one event. `data` may have several lines, however they end; its reader gets them joined by line feeds.

    Raises ValueError for a name that holds the end of a line.
    """
    if "\n" in name or "\r" in name:
        raise ValueError(f"event {name!r}: must be one line")
    head = b"event: %b\n" % name.encode() if name else b""
    if b"\n" in data or b"\r" in data:
        lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        return head + b"".join(b"data: %b\n" % line for line in lines) + b"\n"
    return b"%bdata: %b\n\n" % (head, data)


def write_comment(text: str = "") -> bytes:
    """Return a line that readers overlook, and that keeps a connection from being idle."""
    return b": %b\n\n" % text.replace("\r", " ").replace("\n", " ").encode()


class EventParser:
    """Turns the bytes of an event stream, in whatever pieces they come, into events.

    Comments, `retry` and unknown fields are overlooked; an event without data is none. Raises ValueError for an event that
    is longer than `max_event_bytes`.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()  # the beginning of one
        self._after_return = False  # a line feed now belongs to the carriage return before it
        self._first = True
        self._size = 0
        self._data: list[bytes] = []
        self._name = ""
        self._id = ""

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes."""
        if self._after_return and data:
            self._after_return = False
            if data.startswith(b"\n"):
                data = data[1:]
        self._after_return = data.endswith(b"\r")
        lines = (bytes(self._line) + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._line = bytearray(lines.pop())
        events = [event for event in map(self._take, lines) if event is not None]
        if self._size + len(self._line) > self._max_event_bytes:
            raise ValueError(f"an event of more than {self._max_event_bytes} bytes")
        return events

    def _take(self, line: bytes) -> Event | None:
        if self._first:
            self._first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            return self._dispatch()
        self._size += len(line)
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> Event | None:
        event = Event(b"\n".join(self._data), self._name or "message", self._id) if self._data else None
        self._data, self._name, self._size = [], "", 0
        return event
