"""The life of one request without a task of its own: what it sends at its end, and what its caller stops by leaving."""

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
from tests.protocols.test_exchange import Pair, items, serving
from tests.streaming_models import Count, Script, Ticking
from tests.waiting import until

from weir.errors import InvalidRequest, ModelNotReady, Overloaded, unread_model
from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.protocols.call import InferenceCall, Writing
from weir.protocols.exchange import Exchange, StreamPart
from weir.protocols.offloading import LONG_BODY, LONG_RESPONSE
from weir.serving.service import Service
from weir.testing import FakeExecutor
from weir.wire.inference import InferenceRequest, InferenceResponse

DONE = b"[3,3]"


class Recorded(InferenceCall):
    """A request for `service`. It keeps what it would send, how often it was released, the threads in which it was read and written, and what was held then.

    It has a body of `size` bytes, and a response of `length`. A thread reads or writes no more while `pause` is set.
    """

    def __init__(self, service: Service, size: int = 1, length: int = 1) -> None:
        super().__init__(Account(HttpSettings()), 7)
        self.asked = Exchange(service, frontend="lines")
        self.size, self.length = size, length
        self.sent: list[Any] = []
        self.released = 0
        self.worked: list[tuple[bool, int]] = []
        self.at_work, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def begin(self) -> None:
        """Read the body, and have the model compute the request."""
        self.read(self.size, self._read, lambda read: self.infer(self.asked, read, self._writing))

    def _read(self) -> InferenceRequest:
        self._work()
        return InferenceRequest("pair", [items(b"3")])

    def _writing(self, response: InferenceResponse) -> Writing:
        return Writing(self.length, partial(self._written, response.outputs[0].array[0]))

    def _written(self, document: bytes) -> bytes:
        self._work()
        return document

    def _work(self) -> None:
        in_thread = threading.current_thread().name.startswith("weir-")
        self.worked.append((in_thread, self.account.held_bytes))
        if in_thread:
            self.at_work.set()
            assert self.go_on.wait(60)

    def send(self, message: bytes) -> int:
        self.sent.append(message)
        return len(message)

    async def send_part(self, message: Any) -> int:
        self.sent.append(message)
        return 3

    def fail(self, error: Exception) -> None:
        self.sent.append(error)

    def release(self) -> None:
        super().release()
        self.released += 1


def raised(error: Exception, *_: Any) -> Any:
    raise error


def shown(part: StreamPart) -> Writing:
    """Write a response of a stream as what it holds, and whether it is the last one."""
    return Writing(1, lambda: (*[each.array[0] for each in part.response.outputs], part.last))


async def over(call: Recorded) -> None:
    """Return when the request has ended."""
    await until(lambda: call.over)


async def test_a_response_is_sent_and_counted_after_all_was_given_back() -> None:
    async with serving(Pair) as (service, observer):
        for size, length in ((1, 1), (LONG_BODY + 1, LONG_RESPONSE + 1)):
            call = Recorded(service, size, length)
            call.begin()
            await over(call)
            assert (call.sent, call.released, call.account.held_bytes) == ([DONE], 1, 0)
            assert call.worked == [(size > 1, 0), (size > 1, length if size > 1 else 0)]
            call.leave()
            assert call.released == 1
    assert observer.transfers == [("pair", "lines", 7, len(DONE))] * 2


async def test_a_stream_ends_with_a_mark_unless_it_wants_none() -> None:
    for model, document, ends, parts in (
        (Count, b"2", True, [(b"1", False), (b"2", False), (True,)]),
        (Count, b"2", False, [(b"1", False), (b"2", False)]),
        (Script, b'["a", {"last": "b"}]', True, [(b'"a"', False), (b'"b"', True)]),
    ):
        async with serving(model) as (service, observer):
            call = Recorded(service)
            asked = InferenceRequest(service.facts.name, [items(document)])
            call.attempt(partial(call.stream, call.asked, asked, shown, ends=ends))
            await over(call)
            assert (call.sent, call.released) == (parts, 1)
        assert observer.transfers == [(service.facts.name, "lines", 7, 3 * len(parts))]


@pytest.mark.parametrize("state", ["reading", "loading", "queued", "writing", "streaming"])
async def test_who_leaves_stops_what_is_under_way_and_gets_nothing(state: str) -> None:
    executor = FakeExecutor()
    streams = state == "streaming"
    async with serving(Ticking if streams else Pair, executor=executor if state == "queued" else "inline") as (
        service,
        observer,
    ):
        long = {"reading": {"size": LONG_BODY + 1}, "writing": {"length": LONG_RESPONSE + 1}}
        call = Recorded(service, **long.get(state, {}))
        if state in long:
            call.go_on.clear()

        if streams:
            call.attempt(partial(call.stream, call.asked, InferenceRequest("ticking", [items(b'"go"')]), shown))
            await until(lambda: bool(call.sent))
        elif state == "loading":
            call.attempt(partial(raised, unread_model("pair", asyncio.get_running_loop().create_future)))
        else:
            call.begin()
        if state in long:
            await asyncio.to_thread(call.at_work.wait)
        if state == "queued":
            await until(lambda: bool(executor.pending))
        assert not (sent := [*call.sent]) or streams
        call.leave()
        call.leave()
        call.go_on.set()
        await until(lambda: call.released > 0)
        if state == "queued":
            executor.respond_next(lambda batch: [DONE])
        await until(lambda: service.state()["waiting"] == service.state()["in_flight"] == 0)
        assert (call.sent, call.released, call.account.held_bytes) == (sent, 1, 0)
    assert not observer.refusals and not observer.transfers


async def test_an_error_in_any_state_is_the_end_and_is_reported_once() -> None:
    async with serving(Pair) as (service, observer):
        no_room, wrong = Overloaded("no room"), InvalidRequest("wrong")

        for attribute in ("_read", "_writing", "_written", "send", "charge"):
            error = wrong if attribute.startswith("_") else no_room
            call = Recorded(service, LONG_BODY + 1, LONG_RESPONSE + 1)
            setattr(call, attribute, partial(raised, error))
            call.begin()
            await over(call)
            assert (call.sent, call.over, call.released) == ([error], True, 1)
            call.end(wrong)
            assert call.sent == [error]
    # Without a model, of which no observer knows; before there is a response; and while a thread writes it, when it has been counted.
    assert [error for _, error, _ in observer.responses] == [wrong, None, None, no_room]
    assert not observer.refusals


async def test_a_part_that_cannot_be_sent_is_no_second_end() -> None:
    async with serving(Count) as (service, observer):
        call, no_room = Recorded(service), Overloaded("no room")
        setattr(call, "send_part", partial(raised, no_room))  # noqa: B010 - mypy refuses to assign to a method
        asked = InferenceRequest(service.facts.name, [items(b"200")])
        call.attempt(partial(call.stream, call.asked, asked, shown))
        await over(call)
        assert call.sent == [no_room]
    assert (observer.kinds.total(), observer.refusals) == (1, [])


async def test_a_model_on_demand_is_read_once_and_then_found() -> None:
    async with serving(Pair) as (service, _):
        reads: list[int] = []

        async def read() -> None:
            reads.append(len(reads))

        for times, end in ((1, bytes), (2, ModelNotReady)):
            call, missing = Recorded(service), iter(range(times))

            def find(call: Recorded = call, missing: Any = missing) -> None:
                if next(missing, None) is not None:
                    raise unread_model("pair", read)
                call.begin()

            call.attempt(find)
            await over(call)
            assert [type(each) for each in call.sent] == [end]
        assert reads == [0, 1]
