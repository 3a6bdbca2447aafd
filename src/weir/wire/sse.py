"""Server-sent events (HTML Living Standard, section 9.2): writes events as bytes, and parses bytes into events."""

from typing import NamedTuple

CONTENT_TYPE = "text/event-stream"
MAX_EVENT_BYTES = 64 << 20


class Event(NamedTuple):
    """One event. `name` is "message" if the server sent none."""

    data: bytes
    name: str = "message"
    id: str = ""


def write_event(data: bytes, name: str = "") -> bytes:
    """Return one event as bytes. `data` may have several lines with any line ends; the reader gets them joined with line feeds.

    Raises ValueError for a name that contains a line end.
    """
    if "\n" in name or "\r" in name:
        raise ValueError(f"event {name!r}: must be one line")
    head = b"event: %b\n" % name.encode() if name else b""
    if b"\n" in data or b"\r" in data:
        lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        return head + b"".join(b"data: %b\n" % line for line in lines) + b"\n"
    return b"%bdata: %b\n\n" % (head, data)


def write_comment(text: str = "") -> bytes:
    """Return a comment. Readers ignore it, and it keeps a connection from being idle."""
    return b": %b\n\n" % text.replace("\r", " ").replace("\n", " ").encode()


class EventParser:
    """Parses an event stream, which may arrive in pieces of any size.

    Comments, `retry` and unknown fields are ignored, and an event without data is dropped. An event of more than `max_event_bytes` raises ValueError.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()  # an incomplete line
        self._after_return = False  # the last byte was CR, so a LF now belongs to it
        self._first = True
        self._size = 0
        self._data: list[bytes] = []
        self._name = ""
        self._id = ""

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes. Raises ValueError for one that is too long."""
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
