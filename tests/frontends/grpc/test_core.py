"""The thread of gRPC's core, and the messages that may be received at the same time."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest
from msgspec.json import encode
from tests.frontends.grpc.kit import FRONTS, INFER, PREFACE, Double, Rig, item, make_request, refused, run, serving
from tests.frontends.http.sockets import until

from weir import Model, Service
from weir.errors import RequestTimeout, WeirError
from weir.frontends.grpc import core as tested
from weir.frontends.grpc.aio import AioCore
from weir.frontends.grpc.call import cygrpc
from weir.frontends.grpc.core import PATIENCE, Connected, Core, Intake, Unsent
from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.testing import FakeClock, FakeExecutor
from weir.wire.kserve_grpc import methods, read_stream_response, write_request

LIMIT = 20.0  # seconds after which a thread is taken for one that waits for ever


@contextmanager
def ending(requested: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[asyncio.AbstractEventLoop, Any]]:
    """A server that was notified to end, and a loop that does not run but was notified of the first event. Such a server has an event for each
    of the calls that were `requested`, and then one more: all calls have ended."""
    monkeypatch.setattr(tested, "_REQUESTED", requested)
    monkeypatch.setattr(tested, "_LOOP_LOOK_EVERY", 0.01)
    loop, notified = asyncio.new_event_loop(), threading.Event()
    say = loop.call_soon_threadsafe

    def telling(*arguments: Any) -> Any:
        handle = say(*arguments)
        notified.set()
        return handle

    monkeypatch.setattr(loop, "call_soon_threadsafe", telling)

    async def make() -> Any:
        core = Core(
            {}, [], lambda path, call: True, lambda error, call: None, Account(HttpSettings()), max_message_size=1000, patience=1.0
        )  # fmt: skip
        await core.start()
        return core

    core = loop.run_until_complete(make())
    core._ending = True
    core._server.shutdown(core._queue, core._shut)
    assert notified.wait(LIMIT)
    yield loop, core
    loop.close()
    core._thread.join(LIMIT)
    ended = not core._thread.is_alive()
    if not ended:  # let it go on, so that no other test hears of it
        core._over = True
        core._given.release()
    assert ended
    core.discard()


def test_the_thread_ends_if_the_loop_is_closed_before_it_hears_of_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    with ending(0, monkeypatch) as (_, core):
        assert not core._over


def test_the_thread_ends_if_the_loop_is_closed_before_its_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "_EVENTS_AT_ONCE", 1)
    with ending(4, monkeypatch) as (loop, core):
        loop.call_soon(loop.stop)
        loop.run_forever()  # one turn: an event of the thread, another of the queue, and the next turn is to come
        assert not core._over
        assert core._given.locked()


WATCH = "/grpc.health.v1.Health/Watch"


class FakeCall:
    """A call that can be over, be watched and be cancelled."""

    def __init__(self) -> None:
        self.over = False
        self.cancelled = False
        self.watched = False

    def watch(self) -> None:
        self.watched = True

    def cancel(self) -> None:
        self.cancelled = True


class Rules:
    """An Intake, and what it did."""

    def __init__(self, calls: int = 2, messages: int = 2) -> None:
        self.refused: list[tuple[WeirError, Any]] = []
        self.received: list[Any] = []
        self.clock = FakeClock()
        self.account = Account(HttpSettings(max_connections=calls))
        self.intake = Intake(self.account, messages, lambda error, call: self.refused.append((error, call)), self.clock)

    def receive(self, call: Any, peer: str = "") -> None:
        self.intake.receive(call, peer or str(id(call)), lambda: self.received.append(call))

    def has_come(self, call: Any) -> None:
        self.intake.received(call)


def test_calls_are_counted_until_the_core_is_done_with_them() -> None:
    rules = Rules(calls=2)
    assert [rules.intake.begin("a"), rules.intake.begin("b")] == [None, None]
    error = rules.intake.begin("a")
    assert error is not None and "2 calls are in flight" in error.message
    assert (rules.account.calls, rules.intake.connections) == (3, 2)
    rules.intake.end("a")
    rules.intake.end("a")
    assert (rules.account.calls, rules.intake.connections) == (1, 1)
    assert rules.intake.begin("c") is None


def test_messages_take_turns() -> None:
    rules, calls = Rules(messages=2), [FakeCall() for _ in range(5)]
    for call in calls:
        rules.receive(call)
    assert (rules.received, rules.intake.waits) == (calls[:2], True)
    assert [call.watched for call in calls] == [False, False, True, True, True]  # who waits may leave
    calls[2].over = True  # its caller has left
    rules.has_come(calls[0])
    assert rules.received == [*calls[:2], calls[3]]
    rules.has_come(calls[1])
    assert (rules.received[-1], rules.intake.waits) == (calls[4], False)


def test_connections_take_turns_and_none_takes_more_than_half() -> None:
    rules, hostile, honest = Rules(messages=4), [FakeCall() for _ in range(9)], [FakeCall() for _ in range(4)]
    for call in hostile:
        rules.receive(call, "hostile")
    assert rules.received == hostile[:2]
    for call in honest:
        rules.receive(call, "honest")
    assert rules.received == [*hostile[:2], *honest[:2]]  # at once, whoever came before
    rules.has_come(hostile[0])
    rules.has_come(honest[0])
    assert rules.received[4:] == [hostile[2], honest[2]]


def test_who_does_not_send_loses_the_turn_while_others_wait() -> None:
    rules, calls = Rules(messages=1), [FakeCall() for _ in range(3)]
    rules.receive(calls[0])
    rules.clock.advance(PATIENCE + 1)
    rules.intake.look()
    assert not rules.refused  # nobody waits
    rules.receive(calls[1])
    assert [type(error) for error, _ in rules.refused] == [RequestTimeout]
    assert rules.received == calls[:2]
    rules.receive(calls[2])
    rules.clock.advance(PATIENCE)
    rules.intake.look()
    assert rules.received == calls[:2]
    rules.clock.advance(1.0)
    rules.intake.look()
    assert rules.received == calls


def test_connections_that_lost_turns_do_not_hold_back_the_others() -> None:
    rules, stalled = Rules(messages=8), [FakeCall() for _ in range(40)]
    for place, call in enumerate(stalled):
        rules.intake.begin(f"stalled {place % 4}")
        rules.receive(call, f"stalled {place % 4}")
    rules.clock.advance(PATIENCE + 1)
    rules.intake.look()
    waiting = [FakeCall() for _ in range(100)]
    rules.intake.begin("honest")
    for call in waiting:
        rules.receive(call, "honest")
    for call in waiting:
        assert call in rules.received
        rules.has_come(call)
    for place in range(40):
        rules.intake.end(f"stalled {place % 4}")
    again = [FakeCall() for _ in range(2)]
    for call in again:
        rules.receive(call, "stalled 0")
    assert again[0] in rules.received and again[1] in rules.received  # with its next calls, it is trusted again


async def test_answers_that_are_not_sent_are_charged_and_given_up() -> None:
    account = Account(HttpSettings(max_waiting_bytes=100))
    unsent, calls = Unsent(account, patience=0.0), [FakeCall(), FakeCall()]
    numbers = [unsent.add(call, 200) for call in calls]
    assert account.held_bytes == 400
    unsent.remove(numbers[0])
    async with asyncio.timeout(60):
        await until(lambda: calls[1].cancelled)
    assert not calls[0].cancelled
    unsent.remove(numbers[1])
    assert account.held_bytes == 0


def calling(rig: Rig) -> int:
    """Return how many connections have calls under way."""
    core: Any = rig.server._core
    return int(core._intake.connections)


async def test_connections_without_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.frontends.grpc.core._COUNT_EVERY", 0.0)
    async with serving(Service(Double, executor="inline")) as rig, serving(Service(Double, executor="inline")):
        account = rig.context.account
        opened = []
        for _ in range(120):
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
            writer.write(PREFACE)
            opened.append((reader, writer))
        await until(lambda: account.connections == 120)
        assert (await rig.infer(make_request())).outputs
        await until(lambda: account.connections == 121)
        for _, writer in opened:
            writer.close()
        await until(lambda: account.connections == 1)


def test_connections_are_not_counted_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counted = FakeClock(), []
    servers, pages = [1], [["1", "5"], ["9"], []]
    documents: dict[str, Callable[..., bytes]] = {
        "channelz_get_servers": lambda start: encode({"server": [{"ref": {"serverId": each}} for each in servers]}),
        "channelz_get_server_sockets": lambda server, start, most: page(server, start),
    }

    def page(server: int, start: int) -> bytes:
        counted.append((server, start))
        clock.advance(0.02)
        sockets = pages[{0: 0, 6: 1, 10: 2}[start]]
        return encode({"socketRef": [{"socketId": each} for each in sockets]} if sockets else {"end": True})

    for name, document in documents.items():
        monkeypatch.setattr(f"weir.frontends.grpc.core.cygrpc.{name}", document)
    least = [0]
    connected = Connected(lambda: least[0], clock)
    servers.append(2)
    connected.begin()
    assert connected() == 3
    assert counted == [(2, 0), (2, 6), (2, 10)]
    clock.advance(5.9)  # a hundred times what it took is not over
    least[0] = 7
    assert (connected(), len(counted)) == (7, 3)
    clock.advance(0.2)
    assert (connected(), len(counted)) == (7, 6)
    servers.append(3)
    unknown = Connected(lambda: 4, clock)
    unknown.begin()  # none was made
    assert (unknown(), len(counted)) == (4, 6)


def test_who_says_nothing_or_does_nothing_is_let_go() -> None:
    async def test(rig: Rig) -> None:
        async def let_go(sent: bytes) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
            writer.write(sent)
            while await reader.read(1000):
                pass
            writer.close()

        await asyncio.gather(*[let_go(sent) for sent in (b"", PREFACE[:8], PREFACE)])

    run(test, http={"header_timeout": 0.2, "idle_timeout": 0.4})


def large(size: int) -> bytes:
    return write_request(item(b'"' + b"x" * size + b'"', "echo"))


class Echo(Model):
    """Answers with what it gets."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


