"""What a dispatcher takes from a front, and what it does with a front that sends something else or does not read."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from tempfile import TemporaryFile
from typing import Any

import msgspec
from tests.fakes import RecordingObserver
from tests.frontends.http.fast.kit import Square, squared
from tests.rings import subcases
from tests.waiting import until

from weir.batching.request_state import RequestBase
from weir.catalog.registry import Registry
from weir.errors import InvalidRequest, Overloaded
from weir.fronts.dispatcher import Catalogue, ConnectedFront, FrontsShared, RemoteRequest
from weir.fronts.messages import (
    LONGEST_PAYLOAD,
    CallerLeft,
    FailedRequest,
    MustHandOver,
    Outputs,
    PlaceFree,
    Refused,
    RequestForm,
    SentPlace,
    SentText,
    Submit,
    Transferred,
    WantPlace,
    batch_key,
    frame_of,
    reader_of_dispatcher,
    reader_of_front,
    sent_error,
)
from weir.fronts.passing import ConnectionSender, Passage, socket_pair
from weir.messages import JSON, Form, Kind
from weir.protocols import HttpSettings
from weir.protocols.account import Account, SharedAccount, SharedFigures, table_bytes
from weir.serving.service import Service
from weir.testing import FakeExecutor
from weir.workers.arena import create_memory

# Some requests are made when the module is imported: they must not expire before their test.
FORM = RequestForm(0, 1, Form(1e6, content_type=JSON, accept=JSON, frontend="http"))


class Front:
    """The other end: a front of which a test sends every message itself."""

    def __init__(self, service: Service, account: Account, observers: list[Any]) -> None:
        ours, self.link = socket.socketpair()
        connections, self.connections = socket_pair()
        self.catalogue = Catalogue(Registry([service]))
        self.catalogue.table()
        self.ended: list[str] = []
        self.passed: list[bytes] = []
        self.lost = 0  # connections
        self.pressed: list[int] = []
        shared = FrontsShared(self.catalogue, account, observers, None, time.monotonic, self.pressed.append)
        self.side = ConnectedFront(ours, connections, shared, self._passed, self.ended.append)
        self.link.setblocking(False)
        self._reader = reader_of_dispatcher()
        self._came: list[Any] = []

    def _passed(self, connection: socket.socket | None, data: bytes, origin: Any) -> None:
        if connection is None:
            self.lost += 1
            return
        connection.close()
        self.passed.append(data)

    async def send(self, *messages: Any) -> None:
        """Send one frame."""
        await asyncio.get_running_loop().sock_sendall(self.link, frame_of(list(messages)))

    async def next(self) -> Any:
        """Return the next message."""
        while not self._came:
            data = await asyncio.get_running_loop().sock_recv(self.link, 1 << 16)
            self._came += [message for frame in self._reader.feed(data) for message in frame]
        return self._came.pop(0)

    async def until_ended(self) -> str:
        """Return why the dispatcher ends this front."""
        await until(lambda: bool(self.ended))
        return self.ended[0]


@asynccontextmanager
async def connected(
    executor: FakeExecutor | None = None, observers: list[Any] | None = None, max_waiting_bytes: int | None = None, **settings: Any
) -> AsyncIterator[tuple[Front, Service, Account]]:  # fmt: skip
    heard = observers or []
    async with Service(
        Square, executor=executor or FakeExecutor(squared), observers=heard, drain_timeout=0.0, **settings
    ) as service:
        account = Account(HttpSettings(max_connections=3, max_waiting_bytes=max_waiting_bytes))
        front = Front(service, account, heard)
        try:
            yield front, service, account
        finally:
            front.side.close()
            front.link.close()
            front.connections.close()


def request(number: int, payload: bytes = b"3", form: int = 0) -> Submit:
    return Submit(number, form, [time.monotonic()], [payload])


async def test_requests_come_back_in_one_frame() -> None:
    async with connected() as (front, _, _):
        now = time.monotonic()
        await front.send(FORM, request(5), Submit(7, 0, [now, now], [b"4", b"5"]))
        outputs = await front.next()
        assert isinstance(outputs, Outputs)
        assert dict(zip(outputs.numbers, outputs.outputs, strict=True)) == {5: b"9", 7: b"16", 8: b"25"}


async def test_requests_expire_are_explained_or_find_the_queue_full() -> None:
    """The first one's time is over already."""
    executor = FakeExecutor(squared)
    async with connected(executor, max_queue_size=1, max_batch_size=1) as (front, _, _):
        await front.send(msgspec.structs.replace(FORM, form=FORM.form.replaced(timeout=-0.01)), request(5))
        expired = await front.next()
        assert (expired.number, expired.error.kind) == (5, "DeadlineExceeded")
        await front.send(
            msgspec.structs.replace(FORM, number=1, form=FORM.form.replaced(explain=True)), request(6, form=1)
        )
        answer = await front.next()
        assert isinstance(answer, Outputs) and answer.batch is not None
        assert (answer.numbers, answer.outputs, answer.batch.rows) == ([6], [b"9"], 1)
        now = time.monotonic()
        await front.send(msgspec.structs.replace(FORM, number=2), Submit(7, 2, [now] * 2, [b"3", b"4"]))
        failed = await front.next()
        assert isinstance(failed, FailedRequest) and (failed.number, failed.error.kind) == (8, "Overloaded")
        assert front.ended == []


