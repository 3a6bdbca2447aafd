"""OpenAI's /v1/files and /v1/batches over HTTP, what a server adds for them, and what its dashboard shows of them.

Files come as `multipart/form-data`. A file goes to disk, or comes from it, in pieces, so memory does not grow with it. Between two pieces no file is
open: a client that stalls holds its connection alone, and no descriptor that another one needs.
"""

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weir.errors import (
    Cancelled,
    Draining,
    InvalidRequest,
    Overloaded,
    TooLarge,
    UnsupportedMediaType,
    WeirError,
    reason_of,
)
from weir.frontends.http.asgi import HttpEndpoint, answered, as_response, too_slow, unless_left
from weir.jobs.running import JobContext, JobRunner, check_endpoint
from weir.jobs.store import Disk, Job, JobStore, StoredFile
from weir.protocols import HttpSettings
from weir.protocols.account import Pace, release
from weir.protocols.native import content_length
from weir.protocols.offloading import off_loop
from weir.protocols.response import openai_error_response
from weir.wire.values import UNREADABLE
from weir.workers.timer import in_background

_MAX_FIELD = 1024  # bytes of a field next to the file
_MAX_FIELDS = 16
_MAX_NAME = 200  # characters of a file's name that are kept
PIECE = 256 << 10  # bytes that are written or read at once
OVERHEAD = 65536  # bytes that the other fields and the headers of the parts may take

_WINDOW = re.compile(r"([0-9]{1,4})([mhd])")
_UNITS = {"m": 60, "h": 3600, "d": 86400}
_LONGEST_WINDOW = 30 * 86400  # seconds
_MOST_LISTED, _LISTED = 100, 20
_MOST_FILES = 10_000
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512
_MAX_BODY = 65536
_SHOWN = 20  # jobs on the dashboard
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class Upload:
    """An upload of one file to `path` on `disk`, at most `max_size` bytes, and of some short fields.

    `content_type` is that of the body. `reserve` is called before each piece is written: it keeps room for its bytes, or raises. After `read`, `fields` has the fields, and `filename` the name that the client gave, without folders; it is only
    shown. Raises UnsupportedMediaType if the body is not a form with parts.
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

        received, kept, pace = 0, 0, Pace()
        try:
            while chunk := await pace.next(lambda: anext(chunks, b""), len, within):
                received += len(chunk)
                kept += len(chunk)
                if received > self._max_size + OVERHEAD:
                    raise TooLarge(f"body: must have at most {OVERHEAD} bytes beside a file of {self._max_size}")
                self._parser.write(chunk)
                if len(self._piece) >= PIECE:
                    await self._write()
                    release(kept)
                    kept = 0
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
    """The response with a file of `size` bytes."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(media_type="application/octet-stream", headers={"content-length": str(size)})
        self._path = path
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, until the client leaves. Where somebody deletes the file meanwhile, the response ends before its length, and the connection with it."""
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


class BatchCall(msgspec.Struct):
    """The body of a request that creates a job."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


def seconds_of(window: str) -> int:
    """Return how many seconds a completion window such as 24h has. Raises InvalidRequest naming the rule."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST_WINDOW:
        rule = "must be minutes, hours or days, such as 24h, at most 30d"
        raise InvalidRequest(rule).of("completion_window", repr(window[:20]))
    return seconds


def shown_file(file: StoredFile) -> dict[str, Any]:
    """Return a file as OpenAI's clients read it."""
    return {**file._asdict(), "object": "file", "status": "processed", "status_details": None}


def shown_job(job: Job) -> dict[str, Any]:
    """Return a job as OpenAI's clients read it."""
    fields = job._asdict()
    counts = {name: fields.pop(name) for name in ("total", "completed", "failed")}
    del fields["answer_bytes"]
    errors = fields.pop("errors")
    return {
        **fields,
        "object": "batch",
        "errors": None if errors is None else {"object": "list", "data": errors},
        "request_counts": counts,
    }


