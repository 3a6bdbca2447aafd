"""Runs a file of requests in this process, for `weir batch run`: the same jobs as those of a server, in a directory next to the output.

The directory is removed when the output is complete. If the process ends before that, the next run goes on from it.
"""

import asyncio
import csv
import shutil
import sqlite3
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weir.errors import InvalidRequest, SettingsError, add_extra, reason_of
from weir.jobs import JobSettings
from weir.jobs.running import NO_REQUESTS, Ask, JobContext, JobRunner, begin_of_text, check_endpoint, read_line
from weir.jobs.store import ACTIVE, Disk, Job, JobStore
from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.wire.values import UNREADABLE

STATE = ".weir-batch"  # what the name of the directory has behind that of the output
_LOOK = 0.25  # seconds between two looks at the progress
_FOREVER = 10 * 365 * 86400  # seconds
_LONGEST_LINE = 1 << 26  # bytes of a line, characters of a field
_ROWS = 1000  # rows of a parquet file that are read at once

Progress = Callable[[int, int], None]  # requests done, and their number


class Source(NamedTuple):
    """The file of requests, and how rows of a table become requests: each sends its `column` to `url`, naming `model` if that is not empty."""

    path: Path
    url: str | None = None
    column: str | None = None
    model: str = ""


class Done(NamedTuple):
    """The result of a run: the output, the file of errors or None, and how many requests succeeded and failed."""

    output: Path
    errors: Path | None
    completed: int
    failed: int


def endpoint_of(source: Source) -> str:
    """Return the endpoint of the requests. Raises SettingsError if there is none."""
    if source.path.suffix.lower() == ".jsonl":
        return _url_of(source)
    if source.url is None:
        raise SettingsError(f"{source.path}: a table needs --url, the endpoint for its rows, such as /v1/embeddings")
    return source.url


def check_endpoint_of(source: Source, endpoints: Container[str]) -> None:
    """Raise SettingsError unless the requests are for one of `endpoints`."""
    try:
        check_endpoint(endpoint_of(source), endpoints)
    except InvalidRequest as error:
        raise SettingsError(error.renamed({"endpoint": "url"}).message) from error


def check_source(source: Source) -> None:
    """Raise SettingsError naming what is wrong with the file as a whole, or with the options about it, before any model is loaded."""
    kind = source.path.suffix.lower()
    if kind not in (".jsonl", ".csv", ".parquet"):
        raise SettingsError(f"{source.path}: must be .jsonl, .csv or .parquet")
    try:
        with source.path.open("rb"):
            pass
        endpoint_of(source)
        if kind != ".jsonl":
            next(_csv_values(source) if kind == ".csv" else _parquet_values(source), None)
    except OSError as error:
        raise SettingsError(f"{source.path}: cannot be read: {reason_of(error)}") from error


async def run(
    source: Source, output: Path, ask: Ask, settings: JobSettings, *, max_line: int, progress: Progress
) -> Done:
    """Send the requests of `source`, which has been checked, by `ask`, and write the responses to `output`; failed ones to a file with the ending .errors.jsonl.

    Raises SettingsError naming what is wrong with its lines, or with the directory of an earlier run, or of this one, such as a full disk.
    """
    directory = Path(f"{output}{STATE}")
    context = JobContext(settings, ask, max_line, Account(HttpSettings(max_body_size=max_line)))
    runner = JobRunner(JobStore(directory, settings), context)
    store = runner.store
    try:
        if not await runner.use(store.lead):
            raise SettingsError(f"{directory}: another process is using it")
        job = await runner.use(_job_for, store, source, directory, runner.now)
        working = asyncio.create_task(runner.finish(job.id))
        try:
            while not working.done():
                await asyncio.wait([working], timeout=_LOOK)
                job = await runner.use(store.job, job.id)
                progress(job.completed + job.failed, job.total)
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError):
                job = await working
        if job.status != "completed":
            errors = "; ".join(each["message"] for each in job.errors or [])
            shutil.rmtree(directory)
            raise SettingsError(f"{source.path}: {errors or job.status}")
        return await runner.use(_placed, store, job, output, directory)
    except (OSError, sqlite3.Error) as error:
        raise SettingsError(
            f"{directory}: {reason_of(error)}; fix this and run the same command again to continue"
        ) from error
    finally:
        begun = bool(await runner.use(store.jobs, after=None, limit=1))
        await runner.stop()
        if not begun:
            shutil.rmtree(directory, ignore_errors=True)


