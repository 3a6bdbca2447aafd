"""store.py: what is kept, in what order, within which bounds; and what a process that ends at any moment leaves."""

import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weir.errors import Conflict, InvalidRequest, NotFound, Overloaded, SettingsError, TooLarge
from weir.jobs import JobSettings
from weir.jobs.running import EXPIRED
from weir.jobs.store import STALE, Disk, JobRequest, JobResponse, JobStore, StoredFile

_opened: list[JobStore] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """What a test has opened is closed after it."""
    yield
    while _opened:
        _opened.pop().close()


def opened(tmp_path: Path, max_bytes: int = 1 << 20, disk: Disk | None = None, **bounds: Any) -> JobStore:
    _opened.append(JobStore(tmp_path / "jobs", JobSettings(batch_max_bytes=max_bytes, **bounds), disk))
    return _opened[-1]


def upload(store: JobStore, body: bytes = b"x" * 10, now: int = 100, expires_at: int = 1000) -> StoredFile:
    name, path = store.begin_file()
    path.write_bytes(body)
    return store.add_file(name, "in.jsonl", "batch", now, expires_at)


def begun(store: JobStore, count: int = 3) -> str:
    job = store.add_job("/infer/m", upload(store).id, "24h", {"a": "b"}, 100, 900)
    store.add_requests(job.id, [JobRequest(number, f"r{number}", 10 * number, 10) for number in range(count)])
    assert store.begin_job(job.id, 101).total == count
    return job.id


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return opened(tmp_path)


def line(number: int, status: int = 200) -> JobResponse:
    return JobResponse(number, status, b'{"n":%d}' % number)


def test_a_job_from_its_file_to_its_output(store: JobStore) -> None:
    job = begun(store)
    assert (store.job(job).status, store.job(job).total, store.job(job).metadata) == ("in_progress", 3, {"a": "b"})
    store.put(job, [line(2), line(0)])
    store.put(job, [line(1, 500)])
    store.step(job, "finalizing", 102)
    ended = store.end(job, "completed", 103, 1000)
    assert (ended.status, ended.completed, ended.failed, ended.answer_bytes) == ("completed", 2, 1, 0)
    assert (ended.in_progress_at, ended.finalizing_at, ended.completed_at) == (101, 102, 103)
    assert store.path(str(ended.output_file_id)).read_bytes() == b'{"n":0}\n{"n":2}\n'
    assert store.path(str(ended.error_file_id)).read_bytes() == b'{"n":1}\n'
    assert store.step(job, "cancelling", 104).status == "completed"
    assert [each.id for each in store.jobs(after=None, limit=5)] == [job]
    assert store.active() == []


def test_an_answer_is_stored_once(store: JobStore) -> None:
    job = begun(store)
    store.put(job, [line(0)])
    store.put(job, [JobResponse(0, 500, b"other"), line(1)])
    assert (store.job(job).completed, store.job(job).failed) == (2, 0)
    assert [request.number for request in store.pending(job, -1, 9)] == [2]
    assert store.pending(job, 2, 9) == []


def test_what_an_earlier_process_has_left_goes_on(store: JobStore, tmp_path: Path) -> None:
    job = begun(store)
    store.put(job, [line(1)])
    store.step(job, "finalizing", 102)
    files = tmp_path / "jobs" / "files"
    unfinished = files / "file-left", files / "file-half.part"  # an output without its row, and half an upload
    for path in unfinished:
        path.write_bytes(b"something")
    again = opened(tmp_path)  # the first is not closed before, as after a kill
    again.clean(103, 0)
    assert all(path.exists() for path in unfinished)  # another process may be writing them
    for path in unfinished:
        os.utime(path, (0, 103 - STALE))
    again.clean(103, 0)
    assert len(list(files.iterdir())) == 1 and not any(path.exists() for path in unfinished)
    assert [each.id for each in again.active()] == [job]
    assert [request.number for request in again.pending(job, -1, 9)] == [0, 2]
    lines = again.path(str(again.end(job, "expired", 104, 1000, EXPIRED).error_file_id)).read_bytes().splitlines()
    assert lines[0].startswith(b'{"custom_id":"r0","response":null,"error":{"code":"batch_expired"')
    assert len(lines) == 2


