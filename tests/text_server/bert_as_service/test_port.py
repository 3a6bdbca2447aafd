"""port.py: what one connection sends is handled a little at a time, and nothing of it is lost."""

import asyncio
from typing import Any

from structlog.testing import CapturingLogger
from tests.frontends.http.fast.kit import FakeTransport, settled
from tests.waiting import until

from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.text_server.bert_as_service.frames import COMMAND, GREETING, Event, Received, frame, ready
from weir.text_server.bert_as_service.port import Drops, Limits, Peer, Port

LIMITS = Limits(1 << 20, 5, 10, 1 << 22, 10.0, 10.0)
PING, PONG = frame(b"\x04PING\0\0", COMMAND), frame(b"\x04PONG", COMMAND)


class Opened:
    """A connection that has shaken hands, and the events of it."""

    def __init__(self) -> None:
        logger: Any = CapturingLogger()
        self.events: list[Event] = []
        self.port = Port(
            "PULL", LIMITS, Drops(logger), Account(HttpSettings()), lambda peer, event: self.events.append(event)
        )
        self.transport = FakeTransport()
        self.peer = Peer(self.port)
        self.transport.connect(self.peer)
        self.transport.receive(GREETING + ready("PUSH"))
        self.transport.sent.clear()


async def test_a_flood_of_pings_is_answered_in_many_turns_of_the_loop() -> None:
    opened = Opened()
    opened.transport.receive(PING * 10_000)
    assert opened.transport.sent == PONG * 16 and not opened.transport.is_reading()
    await asyncio.sleep(0)
    assert opened.transport.sent == PONG * 32
    await until(lambda: not opened.peer.has_pending_events)
    assert opened.transport.sent == PONG * 10_000 and opened.transport.is_reading()
    assert opened.peer.held == opened.port.held == 0


async def test_a_flood_of_messages_is_heard_in_order_and_whole() -> None:
    opened = Opened()
    opened.transport.receive(b"".join(frame(b"%d" % number) for number in range(200)) + frame(b"cut")[:-1])
    assert len(opened.events) == 16
    opened.port.pause()  # what has come is heard all the same
    await until(lambda: not opened.peer.has_pending_events)
    assert [each.frames for each in opened.events if isinstance(each, Received)] == [
        [b"%d" % number] for number in range(200)
    ]
    assert not opened.transport.is_reading() and opened.peer.message_since is not None
    opened.port.resume()
    assert opened.transport.is_reading()
    opened.transport.receive(b"t")
    assert len(opened.events) == 201


async def test_what_is_wrong_ends_the_connection_when_its_turn_comes() -> None:
    opened = Opened()
    opened.transport.receive(PING * 100 + b"\xf0\0")
    assert not opened.transport.is_closing()
    await settled()
    assert opened.transport.is_closing() and opened.transport.sent == PONG * 100
    assert not opened.port.peers


async def test_who_leaves_is_heard_no_longer() -> None:
    opened = Opened()
    opened.transport.receive(frame(b"x") * 1000)
    opened.transport.abort()
    await settled()
    assert len(opened.events) == 16