def _job_for(store: JobStore, source: Source, directory: Path, now: int) -> Job:
    """Return the job of an earlier run of the same file, or a new one. Raises SettingsError if the directory is that of another file."""
    stat = source.path.stat()
    of = {
        "source": f"{source.path.resolve()} {stat.st_size} {stat.st_mtime_ns} {source.url} {source.column} {source.model}"
    }
    for job in store.jobs(after=None, limit=1):
        if job.metadata != of:
            raise SettingsError(
                f"{directory}: belongs to another input file or other options; delete it to start again"
            )
        if job.status in (*ACTIVE, "completed"):
            return job
    name, path = store.begin_file()
    endpoint = _write_input(source, path)
    store.add_file(name, source.path.name, "batch", now, now + _FOREVER)
    return store.add_job(endpoint, name, "run", of, now, now + _FOREVER)


def _placed(store: JobStore, job: Job, output: Path, directory: Path) -> Done:
    """Move the outputs of a job to their places, and remove the directory."""
    errors = output.with_suffix(".errors.jsonl")
    if job.error_file_id is not None:
        shutil.copyfile(store.path(job.error_file_id), errors)
    if job.output_file_id is None:
        output.write_bytes(b"")
    else:
        part = output.with_name(f"{output.name}.part")
        shutil.copyfile(store.path(job.output_file_id), part)
        part.replace(output)
    shutil.rmtree(directory)
    return Done(output, None if job.error_file_id is None else errors, job.completed, job.failed)


# Input: JSON lines as they are, or rows of a table.


def _write_input(source: Source, path: Path) -> str:
    """Write the requests of `source` as JSON lines to `path`. Return the endpoint that they are for."""
    kind = source.path.suffix.lower()
    if kind == ".jsonl":
        shutil.copyfile(source.path, path)
        return endpoint_of(source)
    endpoint = endpoint_of(source)
    values = _csv_values(source) if kind == ".csv" else _parquet_values(source)
    with Disk().create(path) as file:
        for number, value in enumerate(values):
            line = {
                "custom_id": str(number),
                "method": "POST",
                "url": endpoint,
                "body": _body(endpoint, value, source.model),
            }
            file.write(msgspec.json.encode(line) + b"\n")
    return endpoint


def _url_of(source: Source) -> str:
    """Return the url of the first request of a file of JSON lines."""
    with source.path.open("rb") as file:
        begin_of_text(file)
        lines = enumerate(iter(partial(file.readline, _LONGEST_LINE), b""), start=1)
        number, line = next(((number, line) for number, line in lines if line.strip()), (0, b""))
    if not number:
        raise SettingsError(f"{source.path}: {NO_REQUESTS}")
    try:
        url = read_line(line).url
    except UNREADABLE as error:
        rule = "must be an object with custom_id, method, url and body"
        raise SettingsError(f"{source.path}: line {number}: {rule}") from error
    if source.url not in (None, url):
        raise SettingsError(f"{source.path}: line {number}: url {url!r}: must be that of --url, {source.url}")
    return url


def _body(endpoint: str, value: Any, model: str) -> Any:
    """Return the body of a request for one value of a table: the value itself, or the text as the endpoint takes it."""
    if endpoint != "/v1/embeddings":
        return value
    return {"input": value} | ({"model": model} if model else {})


def _csv_values(source: Source) -> Iterator[str]:
    csv.field_size_limit(_LONGEST_LINE)
    with source.path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        try:
            column = _column(source, list(rows.fieldnames or []))
            for row in rows:
                yield row[column]
        except (csv.Error, UnicodeDecodeError) as error:
            raise SettingsError(f"{source.path}: behind line {rows.line_num}: is not CSV in UTF-8: {error}") from error


def _parquet_values(source: Source) -> Iterator[Any]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise SettingsError(f"{source.path}: needs pyarrow; {add_extra('parquet')}") from error
    try:
        file = parquet.ParquetFile(source.path)
    except ValueError as error:  # pyarrow's own are such, too
        raise SettingsError(f"{source.path}: is not a parquet file: {error}") from error
    column = _column(source, list(file.schema_arrow.names))
    for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
        yield from batch.column(0).to_pylist()


def _column(source: Source, names: list[str]) -> str:
    """Return the column that has the values: the one of the source, else `text`, else the only one."""
    wanted = source.column or ("text" if "text" in names else names[0] if len(names) == 1 else None)
    if wanted not in names:
        raise SettingsError(
            f"{source.path}: --column={wanted}: must be one of {', '.join(names) or 'none: the file is empty'}"
        )
    return str(wanted)