def test_only_one_process_runs_the_jobs(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    assert first.lead() and first.lead() and not second.lead()
    first.close()
    first.close()
    assert second.lead()
    second.close()


def test_a_custom_id_that_comes_twice_stores_no_request(store: JobStore) -> None:
    job = store.add_job("/infer/m", upload(store).id, "24h", None, 100, 900).id
    with pytest.raises(InvalidRequest, match=r"^custom_id 'a': must differ") as raised:
        store.add_requests(job, [JobRequest(0, "a", 0, 1), JobRequest(1, "a", 1, 1)])
    assert raised.value.details == {"line": 2, "code": "duplicate_custom_id"}
    assert store.pending(job, -1, 9) == []
    store.add_requests(job, [JobRequest(0, "a", 0, 1)])
    store.forget_requests(job)
    assert (store.pending(job, -1, 9), store.job(job).status) == ([], "validating")


def test_a_job_that_was_cancelled_while_it_was_read_stays_so(store: JobStore) -> None:
    job = store.add_job("/infer/m", upload(store).id, "24h", None, 100, 900).id
    store.step(job, "cancelling", 101)
    store.add_requests(job, [JobRequest(0, "a", 0, 1)])
    assert store.begin_job(job, 102).status == "cancelling"
    assert store.step(job, "finalizing", 103).status == "cancelling"
    ended = store.end(job, "cancelled", 104, 1000)
    assert (ended.status, ended.output_file_id, ended.error_file_id) == ("cancelled", None, None)


def test_files_and_answers_are_bounded_together(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=100)
    with pytest.raises(TooLarge, match=r"^file of 101 bytes: must be at most 100 \(batch_max_bytes\)"):
        store.reserve(101)
    store.reserve(80)
    with pytest.raises(Overloaded, match="take 80 bytes, 30 more would exceed 100"):
        store.reserve(30)
    job = begun(opened(tmp_path, max_bytes=100))
    store.put(job, [line(0), JobResponse(2, 200, b"y" * 70)])  # not where uploads under way are: they fail no job
    name, path = store.begin_file()
    path.write_bytes(b"x" * 20)
    with pytest.raises(Overloaded, match="take 89 bytes, 20 more would exceed 100"):
        store.add_file(name, "in.jsonl", "batch", 100, 1000)
    store.give_back(80)
    assert store.kept_bytes == 10 + 8 + 71
    with pytest.raises(TooLarge, match="the responses would exceed 100 bytes"):
        store.put(job, [JobResponse(1, 200, b"y" * 90)])
    assert store.job(job).completed == 2
    assert store.end(job, "expired", 103, 1000, EXPIRED).error_file_id is None  # what says so has no room either
    assert store.kept_bytes == 10 + 8 + 71


def test_only_their_user_can_read_files_and_answers(tmp_path: Path) -> None:
    for made in (True, False):  # a directory that exists keeps its mode
        directory = tmp_path / str(made) / "jobs"
        directory.parent.mkdir()
        if not made:
            directory.mkdir(mode=0o755)
        store = JobStore(directory, JobSettings())
        assert store.lead()
        job = begun(store)
        store.put(job, [line(0)])
        store.end(job, "completed", 103, 1000)
        modes = {path.name: path.stat().st_mode & 0o077 for path in directory.rglob("*") if path.parent == directory}
        assert set(modes) >= {"jobs.sqlite", "jobs.sqlite-wal", "files", "lock"}
        assert set(modes.values()) == {0}
        assert directory.stat().st_mode & 0o077 == (0 if made else 0o055)
        store.close()


def test_the_oldest_job_that_has_ended_makes_room(tmp_path: Path) -> None:
    store = opened(tmp_path, batch_max_jobs=2)
    first, second = begun(store), begun(store)
    with pytest.raises(Overloaded, match=r"^2 batch jobs have not ended, must be at most 2 \(batch_max_jobs\)"):
        begun(store)
    store.step(second, "cancelling", 102)
    store.end(second, "cancelled", 103, 1000)
    third = begun(store)
    assert {job.id for job in store.jobs(after=None, limit=9)} == {first, third}
    assert store.overview(1) == ({"in_progress": 2}, [store.job(third)])


def test_files_are_bounded_with_those_that_jobs_will_write(tmp_path: Path) -> None:
    store = opened(tmp_path, batch_max_files=4)
    job = begun(store)
    store.reserve(1)  # one file, and two that the job may write
    store.give_back(1)
    with pytest.raises(Overloaded, match=r"^there are 4 files of batch jobs, must be at most 4 \(batch_max_files\)"):
        begun(store)
    with pytest.raises(Overloaded, match="batch_max_files"):
        store.reserve(1)
    store.put(job, [line(0), line(1, 500)])
    assert store.end(job, "completed", 103, 1000).error_file_id is not None
    counts, (shown,) = store.overview(5)
    assert (counts, shown.id) == ({"completed": 1}, job)


def test_files_are_listed_and_deleted(store: JobStore) -> None:
    names = [file.id for file in [upload(store) for _ in range(3)]]
    assert [file.id for file in store.files(purpose="batch", after=None, limit=2, ascending=True)] == names[:2]
    assert [file.id for file in store.files(purpose=None, after=names[1], limit=9, ascending=False)] == names[:1]
    assert store.files(purpose="other", after=None, limit=9, ascending=True) == []
    with pytest.raises(InvalidRequest, match="after='nope': unknown id"):
        store.files(purpose=None, after="nope", limit=9, ascending=True)
    store.add_job("/infer/m", names[0], "24h", None, 100, 900)
    with pytest.raises(Conflict, match="reads it, which has not ended"):
        store.delete_file(names[0])
    store.delete_file(names[1])
    for ask in (
        lambda: store.path(names[1]),
        lambda: store.path("../jobs.sqlite"),
        lambda: store.job("batch_none"),
        lambda: store.add_job("/infer/m", names[1], "24h", None, 100, 900),
    ):
        with pytest.raises(NotFound, match="unknown id"):
            ask()


def test_what_has_expired_is_removed_unless_a_job_reads_it(store: JobStore, tmp_path: Path) -> None:
    kept, gone = upload(store, expires_at=200), upload(store, expires_at=200)
    job = store.add_job("/infer/m", kept.id, "24h", None, 100, 900).id
    store.clean(300, 0)
    assert [file.id for file in store.files(purpose=None, after=None, limit=9, ascending=True)] == [kept.id]
    assert not (tmp_path / "jobs" / "files" / gone.id).exists()
    store.end(job, "cancelled", 301, 1000)
    store.clean(300, 100)
    assert store.jobs(after=None, limit=9) == []


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("a file")
    with pytest.raises(SettingsError, match=r"batch_dir=.*jobs'?: cannot be used"):
        opened(tmp_path)


def test_a_full_disk_costs_one_transaction_and_leaves_nothing(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begun(store)
    database = store._database
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="disk is full"):
            store.put(job, [JobResponse(0, 200, bytes(1 << 16))])
    database.execute("PRAGMA max_page_count = 100000")
    store.put(job, [line(0)])
    files = set((tmp_path / "jobs" / "files").iterdir())
    sync = os.fsync

    def full(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.end(job, "completed", 104, 1000)
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        store.end(job, "failed", 104, 1000, errors=[{"message": "x" * 10_000}])
    assert set((tmp_path / "jobs" / "files").iterdir()) == files
    database.execute("PRAGMA max_page_count = 100000")
    assert store.end(job, "completed", 104, 1000).completed == 1


class Failing(Disk):
    """Cannot make the names of files durable."""

    def sync_names(self, directory: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_file_whose_name_is_not_durable_is_not_kept(tmp_path: Path) -> None:
    """It would have an id, and no content after the power has failed."""
    store = opened(tmp_path, disk=Failing())
    with pytest.raises(OSError, match="Input/output error"):
        upload(store)
    assert list((tmp_path / "jobs" / "files").iterdir()) == []
    assert store.kept_bytes == 0


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_makes_no_names_durable_is_used(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refused)
    Disk().sync_names(tmp_path)
