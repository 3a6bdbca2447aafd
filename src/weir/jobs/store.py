"""Keeps batch jobs in a directory: SQLite has jobs, requests and responses; each file is a file of its own, named by its id.

The directory survives the process at any moment. A response is stored together with the mark that its request is done, in one transaction, so no request
whose response was stored runs again, and none is lost. An output is written to a new file, which gets its name before the transaction that ends the job: if
the process ends between the two, the file has no row, is removed at the next start, and is written again.

All that is written goes through a `Disk`, so a test can have one that is full, fails, or loses what was not made durable.

A JobStore is used from one thread at a time; several may use the same directory, in one process or more. Only the user of the process can read what it
keeps. Instants are whole seconds since 1970, sizes are in bytes.
"""

import errno
import fcntl
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from weir.errors import Conflict, InvalidRequest, NotFound, Overloaded, SettingsError, TooLarge, reason_of
from weir.jobs import JobSettings

_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}  # the errors of file systems that do not make names durable

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT,
    status TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER,
    completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    output_file_id TEXT, error_file_id TEXT, errors TEXT, total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, answer_bytes INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS requests (
    job TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
    status INTEGER, answer BLOB, PRIMARY KEY (job, number), UNIQUE (job, custom_id)
);
"""
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")  # the states of a job that has not ended
_MARKS = ", ".join("?" * len(ACTIVE))
STALE = 600  # seconds after which a file that nobody knows and nobody writes to is removed
SUCCESS = 400  # a status below this is a success


class Disk:
    """The disk of this machine. What it cannot do raises OSError."""

    def create(self, path: Path, mode: Literal["wb", "ab"] = "wb") -> BinaryIO:
        """Open a file to write to it; a new one can be read by the user of this process alone."""
        return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))

    def keep(self, part: Path, path: Path) -> int:
        """Make the file `part` durable, under the name `path`; return its size. If that fails, there is no file `path`."""
        size = self.sync_file(part)
        self.rename(part, path)
        try:
            self.sync_names(path.parent)
        except BaseException:
            self.remove(path)
            raise
        return size

    def sync_file(self, path: Path) -> int:
        """Make what a file holds durable; return its size."""
        with path.open("rb") as written:
            os.fsync(written.fileno())
            return os.fstat(written.fileno()).st_size

    def rename(self, path: Path, to: Path) -> None:
        """Give a file another name."""
        path.rename(to)

    def sync_names(self, directory: Path) -> None:
        """Make the names of the files in a directory durable, if its file system can do so."""
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def written_at(self, path: Path) -> float:
        """Return when a file was last written to, in seconds since 1970."""
        return path.stat().st_mtime

    def connect(self, path: Path) -> sqlite3.Connection:
        """Open a database, whose transactions are durable as soon as they are committed."""
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))  # SQLite gives its mode to the files next to it
        database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
        except BaseException:
            database.close()
            raise
        return database


class StoredFile(NamedTuple):
    """A file that was uploaded or is the output of a job."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int


