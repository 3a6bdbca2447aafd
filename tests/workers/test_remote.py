"""Workers that attach over a socket, against the executor alone."""

import asyncio
import os
import signal
import socket
import stat
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rings import subcases
from tests.workers.models import Square
from tests.workers.outsiders import Outsider
from tests.workers.pools import Recorder
from tests.workers.runs import started

from weir import errors
from weir.messages import JSON, MSGPACK, OBJECT, OCTETS, Batch, EventKind
from weir.model import External, Tensor
from weir.wire.frames import ASK, LockstepReply, encode_jobs
from weir.wire.values import encode
from weir.workers import remote
from weir.workers.remote import ExternalExecutor, LockstepBatch
from weir.workers.settings import WorkerSettings, parse_address


def settings(address: str, **more: Any) -> WorkerSettings:
    return WorkerSettings(executor="external", worker_socket=address, **{"start_timeout": 20.0, **more})


@asynccontextmanager
async def running(
    address: str, *workers: Outsider, max_body_bytes: int = 1 << 20, **more: Any
) -> AsyncIterator[tuple[ExternalExecutor, Recorder, Outsider]]:
    """A started executor, its listener, and the first worker."""
    executor, heard = (
        ExternalExecutor(
            External, {}, settings(address, **more), name="m", max_batch_size=64, max_body_bytes=max_body_bytes
        ),
        Recorder(),
    )
    starting = asyncio.ensure_future(executor.start(heard))
    await asyncio.sleep(0)
    worker = await Outsider.connect(executor.address)
    await starting
    try:
        yield executor, heard, worker
    finally:
        await executor.stop()
        await worker.leave()


def batch(number: int, *payloads: Any, content_type: str = JSON, accept: str = JSON) -> Batch:
    return Batch(number, list(payloads), content_type, accept)


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/w.sock" if request.param == "unix" else "tcp:127.0.0.1:0"


@pytest.fixture
def unix(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/w.sock"


async def test_a_worker_attaches_answers_and_leaves(address: str) -> None:
    async with running(address) as (executor, heard, worker):
        assert heard.ready == [(0, 1)]
        assert executor.states()[0].pid in (os.getpid(), None)
        executor.run(0, batch(1, b"1", b"22"))
        assert executor.states()[0].in_flight == 1
        jobs = await worker.jobs()
        assert list(jobs.values()) == [b"1", b"22"]
        first, second = jobs
        worker.answer({second: b'"two"', first: b'"bad"'}, first)
        await heard.until(lambda: 1 in heard.events)
        refused, two = heard.events[1].outputs
        assert two == b'"two"'
        assert isinstance(refused, errors.ValidationFailed)
        assert refused.details == "bad"
        await worker.leave()
        await heard.until(lambda: bool(heard.lost))
        assert heard.lost == [(0, "it closed its channel")]
        assert executor.gauges()["restarts"] == 0
        again = await Outsider.connect(executor.address)
        await heard.until(lambda: len(heard.ready) == 2)
        assert heard.ready[1] == (0, 1)
        assert executor.gauges()["restarts"] == 1
    assert await again.closed()
    await again.leave()


async def test_what_a_dead_server_left_is_in_nobodys_way(unix: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(unix.removeprefix("unix:"))
    async with running(unix) as (_, heard, _worker):
        assert heard.ready


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    executor = ExternalExecutor(External, {}, settings(f"unix:{tmp_path}/file"), name="m", max_batch_size=64)
    with pytest.raises(errors.SettingsError, match="cannot be had"):
        asyncio.run(executor.start(Recorder()))
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\xff\xff\xff\xff", "it sent a frame of 4294967295 bytes, over the limit"),
        (b"\x00\x00\x00\x01x", "it sent a frame of 1 bytes that is not a msgpack map"),
        (b"GET / HTTP/1.1\r\n\r\n", "over the limit"),
    ],
)
async def test_garbage_is_the_end_of_that_worker_alone(unix: str, sent: bytes, reason: str) -> None:
    async with running(unix) as (executor, heard, worker):
        other = await Outsider.connect(executor.address)
        await heard.until(lambda: len(heard.ready) == 2)
        executor.run(0, batch(1, b"1"))
        executor.run(1, batch(2, b"2"))
        worker.writer.write(sent)
        await heard.until(lambda: bool(heard.lost))
        assert heard.lost[0][0] == 0
        assert reason in heard.lost[0][1]
        other.answer(dict.fromkeys(await other.jobs(), b"4"))
        await heard.until(lambda: 2 in heard.events)
        assert heard.events[2].outputs == [b"4"]
        assert 1 not in heard.events
        await other.leave()


