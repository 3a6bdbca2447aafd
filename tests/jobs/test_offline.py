"""offline.py: tables with what CSV may hold, and a disk that is full for a time. The rest is tried by `weir batch run` in test_batch_api.py."""

import asyncio
import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from weir.errors import SettingsError
from weir.jobs import JobSettings, offline
from weir.jobs.offline import Source, check_source, run
from weir.jobs.running import Reply
from weir.jobs.store import JobStore


def answers(source: Source, output: Path) -> list[Any]:
    """Run the requests of `source` by a model that tells how long a text is."""

    async def ask(path: str, body: bytes) -> Reply:
        return Reply(200, b'"%s"' % (b"x" * 5000 if body == b'"long answer"' else b"%d" % len(json.loads(body))))

    done = asyncio.run(run(source, output, ask, JobSettings(), max_line=1 << 20, progress=lambda done, total: None))
    lines = [json.loads(line) for line in done.output.read_bytes().splitlines()]
    return [line["response"]["body"] for line in lines]


def table(tmp_path: Path, content: bytes) -> Source:
    path = tmp_path / "in.csv"
    path.write_bytes(content)
    return Source(path, "/infer/m")


def test_a_file_whose_first_line_is_no_request_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "in.jsonl").write_bytes(b'\n{"custom_id":"a","url":"/infer/m","body":' + b"[" * 100_000)
    with pytest.raises(SettingsError, match=r"in.jsonl: line 2: must be an object with custom_id"):
        check_source(Source(path))


def test_a_field_may_be_long(tmp_path: Path) -> None:
    source = table(tmp_path, b"text\n" + b"a" * 200_000 + b"\nshort\n")
    check_source(source)
    assert answers(source, tmp_path / "out") == ["200000", "5"]


def test_a_table_that_is_none_is_named_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"in.csv: behind line 0: is not CSV in UTF-8: 'utf-8' codec can't decode"):
        check_source(table(tmp_path, b"text\n\xff\n"))
    with pytest.raises(SettingsError, match=r"in.csv: behind line \d{5}: is not CSV in UTF-8"):
        answers(table(tmp_path, b"text\n" + b"a\n" * 20_000 + b"\xff\n"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


@pytest.mark.parametrize("content", [b"", b"\n \n", BOM_UTF8])
def test_an_empty_file_is_named_as_a_server_names_it(tmp_path: Path, content: bytes) -> None:
    source = Source(tmp_path / "in.jsonl")
    source.path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"in.jsonl: the file has no requests"):
        check_source(source)


def test_a_run_goes_on_when_the_disk_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [16]

    class SmallStore(JobStore):
        def __init__(self, *arguments: Any, **bounds: Any) -> None:
            super().__init__(*arguments, **bounds)
            self._database.execute(f"PRAGMA max_page_count = {pages[0]}")

    monkeypatch.setattr(offline, "JobStore", SmallStore)
    source = table(tmp_path, b"text\n" + b"long answer\n" * 50)
    with pytest.raises(
        SettingsError, match=r"out.weir-batch: database or disk is full; fix this and run the same command again"
    ):
        answers(source, tmp_path / "out")
    pages[0] = 10_000
    assert answers(source, tmp_path / "out") == ["x" * 5000] * 50
    assert not (tmp_path / "out.weir-batch").exists()