async def test_messages_are_charged_until_they_are_answered() -> None:
    executor = FakeExecutor()
    async with serving(Service(Echo, executor=executor), http={"max_waiting_bytes": 5_000_000}) as rig:
        account = rig.context.account
        accepted = rig.raw(INFER, large(600_000))
        await until(lambda: bool(executor.pending))
        assert 600_000 < account.held_bytes < 700_000
        code, text = await refused(rig.raw(INFER, large(4_600_000)))
        assert (code, "max_waiting_bytes" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        executor.answer_next(lambda batch: [b"1"] * len(batch))
        assert await accepted
        await until(lambda: account.held_bytes == 0 and calling(rig) == 0)


def test_compressed_messages_are_charged_as_what_they_are() -> None:
    async def test(rig: Rig) -> None:
        code, text = await refused(rig.raw(INFER, large(1_000_000), compression=grpc.Compression.Gzip))
        assert (code, "max_waiting_bytes" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)

    run(test, Echo, http={"max_waiting_bytes": 500_000})


async def test_more_calls_than_may_be_are_refused_and_others_answered_afterwards() -> None:
    executor = FakeExecutor()
    async with serving(Service(Double, executor=executor), http={"max_connections": 3}) as rig:
        calls = [rig.raw(INFER, write_request(make_request())) for _ in range(3)]
        await until(lambda: len(executor.pending) > 0)
        code, text = await refused(rig.infer(make_request()))
        assert (code, "max_connections" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        for call in calls:
            call.cancel()
        await until(lambda: calling(rig) == 0)
        again = asyncio.ensure_future(rig.infer(make_request()))
        while not again.done():
            await until(lambda: bool(executor.pending) or again.done())
            if executor.pending:  # what was cancelled, and this one
                executor.answer_next(lambda batch: [{"y": each["x"]} for each in batch])
        assert (await again).outputs


def test_who_leaves_before_its_message_is_counted_no_more() -> None:
    async def test(rig: Rig) -> None:
        call = rig.channel.stream_unary(INFER)()  # nothing is written
        await until(lambda: calling(rig) == 1)
        call.cancel()
        await until(lambda: calling(rig) == 0)
        assert (await rig.infer(make_request())).outputs

    run(test)


async def test_a_stream_reads_no_more_than_its_share_and_answers_all() -> None:
    executor = FakeExecutor()
    settings = {"max_waiting_bytes": 1_000_000}
    async with serving(Service(Echo, executor=executor, max_batch_size=1), http=settings) as rig:
        call = rig.stream()

        async def send() -> None:
            for _ in range(20):
                await call.write(large(100_000))
            await call.done_writing()

        sending = asyncio.ensure_future(send())
        got = 0
        while got < 20:
            await until(lambda: bool(executor.pending))
            assert rig.context.account.held_bytes < 350_000
            executor.answer_next(lambda batch: [b"1"] * len(batch))
            _, response = read_stream_response(await call.read())
            assert response.outputs
            got += 1
        await sending
        await until(lambda: rig.context.account.held_bytes == 0)


def test_an_answer_of_a_stream_for_which_there_is_no_room_is_its_error() -> None:
    async def test(rig: Rig) -> None:
        call = rig.stream()
        rig.context.account.take(930_000)
        await call.write(large(30_000))  # short enough to be read at once, without room for its values
        _, response = read_stream_response(await call.read())
        assert response.outputs  # there is room for the request and its answer
        await until(lambda: rig.context.account.held_bytes == 930_000)
        rig.context.account.take(20_000)
        await call.write(large(30_000))  # there is room for the request alone
        error, _ = read_stream_response(await call.read())
        assert "max_waiting_bytes" in error
        call.cancel()
        await until(lambda: rig.context.account.held_bytes == 950_000)

    run(test, Echo, http={"max_waiting_bytes": 1_000_000})


async def write_for_ever(call: Any) -> None:
    with suppress(asyncio.InvalidStateError):  # the call has ended
        while True:
            await call.write(large(100_000))


@pytest.mark.parametrize("over", [Core, FRONTS], indirect=True)
def test_who_does_not_read_the_responses_of_a_stream_is_let_go(over: None) -> None:
    async def test(rig: Rig) -> None:
        call = rig.stream()
        writing = asyncio.ensure_future(write_for_ever(call))
        await until(lambda: rig.context.account.held_bytes > 100_000)
        await until(lambda: rig.context.account.held_bytes == 0 and writing.done())

    run(test, Echo, http={"body_timeout": 0.5})


@pytest.mark.parametrize("over", [Core, AioCore, FRONTS], indirect=True)
def test_a_message_of_a_stream_that_is_too_large_is_refused_alone(over: None) -> None:
    async def test(rig: Rig) -> None:
        call = rig.stream()
        for size, too_large in ((30_000, True), (100, False)):
            await call.write(large(size))
            error, response = read_stream_response(await call.read())
            assert ("max_waiting_bytes" in error, bool(response.outputs)) == (too_large, not too_large)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        await until(lambda: rig.context.account.held_bytes == 0)

    run(test, Echo, http={"max_waiting_bytes": 20_000})


def test_watchers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.frontends.grpc.services._MOST_WATCHERS", 2)
    (watch,) = [method for method in methods("grpc.health.v1.Health") if method.path == WATCH]

    async def test(rig: Rig) -> None:
        request = watch.request().SerializeToString()
        watching = [rig.channel.unary_stream(WATCH)(request) for _ in range(2)]
        for each in watching:
            await each.read()
        more = rig.channel.unary_stream(WATCH)(request)
        with pytest.raises(grpc.aio.AioRpcError) as text:
            await more.read()
        assert text.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watching[0].cancel()
        while True:
            again = rig.channel.unary_stream(WATCH)(request)
            try:
                assert await again.read()
                break
            except grpc.aio.AioRpcError:
                continue
        for each in (*watching, again):
            each.cancel()

    run(test)


def test_requests_without_room_hold_nothing_while_their_errors_wait() -> None:
    async def test(rig: Rig) -> None:
        account = rig.context.account
        account.take(990_000)
        call = rig.stream()
        for _ in range(30):
            await call.write(large(100_000))
        await call.done_writing()
        errors = [error async for error, _ in map_errors(call)]
        assert len(errors) == 30 and all("max_waiting_bytes" in error for error in errors)
        assert account.held_bytes == 990_000

    run(test, Echo, http={"max_waiting_bytes": 1_000_000})


async def map_errors(call: Any) -> Any:
    """Yield the error and the response of each answer."""
    async for body in call:
        yield read_stream_response(body)


def test_the_core_outlives_an_event_that_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    async def test(rig: Rig) -> None:
        core: Any = rig.server._core
        failed: list[Any] = []
        poll = core._next

        def short_of_memory(until: float | None) -> Any:
            event = poll(until)
            if event.completion_type == cygrpc.CompletionType.operation_complete and len(failed) < 5:
                failed.append(event)
                raise MemoryError
            return event

        core._next = short_of_memory
        while len(failed) < 5:
            await asyncio.wait(
                [asyncio.ensure_future(rig.raw(INFER, write_request(make_request()), timeout=0.2).code())]
            )
        assert (await rig.infer(make_request())).outputs

    run(test)
    assert "a gRPC event was lost" in caplog.text