class JobRoutes:
    """The routes of batch jobs. They keep jobs in a JobStore and wake the runner, which `begin` makes on the event loop of the server.

    The runner has a store of its own in the same directory, and so a thread of its own: nobody waits for the files that it reads and writes. `endpoints` are the paths of inference that a job may have.
    """

    def __init__(self, context: JobContext, http: HttpSettings, endpoints: Container[str]) -> None:
        """Raise SettingsError if the directory of the settings cannot be used."""
        self._context = context
        self._http = http
        self._endpoints = endpoints
        self._opened().close()
        self._thread = ThreadPoolExecutor(1, "weir-files")
        self._made: tuple[JobRunner, JobStore] | None = None
        self._shown: Mapping[str, Any] | None = None
        self._showing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin to serve files and jobs; this is called on the event loop. No job runs before `start`."""
        self._made = JobRunner(self._opened(), self._context), self._opened()

    def _opened(self) -> JobStore:
        settings = self._context.settings
        assert settings.batch_dir is not None  # the caller has looked
        return JobStore(settings.batch_dir, settings, self._context.disk)

    def start(self) -> None:
        """Begin to run the jobs: the models are ready."""
        self._runner.start()

    async def stop(self) -> None:
        """Stop running the jobs; they go on at the next start. Idempotent."""
        made, self._made = self._made, None
        if self._showing is not None:
            await asyncio.wait([self._showing])
        if made is not None:
            runner, store = made
            await runner.stop()
            await asyncio.get_running_loop().run_in_executor(self._thread, store.close)
            self._thread.shutdown()

    async def _use(self, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Return what `work` returns, a method of the store: it runs in the thread that uses the store. Raises Draining if the server does not run."""
        assert self._runner  # it runs
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments, **named))

    def overview(self) -> Mapping[str, Any] | None:
        """Return what the dashboard shows of the jobs: `counts` by state and `jobs`, as the store had them at the call before this one.

        None at the first call. This is called on the event loop, and reads nothing itself.
        """
        if self._made is not None and (self._showing is None or self._showing.done()):
            self._showing = in_background(self._look(), "the overview of batch jobs")
        return self._shown

    async def _look(self) -> None:
        counts, jobs = await self._use(self._store.overview, _SHOWN)
        fields = ("id", "endpoint", "status", "total", "completed", "failed", "created_at", "expires_at")
        shown = [{name: getattr(job, name) for name in fields} for job in jobs]
        self._shown = {"counts": counts, "jobs": shown}

    @property
    def _begun(self) -> tuple[JobRunner, JobStore]:
        if self._made is None:
            raise Draining("the server runs no batch jobs now: it is starting or shutting down; try again later")
        return self._made

    @property
    def _runner(self) -> JobRunner:
        return self._begun[0]

    @property
    def _store(self) -> JobStore:
        return self._begun[1]

    def endpoints(self) -> list[HttpEndpoint]:
        """Return the endpoints."""
        job, file = "/v1/batches/{batch}", "/v1/files/{file}"
        declared: list[tuple[str, str, Handler, str, str]] = [
            ("POST", "/v1/files", self._upload, "uploadFile", "Upload a file of requests"),
            ("GET", "/v1/files", self._files, "listFiles", "List the files"),
            ("GET", file, self._file, "showFile", "Describe a file"),
            ("DELETE", file, self._delete, "deleteFile", "Delete a file"),
            ("GET", f"{file}/content", self._content, "readFile", "Return what a file holds"),
            ("POST", "/v1/batches", self._create, "createBatch", "Run the requests of a file as bulk work"),
            ("GET", "/v1/batches", self._batches, "listBatches", "List the batch jobs"),
            ("GET", job, self._batch, "showBatch", "Describe a batch job"),
            ("POST", f"{job}/cancel", self._cancel, "cancelBatch", "Cancel a batch job"),
        ]
        responses = {"200": {"description": "see OpenAI's reference"}}
        return [
            HttpEndpoint(
                method,
                path,
                answered(_responding(handler)),
                {"summary": summary, "operationId": name, "tags": ["batch jobs"], "responses": responses},
                openai_error_response,
            )
            for method, path, handler, name, summary in declared
        ]

    # Files.

    async def _upload(self, request: Request) -> Response:
        store, most = self._store, self._context.settings.batch_max_file_size
        size = content_length(request.headers.get("content-length", "0").encode("latin-1"))
        if size > most + OVERHEAD:
            raise TooLarge(f"file: must have at most {most} bytes (batch_max_file_size)")
        await self._use(store.check_room, size)
        name, path = store.begin_file()
        reserved = 0

        async def reserve(more: int) -> None:
            nonlocal reserved
            await self._use(store.reserve, more)
            reserved += more

        try:
            upload = Upload(request.headers.get("content-type", ""), path, most, reserve, self._context.disk)
            await upload.read(_chunks(request), self._http.body_timeout)
            purpose = upload.fields.get("purpose", "")
            if purpose != "batch":
                raise InvalidRequest("must be batch").of("purpose", repr(purpose[:40]))
            runner = self._runner
            expires_at = _expiry(upload.fields, runner)
            kept = await self._use(store.add_file, name, upload.filename, purpose, runner.now, expires_at)
        except TimeoutError:
            raise too_slow(self._http.body_timeout) from None
        finally:
            self._context.disk.remove(path)
            store.give_back(reserved)
        return _json(shown_file(kept))

    async def _files(self, request: Request) -> Response:
        limit = _limit(request, _MOST_FILES, _MOST_FILES)
        ascending = request.query_params.get("order", "desc") == "asc"
        found = await self._use(
            self._store.files,
            purpose=request.query_params.get("purpose"),
            after=request.query_params.get("after"),
            limit=limit + 1,
            ascending=ascending,
        )
        return await off_loop(200 * len(found), lambda: _listed([shown_file(file) for file in found], limit))

    async def _file(self, request: Request) -> Response:
        return _json(shown_file(await self._use(self._store.file, request.path_params["file"])))

    async def _delete(self, request: Request) -> Response:
        name = request.path_params["file"]
        await self._use(self._store.delete_file, name)
        return _json({"id": name, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        name, store = request.path_params["file"], self._store
        file, path = await self._use(lambda: (store.file(name), store.path(name)))
        return Download(path, file.bytes)

    # Jobs.

    async def _create(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_BODY:
                raise TooLarge(f"body: must have at most {_MAX_BODY} bytes")
        try:
            read = msgspec.json.decode(body, type=BatchCall)
        except UNREADABLE as error:
            raise InvalidRequest(f"body: {error}") from error
        _check_metadata(read.metadata)
        check_endpoint(read.endpoint, self._endpoints)
        runner = self._runner
        ends = runner.now + seconds_of(read.completion_window)
        job = await self._use(
            self._store.add_job,
            read.endpoint,
            read.input_file_id,
            read.completion_window,
            read.metadata,
            runner.now,
            ends,
        )
        runner.wake()
        return _json(shown_job(job))

    async def _batches(self, request: Request) -> Response:
        limit = _limit(request, _LISTED, _MOST_LISTED)
        found = await self._use(self._store.jobs, after=request.query_params.get("after"), limit=limit + 1)
        return _listed([shown_job(job) for job in found], limit)

    async def _batch(self, request: Request) -> Response:
        return _json(shown_job(await self._use(self._store.job, request.path_params["batch"])))

    async def _cancel(self, request: Request) -> Response:
        job = await self._use(self._store.step, request.path_params["batch"], "cancelling", self._runner.now)
        self._runner.wake()
        return _json(shown_job(job))


def _responding(handler: Handler) -> Handler:
    """Return a handler whose errors are responses in OpenAI's form."""

    async def respond(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except (WeirError, OSError, sqlite3.Error) as raised:
            # What the system or SQLite raises is a full disk, or a directory that another process holds for long.
            error = raised if isinstance(raised, WeirError) else _no_room(raised)
            return as_response(openai_error_response(error))

    return respond


def _no_room(error: Exception) -> Overloaded:
    return Overloaded(
        f"batch_dir: the server cannot keep files and jobs there now ({reason_of(error)})", retry_after=60.0
    )


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        if chunk:
            yield chunk


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _listed(found: list[dict[str, Any]], limit: int) -> Response:
    data, more = found[:limit], len(found) > limit
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return _json({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more})


def _limit(request: Request, default: int, most: int) -> int:
    text = request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 7 and 1 <= int(text) <= most):
        raise InvalidRequest(f"must be 1 to {most}").of("limit", repr(text[:20]))
    return int(text)


def _check_metadata(metadata: dict[str, str] | None) -> None:
    for key, value in (metadata or {}).items():
        if len(metadata or {}) > _MOST_METADATA or len(key) > _LONGEST_KEY or len(value) > _LONGEST_VALUE:
            rule = (
                f"must have at most {_MOST_METADATA} keys of {_LONGEST_KEY} characters, with values of {_LONGEST_VALUE}"
            )
            raise InvalidRequest(rule).of("metadata")


def _expiry(fields: Mapping[str, str], runner: JobRunner) -> int:
    """Return the instant at which an uploaded file expires: as it states, at most that of the settings."""
    text = fields.get("expires_after[seconds]", "")
    latest = runner.expires_at()
    if not text:
        return latest
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise InvalidRequest("must be a number of seconds").of("expires_after", repr(text[:20]))
    return min(latest, runner.now + int(text))
