"""Runs batch jobs: each request of a job is a call of the server's own application, as bulk work.

The lines of input files (`InputFile`), of outputs and of errors have the forms of OpenAI's Batch API. A line is read when it is needed, by its place in
the file, so memory does not grow with the file.

A job is validated, run, and finalized. Its state is in the JobStore alone: after a restart, also one by `kill -9`, a job goes on where its last stored response
was. Responses that came meanwhile are stored together, in one transaction, while further requests run.

A request is in memory only until its response is there: its line is charged to the server's account when it is read, and given up before the request waits to be
sent again.
"""

import asyncio
import logging
import math
import os
import time
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.types import ASGIApp, Message

from weir.errors import InvalidRequest, NotFound, WeirError
from weir.jobs import JobSettings
from weir.jobs.store import Disk, Job, JobRequest, JobResponse, JobStore
from weir.messages import JSON
from weir.protocols.account import Account, Claim
from weir.protocols.offloading import off_loop
from weir.protocols.response import error_body
from weir.wire.status import http_code
from weir.wire.values import UNREADABLE, unreadable
from weir.workers.timer import outcome_of

MOST_ERRORS = 50  # that are listed of one file
LONGEST_ID = 512  # characters of a custom_id

NO_REQUESTS = "the file has no requests"
EXPIRED = b'"response":null,"error":{"code":"batch_expired","message":"This request could not be run before the completion window ended."}}'
T = TypeVar("T")
JOBS_AT_ONCE = 4  # jobs that share the requests under way; others wait
LOOK_AGAIN = 5.0  # seconds after which another process is looked for that no longer runs the jobs, or has cancelled one
CLEAN_EVERY = 600.0  # seconds, or sooner where files expire sooner
RETRIED = (429, 503)  # statuses with which a server says that it has no room now; such a request is sent again
RETRY_MIN, RETRY_MAX = 0.05, 5.0  # seconds until then
CHUNK = 512  # requests that are read from the store, or from a file, at once
_PART = 4  # the lines that are being answered may take one such part of the account; a job may always have one
LONGEST_CALL = 86400.0  # seconds