class Job(NamedTuple):
    """A batch job. `total`, `completed` and `failed` count its requests; the instants are None until they come."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    status: str
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    output_file_id: str | None
    error_file_id: str | None
    errors: list[dict[str, Any]] | None
    total: int
    completed: int
    failed: int
    answer_bytes: int


class JobRequest(NamedTuple):
    """One request of a job: its number, from 0 on, its custom_id, and where its line is in the input file."""

    number: int
    custom_id: str
    start: int
    length: int


class JobResponse(NamedTuple):
    """The response to a request: the HTTP status, and the line of the output file without its end."""

    number: int
    status: int
    line: bytes


class JobStore:
    """The jobs and files in `directory`, which is made if it is missing. At most as many bytes, files and jobs are kept as `settings` state.

    Raises SettingsError if the directory cannot be used.
    """

    def __init__(self, directory: str | Path, settings: JobSettings, disk: Disk | None = None) -> None:
        self.disk = Disk() if disk is None else disk
        self._directory = Path(directory)
        self._files = self._directory / "files"
        self._limits = settings
        self._reserved = 0  # bytes of uploads under way
        self._lock: BinaryIO | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._files.mkdir(exist_ok=True, mode=0o700)
            with ExitStack() as opened:
                self._database = opened.enter_context(closing(self.disk.connect(self._directory / "jobs.sqlite")))
                self._database.executescript(_SCHEMA)
                opened.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"batch_dir={str(directory)!r}: cannot be used: {reason_of(error)}") from error

    def close(self) -> None:
        """Close the database, and let another process run the jobs. Idempotent."""
        self._database.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def lead(self) -> bool:
        """Return whether this process runs the jobs: it is the first of those that use the directory."""
        if self._lock is None:
            lock = self.disk.create(self._directory / "lock")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                return False
            self._lock = lock
        return True

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # SQLite itself has rolled back if the disk is full
                self._database.execute("ROLLBACK")
            raise

    # Files.

    @property
    def kept_bytes(self) -> int:
        """The bytes that files and responses take together."""
        (files,) = self._database.execute("SELECT coalesce(sum(bytes), 0) FROM files").fetchone()
        (responses,) = self._database.execute("SELECT coalesce(sum(answer_bytes), 0) FROM jobs").fetchone()
        return int(files) + int(responses)

    def reserve(self, size: int) -> None:
        """Keep room for `size` more bytes of an upload, which have arrived. Raises what `check_room` raises. Responses of jobs may take that room: a job that
        runs does not fail because somebody uploads."""
        self.check_room(size)
        self._reserved += size

    def check_room(self, size: int) -> None:
        """Raise Overloaded if there is no room for `size` more bytes now, and TooLarge if there never will be."""
        if size > self._limits.batch_max_bytes:
            raise TooLarge(f"file of {size} bytes: must be at most {self._limits.batch_max_bytes} (batch_max_bytes)")
        self._check_files(1)
        self._check_bytes(self.kept_bytes + self._reserved, size)

    def _check_bytes(self, used: int, size: int) -> None:
        if used + size > self._limits.batch_max_bytes:
            raise Overloaded(
                f"files of batch jobs take {used} bytes, {size} more would exceed {self._limits.batch_max_bytes} (batch_max_bytes); delete some",
                retry_after=60.0,
            )

    def _check_files(self, more: int) -> None:
        """Raise Overloaded if `more` files would be too many in addition to those that are kept and those that active jobs may write."""
        (kept,) = self._database.execute("SELECT count(*) FROM files").fetchone()
        files = kept + len(_OUTPUTS) * len(self.active())
        if files + more > self._limits.batch_max_files:
            raise Overloaded(
                f"there are {files} files of batch jobs, must be at most {self._limits.batch_max_files} (batch_max_files); delete some",
                retry_after=60.0,
            )

    def _make_room(self, database: sqlite3.Connection) -> None:
        """Remove the oldest job that has ended if there are as many as may be kept. Raises Overloaded if none has ended."""
        (kept,) = database.execute("SELECT count(*) FROM jobs").fetchone()
        if kept < self._limits.batch_max_jobs:
            return
        removed = database.execute(
            f"DELETE FROM jobs WHERE rowid = (SELECT min(rowid) FROM jobs WHERE status NOT IN ({_MARKS}))", ACTIVE
        )
        if not removed.rowcount:
            raise Overloaded(
                f"{kept} batch jobs have not ended, must be at most {self._limits.batch_max_jobs} (batch_max_jobs); wait or cancel some",
                retry_after=60.0,
            )

    def give_back(self, size: int) -> None:
        """Give up room that was reserved."""
        self._reserved -= size

    def begin_file(self) -> tuple[str, Path]:
        """Return the id of a new file, and the path at which it is to be written. `add_file` gives it its name."""
        name = f"file-{secrets.token_hex(12)}"
        return name, self._files / f"{name}.part"

    def add_file(self, name: str, filename: str, purpose: str, now: int, expires_at: int) -> StoredFile:
        """Keep the file that was written for the id `name`, under a `filename` that is only shown. Return what is kept. Raises Overloaded if responses have
        taken the room meanwhile."""
        self._check_bytes(self.kept_bytes, (self._files / f"{name}.part").stat().st_size)
        added = self._placed(name, filename, purpose, now, expires_at)
        with self._transaction() as database:
            _insert_file(database, added)
        return added

    def _placed(self, name: str, filename: str, purpose: str, now: int, expires_at: int) -> StoredFile:
        size = self.disk.keep(self._files / f"{name}.part", self._files / name)
        return StoredFile(name, filename, purpose, size, now, expires_at)

    def file(self, name: str) -> StoredFile:
        """Return the file with the id `name`. Raises NotFound."""
        row = self._database.execute("SELECT * FROM files WHERE id = ?", (name,)).fetchone()
        if row is None:
            raise NotFound("unknown id of a file").of("id", repr(name[:80]))
        return StoredFile(*row)

    def path(self, name: str) -> Path:
        """Return where the file with the id `name` is. Raises NotFound: only ids of files that are kept make a path."""
        return self._files / self.file(name).id

    def files(self, *, purpose: str | None, after: str | None, limit: int, ascending: bool) -> list[StoredFile]:
        """Return up to `limit` files, of one purpose if given, that come after the file `after`."""
        rows = self._page("files", after, limit, ascending, "purpose", purpose)
        return [StoredFile(*row) for row in rows]

    def _page(
        self, table: str, after: str | None, limit: int, ascending: bool, column: str = "", value: str | None = None
    ) -> list[tuple[Any, ...]]:
        rule, order = (">", "ASC") if ascending else ("<", "DESC")
        conditions, values = [], []
        if value is not None:
            conditions.append(f"{column} = ?")
            values.append(value)
        if after is not None:
            row = self._database.execute(f"SELECT rowid FROM {table} WHERE id = ?", (after,)).fetchone()
            if row is None:
                raise InvalidRequest(f"after={after[:80]!r}: unknown id")
            conditions.append(f"rowid {rule} ?")
            values.append(row[0])
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        query = f"SELECT * FROM {table} {where} ORDER BY rowid {order} LIMIT ?"
        return self._database.execute(query, (*values, limit)).fetchall()

    def delete_file(self, name: str) -> None:
        """Remove a file. Raises NotFound, and Conflict while a job that has not ended reads it."""
        path = self.path(name)
        with self._transaction() as database:
            query = f"SELECT id FROM jobs WHERE input_file_id = ? AND status IN ({_MARKS})"
            reading = database.execute(query, (name, *ACTIVE)).fetchone()
            if reading is not None:
                raise Conflict(f"file {name!r}: batch {reading[0]!r} reads it, which has not ended")
            database.execute("DELETE FROM files WHERE id = ?", (name,))
        self.disk.remove(path)

    def clean(self, now: int, oldest: int) -> None:
        """Remove files that have expired, jobs that ended before the instant `oldest`, and what a process has left half written STALE seconds ago. Until
        then another process may be writing it."""
        in_use = f"SELECT input_file_id FROM jobs WHERE status IN ({_MARKS})"
        with self._transaction() as database:
            query = f"DELETE FROM files WHERE expires_at <= ? AND id NOT IN ({in_use}) RETURNING id"
            gone = database.execute(query, (now, *ACTIVE)).fetchall()
            database.execute(f"DELETE FROM jobs WHERE created_at <= ? AND status NOT IN ({_MARKS})", (oldest, *ACTIVE))
        for (name,) in gone:
            self.disk.remove(self._files / name)
        known = {row[0] for row in self._database.execute("SELECT id FROM files")}
        for path in self._files.iterdir():
            if path.name not in known and (self._reserved == 0 or not path.name.endswith(".part")):
                with suppress(FileNotFoundError):  # it has been removed, or has its name now
                    if self.disk.written_at(path) <= now - STALE:
                        self.disk.remove(path)

    # Jobs.

    def add_job(
        self, endpoint: str, input_file_id: str, window: str, metadata: dict[str, str] | None, now: int, expires_at: int
    ) -> Job:
        """Add a job that is still to be validated. Raises NotFound if there is no such file, and Overloaded if there are too many jobs or files."""
        self.file(input_file_id)
        self._check_files(len(_OUTPUTS))
        name = f"batch_{secrets.token_hex(12)}"
        with self._transaction() as database:
            self._make_room(database)
            database.execute(
                "INSERT INTO jobs (id, endpoint, input_file_id, completion_window, metadata, status, created_at, expires_at) "
                "VALUES (?, ?, ?, ?, ?, 'validating', ?, ?)",
                (
                    name,
                    endpoint,
                    input_file_id,
                    window,
                    None if metadata is None else json.dumps(metadata),
                    now,
                    expires_at,
                ),
            )
        return self.job(name)

    def job(self, name: str) -> Job:
        """Return the job with the id `name`. Raises NotFound."""
        row = self._database.execute("SELECT * FROM jobs WHERE id = ?", (name,)).fetchone()
        if row is None:
            raise NotFound("unknown id of a batch").of("id", repr(name[:80]))
        return _job_of(row)

    def jobs(self, *, after: str | None, limit: int) -> list[Job]:
        """Return up to `limit` jobs, the newest first, that come after the job `after`."""
        return [_job_of(row) for row in self._page("jobs", after, limit, ascending=False)]

    def active(self) -> list[Job]:
        """Return the jobs that have not ended, the oldest first."""
        rows = self._database.execute(f"SELECT * FROM jobs WHERE status IN ({_MARKS}) ORDER BY rowid", ACTIVE)
        return [_job_of(row) for row in rows.fetchall()]

    def overview(self, limit: int) -> tuple[dict[str, int], list[Job]]:
        """Return how many jobs there are in each state, and `limit` of them: those that have not ended first, then the newest."""
        counts = self._database.execute("SELECT status, count(*) FROM jobs GROUP BY status").fetchall()
        rows = self._database.execute(
            f"SELECT * FROM jobs ORDER BY status NOT IN ({_MARKS}), rowid DESC LIMIT ?", (*ACTIVE, limit)
        )
        return dict(counts), [_job_of(row) for row in rows.fetchall()]

    def add_requests(self, job: str, requests: Sequence[JobRequest]) -> None:
        """Store some requests of a job, all or none of them. Raises InvalidRequest naming a custom_id that comes twice."""
        with self._transaction() as database:
            for request in requests:
                try:
                    database.execute(
                        "INSERT INTO requests (job, number, custom_id, start, length) VALUES (?, ?, ?, ?, ?)",
                        (job, *request),
                    )
                except sqlite3.IntegrityError:
                    raise InvalidRequest(
                        f"custom_id {request.custom_id[:80]!r}: must differ from those of all other requests",
                        details={"line": request.number + 1, "code": "duplicate_custom_id"},
                    ) from None

    def forget_requests(self, job: str) -> None:
        """Remove what was stored of a job that did not come to its end, or that is not valid."""
        with self._transaction() as database:
            database.execute("DELETE FROM requests WHERE job = ?", (job,))

    def begin_job(self, job: str, now: int) -> Job:
        """Begin a job whose requests are all stored, unless it was cancelled meanwhile. Return it."""
        with self._transaction() as database:
            database.execute(
                "UPDATE jobs SET total = (SELECT count(*) FROM requests WHERE job = id) WHERE id = ?", (job,)
            )
            if self.job(job).status == "validating":
                _step(database, job, "in_progress", now)
        return self.job(job)

    def pending(self, job: str, after: int, limit: int) -> list[JobRequest]:
        """Return up to `limit` requests without a response whose number is above `after`, in order."""
        rows = self._database.execute(
            "SELECT number, custom_id, start, length FROM requests WHERE job = ? AND number > ? AND status IS NULL "
            "ORDER BY number LIMIT ?",
            (job, after, limit),
        )
        return [JobRequest(*row) for row in rows.fetchall()]

    def put(self, job: str, responses: Sequence[JobResponse]) -> None:
        """Store responses, and mark their requests as done; those that have a response keep it. Raises TooLarge if there is no room for them."""
        size = sum(len(response.line) + 1 for response in responses)  # with the end of the line in the output
        if self.kept_bytes + size > self._limits.batch_max_bytes:
            raise TooLarge(f"the responses would exceed {self._limits.batch_max_bytes} bytes in all (batch_max_bytes)")
        with self._transaction() as database:
            for number, status, line in responses:
                changed = database.execute(
                    "UPDATE requests SET status = ?, answer = ? WHERE job = ? AND number = ? AND status IS NULL",
                    (status, line, job, number),
                )
                if changed.rowcount:
                    column = "completed" if status < SUCCESS else "failed"
                    database.execute(
                        f"UPDATE jobs SET {column} = {column} + 1, answer_bytes = answer_bytes + ? WHERE id = ?",
                        (len(line) + 1, job),
                    )

    def step(self, job: str, status: str, now: int, errors: list[dict[str, Any]] | None = None) -> Job:
        """Note that the job has come to `status` at the instant `now`, with `errors` if it failed. One that has ended stays as it is, and so does one
        that is being cancelled."""
        with self._transaction() as database:
            if self.job(job).status in ACTIVE[:3]:
                _step(database, job, status, now)
                if errors is not None:
                    database.execute("UPDATE jobs SET errors = ? WHERE id = ?", (json.dumps(errors), job))
        return self.job(job)

    def end(
        self,
        job: str,
        status: str,
        now: int,
        expires_at: int,
        unanswered: bytes | None = None,
        errors: list[dict[str, Any]] | None = None,
    ) -> Job:
        """Write the output and the errors of a job to files, and end it with `status`. If that fails, no file is left.

        `unanswered` is what the errors say of a request without a response, behind its custom_id, as long as there is room; None: nothing. `errors` say
        why the job failed.
        """
        files = dict[str, StoredFile]()
        try:
            for column, name, good in _OUTPUTS:
                made = self._written(job, good, f"{job}_{name}.jsonl", now, expires_at, unanswered)
                if made is not None:
                    files[column] = made
            with self._transaction() as database:
                for column, made in files.items():
                    _insert_file(database, made)
                    database.execute(f"UPDATE jobs SET {column} = ? WHERE id = ?", (made.id, job))
                shown = None if errors is None else json.dumps(errors)
                database.execute("UPDATE jobs SET answer_bytes = 0, errors = ? WHERE id = ?", (shown, job))
                database.execute("DELETE FROM requests WHERE job = ?", (job,))
                _step(database, job, status, now)
        except BaseException:
            for made in files.values():
                self.disk.remove(self._files / made.id)
            raise
        return self.job(job)

    def _written(
        self, job: str, good: bool, filename: str, now: int, expires_at: int, unanswered: bytes | None
    ) -> StoredFile | None:
        """Write the responses that are successes (`good`) or not, in the order of the requests. Return the file; None if there is none."""
        name, path = self.begin_file()
        rows = self._database.execute(
            "SELECT custom_id, status, answer FROM requests WHERE job = ? ORDER BY number", (job,)
        )
        written, room = 0, self._limits.batch_max_bytes - self.kept_bytes
        try:
            with self.disk.create(path) as file:
                for custom_id, status, line in rows:
                    if status is None and not good and unanswered is not None:
                        line = b'{"custom_id":%s,%s' % (json.dumps(custom_id).encode(), unanswered)
                        room -= len(line) + 1
                        if room < 0:
                            continue
                    elif status is None or (status < SUCCESS) != good:
                        continue
                    file.write(line + b"\n")
                    written += 1
            return self._placed(name, filename, "batch_output", now, expires_at) if written else None
        finally:
            self.disk.remove(path)  # of no output, or of one for which the disk has no room


_OUTPUTS = (("output_file_id", "output", True), ("error_file_id", "error", False))


def _insert_file(database: sqlite3.Connection, added: StoredFile) -> None:
    database.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", added)


def _step(database: sqlite3.Connection, job: str, status: str, now: int) -> None:
    database.execute(f"UPDATE jobs SET status = ?, {status}_at = ? WHERE id = ?", (status, now, job))


def _job_of(row: Sequence[Any]) -> Job:
    fields: dict[str, Any] = dict(zip(Job._fields, row, strict=True))
    for name in ("metadata", "errors"):
        if fields[name] is not None:
            fields[name] = json.loads(fields[name])
    return Job(**fields)
