"""Who gets an answer where many listen and do not read; against peers that only count."""

import asyncio
from itertools import pairwise
from typing import Any, cast

from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.telemetry.logs import get_logger
from weir.text_server.bert_as_service.frames import Subscribed
from weir.text_server.bert_as_service.port import Drops, Peer
from weir.text_server.bert_as_service.zeromq import CANCELLED_PER_TURN, Paced, Publisher


class Reader:
    """A peer that reads only what it is told to."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.topics: set[bytes] = set()
        self.unread = self.charged = 0

    def write(self, data: Any) -> None:
        self.unread += len(b"".join(data) if isinstance(data, (list, tuple)) else data)


def listening(publisher: Publisher, topic: bytes) -> Reader:
    reader = Reader(topic.decode())
    publisher.subscribe(cast(Peer, reader), Subscribed(topic, True))
    return reader


def test_those_who_leave_most_unread_go_without_and_not_the_others() -> None:
    dropped: list[str] = []
    drops = Drops(get_logger("weir"), lambda kind, times: dropped.append(kind))
    publisher = Publisher(1000, 5.0, drops, Account(HttpSettings()))
    honest = listening(publisher, b"honest")
    publisher.publish([b"honest", b"x" * 10])
    assert 0 < honest.unread < 100
    strangers = [listening(publisher, b"%d" % number) for number in range(8)]
    for number in range(8):
        for _ in range(2):
            publisher.publish([b"%d" % number, b"x" * 600])
    held = [stranger.unread for stranger in strangers]
    assert sum(held) > 4000
    assert dropped  # so much may all leave unread: no more for those who have their share

    before = honest.unread
    publisher.publish([b"honest", b"x" * 10])
    publisher.publish([b"0", b"x" * 10])
    assert honest.unread > before
    assert strangers[0].unread == held[0]


async def test_of_those_who_come_at_once_a_few_go_on_in_each_turn() -> None:
    went, turns, paced = list[int](), list[int](), Paced()

    async def go(number: int) -> None:
        await paced.turn()
        went.append(number)

    tasks = [asyncio.create_task(go(number)) for number in range(100)]
    while len(went) < 99:  # one leaves
        await asyncio.sleep(0)
        turns.append(len(went))
        if turns == [0]:
            tasks[50].cancel()
    assert went == [number for number in range(100) if number != 50]
    assert max(after - before for before, after in pairwise(turns)) == CANCELLED_PER_TURN
