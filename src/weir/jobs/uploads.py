"""Reads an upload of `multipart/form-data` as it arrives: the file goes to disk in pieces, so memory does not grow with it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from weir.errors import InvalidRequest, TooLarge, UnsupportedMediaType

_MAX_FIELD = 1024  # bytes of a field beside the file
_MAX_FIELDS = 16
_MAX_NAME = 200  # characters of a file's name that are kept
OVERHEAD = 65536  # bytes that the other fields and the headers of the parts may take


class Upload:
    """An upload of one file to `path`, at most `max_size` bytes, and of some short fields.

    `content_type` is that of the body. After `read`, `fields` has the fields, and `filename` the name that the client gave, without folders; it is only
    shown. Raises UnsupportedMediaType if the body is no form with parts.
    """

    def __init__(self, content_type: str, path: Path, max_size: int) -> None:
        from python_multipart.multipart import MultipartParser, parse_options_header

        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise UnsupportedMediaType(
                f"Content-Type {content_type[:80]!r}: must be multipart/form-data with a boundary"
            )
        self._parse = parse_options_header
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part, "on_header_field": self._header_name, "on_header_value": self._header_value,
                "on_header_end": self._end_header, "on_headers_finished": self._end_headers, "on_part_data": self._data,
                "on_end": self._end,
            },
        )  # fmt: skip
        self._path = path
        self._max_size = max_size
        self._file: IO[bytes] | None = None
        self._name = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._field: str | None = None  # the field of the present part; None for the file
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self._ended = False

    async def read(self, chunks: AsyncIterator[bytes], within: float) -> None:
        """Read the body from `chunks`, each of which must come within so many seconds.

        Raises InvalidRequest naming what is wrong, TooLarge, and TimeoutError. The file may have been written in part then.
        """
        from python_multipart.exceptions import FormParserError

        received = 0
        try:
            while True:
                async with asyncio.timeout(within):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    break
                received += len(chunk)
                if received > self._max_size + OVERHEAD:
                    raise TooLarge(f"body: must have at most {OVERHEAD} bytes beside a file of {self._max_size}")
                self._parser.write(chunk)
            self._parser.finalize()
        except FormParserError as error:
            raise InvalidRequest(f"body: is not a form with parts: {error}") from error
        finally:
            if self._file is not None:
                self._file.close()
        if not self._ended:
            raise InvalidRequest("body: ends before its last boundary")
        if self.filename is None:
            raise InvalidRequest("file: is missing; must be a part with the name file", details={"param": "file"})

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
        if self._file is not None:
            raise InvalidRequest("file: comes twice; must come once", details={"param": "file"})
        given = options.get(b"filename", b"").decode("utf-8", "replace")
        self._field = None
        self.filename = given.replace("\\", "/").rpartition("/")[2][:_MAX_NAME] or "file"
        self._file = self._path.open("wb")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            if len(self.fields[self._field]) + end - start > _MAX_FIELD:
                raise InvalidRequest(f"{self._field[:40]}: must have at most {_MAX_FIELD} bytes")
            self.fields[self._field] += data[start:end].decode("utf-8", "replace")
            return
        self.size += end - start
        if self.size > self._max_size:
            raise TooLarge(f"file: must have at most {self._max_size} bytes (batch_max_file_size)")
        assert self._file is not None  # its headers have been read
        self._file.write(data[start:end])