@pytest.mark.parametrize("greeting", [b"\x00\x00\x00\x01x", b"\xff\xff\xff\xff", ASK + ASK])
async def test_who_does_not_begin_as_a_worker_does_is_closed(unix: str, greeting: bytes) -> None:
    async with running(unix) as (executor, heard, _):
        stranger = await Outsider.connect(executor.address, greeting)
        assert await stranger.closed()
        assert [index for index, _ in heard.lost] == [1] * (greeting == ASK + ASK)
        await stranger.leave()


async def test_a_connection_that_asks_for_nothing_is_closed(unix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "GREETING", 0.01)
    executor = ExternalExecutor(External, {}, settings(unix), name="m", max_batch_size=64)
    starting = asyncio.ensure_future(executor.start(Recorder()))
    await asyncio.sleep(0)
    silent = await Outsider.connect(executor.address, b"\x00")
    assert await silent.closed()
    await silent.leave()
    await executor.stop()
    with pytest.raises(errors.ModelNotReady, match="stopped before"):
        await starting


async def test_a_batch_that_takes_too_long_ends_its_worker(unix: str) -> None:
    async with running(unix, predict_timeout=0.05) as (executor, heard, worker):
        executor.run(0, batch(1, b"1"))
        await heard.until(lambda: bool(heard.lost))
        assert heard.lost == [(0, "it was cut off because a batch ran longer than predict_timeout=0.05")]
        assert (await worker.jobs()).popitem()[1] == b"1"
        assert await worker.closed()


