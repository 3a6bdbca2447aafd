"""The thread of gRPC's core, and the messages that may be received at the same time."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tests.frontends.grpc.kit import FRONTS, INFER, PREFACE, Rig, item, make_request, refuses, serving
from tests.waiting import until
from tests.workers.models import Echo

from weir import Service
from weir.errors import RequestTimeout, WeirError
from weir.frontends.grpc import core as tested
from weir.frontends.grpc.aio import AioCore
from weir.frontends.grpc.call import cygrpc
from weir.frontends.grpc.core import PATIENCE, Core, Intake, Unsent
from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.testing import FakeClock, FakeExecutor
from weir.wire.kserve_grpc import methods, read_stream_response, write_request

Code = grpc.StatusCode
LIMIT = 20.0  # seconds after which a thread is taken for one that waits for ever


def bare_core() -> Any:
    """Return a core that serves nothing."""
    account = Account(HttpSettings())
    return Core({}, [], lambda path, call: True, lambda error, call: None, account, max_message_size=1000, patience=1.0)


@contextmanager
def ending(requested: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[asyncio.AbstractEventLoop, Any]]:
    """A server that was notified to end, and a loop that does not run but was notified of the first event. Such a server has an event for each
    of the calls that were `requested`, and then one more: all calls have ended."""
    monkeypatch.setattr(tested, "_REQUESTED", requested)
    monkeypatch.setattr(tested, "_LOOP_LOOK_EVERY", 0.01)
    loop, notified = asyncio.new_event_loop(), threading.Event()
    wake = loop.call_soon_threadsafe

    def woken(*arguments: Any) -> Any:
        handle = wake(*arguments)
        notified.set()
        return handle

    monkeypatch.setattr(loop, "call_soon_threadsafe", woken)

    async def make() -> Any:
        core = bare_core()
        await core.start()
        return core

    core = loop.run_until_complete(make())
    core._ending = True
    core._arrivals.expect()
    loop.call_soon(loop.stop)
    loop.run_forever()  # the thread gets the queue, which has no events yet
    core._server.shutdown(core._arrivals.queue, core._shut)
    assert notified.wait(LIMIT)
    yield loop, core
    loop.close()
    for each in core._queues:
        each.thread.join(LIMIT)
        assert not each.thread.is_alive()
    core.discard()


def test_the_thread_ends_if_the_loop_is_closed_before_it_hears_of_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    with ending(0, monkeypatch) as (_, core):
        assert not core._ended.done()


def test_the_thread_ends_if_the_loop_is_closed_before_its_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "_EVENTS_AT_ONCE", 1)
    with ending(4, monkeypatch) as (loop, core):
        loop.call_soon(loop.stop)
        loop.run_forever()  # an event of the thread; the first turn is to come
        assert not core._ended.done()
        assert core._arrivals._given.locked()


@pytest.mark.parametrize(("entries", "most"), [(0, 64), (100_000, 1)], ids=["", "with much metadata"])
async def test_others_have_their_turns_between_events(
    entries: int, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One that fails harms no other event."""
    core, taken = bare_core(), list[Any]()

    def take(event: Any) -> None:
        taken.append(event)
        raise LookupError("it fails")

    kind = cygrpc.CompletionType.operation_complete
    events = core._arrivals
    events._next = lambda until: SimpleNamespace(completion_type=kind, tag=take, invocation_metadata=(None,) * entries)
    events._expected = 2 * most
    events._turn()
    assert len(taken) == most
    assert "could not be answered" in caplog.text
    events._expected = 0
    core.discard()


async def test_the_core_outlives_an_event_that_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as rig:
        core: Any = rig.server._core
        events, failed = core._arrivals, list[Any]()
        poll = events._next

        def short_of_memory(until: float | None) -> Any:
            event = poll(until)
            if event.completion_type == cygrpc.CompletionType.operation_complete and len(failed) < 5:
                failed.append(event)
                raise MemoryError
            return event

        events._next = short_of_memory
        while len(failed) < 5:
            await rig.raw(INFER, write_request(make_request()), timeout=0.2).code()
        assert (await rig.infer(make_request())).outputs
    assert "a gRPC event was lost" in caplog.text


class FakeCall:
    """A call that can be over, be watched and be cancelled."""

    over = cancelled = watched = False

    def watch(self) -> None:
        self.watched = True

    def cancel(self) -> None:
        self.cancelled = True


class Rules:
    """An Intake, and what it did."""

    def __init__(self, calls: int = 2, messages: int = 2) -> None:
        self.refused: list[WeirError] = []
        self.received: list[Any] = []
        self.clock = FakeClock()
        self.account = Account(HttpSettings(max_connections=calls))
        self.intake = Intake(self.account, messages, lambda error, call: self.refused.append(error), self.clock)

    def receive(self, calls: Sequence[Any], peer: str = "") -> None:
        for call in calls:
            self.intake.receive(call, peer or str(id(call)), partial(self.received.append, call))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.intake.look()