class InputLine(msgspec.Struct):
    """One line of an input file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


read_line = msgspec.json.Decoder(InputLine).decode  # raises one of UNREADABLE


def check_endpoint(endpoint: str, endpoints: Container[str]) -> str:
    """Return `endpoint` if it is one of `endpoints`, the paths of inference that give one response. Raises InvalidRequest naming it and the rule."""
    if unquote(endpoint) not in endpoints:
        rule = "must be a path of inference of this server that gives one response, such as /infer/MODEL"
        raise InvalidRequest(rule).of("endpoint", repr(endpoint[:200]))
    return endpoint


def begin_of_text(file: BinaryIO) -> int:
    """Move to where the text of `file` begins, after a byte order mark if it has one, and return that place."""
    return file.seek(len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0)


class InputFile:
    """An input file of a job whose requests go to `endpoint`. Iterating reads its requests, and collects what is wrong in `errors`.

    A line has at most `max_line` bytes, and the file at most `max_requests` requests and as many blank lines. Raises nothing for what a file holds: whoever reads it looks at
    `errors`, each with code, line and message.
    """

    def __init__(self, path: Path, endpoint: str, *, max_requests: int, max_line: int) -> None:
        self._path = path
        self._endpoint = endpoint
        self._max_requests = max_requests
        self._max_line = max_line
        self.errors: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[JobRequest]:
        number, line_number = 0, 0
        with self._path.open("rb") as file:
            start = begin_of_text(file)
            while len(self.errors) < MOST_ERRORS and (line := file.readline(self._max_line + 2)):
                line_number += 1
                if len(line) > self._max_line + 1:
                    self._note("line_too_long", line_number, f"has more than {self._max_line} bytes (max_body_size)")
                    return
                if line.strip():
                    if number == self._max_requests:
                        self._note(
                            "too_many_requests",
                            line_number,
                            f"a job has at most {number} requests (batch_max_requests)",
                        )
                        return
                    request = self._request(line, number, line_number, start)
                    number += 1
                    if request is not None:
                        yield request
                elif line_number - number > self._max_requests:
                    self._note(
                        "too_many_lines",
                        line_number,
                        f"a file has at most {self._max_requests} blank lines (batch_max_requests)",
                    )
                    return
                start += len(line)
        if not number:
            self._note("empty_file", None, NO_REQUESTS)

    def _request(self, line: bytes, number: int, line_number: int, start: int) -> JobRequest | None:
        try:
            read = read_line(line)
        except UNREADABLE as error:
            self._note(
                "invalid_json_line", line_number, f"must be an object with custom_id, method, url and body: {error}"
            )
            return None
        if not 0 < len(read.custom_id) <= LONGEST_ID:
            self._note("invalid_custom_id", line_number, f"custom_id: must have 1 to {LONGEST_ID} characters")
        elif read.method != "POST":
            self._note("invalid_method", line_number, f"method {read.method[:20]!r}: must be POST")
        elif read.url != self._endpoint:
            self._note(
                "mismatched_url",
                line_number,
                f"url {read.url[:200]!r}: must be the endpoint of the job, {self._endpoint}",
            )
        else:
            return JobRequest(number, read.custom_id, start, len(line))
        return None

    def _note(self, code: str, line: int | None, message: str) -> None:
        where = "" if line is None else f"line {line}: "
        self.errors.append({"code": code, "line": line, "message": where + message, "param": None})


def body_of(file: int, request: JobRequest) -> bytes:
    """Return the body of a request, from the input file with this descriptor. Raises NotFound if the file is no longer what it was when it was read
    first, and InvalidRequest for a body that is nested too deeply to be read here."""
    try:
        return bytes(read_line(os.pread(file, request.length, request.start)).body)
    except RecursionError as error:  # how deep may be read depends on the caller
        raise unreadable(error, JSON) from None
    except UNREADABLE as error:
        raise NotFound(
            f"input file: the request {request.custom_id[:80]!r} is no longer there: the file was changed or truncated after it was validated"
        ) from error


def job_response(job: str, request: JobRequest, status: int, body: bytes) -> JobResponse:
    """Return what is kept of the response to a request: its line in the output file. A body that is not JSON becomes a JSON string."""
    shown: Any
    try:
        body.decode()
        shown = msgspec.json.decode(msgspec.json.format(body, indent=-1) if b"\n" in body else body, type=msgspec.Raw)
    except UNREADABLE:
        shown = body.decode("utf-8", "replace")
    name = f"batch_req_{job.removeprefix('batch_')}_{request.number}"
    line = {
        "id": name,
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": name, "body": shown},
        "error": None,
    }
    return JobResponse(request.number, status, msgspec.json.encode(line))


class Reply(NamedTuple):
    """The response to one request. `retry_after` is in seconds, 0 if it does not say."""

    status: int
    body: bytes
    retry_after: float = 0.0


class Ended(NamedTuple):
    """A response, and the bytes that it holds until it is stored."""

    response: JobResponse
    claim: Claim


Ask = Callable[[str, bytes], Awaitable[Reply]]  # sends a body to a path


async def call(app: ASGIApp, path: str, body: bytes, key: str | None = None) -> Reply:
    """Return the response of an ASGI application to a POST of JSON, as bulk work. `key` is the API key. Cancelling it withdraws the request."""
    headers = [
        (b"content-type", b"application/json"),
        (b"accept", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-weir-class", b"bulk"),
        (b"x-request-timeout", b"%d" % LONGEST_CALL),
    ]
    if key is not None:
        headers.append((b"authorization", b"Bearer " + key.encode()))
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": unquote(path),
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers, "client": None, "server": None, "state": {},
    }  # fmt: skip
    unread, never = True, asyncio.Event()
    status, retry_after, parts = 500, 0.0, list[bytes]()

    async def receive() -> Message:
        nonlocal unread
        if not unread:
            await never.wait()  # the caller does not leave
        unread = False
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, retry_after
        if message["type"] == "http.response.start":
            status = message["status"]
            stated = dict(message.get("headers", ())).get(b"retry-after", b"")
            retry_after = float(stated) if stated.isdigit() else 0.0
        elif message["type"] == "http.response.body":
            parts.append(bytes(message.get("body", b"")))

    await app(scope, receive, send)
    return Reply(status, b"".join(parts), retry_after)


class Log(Protocol):
    """Logs an event with its fields, as a logger's `log` does."""

    def __call__(self, level: int, event: str, **fields: Any) -> Any: ...


@dataclass(frozen=True)
class JobContext:
    """The parts of the server that jobs run with.

    Attributes:
        settings: how much of them there may be.
        ask: sends a request to the server's own application.
        max_line: the most bytes of a line of an input file.
        account: charged for requests and responses.
        log: logs what becomes of jobs.
        clock: returns seconds since 1970.
        disk: what is kept goes through it.
    """

    settings: JobSettings
    ask: Ask
    max_line: int
    account: Account
    log: Log = lambda level, event, **fields: None
    clock: Callable[[], float] = time.time
    disk: Disk = Disk()