def test_a_request_has_what_its_form_and_any_other_request_has() -> None:
    form = Form(2.5, Kind.ITEM, "a/b", "c/d", 4, 4.0, (("x", "<f4", (2,)), "mine"), -3, "http", explain=True)
    ((sent,),) = reader_of_front().feed(memoryview(frame_of([RequestForm(0, 1, form)])))
    assert isinstance(sent, RequestForm)
    known = sent.form.replaced(key=batch_key(sent.form.key))
    assert known == form and hash(known)
    made = RemoteRequest(None, None, known, 9, 10.0, b"body")  # type: ignore[arg-type]  # not asked
    for name in RequestBase.__slots__:
        assert getattr(made, name) == getattr(RequestBase(known, b"body", 10.0), name), name


BAD: dict[str, bytes | bytearray] = {
    "garbage": b"\x00\x00\x00\x04oops",
    "a frame without end": b"\xff\xff\xff\xff",
    "an unknown message": b"\x00\x00\x00\x03\x91\x91\x63",
    "no rows": frame_of([msgspec.structs.replace(FORM, form=FORM.form.replaced(rows=0))]),
    "an endless timeout": frame_of([msgspec.structs.replace(FORM, form=FORM.form.replaced(timeout=1e30))]),
    "a number of a form that is too large": frame_of([msgspec.structs.replace(FORM, number=1 << 20)]),
    "a key that is none": frame_of([msgspec.structs.replace(FORM, form=FORM.form.replaced(key={}))]),
    "an unknown form": frame_of([request(1, form=8)]),
    "two of one number": frame_of([FORM, request(1), request(1)]),
    "more than it can have connections": frame_of([FORM, *map(request, range(7))]),
    "more in one run than it can have connections": frame_of([FORM, Submit(0, 0, [1.0] * 7, [b"3"] * 7)]),
    "a long body": frame_of([FORM, request(1, bytes(LONGEST_PAYLOAD + 1))]),
    "a request from the future": frame_of([FORM, Submit(1, 0, [time.monotonic() + 1e6], [b"3"])]),
    "requests out of order": frame_of([FORM, Submit(1, 0, [2.0, 1.0], [b"3", b"3"])]),
    "no requests": frame_of([FORM, Submit(1, 0, [], [])]),
    "requests without an arrival": frame_of([FORM, Submit(1, 0, [1.0], [b"3", b"3"])]),
    "a former number": frame_of([FORM, request(5), request(4)]),
    "a number below none": frame_of([FORM, request(-1)]),
    "an error that is none": frame_of([Refused(None, "http", msgspec.structs.replace(sent_error(InvalidRequest("x")), kind="OSError"))]),
    "an error without form": frame_of([Refused(None, "http", msgspec.structs.replace(sent_error(InvalidRequest("x")), state=b"["))]),
    "a place that it does not have": frame_of([FORM, Submit(1, 0, [0.0, 0.0], [b"1", SentPlace(0, 64)])]),
    "texts and other requests": frame_of([FORM, Submit(1, 0, [0.0, 0.0], [b"1", SentText(b"abcd", 1, 0.0, True, 0, ())])]),
    "a place back that it does not have": frame_of([PlaceFree(1, 0)]),
    "an output back that it does not have": frame_of([PlaceFree(-1, 5)]),
    "a wish for less than no place": frame_of([WantPlace(1, -1)]),
    "less than no bytes": frame_of([Transferred(1, "http", -5, 0)]),
}  # fmt: skip


@subcases("name", BAD)
async def test_a_front_that_sends_something_else_is_ended(name: str) -> None:
    async with connected(FakeExecutor()) as (front, service, _):
        await asyncio.get_running_loop().sock_sendall(front.link, BAD[name])
        assert (await front.until_ended()).startswith("it sent ")
        front.side.close()
        assert service.state()["waiting"] == 0