def fakes(count: int) -> list[Any]:
    return [FakeCall() for _ in range(count)]


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
    rules, calls = Rules(messages=2), fakes(5)
    rules.receive(calls)
    assert (rules.received, rules.intake.waits) == (calls[:2], True)
    assert [call.watched for call in calls] == [False, False, True, True, True]  # who waits may leave
    calls[2].over = True  # its caller has left
    rules.intake.received(calls[0])
    assert rules.received == [*calls[:2], calls[3]]
    rules.intake.received(calls[1])
    assert (rules.received[-1], rules.intake.waits) == (calls[4], False)


def test_connections_take_turns_and_none_takes_more_than_half() -> None:
    rules, hostile, honest = Rules(messages=4), fakes(9), fakes(4)
    rules.receive(hostile, "hostile")
    assert rules.received == hostile[:2]
    rules.receive(honest, "honest")
    assert rules.received == [*hostile[:2], *honest[:2]]  # at once, whoever came before
    rules.intake.received(hostile[0])
    rules.intake.received(honest[0])
    assert rules.received[4:] == [hostile[2], honest[2]]


def test_who_does_not_send_loses_the_turn_while_others_wait() -> None:
    rules, calls = Rules(messages=1), fakes(3)
    rules.receive(calls[:1])
    rules.pass_time(PATIENCE + 1)
    assert not rules.refused  # nobody waits
    rules.receive(calls[1:2])
    assert [type(error) for error in rules.refused] == [RequestTimeout]
    assert rules.received == calls[:2]
    rules.receive(calls[2:])
    rules.pass_time(PATIENCE)
    assert rules.received == calls[:2]
    rules.pass_time(1.0)
    assert rules.received == calls


def test_connections_that_lost_turns_do_not_hold_back_the_others() -> None:
    rules, waiting, again = Rules(messages=8), fakes(100), fakes(2)
    peers = [f"stalled {place % 4}" for place in range(40)]
    for peer in peers:
        rules.intake.begin(peer)
        rules.receive(fakes(1), peer)
    rules.pass_time(PATIENCE + 1)
    rules.intake.begin("honest")
    rules.receive(waiting, "honest")
    for call in waiting:
        assert call in rules.received
        rules.intake.received(call)
    for peer in peers:
        rules.intake.end(peer)
    rules.receive(again, "stalled 0")
    assert set(again) <= set(rules.received)  # with its next calls, it is trusted again


async def test_answers_that_are_not_sent_are_charged_and_given_up() -> None:
    account = Account(HttpSettings(max_waiting_bytes=100))
    unsent, calls = Unsent(account, patience=0.0), fakes(2)
    numbers = [unsent.add(call, 200) for call in calls]
    assert account.held_bytes == 400
    unsent.remove(numbers[0])
    await until(lambda: bool(calls[1].cancelled))
    assert not calls[0].cancelled
    unsent.remove(numbers[1])
    assert account.held_bytes == 0


async def test_connections_without_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.frontends.grpc.core._COUNT_EVERY", 0.0)
    async with serving() as rig, serving():
        account = rig.context.account
        opened = [await asyncio.open_connection("127.0.0.1", rig.server.port) for _ in range(120)]
        for _, writer in opened:
            writer.write(PREFACE)
        await until(lambda: account.connections == 120)
        assert (await rig.infer(make_request())).outputs
        await until(lambda: account.connections == 121)
        for _, writer in opened:
            writer.close()
        await until(lambda: account.connections == 1)


async def test_who_says_nothing_or_does_nothing_is_let_go() -> None:
    async with serving(http={"header_timeout": 0.2, "idle_timeout": 0.4}) as rig:

        async def let_go(sent: bytes) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
            writer.write(sent)
            while await reader.read(1000):
                pass
            writer.close()

        await asyncio.gather(*[let_go(sent) for sent in (b"", PREFACE[:8], PREFACE)])


def large(size: int) -> bytes:
    return write_request(item(b'"' + b"x" * size + b'"', "echo"))


def calling(rig: Rig) -> int:
    """Return how many connections have calls under way."""
    core: Any = rig.server._core
    return int(core._intake.connections)


async def test_messages_are_charged_until_they_are_answered() -> None:
    """Compressed ones as what they are."""
    executor = FakeExecutor()
    async with serving(Echo, executor=executor, http={"max_waiting_bytes": 5_000_000}) as rig:
        account = rig.context.account
        accepted = rig.raw(INFER, large(600_000))
        await until(lambda: bool(executor.pending))
        assert 600_000 < account.held_bytes < 700_000
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            call = rig.raw(INFER, large(4_600_000), compression=compression)
            await refuses(call, Code.RESOURCE_EXHAUSTED, "max_waiting_bytes")
        executor.respond_next(lambda batch: [b"1"] * len(batch))
        assert await accepted
        await until(lambda: account.held_bytes == 0 and calling(rig) == 0)


