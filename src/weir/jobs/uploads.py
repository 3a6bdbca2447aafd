"""Uploads of `multipart/form-data`, and downloads. A file goes to disk, or comes from it, in pieces, so memory does not grow with it.

Between two pieces no file is open: a client that stalls holds its connection alone, and no descriptor that another one needs.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weir.errors import Cancelled, InvalidRequest, TooLarge, UnsupportedMediaType
from weir.frontends.http.asgi import unless_left
from weir.jobs.disk import Disk
from weir.protocols.account import Pace, charge

_MAX_FIELD = 1024  # bytes of a field next to the file
_MAX_FIELDS = 16
_MAX_NAME = 200  # characters of a file's name that are kept
PIECE = 256 << 10  # bytes that are written or read at once
OVERHEAD = 65536  # bytes that the other fields and the headers of the parts may take


class Upload:
    """An upload of one file to `path` on `disk`, at most `max_size` bytes, and of some short fields.

    `content_type` is that of the body. `reserve` is called before each piece is written: it keeps room for so many bytes, or raises. After `read`, `fields` has the fields, and `filename` the name that the client gave, without folders; it is only
    shown. Raises UnsupportedMediaType if the body is no form with parts.
    """

    def __init__(
        self, content_type: str, path: Path, max_size: int, reserve: Callable[[int], Awaitable[None]], disk: Disk
    ) -> None:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser, parse_options_header

        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise UnsupportedMediaType(
                f"Content-Type {content_type[:80]!r}: must be multipart/form-data with a boundary"
            )
        self._parse = parse_options_header
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequest(f"Content-Type {content_type[:80]!r}: {error}") from error
        self._path = path
        self._max_size = max_size
        self._reserve = reserve
        self._disk = disk
        self._piece = bytearray()  # of the file, to be written
        self._written = 0
        self._name = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._field: str | None = None  # the field of the present part; None for the file
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self._ended = False

    async def read(self, chunks: AsyncIterator[bytes], within: float) -> None:
        """Read the body from `chunks`, which must come as Pace demands it.

        Raises InvalidRequest naming what is wrong, TooLarge, and TimeoutError. The file may have been written in part then.
        """
        from python_multipart.exceptions import FormParserError

        charge(PIECE)
        received, pace = 0, Pace()
        try:
            while chunk := await pace.next(lambda: anext(chunks, b""), len, within):
                received += len(chunk)
                if received > self._max_size + OVERHEAD:
                    raise TooLarge(f"body: must have at most {OVERHEAD} bytes beside a file of {self._max_size}")
                self._parser.write(chunk)
                if len(self._piece) >= PIECE:
                    await self._write()
            self._parser.finalize()
        except FormParserError as error:
            raise InvalidRequest(f"body: is not a form with parts: {error}") from error
        if not self._ended:
            raise InvalidRequest("body: ends before its last boundary")
        if self.filename is None:
            raise InvalidRequest("is missing; must be a part with the name file").of("file")
        await self._write()

    async def _write(self) -> None:
        piece, self._piece = self._piece, bytearray()
        await self._reserve(len(piece))
        await asyncio.to_thread(self._append, piece)

    def _append(self, piece: bytearray) -> None:
        with self._disk.create(self._path, "ab") as file:
            if file.tell() != self._written:
                raise OSError("another request changed the file during the upload")
            file.write(piece)
        self._written += len(piece)

    # What the parser finds. `data` holds more than the part that is meant.

    def _end(self) -> None:
        self._ended = True

    def _begin_part(self) -> None:
        self._headers, self._name, self._value = {}, b"", b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name = (self._name + data[start:end])[:_MAX_FIELD]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value = (self._value + data[start:end])[:_MAX_FIELD]

    def _end_header(self) -> None:
        if len(self._headers) < _MAX_FIELDS:
            self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _end_headers(self) -> None:
        _, options = self._parse(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name != "file":
            if len(self.fields) >= _MAX_FIELDS:
                raise InvalidRequest(f"body: has more than {_MAX_FIELDS} fields")
            self._field = name
            self.fields[name] = ""
            return
        if self.filename is not None:
            raise InvalidRequest("was sent twice; must be sent once").of("file")
        given = options.get(b"filename", b"").decode("utf-8", "replace")
        self._field = None
        self.filename = given.replace("\\", "/").rpartition("/")[2][:_MAX_NAME] or "file"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            if len(self.fields[self._field]) + end - start > _MAX_FIELD:
                raise InvalidRequest(f"{self._field[:40]}: must have at most {_MAX_FIELD} bytes")
            self.fields[self._field] += data[start:end].decode("utf-8", "replace")
            return
        self.size += end - start
        if self.size > self._max_size:
            raise TooLarge(f"file: must have at most {self._max_size} bytes (batch_max_file_size)")
        self._piece += memoryview(data)[start:end]


class Download(Response):
    """The answer with a file of `size` bytes."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(media_type="application/octet-stream", headers={"content-length": str(size)})
        self._path = path
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, until the client leaves. Where somebody deletes the file meanwhile, the answer ends before its length, and the connection with it."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD" or not self._size:
            return await send({"type": "http.response.body"})
        with suppress(Cancelled, OSError):
            await unless_left(self._send_pieces(send), receive)

    async def _send_pieces(self, send: Send) -> None:
        for start in range(0, self._size, PIECE):
            piece = await asyncio.to_thread(partial(_read, self._path, start))
            await send({"type": "http.response.body", "body": piece, "more_body": start + PIECE < self._size})


def _read(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(PIECE)
