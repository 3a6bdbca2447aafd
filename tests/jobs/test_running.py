"""running.py: what has expired goes while the server runs; the rest is tried on real servers in test_batch_api.py."""

import asyncio
from pathlib import Path

import pytest

from weir.jobs import running
from weir.jobs.running import JobRunner, Reply
from weir.jobs.settings import JobSettings
from weir.jobs.store import JobStore


def test_files_go_when_they_expire(tmp_path: Path) -> None:
    now = 100.0

    async def unasked(path: str, body: bytes) -> Reply:
        raise AssertionError("no job runs")

    async def play() -> None:
        nonlocal now
        store = JobStore(tmp_path, max_bytes=1 << 20)
        runner = JobRunner(store, JobSettings(batch_expire_after=0.001), unasked, max_line=100, clock=lambda: now)
        for expires_at in (100, 1000):
            name, path = store.begin_file()
            path.write_bytes(b"x")
            await runner.use(store.add_file, name, "in.jsonl", "batch", 50, expires_at)
        runner.start()
        for left in (1, 0):  # the first goes at the start
            while len(await runner.use(store.files, purpose=None, after=None, limit=9, ascending=True)) > left:
                runner.wake()
            now = 2000.0
        assert list((tmp_path / "files").iterdir()) == []
        await runner.stop()

    asyncio.run(play())


def test_a_job_that_a_full_disk_interrupts_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "LOOK_AGAIN", 3600.0)

    async def answered(path: str, body: bytes) -> Reply:
        return Reply(200, b"1" * 100_000)

    async def play() -> None:
        interrupted, logged = asyncio.Event(), []

        def log(event: str, **fields: object) -> None:
            logged.append((event, fields.get("error", "")))
            interrupted.set()

        store = JobStore(tmp_path, max_bytes=1 << 30)
        runner = JobRunner(store, JobSettings(), answered, max_line=100, log=log)
        name, path = store.begin_file()
        path.write_bytes(b'{"custom_id": "a", "url": "/infer/m", "body": 1}')
        file = store.add_file(name, "in.jsonl", "batch", runner.now, runner.expires_at())
        job = store.add_job("/infer/m", file.id, "24h", None, runner.now, runner.expires_at()).id
        store._database.execute("PRAGMA max_page_count = 20")
        runner.start()
        await interrupted.wait()
        assert logged == [("batch job interrupted", "OperationalError: database or disk is full")]
        await runner.use(store._database.execute, "PRAGMA max_page_count = 10000")
        interrupted.clear()
        runner.wake()
        await interrupted.wait()
        assert [event for event, _ in logged] == ["batch job interrupted", "batch job"]
        assert (await runner.use(store.job, job)).status == "completed"
        await runner.stop()

    asyncio.run(play())
