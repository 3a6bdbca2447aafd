"""running.py: what has expired goes while the server runs; the rest is tried on real servers in test_batch_api.py."""

import asyncio
from pathlib import Path

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
