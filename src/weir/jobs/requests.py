"""The lines of a batch job: what a line of an input file must be, and what lines of output and errors say.

The forms are those of OpenAI's Batch API. A line is read when it is needed, by its place in the file, so memory does not grow with the file.
"""

import os
from codecs import BOM_UTF8
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

import msgspec

from weir.errors import InvalidRequest
from weir.jobs.store import Answer, JobRequest

MOST_ERRORS = 50  # that are listed of one file
LONGEST_ID = 512  # characters of a custom_id


class InputLine(msgspec.Struct):
    """One line of an input file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


_DECODER = msgspec.json.Decoder(InputLine)


def check_endpoint(endpoint: str, endpoints: Container[str]) -> str:
    """Return `endpoint` if it is one of `endpoints`, the paths of inference that give one response. Raises InvalidRequest naming it and the rule."""
    if unquote(endpoint) not in endpoints:
        rule = "must be a path of inference of this server that gives one response, such as /infer/MODEL"
        raise InvalidRequest(rule).of("endpoint", repr(endpoint[:200]))
    return endpoint


NO_REQUESTS = "the file has no requests"


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
        number, place = 0, 0
        with self._path.open("rb") as file:
            start = begin_of_text(file)
            while len(self.errors) < MOST_ERRORS and (line := file.readline(self._max_line + 2)):
                place += 1
                if len(line) > self._max_line + 1:
                    self._note("line_too_long", place, f"has more than {self._max_line} bytes (max_body_size)")
                    return
                if line.strip():
                    if number == self._max_requests:
                        self._note(
                            "too_many_requests", place, f"a job has at most {number} requests (batch_max_requests)"
                        )
                        return
                    request = self._request(line, number, place, start)
                    number += 1
                    if request is not None:
                        yield request
                elif place - number > self._max_requests:
                    self._note(
                        "too_many_lines",
                        place,
                        f"a file has at most {self._max_requests} blank lines (batch_max_requests)",
                    )
                    return
                start += len(line)
        if not number:
            self._note("empty_file", None, NO_REQUESTS)

    def _request(self, line: bytes, number: int, place: int, start: int) -> JobRequest | None:
        try:
            read = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._note("invalid_json_line", place, f"must be an object with custom_id, method, url and body: {error}")
            return None
        if not 0 < len(read.custom_id) <= LONGEST_ID:
            self._note("invalid_custom_id", place, f"custom_id: must have 1 to {LONGEST_ID} characters")
        elif read.method != "POST":
            self._note("invalid_method", place, f"method {read.method[:20]!r}: must be POST")
        elif read.url != self._endpoint:
            self._note(
                "mismatched_url", place, f"url {read.url[:200]!r}: must be the endpoint of the job, {self._endpoint}"
            )
        else:
            return JobRequest(number, read.custom_id, start, len(line))
        return None

    def _note(self, code: str, line: int | None, message: str) -> None:
        where = "" if line is None else f"line {line}: "
        self.errors.append({"code": code, "line": line, "message": where + message, "param": None})


def body_of(file: int, request: JobRequest) -> bytes:
    """Return the body of a request, from the input file with this descriptor. Raises InvalidRequest if the file is no longer what it was when it was read
    first."""
    try:
        return bytes(_DECODER.decode(os.pread(file, request.length, request.start)).body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"input file: the request {request.custom_id[:80]!r} is no longer there: the file was changed or truncated after it was validated"
        ) from error


def answer_of(job: str, request: JobRequest, status: int, body: bytes) -> Answer:
    """Return what is kept of the answer to a request: its line in the output file. A body that is no JSON becomes a JSON string."""
    shown: Any
    try:
        body.decode()
        shown = msgspec.json.decode(msgspec.json.format(body, indent=-1) if b"\n" in body else body, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        shown = body.decode("utf-8", "replace")
    name = f"batch_req_{job.removeprefix('batch_')}_{request.number}"
    line = {
        "id": name,
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": name, "body": shown},
        "error": None,
    }
    return Answer(request.number, status, msgspec.json.encode(line))


EXPIRED = b'"response":null,"error":{"code":"batch_expired","message":"This request could not be run before the completion window ended."}}'
STOPPED = b'"response":null,"error":{"code":"batch_failed","message":"This request was not run: the job failed."}}'