class JobRunner:
    """Runs the jobs of a store on the present event loop.

    The store is used by one thread, through `use`, and input files are read by another.
    """

    def __init__(self, store: JobStore, context: JobContext) -> None:
        self.store = store
        self.context = context
        self._line_bytes = 0  # of the requests that are being answered
        self._thread = ThreadPoolExecutor(1, "weir-jobs")
        self._reader = ThreadPoolExecutor(1, "weir-jobs-read")
        self._room = asyncio.Semaphore(context.settings.batch_concurrency)
        self._wake = asyncio.Event()
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()
        self._main: asyncio.Task[None] | None = None

    async def use(self, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Return what `work`, a method of the store, returns; it runs in the thread that uses the store."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments, **named))

    def start(self) -> None:
        """Begin to run the jobs, also those that an earlier process has left."""
        if self._main is None:
            self._main = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Note that there is a new job, or that one was cancelled."""
        self._wake.set()

    async def stop(self) -> None:
        """Stop running the jobs; they go on at the next start. What runs is withdrawn, and what was answered is stored."""
        main, self._main = self._main, None
        tasks = [task for task in (main, *self._jobs.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.use(self.store.close)
        self._thread.shutdown()
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def finish(self, job: str) -> Job:
        """Run one job to its end, and return it."""
        await self._job(job)
        return await self.use(self.store.job, job)

    @property
    def now(self) -> int:
        """The present instant."""
        return int(self.context.clock())

    def expires_at(self) -> int:
        """The instant at which a file that is made now expires."""
        return int(self.context.clock() + self.context.settings.batch_expire_after)

    async def _run(self) -> None:
        monotonic = asyncio.get_running_loop().time
        cleaned, pause = -math.inf, min(CLEAN_EVERY, self.context.settings.batch_expire_after)
        while True:
            self._wake.clear()
            try:
                if await self.use(self.store.lead):
                    if monotonic() - cleaned >= pause:
                        cleaned = monotonic()
                        oldest = int(self.context.clock() - self.context.settings.batch_expire_after)
                        await self.use(self.store.clean, self.now, oldest)
                    await self._begin()
            except Exception as error:
                self.context.log(logging.WARNING, "batch jobs", error=f"{type(error).__name__}: {error}")
            try:
                async with asyncio.timeout(LOOK_AGAIN):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _begin(self) -> None:
        for job in await self.use(self.store.active):
            if job.status == "cancelling":
                self._cancelled.add(job.id)
            begins = job.status == "cancelling" or len(self._jobs) < JOBS_AT_ONCE  # a cancelled one has only to end
            if begins and job.id not in self._jobs:
                self._jobs[job.id] = task = asyncio.create_task(self._job(job.id))
                task.add_done_callback(partial(self._ended, job.id))

    def _ended(self, job: str, task: "asyncio.Task[None]") -> None:
        self._jobs.pop(job, None)
        self._cancelled.discard(job)
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._wake.set()
        else:  # such as a full disk; it goes on where it was, and not at once
            self.context.log(
                logging.WARNING, "batch job interrupted", job=job, error=f"{type(error).__name__}: {error}"
            )

    async def _job(self, name: str) -> None:
        """Take a job from the state that it is in to its end. Raises OSError and sqlite3.Error, such as of a full disk, and can be called again then."""
        job = await self.use(self.store.job, name)
        try:
            if job.status == "validating":
                job = await self._validated(job)
            if job.status == "in_progress":
                job = await self._work(job)
            if job.status == "cancelling":
                job = await self.use(self.store.end, name, "cancelled", self.now, self.expires_at())
            elif job.status == "finalizing":
                late = job.completed + job.failed < job.total  # a clock may have been set meanwhile
                status, rest = ("expired", EXPIRED) if late else ("completed", None)
                job = await self.use(self.store.end, name, status, self.now, self.expires_at(), rest)
        except (WeirError, FileNotFoundError) as error:
            self.context.log(logging.WARNING, "batch job failed", job=name, error=str(error))
            errors = [{"code": "failed", "line": None, "message": str(error), "param": None}]
            job = await self.use(self.store.end, name, "failed", self.now, self.expires_at(), errors=errors)
        self.context.log(logging.INFO, "batch job", job=name, status=job.status, requests=job.total, failed=job.failed)

    async def _validated(self, job: Job) -> Job:
        """Read the input file and store the places of its requests."""
        settings, store = self.context.settings, self.store
        path = await self.use(store.path, job.input_file_id)
        lines = InputFile(path, job.endpoint, max_requests=settings.batch_max_requests, max_line=self.context.max_line)
        found, loop = iter(lines), asyncio.get_running_loop()
        await self.use(store.forget_requests, job.id)  # of a process that ended meanwhile
        try:
            while chunk := await loop.run_in_executor(self._reader, lambda: list(islice(found, CHUNK))):
                await self.use(store.add_requests, job.id, chunk)
                if job.id in self._cancelled:
                    break
            errors = lines.errors
        except InvalidRequest as error:
            details = error.details or {}
            code, line = details.get("code", "invalid"), details.get("line")
            errors = lines.errors or [{"code": code, "line": line, "message": error.message, "param": None}]
        if not errors:
            return await self.use(store.begin_job, job.id, self.now)
        await self.use(store.forget_requests, job.id)
        return await self.use(store.step, job.id, "failed", self.now, errors)

    async def _work(self, job: Job) -> Job:
        """Run the requests that have no response yet. Return the job in the state in which it is to be finalized."""
        path = await self.use(self.store.path, job.input_file_id)
        file = os.open(path, os.O_RDONLY)
        running: set[asyncio.Task[Ended]] = set()
        ended: list[Ended] = []
        try:
            async with asyncio.timeout(max(0.0, job.expires_at - self.context.clock())):
                await self._run_all(job, file, running, ended)
        except TimeoutError:
            pass
        finally:
            await self._withdraw(running, ended)
            os.close(file)
            await self._store_responses(job, ended)
        if await self._is_cancelled(job):
            return await self.use(self.store.job, job.id)
        return await self.use(self.store.step, job.id, "finalizing", self.now)

    async def _run_all(self, job: Job, file: int, running: set[asyncio.Task[Ended]], ended: list[Ended]) -> None:
        last, waiting = -1, list[JobRequest]()
        while not await self._is_cancelled(job):
            if not waiting:
                waiting = await self.use(self.store.pending, job.id, last, CHUNK)
                last = waiting[-1].number if waiting else last
                waiting.reverse()
            while waiting and (not running or self._has_room(waiting[-1])):
                running.add(await self._begun(job, file, waiting.pop()))
            if not running:
                return
            done, _ = await asyncio.wait(running, timeout=LOOK_AGAIN, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # the responses of a batch come together: store them together
            done |= {task for task in running if task.done()}
            running -= done
            failed = next((task for task in done if task.exception()), None)
            ended += [task.result() for task in done if not task.exception()]
            await self._store_responses(job, ended)
            if failed is not None:
                failed.result()

    async def _store_responses(self, job: Job, ended: list[Ended]) -> None:
        """Store `ended`, which is empty then."""
        storing, ended[:] = ended[:], []
        try:
            if storing:
                responses = [each.response for each in storing]
                await outcome_of(asyncio.ensure_future(self.use(self.store.put, job.id, responses)))
        finally:
            for each in storing:
                each.claim.close()

    def _has_room(self, request: JobRequest) -> bool:
        """Whether a further request may be answered now."""
        return not self._room.locked() and self._line_bytes + request.length <= self.context.account.max_bytes // _PART

    async def _begun(self, job: Job, file: int, request: JobRequest) -> asyncio.Task[Ended]:
        await self._room.acquire()
        self._line_bytes += request.length

        def ended(_: object) -> None:
            self._room.release()
            self._line_bytes -= request.length

        task = asyncio.create_task(self._run_line(job, file, request))
        task.add_done_callback(ended)
        return task

    async def _withdraw(self, running: set[asyncio.Task[Ended]], ended: list[Ended]) -> None:
        """End the requests that still run; keep the responses that came before that."""
        for task in running:
            task.cancel()
        ends = await asyncio.gather(*running, return_exceptions=True)
        ended += [end for end in ends if isinstance(end, Ended)]

    async def _is_cancelled(self, job: Job) -> bool:
        if job.id in self._cancelled:
            return True
        return (await self.use(self.store.job, job.id)).status == "cancelling"

    async def _run_line(self, job: Job, file: int, request: JobRequest) -> Ended:
        """Return the response to a request, which is sent again while the server has no room for it."""
        wait, claim = RETRY_MIN, self.context.account.claim()
        try:
            while True:
                reply = await self._reply(job, file, request, claim)
                if reply.status not in RETRIED:
                    break
                claim.close()
                await asyncio.sleep(min(max(wait, reply.retry_after), RETRY_MAX))
                wait *= 2.0
            status, body = reply.status, reply.body
            response = await off_loop(len(body), partial(job_response, job.id, request, status, body), writes=True)
            claim.hold(min(claim.held_bytes, len(response.line)))
        except BaseException:
            claim.close()
            raise
        return Ended(response, claim)

    async def _reply(self, job: Job, file: int, request: JobRequest, claim: Claim) -> Reply:
        """Read a request and send it once. `claim` then holds what the reply takes, and its line in the output. Raises OSError, and NotFound if the input
        file was changed."""
        try:
            claim.take(2 * request.length)  # the line, and the body in it
            body = await off_loop(request.length, partial(body_of, file, request))
            claim.hold(len(body))
            reply = await self.context.ask(job.endpoint, body)
        except (NotFound, OSError):
            raise
        except Exception as error:  # what one request raises, whatever it is, is its response and does not stop the job
            return Reply(http_code(error), error_body(error))
        claim.close()
        claim.add(2 * len(reply.body))
        return reply