async def test_a_request_for_a_model_that_has_changed_is_handed_over() -> None:
    async with connected() as (front, service, _):
        await front.send(FORM, msgspec.structs.replace(FORM, number=1, model=77), request(1, form=1))
        assert await front.next() == MustHandOver(1)
        async with Service(Square, name="square", executor=FakeExecutor(squared)) as other:
            former = service.replace_with(other)
            await front.send(request(2))
            assert await front.next() == MustHandOver(2)
            await former.stop(0.0)


async def test_refusals_and_bytes_reach_the_observers() -> None:
    heard = RecordingObserver()
    async with connected(observers=[heard]) as (front, _, _):
        await front.send(
            Transferred(1, "http", 10, 20), Transferred(99, "http", 1, 1), Refused(1, "http", sent_error(InvalidRequest("bad"))),
            Refused(None, "http", sent_error(InvalidRequest("worse"))), FORM, request(1),
        )  # fmt: skip
        await front.next()
    assert heard.transfers == [("square", "http", 10, 20)]
    assert [(*where, type(error), error.message) for *where, error in heard.refusals] == [
        ("square", "http", InvalidRequest, "bad"), ("", "http", InvalidRequest, "worse"),
    ]  # fmt: skip


async def test_a_caller_that_left_and_a_front_that_ended_cost_nothing() -> None:
    executor = FakeExecutor()
    async with connected(executor, max_batch_size=1) as (front, service, _):
        await front.send(FORM, request(1), request(2), request(3))
        await until(lambda: service.state()["waiting"] == 2)
        await front.send(CallerLeft(2), CallerLeft(2), CallerLeft(1234))
        await until(lambda: service.state()["waiting"] == 1)
        front.side.close()
        assert service.state()["waiting"] == 0


async def test_a_front_that_does_not_read_fills_its_own_bound() -> None:
    large = "x" * (1 << 20)
    executor, heard = FakeExecutor(lambda items: [large for _ in items]), RecordingObserver()
    async with connected(executor, [heard], max_waiting_bytes=16 << 20) as (front, _, account):
        for number in range(12):
            await front.send(*([FORM] if not number else []), request(number))
            await until(lambda number=number: len(executor.batches) == number + 1 and not front.side.open)  # type: ignore[misc]  # bound at once
        await asyncio.sleep(0)
        assert account.max_connection_bytes < account.held_bytes <= account.max_connection_bytes + 2 * len(large)
        ends = [await front.next() for _ in range(12)]
        refused = [each for each in ends if isinstance(each, FailedRequest)]
        assert refused and {each.error.kind for each in refused} == {Overloaded.__name__}
        assert heard.kinds == {"": 12 - len(refused), "Overloaded": len(refused)}
        await front.send(request(12))  # now it reads again
        assert isinstance(await front.next(), Outputs)
        front.side.close()
        assert account.held_bytes == 0


def sender_over(end: socket.socket) -> tuple[ConnectionSender, SharedAccount]:
    fd = create_memory("test-figures", table_bytes(2))
    account = SharedAccount(HttpSettings(), SharedFigures(fd, 2), 1)
    os.close(fd)
    return ConnectionSender(end, asyncio.get_running_loop(), account), account


async def test_a_connection_is_passed_with_its_bytes() -> None:
    async with connected() as (front, _, _):
        one, other = socket.socketpair()
        with one, other:
            sender, _ = sender_over(front.connections)
            for data in (b"GET / HTTP/1.1\r\n", bytes(100_000)):
                sender.send(os.dup(one.fileno()), data)
                await until(lambda: bool(front.passed))
                assert front.passed.pop() == data


async def test_a_connection_that_cannot_be_passed_is_counted_no_more() -> None:
    ours, theirs = socket_pair()
    sender, account = sender_over(ours)
    theirs.close()
    for size in (1, 100_000):
        sender.send(os.open(os.devnull, os.O_RDONLY), bytes(size))
    assert account.connections == 0
    ours.close()


async def test_a_message_for_connections_that_is_none_opens_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with connected() as (front, _, _):
        one, other = socket.socketpair()
        here, alone = msgspec.msgpack.encode(Passage(b"good", None)), msgspec.msgpack.encode(Passage(None, None))
        with one, other, TemporaryFile() as long:
            long.truncate(1 << 40)
            others: list[tuple[bytes, list[Any]]] = [
                (here, []), (here, [long]), (here, [one, other]), (alone, [one]), (alone, [one, other]), (alone, [one, long]),
                (b"no message", [one]),
            ]  # fmt: skip
            for message, descriptors in [*others, (here, [one])]:
                socket.send_fds(front.connections, [message], [each.fileno() for each in descriptors])
            await until(lambda: bool(front.passed))
            assert front.passed == [b"good"] and front.lost == len(others)
    assert len(os.listdir("/proc/self/fd")) == before
