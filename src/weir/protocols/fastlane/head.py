"""Heads of requests, read by llhttp. What could be understood in two ways is refused, never guessed."""

from collections.abc import Iterable

import httptools

from weir.errors import InvalidRequest

Headers = list[tuple[bytes, bytes]]

END_OF_HEAD = b"\r\n\r\n"

MAX_LINES = 256  # of a head: each takes microseconds, however short it is

# llhttp wants to see a body before it reads the next head. Content is nothing to it, so it sees zeros.
_ZEROS = memoryview(bytes(64 << 10))


class Head:
    """The head of one request, as its bytes say. Header names are in lower case."""

    __slots__ = ("headers", "keep_alive", "length", "method", "notable", "upgrade", "url", "version")

    def __init__(self, method: str, url: bytes, version: str, headers: Headers) -> None:
        self.method = method
        self.url = url
        self.version = version
        self.headers = headers
        self.notable = _notable(headers)  # of headers that the fast lane must know: the (last) value
        self.length = int(self.notable.get(b"content-length", 0))
        self.keep_alive = True
        self.upgrade = False


_NOTABLE = frozenset(
    (b"authorization", b"content-length", b"cookie", b"expect", b"host", b"origin", b"proxy-authorization",
     b"transfer-encoding", b"upgrade")
)  # fmt: skip


def _notable(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    notable: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _NOTABLE:
            if name == b"host" and name in notable:
                raise InvalidRequest("Host: must be given once, not twice")
            notable[name] = value
    return notable


class HeadReader:
    """Reads heads with one llhttp parser that lives on: a new one for each head costs 0.8 µs."""

    def __init__(self) -> None:
        self._renew()

    def read(self, head: bytes) -> Head:
        """Read `head`, which is without the empty line at its end.

        Raises InvalidRequest with llhttp's reason, or for a version other than 1.0 and 1.1, or without Host, or with more than MAX_LINES.
        """
        if head.count(b"\r\n") > MAX_LINES:
            raise InvalidRequest(f"head of the request: has more than {MAX_LINES} lines")
        self._url = b""
        self._headers: Headers = []
        self._keep_alive = False
        upgrade = False
        try:
            self._parser.feed_data(head + END_OF_HEAD)
        except httptools.HttpParserUpgrade:
            upgrade = True
        except httptools.HttpParserError as error:
            self._renew()
            raise InvalidRequest(f"head of the request: {error}") from None
        try:
            return self._finished(upgrade)
        except InvalidRequest:
            self._renew()
            raise

    def _finished(self, upgrade: bool) -> Head:
        parser = self._parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise InvalidRequest(f"HTTP version {version}: must be 1.1 or 1.0")
        head = Head(parser.get_method().decode(), self._url, version, self._headers)
        if version == "1.1" and b"host" not in head.notable:
            raise InvalidRequest("Host: HTTP/1.1 requires it, and it is missing")
        head.upgrade = upgrade and head.method != "CONNECT"
        head.keep_alive = self._keep_alive and version == "1.1"
        if upgrade or not head.keep_alive or head.length > len(_ZEROS) or b"transfer-encoding" in head.notable:
            self._renew()
        elif head.length:
            parser.feed_data(_ZEROS[: head.length])
        return head

    def _renew(self) -> None:
        self._parser = httptools.HttpRequestParser(self)

    def on_headers_complete(self) -> None:
        """llhttp: the end of the head. Without a body, it forgets after this whether the connection goes on."""
        self._keep_alive = self._parser.should_keep_alive()

    def on_url(self, url: bytes) -> None:
        """llhttp: the target of the request."""
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        """llhttp: one header."""
        self._headers.append((name.lower(), value))


def check_beginning(data: bytearray, start: int) -> None:
    """Refuse, before its end is there, what can never become a head: for `data` from `start` on is new.

    Raises InvalidRequest for a line ended by LF alone and for a beginning that is no method; whoever sends these would
    otherwise wait for `header_timeout`.
    """
    if not 65 <= data[0] <= 90:  # methods are in capital letters
        raise InvalidRequest("head of the request: must begin with a method")
    at = data.find(b"\n", start)
    while at >= 0:
        if at == 0 or data[at - 1] != 13:
            raise InvalidRequest("head of the request: lines must end with CR LF, not LF alone")
        at = data.find(b"\n", at + 1)