def test_a_worker_waits_longer_each_time_and_little_after_a_batch(unix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    waits: list[str] = []

    def serve() -> None:
        for has_batch in (False, False, True, False):
            with listening.accept()[0] as connection:
                connection.recv(len(ASK), socket.MSG_WAITALL)
                if has_batch:
                    connection.sendall(encode_jobs(["a"], [b"3"]))
                    connection.recv(1000)

    def tell(line: str) -> None:
        if "trying again" in line:
            waits.append(line.rpartition("trying again in ")[2])
            if len(waits) == 4:
                signal.raise_signal(signal.SIGTERM)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(unix.removeprefix("unix:"))
        listening.listen()
        serving = threading.Thread(target=serve)
        serving.start()
        remote.Attachment(started(Square), parse_address(unix, "unix"), JSON, tell).run()
        serving.join()
    assert waits == ["0.001 s", "0.002 s", "0.001 s", "0.002 s"]


def test_too_few_workers_in_time_is_a_failed_start(unix: str) -> None:
    executor = ExternalExecutor(
        External, {}, settings(unix, workers=2, start_timeout=0.01), name="m", max_batch_size=64
    )
    with pytest.raises(
        errors.ModelError, match=r"0 of workers=2 external workers attached to unix:.*start_timeout=0.01"
    ):
        asyncio.run(executor.start(Recorder()))
    assert not os.path.exists(unix.removeprefix("unix:"))


def outputs_of(answers: Sequence[bytes], work: Batch, unix: str) -> list[Any]:
    async def main() -> list[Any]:
        async with running(unix) as (executor, heard, worker):
            executor.run(0, work)
            if answers:
                worker.answer(dict(zip(await worker.jobs(), answers, strict=False)))
            await heard.until(lambda: work.batch_id in heard.events)
            return heard.events[work.batch_id].outputs

    return asyncio.run(main())


def test_values_travel_as_json_bytes_as_they_are(unix: str) -> None:
    work = batch(1, {"x": 1}, b"raw", content_type=OBJECT, accept=OBJECT)
    assert outputs_of([b'{"y": 2}', b"\xff"], work, unix) == [{"y": 2}, b"\xff"]


def test_answers_are_turned_into_what_each_caller_wants(unix: str) -> None:
    work = Batch(
        1, [b"1", b"2", b"3", encode(4, MSGPACK)], [JSON, JSON, JSON, MSGPACK], [MSGPACK, OCTETS, OBJECT, JSON]
    )
    answers = [b"[1]", b"[2]", b"[3]", encode([4], MSGPACK)]
    assert outputs_of(answers, work, unix) == [encode([1], MSGPACK), b"[2]", [3], b"[4]"]


def test_an_item_left_out_and_one_that_cannot_be_read_fail_alone(unix: str) -> None:
    fine, unread, missing = outputs_of([b"1", b"{"], Batch(1, [b"", b"", b""], JSON, [JSON, OBJECT, JSON]), unix)
    assert fine == b"1"
    assert isinstance(unread, errors.ModelError)
    assert isinstance(missing, errors.ModelError)
    assert "lacks this item" in missing.message


def test_what_cannot_be_sent_fails_alone_also_when_it_is_the_whole_batch(unix: str) -> None:
    sent, unsent = outputs_of([b"7"], batch(1, 7, object(), content_type=OBJECT, accept=OBJECT), unix)
    assert sent == 7
    assert isinstance(unsent, errors.InvalidRequest)
    (alone,) = outputs_of([], batch(1, object(), content_type=OBJECT, accept=OBJECT), unix)
    assert isinstance(alone, errors.InvalidRequest)


TENSORS = {"inputs": (Tensor("x", "FP32", [-1]),), "outputs": (Tensor("x", "FP32", [-1]),)}


@pytest.mark.parametrize(
    ("attributes", "more", "words"),
    [
        *[({}, more, next(iter(more))) for more in ({"pipeline_depth": 2}, {"threads": 1}, {"env": [{"A": "b"}]})],
        (TENSORS, {}, "external workers take items"),
        ({"streaming": True}, {}, "external workers take items"),
    ],
)
def test_what_only_processes_of_our_own_can_do_is_refused(
    unix: str, attributes: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(errors.SettingsError, match=words):
        ExternalExecutor(type("M", (External,), attributes), {}, settings(unix, **more), name="m", max_batch_size=64)


async def test_workers_come_and_go_by_themselves(unix: str) -> None:
    async with running(unix) as (executor, _, _worker):
        with pytest.raises(errors.Conflict):
            await executor.add_worker()
        with pytest.raises(errors.Conflict):
            await executor.remove_worker()
        assert executor.reserve(1 << 20) is None
        executor.cancel(0, 1, [0])


FORMS = (JSON, MSGPACK, OCTETS, OBJECT, "image/png")


def output(answer: bytes, sent: str = JSON, wanted: str = JSON, *, failed: bool = False) -> Any:
    events = LockstepBatch(Batch(1, [b"1"], sent, wanted), 0).events(
        LockstepReply([answer], frozenset({0} if failed else ())), 0.5
    )
    assert events.final
    assert events.timing is not None
    assert events.timing.predict == 0.5
    (only,) = events.outputs
    assert events.kinds == ([EventKind.ERROR] if isinstance(only, errors.WeirError) else None)
    return only


@subcases(
    ("answer", "sent", "wanted", "error"),
    [
        (b"1" + b"0" * 40, JSON, MSGPACK, errors.ModelError),  # what the other form cannot say is the worker's fault
        (b"\xc1", MSGPACK, JSON, errors.ModelError),
        (b"1", JSON, "image/png", errors.UnsupportedMediaType),
        *[(b"\xff{", sent, JSON, None) for sent in (OCTETS, "image/png", OBJECT)],  # passed on
    ],
)
def test_an_answer_is_turned_into_the_form_that_is_wanted(answer: bytes, sent: str, wanted: str, error: Any) -> None:
    got = output(answer, sent, wanted)
    assert got == answer if error is None else type(got) is error


@subcases(
    "said",
    [
        b'"why"', b"why", b"[1]", b"{}", b'{"error": 1}', b'{"error": {"type": [], "message": "x"}}', b'{"error": {"type": {}}}',
        b'{"error": {"type": "SettingsError", "message": "x"}}', b'{"error": {"type": "ModelError", "message": 7}}', b"\xff",
        b'{"error": {"type": "ModelError", "message": "x"}, "more": 1}', b"",
    ],
)  # fmt: skip
def test_whatever_a_worker_says_of_an_item_it_refuses(said: bytes) -> None:
    assert isinstance(output(said, failed=True), errors.ValidationFailed)


def test_an_error_may_say_what_it_is() -> None:
    said = msgspec.json.encode({"error": {"type": "ModelError", "message": "no", "details": [1]}})
    for sent in (JSON, OCTETS, MSGPACK):
        error = output(said, sent, failed=True)
        assert type(error) is errors.ModelError
        assert (error.message, error.details) == ("no", [1])


@given(st.binary(max_size=50), st.sampled_from(FORMS), st.sampled_from(FORMS), st.booleans())
def test_any_bytes_have_an_output(answer: bytes, sent: str, wanted: str, failed: bool) -> None:
    assert isinstance(output(answer, sent, wanted, failed=failed), errors.WeirError) >= failed


def test_only_its_owner_reaches_a_unix_socket_and_it_is_gone_afterwards(unix: str) -> None:
    path = unix.removeprefix("unix:")

    async def main() -> None:
        async with running(unix):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            with pytest.raises(errors.SettingsError, match="worker_socket"):
                await ExternalExecutor(External, {}, settings(unix), name="other", max_batch_size=64).start(Recorder())

    asyncio.run(main())
    assert not os.path.exists(path)
