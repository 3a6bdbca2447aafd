"""running.py: what has expired goes while the server runs; the rest is tried on real servers in test_batch_api.py."""

import asyncio
import logging
import os
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.rings import subcases

from weir.errors import InvalidRequest
from weir.jobs import JobSettings, running
from weir.jobs.running import Ask, InputFile, JobContext, JobRunner, Reply, body_of, check_endpoint, job_response
from weir.jobs.store import Job, JobRequest, JobStore
from weir.protocols import HttpSettings
from weir.protocols.account import Account


class Played:
    """A job that runs with an account of 1 MB."""

    def __init__(
        self, tmp_path: Path, lines: Sequence[bytes], ask: Ask, expires_at: int | None = None, **more: Any
    ) -> None:
        self.account = Account(HttpSettings(max_waiting_bytes=1_000_000))
        self.store = store = JobStore(tmp_path, JobSettings())
        self.runner = JobRunner(store, JobContext(JobSettings(), ask, 200_000, self.account, **more))
        name, path = store.begin_file()
        path.write_bytes(b"\n".join(lines))
        file = store.add_file(name, "in.jsonl", "batch", self.runner.now, self.runner.expires_at())
        self.input = store.path(file.id)
        ends = expires_at or self.runner.expires_at()
        self.job = store.add_job("/infer/m", file.id, "24h", None, self.runner.now, ends).id

    async def end(self) -> Job:
        """Run it to its end."""
        async with asyncio.timeout(60.0):
            ended = await self.runner.finish(self.job)
            await self.runner.stop()
        return ended


def line_of(number: int, size: int) -> bytes:
    return b'{"custom_id": "%d", "url": "/infer/m", "body": "%b"}' % (number, b"x" * size)


async def answered_at_once(path: str, body: bytes) -> Reply:
    return Reply(200, b"1")


async def test_files_go_when_they_expire(tmp_path: Path) -> None:
    now = 100.0
    store = JobStore(tmp_path, JobSettings())
    settings = JobSettings(batch_expire_after=0.001)
    account = Account(HttpSettings())
    runner = JobRunner(store, JobContext(settings, answered_at_once, 100, account, clock=lambda: now))
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


async def test_a_job_that_a_full_disk_interrupts_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "LOOK_AGAIN", 3600.0)
    logged: asyncio.Queue[tuple[int, str, object]] = asyncio.Queue()

    async def answered(path: str, body: bytes) -> Reply:
        return Reply(200, b"1" * 100_000)

    def log(level: int, event: str, **fields: object) -> None:
        logged.put_nowait((level, event, fields.get("error", "")))

    played = Played(tmp_path, [line_of(0, 1)], answered, log=log)
    runner, database = played.runner, played.store._database
    database.execute("PRAGMA max_page_count = 20")
    runner.start()
    full = (logging.WARNING, "batch job interrupted", "OperationalError: database or disk is full")
    assert await logged.get() == full
    await runner.use(database.execute, "PRAGMA max_page_count = 10000")
    runner.wake()
    assert (await logged.get())[:2] == (logging.INFO, "batch job")
    assert (await runner.use(played.store.job, played.job)).status == "completed"
    await runner.stop()


async def test_lines_and_answers_are_charged_while_they_are_in_memory(tmp_path: Path) -> None:
    most = at_once = 0
    under_way = list[None]()
    pair = asyncio.Barrier(2)

    async def answered(path: str, body: bytes) -> Reply:
        nonlocal most, at_once
        under_way.append(None)
        await pair.wait()
        await played.runner.use(int)  # until the lines that are being read are read: no third one may be
        assert played.account.held_bytes >= 100_000 * len(under_way)
        most, at_once = max(most, played.account.held_bytes), max(at_once, len(under_way))
        under_way.pop()
        return Reply(200, b"1" * 50_000)

    played = Played(tmp_path, [line_of(number, 100_000) for number in range(20)], answered)
    ended = await played.end()
    assert (ended.completed, ended.failed) == (20, 0)
    assert most <= 1_000_000
    assert at_once == 2  # a quarter of the account
    assert played.account.held_bytes == 0


async def test_a_line_is_given_up_before_it_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "RETRY_MIN", 0.0)
    tried, held = 0, list[int]()

    async def refused(path: str, body: bytes) -> Reply:
        nonlocal tried
        tried += 1
        held.append(played.account.held_bytes)
        return Reply(200 if tried > 3 else 429, b"1")

    played = Played(tmp_path, [line_of(0, 100_000)], refused)
    assert (await played.end()).completed == 1
    assert len(set(held)) == 1
    assert played.account.held_bytes == 0


async def test_a_line_waits_until_the_server_has_memory(tmp_path: Path) -> None:
    played = Played(tmp_path, [line_of(0, 100_000)], answered_at_once)
    with played.account.claim() as others:
        others.take(900_000)
        ending = asyncio.create_task(played.end())
        while not played.account.refused:
            await played.runner.use(int)
    assert (await ending).completed == 1


async def test_what_one_request_raises_is_its_response(tmp_path: Path) -> None:
    """Its job would be interrupted for ever otherwise, and take the place of others'."""

    async def answered(path: str, body: bytes) -> Reply:
        if body == b"1":
            raise KeyError("a bug")
        return Reply(200, b"1")

    def is_read(line: bytes) -> bool:
        (tmp_path / "one.jsonl").write_bytes(line)
        return bool(list(InputFile(tmp_path / "one.jsonl", "/infer/m", max_requests=1, max_line=9999)))

    form = b'{"custom_id": "%d", "url": "/infer/m", "body": %b1%b}'
    lines = [form % (depth, b"[" * depth, b"]" * depth) for depth in range(900, 1000)]
    # What a thread can read, as its stack is short, may be nested too deeply for the event loop.
    read = [line for line in lines if await asyncio.to_thread(is_read, line)][-20:]
    ended = await Played(tmp_path, [*read, form % (0, b"", b"")], answered).end()
    assert (ended.status, ended.completed + ended.failed) == ("completed", len(read) + 1)
    wrong = (tmp_path / "files" / str(ended.error_file_id)).read_bytes().splitlines()
    assert (b'"status_code":500' in wrong[-1], b"KeyError" in wrong[-1]) == (True, False)
    assert all(b"nested less deeply" in line for line in wrong[:-1])