async def test_a_long_response_for_which_there_is_no_room_is_refused() -> None:
    executor = FakeExecutor(lambda batch: [b"1" * 300_000] * len(batch))
    async with serving(Echo, executor=executor, http={"max_waiting_bytes": 1_000_000}) as rig:
        account = rig.context.account
        account.take(500_000)
        assert await rig.raw(INFER, large(10))
        await until(lambda: account.held_bytes == 500_000)
        account.take(200_000)
        await refuses(rig.raw(INFER, large(10)), Code.RESOURCE_EXHAUSTED, "max_waiting_bytes")
        await until(lambda: account.held_bytes == 700_000)
        assert rig.observer.kinds == {"": 1, "Overloaded": 1}


async def test_more_calls_than_may_be_are_refused() -> None:
    async with serving(executor=FakeExecutor(), http={"max_connections": 3}) as rig:
        calls = [rig.raw(INFER, write_request(make_request())) for _ in range(3)]
        await until(lambda: rig.under_way == 3)
        await refuses(rig.infer(make_request()), Code.RESOURCE_EXHAUSTED, "max_connections")
        for call in calls:
            call.cancel()
        await until(lambda: calling(rig) == 0)


async def test_who_leaves_before_its_message_or_sends_none_is_counted_no_more() -> None:
    async with serving() as rig:
        call, empty = rig.channel.stream_unary(INFER)(), rig.channel.stream_unary(INFER)()  # nothing is written
        await until(lambda: calling(rig) == 1)
        call.cancel()
        await empty.done_writing()
        await refuses(empty, Code.UNIMPLEMENTED, "exactly one request message")
        await until(lambda: calling(rig) == 0)
        assert (await rig.infer(make_request())).outputs


async def test_a_stream_reads_no_more_than_its_share_and_answers_all() -> None:
    executor = FakeExecutor()
    service = Service(Echo, executor=executor, max_batch_size=1)
    async with serving(service, http={"max_waiting_bytes": 1_000_000}) as rig:
        call = rig.stream()

        async def send() -> None:
            for _ in range(20):
                await call.write(large(100_000))
            await call.done_writing()

        sending = asyncio.ensure_future(send())
        for _ in range(20):
            await until(lambda: bool(executor.pending))
            assert rig.context.account.held_bytes < 350_000
            executor.respond_next(lambda batch: [b"1"] * len(batch))
            assert read_stream_response(await call.read())[1].outputs
        await sending
        await until(lambda: rig.context.account.held_bytes == 0)


async def test_an_answer_of_a_stream_for_which_there_is_no_room_is_its_error() -> None:
    async with serving(Echo, http={"max_waiting_bytes": 1_000_000}) as rig:
        account, call = rig.context.account, rig.stream()
        account.take(930_000)
        await call.write(large(30_000))  # short enough to be read at once, without room for its values
        assert read_stream_response(await call.read())[1].outputs  # there is room for the request and its answer
        await until(lambda: account.held_bytes == 930_000)
        account.take(20_000)
        await call.write(large(30_000))  # there is room for the request alone
        assert "max_waiting_bytes" in read_stream_response(await call.read())[0]
        call.cancel()
        await until(lambda: account.held_bytes == 950_000)
        assert rig.observer.kinds == {"": 2}


@pytest.mark.parametrize("over", [Core, FRONTS], indirect=True)
async def test_who_does_not_read_the_responses_of_a_stream_is_let_go(over: None) -> None:
    async def write_for_ever(call: Any) -> None:
        with suppress(asyncio.InvalidStateError):  # the call has ended
            while True:
                await call.write(large(100_000))

    async with serving(Echo, http={"body_timeout": 0.5}) as rig:
        writing = asyncio.ensure_future(write_for_ever(rig.stream()))
        await until(lambda: rig.context.account.held_bytes > 100_000)
        await until(lambda: rig.context.account.held_bytes == 0 and writing.done())


@pytest.mark.parametrize("over", [Core, AioCore, FRONTS], indirect=True)
async def test_a_message_of_a_stream_that_is_too_large_is_refused_alone(over: None) -> None:
    async with serving(Echo, http={"max_waiting_bytes": 20_000}) as rig:
        call = rig.stream()
        for size, too_large in ((30_000, True), (100, False)):
            await call.write(large(size))
            error, response = read_stream_response(await call.read())
            assert ("max_waiting_bytes" in error, bool(response.outputs)) == (too_large, not too_large)
        await call.done_writing()
        assert await call.code() is Code.OK
        await until(lambda: rig.context.account.held_bytes == 0)


async def test_watchers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.frontends.grpc.services._MOST_WATCHERS", 2)
    (watch,) = [method for method in methods("grpc.health.v1.Health") if method.name == "Watch"]
    async with serving() as rig:
        begin = partial(rig.channel.unary_stream(watch.path), watch.request().SerializeToString())
        first, second = begin(), begin()
        for each in (first, second):
            await each.read()
        await refuses(begin().read(), Code.RESOURCE_EXHAUSTED)
        first.cancel()
        again = begin()
        while await asyncio.wait([reading := asyncio.ensure_future(again.read())]) and reading.exception():
            again = begin()
        for each in (second, again):
            each.cancel()
