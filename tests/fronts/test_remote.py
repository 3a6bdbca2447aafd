"""What a front sends the dispatcher."""

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from weir.errors import Overloaded
from weir.fronts.messages import (
    PLAIN,
    CallerLeft,
    Link,
    Outputs,
    RequestForm,
    Submit,
    reader_of_dispatcher,
    reader_of_front,
)
from weir.fronts.places import MemoryReceiver, OutputReader
from weir.fronts.remote import RemoteHandle, Requests
from weir.messages import JSON, Form


def submit(requests: Requests, request: Any) -> None:
    """Have `requests` send what is asked of a model without an arena."""
    model: Any = SimpleNamespace(number=1, arena_bytes=0, _requests=requests)
    RemoteHandle.submit(model, request)


def asked(payload: Any, arrival: float, **changes: Any) -> Any:
    """Return what a front asks of its Requests."""
    form = Form(**{"timeout": 5.0, "content_type": JSON, "accept": JSON, "frontend": "http", **changes})
    return SimpleNamespace(payload=payload, arrival=arrival, form=form, settled=False)


def sent_by(act: Callable[[Requests], None]) -> list[list[Any]]:
    """Return the frames that a front has sent, once `act` has used its Requests and the turn has ended, without its forms."""

    async def main() -> list[list[Any]]:
        ours, theirs = socket.socketpair()
        with theirs:
            link: Link[Any] = Link(ours, asyncio.get_running_loop(), reader_of_dispatcher(), print, print)
            act(Requests(link, OutputReader(MemoryReceiver(ours), link.put, asyncio.get_running_loop())))
            await asyncio.sleep(0)
            frames = reader_of_front().feed(theirs.recv(8 << 20))
            link.close()
        return [[message for message in frame if not isinstance(message, RequestForm)] for frame in frames]

    return asyncio.run(main())


def test_the_requests_of_a_turn_that_are_alike_are_one_message() -> None:
    def act(requests: Requests) -> None:
        for number in range(3):
            submit(requests, asked(b"%d" % number, float(number)))

    assert sent_by(act) == [[Submit(0, 0, [0.0, 1.0, 2.0], [b"0", b"1", b"2"])]]


@pytest.mark.parametrize(
    ("arrival", "second"), [(2.0, {"timeout": 6.0}), (0.5, {}), (2.0, {"explain": True}), (2.0, {"frontend": "grpc"})], ids=["form", "order", "explain", "frontend"]
)  # fmt: skip
def test_others_have_a_message_of_their_own(arrival: float, second: dict[str, Any]) -> None:
    def act(requests: Requests) -> None:
        submit(requests, asked(b"a", 1.0))
        submit(requests, asked(b"b", arrival, **second))

    ((one, other),) = sent_by(act)
    assert (one.first, one.payloads, other.first, other.payloads) == (0, [b"a"], 1, [b"b"])


def test_what_left_or_is_followed_by_another_message_does_not_grow() -> None:
    def act(requests: Requests) -> None:
        first = asked(b"a", 1.0)
        submit(requests, first)
        requests.cancel(first)
        submit(requests, asked(b"b", 2.0))
        requests.link.flush()
        submit(requests, asked(b"c", 3.0))
        submit(requests, asked(b"d", 4.0))

    assert sent_by(act) == [
        [Submit(0, 0, [1.0], [b"a"]), CallerLeft(0), Submit(1, 0, [2.0], [b"b"])],
        [Submit(2, 0, [3.0, 4.0], [b"c", b"d"])],
    ]


def ended_by(outputs: list[bytes], *asks: Any) -> None:
    """Have a front that has submitted `asks` get plain responses."""

    def act(requests: Requests) -> None:
        for ask in asks:
            ask.requests = requests
            submit(requests, ask)
        requests.answered(Outputs(list(range(len(asks))), [*outputs]))

    sent_by(act)


def test_a_request_whose_caller_leaves_while_another_ends_gets_no_response() -> None:
    ends: list[Any] = []
    first, second = asked(b"a", 1.0), asked(b"b", 2.0)

    def finish(output: Any, dispatch: Any) -> None:
        ends.append(output)
        first.requests.cancel(second)

    first.finish = finish
    second.finish = lambda output, dispatch: ends.append(output)
    ended_by([b"1", b"2"], first, second)
    assert ends == [b"1"] and first.settled and second.settled


def test_a_front_keeps_no_refused_responses() -> None:
    first = asked(b"a", 1.0)
    first.finish = lambda output, dispatch: dispatch.refuse(first, Overloaded("no room"))
    ended_by([b"1"], first)
    assert not PLAIN.refused


def test_arrays_that_cannot_be_read_end_their_request_alone() -> None:
    ends: list[Any] = []
    first, second = asked({"x": numpy.zeros(2, "f4")}, 1.0), asked(b"b", 2.0)
    first.trace, first.abandon = None, lambda: ends.append("abandoned")
    second.finish = lambda output, dispatch: ends.append(output)
    ended_by([b"no arrays", b"2"], first, second)
    assert ends == ["abandoned", b"2"]