async def test_a_file_that_was_cut_fails_its_job(tmp_path: Path) -> None:
    async def answered(path: str, body: bytes) -> Reply:
        os.truncate(played.input, 150_000)
        return Reply(200, b"1")

    played = Played(tmp_path, [line_of(number, 100_000) for number in range(9)], answered)
    ended = await played.end()
    assert ended.status == "failed"
    assert ended.errors is not None
    assert "the file was changed or truncated after it was validated" in ended.errors[0]["message"]
    assert played.account.held_bytes == 0


async def test_requests_without_an_answer_expire_though_the_clock_is_set_back(tmp_path: Path) -> None:
    """The window ends by a clock that nobody sets. The job must not be completed without them."""

    async def unanswered(path: str, body: bytes) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")

    played = Played(tmp_path, [line_of(0, 1)], unanswered, expires_at=100, clock=lambda: 99.9)
    ended = await played.end()
    assert (ended.status, ended.completed, ended.failed) == ("expired", 0, 0)
    assert b"batch_expired" in (tmp_path / "files" / str(ended.error_file_id)).read_bytes()


# Lines of input files, right and wrong; and the lines of outputs.


GOOD = b'{"custom_id":"a","method":"POST","url":"/infer/m","body":{"x": [1, 2]}}\n'


def read(tmp_path: Path, body: bytes, **limits: int) -> tuple[list[JobRequest], list[tuple[str, int | None]]]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(body)
    lines = InputFile(
        path, "/infer/m", max_requests=limits.get("max_requests", 9), max_line=limits.get("max_line", 200)
    )
    return list(lines), [(error["code"], error["line"]) for error in lines.errors]


def test_requests_are_found_by_their_place(tmp_path: Path) -> None:
    requests, errors = read(tmp_path, GOOD + b"\n" + GOOD.replace(b'"a"', b'"b"').rstrip())
    assert (errors, [request.custom_id for request in requests]) == ([], ["a", "b"])
    assert [request.number for request in requests] == [0, 1]
    file = os.open(tmp_path / "in.jsonl", os.O_RDONLY)
    assert [body_of(file, request) for request in requests] == [b'{"x": [1, 2]}'] * 2
    os.close(file)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (request,), errors = read(tmp_path, BOM_UTF8 + GOOD)
    assert errors == []
    with (tmp_path / "in.jsonl").open("rb") as file:
        assert body_of(file.fileno(), request) == b'{"x": [1, 2]}'
    assert read(tmp_path, BOM_UTF8)[1] == [("empty_file", None)]


@subcases(("line", "code"), [
    (b"no json\n", "invalid_json_line"), (b"[1]\n", "invalid_json_line"),
    (b'{"custom_id":"a","url":"/infer/m"}\n', "invalid_json_line"), (GOOD.replace(b'"a"', b'""'), "invalid_custom_id"),
    (GOOD.replace(b"POST", b"GET"), "invalid_method"), (GOOD.replace(b"/m", b"/n"), "mismatched_url"),
    (GOOD.replace(b"[1, 2]", b"[" + b"1, " * 99 + b"2]"), "line_too_long"),
])  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: bytes, code: str) -> None:
    assert read(tmp_path, GOOD + line)[1] == [(code, 2)]


def test_an_empty_file_and_one_with_too_many_requests(tmp_path: Path) -> None:
    assert read(tmp_path, b"\n\n")[1] == [("empty_file", None)]
    assert read(tmp_path, b"\n" * 9 + GOOD)[1] == []
    assert read(tmp_path, b"\n" * 10_000_000 + GOOD)[1] == [("too_many_lines", 10)]
    assert read(tmp_path, GOOD * 3, max_requests=2)[1] == [("too_many_requests", 3)]
    assert len(read(tmp_path, b"x\n" * 90, max_requests=99)[1]) == 50


def test_an_endpoint_is_a_path_of_inference_however_it_is_encoded() -> None:
    assert check_endpoint("/infer/a%2Fb", {"/infer/a/b"}) == "/infer/a%2Fb"
    with pytest.raises(InvalidRequest, match=r"endpoint='/infer/c': must be a path of inference"):
        check_endpoint("/infer/c", {"/infer/a/b"})


@subcases(("body", "shown"), [
    (b'{"a":1}', {"a": 1}), (b'{"a":\n1}', {"a": 1}), (b"null", None), (b"\xff\x00", "\ufffd\x00"), (b"oops", "oops"),
    (b'["\xff"]', '["\ufffd"]'), (b"[" * 5000, "[" * 5000),
])  # fmt: skip
def test_a_line_of_the_output(body: bytes, shown: object) -> None:
    answer = job_response("batch_7", JobRequest(3, "ä", 0, 1), 200, body)
    assert b"\n" not in answer.line
    assert msgspec.json.decode(answer.line) == {
        "id": "batch_req_7_3", "custom_id": "ä", "response": {"status_code": 200, "request_id": "batch_req_7_3", "body": shown}, "error": None,
    }  # fmt: skip
