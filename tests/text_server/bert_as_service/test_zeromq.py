"""Who gets an answer where many listen and do not read; against peers that only count."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
from tests.text_server.bert_as_service.hashing import DIMENSIONS, expected
from tests.text_server.bert_as_service.opened import Connect, Opened

from weir.client import NEVER, Unreachable
from weir.errors import Cancelled, DeadlineExceeded, Draining, InvalidRequest, SettingsError, Unauthorized, Unsupported
from weir.protocols import HttpSettings
from weir.protocols.access import ControlSettings
from weir.protocols.account import Account
from weir.telemetry.logs import get_logger
from weir.text_server.bert_as_service.client import BertTransport
from weir.text_server.bert_as_service.frames import Received, Subscribed
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


# The frontend over its life: taken ports, counts, one client, ends.


TEXTS = ["First do it", "then do it right", "then do it better"]


def test_a_port_that_is_taken_is_named(opened: Opened) -> None:
    taken = ((Opened(port=opened.port), "zmq_port="), (Opened(port_out=opened.port_out), "zmq_port_out="))
    for other, text in taken:
        with pytest.raises(SettingsError, match=f"host='127.0.0.1', {text}[0-9]+: cannot listen there"):
            asyncio.run(other._start())
        asyncio.run(other.frontend.stop())
    with pytest.raises(SettingsError, match="host='no host at all'"):
        asyncio.run(Opened(http=HttpSettings(host="no host at all"))._start())


def test_calls_are_counted() -> None:
    with Opened() as opened, opened.client() as client:
        client.encode(["a", "b"])
        with pytest.raises(InvalidRequest):
            client.encode(["!fail"])
        opened.call(lambda: opened.frontend.drops("message", "a test"))
        samples = [sample for family in opened.counts.collect() for sample in family.samples]
    counted = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert counted["weir_text_calls_total", "hashing", "zeromq", "200"] == 1
    assert counted["weir_text_calls_total", "hashing", "zeromq", "400"] == 1
    assert counted["weir_texts_total", "hashing", "zeromq"] == 2
    assert counted["weir_zeromq_dropped_total", "message"] == 1


# The end.


def test_the_server_ends_on_request() -> None:
    with Opened() as opened, opened.client(retry=NEVER) as client:
        client.terminate()
        assert opened.ended.wait(60)
        opened.call(opened.frontend.refuse)
        with pytest.raises(Draining):
            client.encode(TEXTS)


def test_with_a_token_nobody_ends_the_server_over_zeromq(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    control = ControlSettings(control_token_file=str(tmp_path / "token"))
    with Opened(control=control) as opened, opened.client() as client:
        with pytest.raises(Unauthorized, match="control token"):
            client.terminate()
        assert not opened.ended.is_set()


def test_what_one_client_can_ask() -> None:
    with Opened() as opened, opened.client("me") as client:
        assert (client.encode(TEXTS) == expected(TEXTS)).all()
        assert (client.encode([("a", "b"), "c"]) == expected([("a", "b"), "c"])).all()
        assert (client.encode([["a", "b"]], is_tokenized=True) == expected([["a", "b"]])).all()
        numbers = [client.encode([text], blocking=False) for text in TEXTS]
        found = {each.id: each.embedding for each in client.fetch()}
        assert (numpy.concatenate([found[number] for number in numbers]) == expected(TEXTS)).all()
        assert client.server_config["client"] == "me"
        assert client.server_status["statistic"]["num_data_request"] == 6
        for said in ({"model": "other"}, {"priority": 1}, {"dimensions": 2}, {"truncate": False}, {"prompt": "query"}):
            with pytest.raises(Unsupported, match="EmbeddingClient does, over HTTP"):
                client.encode(TEXTS, **said)
        with pytest.raises(Unsupported, match="EmbeddingClient does, over HTTP"):
            client.encode(images=[b"file"])
        with pytest.raises(DeadlineExceeded, match=r"no response in time$"):
            client.encode(["!wait"], timeout=0.1)
        client.encode(["!wait"], blocking=False)
        client.close()
        with pytest.raises(Cancelled):
            client.fetch_all()
        with pytest.raises(Cancelled):
            client.encode(TEXTS)


def test_where_nobody_listens(opened: Opened) -> None:
    transport = BertTransport("127.0.0.1", opened.port, 1)
    with pytest.raises(Unreachable, match="no response in time, to anything"):
        transport.config(0.1)
    transport.close()


def test_a_drain_waits_for_the_answers(connect: Connect) -> None:
    with Opened() as opened:
        client = connect(opened)
        client.encode(["!wait"], blocking=False)
        opened.until(lambda: bool(opened.encoder.heard))
        assert not opened.run(opened.frontend.drain(0.05))
        opened.call(opened.encoder.released.set)
        assert opened.run(opened.frontend.drain(20.0))
        assert client.fetch_all()[0].shape == (1, DIMENSIONS)


def test_an_answer_to_a_command_is_waited_for_and_not_kept_after_the_end() -> None:
    account = Account(HttpSettings())
    with Opened(account=account) as opened:

        async def ended() -> bool:
            opened.frontend._handler.received(Received([b"me", b"SHOW_CONFIG", b"1", b"0"]), "peer")
            drained = await opened.frontend.drain(0.0)
            opened.frontend._publisher.publish([b"me", b"{}", b"2"])
            await opened.frontend.stop()
            return drained

        assert not opened.run(ended())
        assert (account.held_bytes, opened.frontend._handler.busy) == (0, False)
