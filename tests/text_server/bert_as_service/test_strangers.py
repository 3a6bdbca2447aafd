"""Whoever finds the ports: garbage, scans and floods are dropped, and take no memory; who serves goes on serving."""

import contextlib
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy
import psutil
import pytest
from tests.rings import subcases
from tests.served import buffered_bytes
from tests.text_server.bert_as_service.hashing import vector_of
from tests.text_server.bert_as_service.opened import Opened

from weir.client.embedding import EncodeCall
from weir.errors import Overloaded, WeirError
from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.text_server.bert_as_service import zeromq
from weir.text_server.bert_as_service.client import BertTransport
from weir.text_server.bert_as_service.frames import GREETING, LONG, MORE, Received, ZmtpParser, frame, ready
from weir.text_server.bert_as_service.zeromq import CANCELLED_PER_TURN, MAX_TOPICS

MIB = 1 << 20
HOUR = 3600.0  # seconds


def still_serves(opened: Opened) -> None:
    with opened.client() as client:
        assert (client.encode(["a b"]) == numpy.stack([vector_of("a b")])).all()


def memory() -> int:
    return int(psutil.Process().memory_info().rss)


def connected(port: int, kind: str | None = None) -> socket.socket:
    """Return a connection; of a socket of `kind`, after the handshake, if that is said."""
    found = socket.create_connection(("127.0.0.1", port), timeout=60)
    if kind is not None:
        found.sendall(GREETING + ready(kind))
        left = len(GREETING) + len(ready("PULL" if kind == "PUSH" else "PUB"))
        while left:
            left -= len(found.recv(left))
    return found


def message(*frames: bytes) -> bytes:
    return b"".join(frame(each, MORE if place + 1 < len(frames) else 0) for place, each in enumerate(frames))


def ends(stranger: socket.socket, data: bytes = b"") -> bool:
    """Send `data` and tell whether the other side ends the connection, which it may do before all of it is sent."""
    with contextlib.suppress(ConnectionError):
        stranger.sendall(data)
        while stranger.recv(1 << 16):
            pass
    stranger.close()
    return True


def floods(stranger: socket.socket, chunks: Sequence[bytes]) -> int:
    """Send until the other side ends the connection; return how much was sent."""
    sent = 0
    with contextlib.suppress(OSError):
        for chunk in chunks:
            stranger.sendall(chunk)
            sent += len(chunk)
    stranger.close()
    return sent


def test_what_is_not_zeromq_is_ended_at_once(opened: Opened) -> None:
    generator = random.Random(4)
    heads = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02\x00", b"SSH-2.0-x\r\n", GREETING + b"\x05\x00"
    old = GREETING[:10] + b"\x01\x00" + GREETING[12:]
    secured = GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:]
    noise = [bytes(generator.randrange(255) for _ in range(200)) for _ in range(20)]
    for port in (opened.port, opened.port_out):
        for head in (*heads, old, secured, *noise):
            assert ends(connected(port), head)
    still_serves(opened)


def test_what_is_no_request_is_dropped(opened: Opened) -> None:
    before = opened.frontend.drops.counts["message"]
    wrong = [b"one"], [b"me", b'["a"]', b"1", b"\xb2"], [b"m" * MIB, b'["a"]', b"1", b"1"]
    refused = opened.frontend.drops.counts["request"]
    with connected(opened.port, "PUSH") as sender:
        for frames in wrong:
            sender.sendall(message(*frames))
        opened.until(lambda: opened.frontend.drops.counts["message"] == before + len(wrong))
        for payload in (b"{", b'["a", "b"]', b"[" * 5000):
            sender.sendall(message(b"me", payload, b"1", b"1"))
        sender.sendall(message(b"0", b"TERMINATION", b"0", b"0", b"no json"))
        opened.until(lambda: opened.frontend.drops.counts["request"] == refused + 3)
    assert not opened.ended.is_set()
    still_serves(opened)


def test_all_may_have_so_many_subscriptions_and_each_may_have_one(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken() -> int:
        return sum(len(peer.topics) for peer in opened.frontend._out.peers)

    monkeypatch.setattr(zeromq, "MAX_ALL_TOPICS", 3)
    first, second, third = [frame(b"\1" + topic) for topic in (b"first", b"second", b"third")]
    with connected(opened.port_out, "SUB") as one:
        one.sendall(first + second + third)
        opened.until(lambda: taken() == 3)
        assert ends(connected(opened.port_out, "SUB"), first + second)
        still_serves(opened)
        one.sendall(frame(b"\0first") + frame(b"\0second"))
        opened.until(lambda: taken() == 1)
        with connected(opened.port_out, "SUB") as other:
            other.sendall(first + second)
            opened.until(lambda: taken() == 3)


def test_nothing_larger_than_allowed_is_taken(opened: Opened) -> None:
    before = memory()
    for said in (bytes((LONG,)) + struct.pack(">Q", 1 << 40), frame(b"", MORE) * 6):
        assert ends(connected(opened.port, "PUSH"), said)
    part = frame(b"x" * (MIB // 2), MORE)
    assert floods(connected(opened.port, "PUSH"), [part] * 400) < 100 * MIB  # libzmq takes all of it
    topics = [frame(b"\1" + b"%d" % number) for number in range(MAX_TOPICS + 1)]
    for said in (b"".join(topics), message(b"\1" + b"x" * MIB)):
        assert ends(connected(opened.port_out, "SUB"), said)
    assert memory() - before < 60 * MIB
    still_serves(opened)


def test_scans_leave_nothing_behind(opened: Opened) -> None:
    def scan(times: int) -> None:
        for number in range(times):
            stranger = connected((opened.port, opened.port_out)[number % 2])
            stranger.sendall((b"\x00" * 50, GREETING, GREETING[:20], b"x" * 2000)[number % 4])
            stranger.close()
        opened.until(lambda: not opened.frontend._in.peers and not opened.frontend._out.peers)

    scan(100)
    before = memory()
    scan(600)
    assert memory() - before < 2 * MIB
    # The last of them may have been accepted only after the look at the peers.
    opened.until(lambda: opened.frontend._in.held == opened.frontend._out.held == 0)
    still_serves(opened)


def test_so_many_connections_may_be_open() -> None:
    account = Account(HttpSettings(max_connections=8))
    account.counters.append(lambda: 2)  # of other endpoints
    with Opened(account=account, http=HttpSettings(max_connections=8)) as opened:
        few = [connected(opened.port, "PUSH") for _ in range(6)]
        opened.until(lambda: account.connections == 8)
        for _ in range(20):
            assert ends(connected(opened.port))
        for each in few:
            each.close()
        opened.until(lambda: not opened.frontend._in.peers)
        still_serves(opened)


def test_who_is_slow_to_say_something_is_not_waited_for() -> None:
    with Opened(http=HttpSettings(header_timeout=0.1)) as opened:
        assert ends(connected(opened.port))
    with Opened(http=HttpSettings(body_timeout=0.1)) as opened:
        assert ends(connected(opened.port, "PUSH"), message(b"me", b"[]")[:-1])
        still_serves(opened)


def test_unfinished_messages_are_bounded_together_and_all_come_whole() -> None:
    with Opened(zmq_max_in_flight=2 * MIB) as opened:
        payload = b'["%b"]' % (b"x" * MIB)
        strangers = [connected(opened.port, "PUSH") for _ in range(8)]
        listening = connected(opened.port_out, "SUB")
        listening.sendall(message(b"\1me"))
        halves = []
        for number, each in enumerate(strangers):
            said = message(b"me", payload, b"%d" % number, b"1")
            each.settimeout(1e-3)
            sent = 0
            with contextlib.suppress(TimeoutError):
                while sent < MIB:
                    sent += each.send(said[sent : sent + (64 << 10)])
            halves.append(said[sent:])
        opened.until(lambda: sum(peer.is_held_back for peer in opened.frontend._in.peers) >= 5)
        assert opened.call(lambda: opened.frontend._in.held) < 5 * MIB
        with ThreadPoolExecutor(8) as threads:
            for each, half in zip(strangers, halves, strict=True):
                each.settimeout(60)
                threads.submit(each.sendall, half)
        opened.until(lambda: len(opened.encoder.heard) == 8)
        assert opened.call(lambda: opened.frontend._in.held) == 0
        assert not opened.frontend.drops.counts["connection"]
        for each in (*strangers, listening):
            each.close()
        still_serves(opened)


def test_a_message_that_waits_for_others_goes_on_when_they_leave() -> None:
    with Opened(zmq_max_in_flight=MIB) as opened:
        first, second = (connected(opened.port, "PUSH") for _ in range(2))
        first.sendall(frame(b"me", MORE) + frame(b"x" * 2 * MIB)[: MIB + 20])
        opened.until(lambda: opened.frontend._in.held > MIB)
        said = message(b"me", b'["%b"]' % (b"x" * 200_000), b"1", b"1")
        second.sendall(said[:100_000])
        opened.until(lambda: any(peer.is_held_back for peer in opened.frontend._in.peers))
        first.close()
        opened.until(lambda: not any(peer.is_held_back for peer in opened.frontend._in.peers))
        second.sendall(said[100_000:])
        opened.until(lambda: len(opened.encoder.heard) == 1)
        second.close()


@pytest.mark.parametrize("account", [None, Account(HttpSettings(max_waiting_bytes=MIB))])
def test_while_much_is_under_way_nothing_is_read(account: Account | None) -> None:
    with Opened(account=account, zmq_max_in_flight=MIB if account is None else 1 << 40) as opened:
        opened.encoder.charges = account is not None
        with opened.client() as client:
            for _ in range(8):
                client.encode(["!wait", "x" * (MIB // 4)], blocking=False)
            opened.until(lambda: opened.frontend._in.paused)
            assert len(opened.encoder.heard) < 8
            # What comes next would be too much.
            assert account is None or MIB // 2 < account.held_bytes < 2 * MIB
            opened.call(opened.encoder.released.set)
            assert len(client.fetch_all()) == 8
        opened.until(lambda: not opened.frontend._in.paused and (account is None or account.held_bytes == 0))


def test_a_message_that_was_kept_waiting_gets_its_time() -> None:
    with Opened(http=HttpSettings(body_timeout=HOUR)) as opened, connected(opened.port, "PUSH") as kept:
        port, handler = opened.frontend._in, opened.frontend._handler
        kept.sendall(frame(b"half")[:-1])
        opened.until(lambda: port.held > 0)

        def wait() -> None:
            handler.in_flight += 1 << 40
            port.pause()
            (peer,) = port.peers
            assert peer.message_since is not None
            peer.message_since -= 2 * HOUR  # as long was nothing read
            port.sweep(time.monotonic())
            handler.in_flight -= 1 << 40
            port.resume()
            port.sweep(time.monotonic())

        opened.call(wait)
        assert opened.frontend.drops.counts["connection"] == 0
        opened.call(lambda: port.sweep(time.monotonic() + 2 * HOUR))
        opened.until(lambda: not port.peers)


def test_time_in_which_the_server_stood_still_is_not_the_clients() -> None:
    stood = 0.0
    limits = HttpSettings(body_timeout=HOUR)
    with Opened(http=limits, clock=lambda: time.monotonic() + stood) as opened, connected(opened.port, "PUSH") as kept:
        port = opened.frontend._in
        kept.sendall(frame(b"half")[:-1])
        opened.until(lambda: port.held > 0)
        stood = 2 * HOUR
        opened.until(lambda: opened.frontend._still > HOUR)
        assert opened.frontend.drops.counts["connection"] == 0


def test_what_clients_hold_is_in_the_account_of_all_endpoints() -> None:
    account = Account(HttpSettings(max_waiting_bytes=2 * MIB))
    text = b'["!wait","' + b"x" * (MIB // 2) + b'"]'
    with Opened(account=account, zmq_grace=HOUR) as opened:
        asking, listening = connected(opened.port, "PUSH"), connected(opened.port_out, "SUB")
        opened.until(lambda: account.connections == 2)
        asking.sendall(message(b"a", text, b"1", b"2"))
        opened.until(lambda: len(opened.encoder.heard) == 1)
        assert MIB // 2 < account.held_bytes < MIB
        asking.sendall(message(b"a", text, b"2", b"2")[: MIB // 4])
        opened.until(lambda: account.held_bytes > 3 * MIB // 4)  # a message that has not come whole
        asking.close()
        opened.until(lambda: account.held_bytes < MIB and account.connections == 1)
        opened.call(opened.encoder.released.set)
        opened.until(lambda: not opened.frontend._handler.busy)
        opened.frontend._publisher._grace = 0.0
        opened.until(lambda: opened.frontend.drops.counts["answer"] == 1)  # kept for who may come, and given up
        opened.until(lambda: account.held_bytes == 0)
        listening.close()
        opened.until(lambda: account.connections == 0)


def test_who_does_not_read_gets_no_more() -> None:
    with Opened(zmq_max_unread=MIB) as opened:
        with opened.client("slow") as asking:
            slow = connected(opened.port_out, "SUB")
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.sendall(message(b"\1slow") + message(b"\1slo") + message(b"\0nothing"))
            opened.until(lambda: len(opened.frontend._publisher._peers) >= 2)
            texts = ["a"] * 20_000  # 640 kB of vectors
            while not opened.frontend.drops.counts["answer"]:
                assert asking.encode(texts).shape == (20_000, 8)
            assert opened.call(lambda: opened.frontend._publisher.unread) < 2 * MIB
            assert opened.call(lambda: opened.frontend._publisher.waiting)
            slow.sendall(frame(b"\x04PING\x00\x01abc", 4) * 100)  # not answered either
            slow.close()
        still_serves(opened)


MANY = b"[" + b",".join([b'"a"'] * 20_000) + b"]"  # their vectors have 640 kB
SENT = (buffered_bytes("wmem") + 4 * MIB) // 640_000  # so many are more than the system takes for a reader


def listening_narrowly(opened: Opened, topic: bytes) -> socket.socket:
    """Return a connection that listens to a topic, for which the system takes little."""
    found = socket.socket()
    found.settimeout(60)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect(("127.0.0.1", opened.port_out))
    found.sendall(GREETING + ready("SUB") + message(b"\1" + topic))
    found.recv(len(GREETING + ready("PUB")), socket.MSG_WAITALL)
    opened.until(lambda: topic in opened.frontend._publisher._peers)
    return found


def test_no_answer_is_lost_to_who_reads_late() -> None:
    with Opened(zmq_max_unread=MIB) as opened:
        with connected(opened.port, "PUSH") as asking, listening_narrowly(opened, b"late") as listening:
            for number in range(SENT):
                asking.sendall(message(b"late", MANY, b"%d" % number, b"20000"))
            opened.until(
                lambda: opened.frontend._publisher.unread > MIB // 2 and bool(opened.frontend._publisher._waiting)
            )
            got: list[bytes | bytearray] = []
            stream = ZmtpParser("PULL", 1 << 30, 5)
            list(stream.feed(GREETING + ready("PUSH")))
            while len(got) < SENT:
                got += [
                    event.frames[3] for event in stream.feed(listening.recv(1 << 20)) if isinstance(event, Received)
                ]
        assert got == [b"%d" % number for number in range(SENT)]
        assert not opened.frontend.drops.counts["answer"]
        opened.until(lambda: not (opened.frontend._publisher._reserved or opened.frontend._publisher._waiting))


def test_who_hardly_reads_is_not_waited_for() -> None:
    with Opened(zmq_max_unread=MIB, http=HttpSettings(body_timeout=0.3), zmq_grace=0.2) as opened:
        with connected(opened.port, "PUSH") as asking, listening_narrowly(opened, b"stuck") as listening:
            for number in range(SENT):
                asking.sendall(message(b"stuck", MANY, b"%d" % number, b"20000"))
            opened.until(lambda: not opened.frontend._out.peers)
            assert ends(listening)
            opened.until(lambda: not opened.frontend._handler.busy)
            assert not opened.frontend._publisher._waiting
        still_serves(opened)


def test_who_asks_much_and_leaves_costs_nothing_and_holds_up_nobody() -> None:
    with Opened(zmq_grace=0.2) as opened:
        turns: list[int] = []

        def look() -> None:
            turns.append(opened.encoder.cancelled)
            opened._loop.call_soon(look)

        asking = connected(opened.port, "PUSH")
        asking.sendall(b"".join(message(b"nobody", b'["!wait"]', b"%d" % number, b"1") for number in range(1000)))
        opened.until(lambda: len(opened.encoder.heard) == 1000)
        opened.call(look)
        opened.until(lambda: opened.encoder.cancelled == 1000)
        opened.until(lambda: not opened.frontend._handler.busy)
        assert max(after - before for before, after in pairwise(turns)) <= 2 * CANCELLED_PER_TURN
        asking.sendall(message(b"nobody", b'["a"]', b"1000", b"1"))
        opened.until(lambda: opened.frontend.drops.counts["answer"] > 0)
        assert not opened.call(lambda: opened.frontend._publisher.waiting)
        asking.close()
        still_serves(opened)


def test_while_the_queue_is_full_only_some_requests_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq, "RETRYING", 8)
    with Opened() as opened:
        opened.encoder.refusals = [Overloaded("full")] * 100_000
        asking = connected(opened.port, "PUSH")
        asking.sendall(b"".join(message(b"me", b'["a%d"]' % number, b"%d" % number, b"1") for number in range(100)))

        def asked() -> Counter[str]:
            return Counter(str(heard.texts[0]) for heard in opened.encoder.heard)

        opened.until(lambda: len(asked()) == 100 and max(asked().values()) > 3)
        assert len([text for text, times in opened.call(asked).items() if times > 1]) == 8
        opened.call(opened.encoder.refusals.clear)
        opened.until(lambda: not opened.frontend._handler.busy)
        assert set(opened.call(asked)) == {f"a{number}" for number in range(100)}
        asking.close()


def test_an_answer_waits_for_who_comes_back(opened: Opened) -> None:
    asking, listening = connected(opened.port, "PUSH"), connected(opened.port_out, "SUB")
    asking.sendall(message(b"late", b'["a b"]', b"7", b"1"))

    def until_kept(number: bytes) -> None:
        kept = opened.frontend._publisher._kept
        opened.until(lambda: [bytes(each.frames[-1]) for each in kept[b"late"]] == [number])

    until_kept(b"7")
    listening.sendall(frame(b"\x09SUBSCRIBElate", 4) + frame(b"\x04PING\x00\x01abc", 4))
    expected = frame(b"\x04PONGabc", 4)
    assert vector_of("a b").tobytes() in read_until(listening, expected)
    listening.sendall(frame(b"\x06CANCELlate", 4))
    opened.until(lambda: not opened.frontend._publisher._subscribers(b"late"))
    asking.sendall(message(b"late", b'["a b"]', b"8", b"1"))
    until_kept(b"8")
    listening.sendall(message(b"\1lat"))
    assert listening.recv(1 << 16).startswith(message(b"late", b"")[:6])
    asking.close()
    listening.close()


@subcases("overheard", [b"", b"la"])
def test_a_stranger_who_listens_to_all_takes_no_answer_away(opened: Opened, overheard: bytes) -> None:
    stranger = connected(opened.port_out, "SUB")
    stranger.sendall(message(b"\1" + overheard))
    opened.until(lambda: bool(opened.frontend._publisher._subscribers(b"later")))
    asking, listening = connected(opened.port, "PUSH"), connected(opened.port_out, "SUB")
    asking.sendall(message(b"later", b'["a b"]', b"7", b"1"))
    assert vector_of("a b").tobytes() in read_until(stranger, b"7")
    listening.sendall(message(b"\1later"))
    assert vector_of("a b").tobytes() in read_until(listening, b"7")
    opened.until(lambda: not opened.frontend._publisher._kept)
    for each in (stranger, asking, listening):
        each.close()


def read_until(connection: socket.socket, end: bytes) -> bytes:
    got = b""
    while not got.endswith(end):
        got += connection.recv(1 << 16)
    return got


def test_no_more_is_kept_for_who_does_not_come_than_allowed() -> None:
    with Opened(zmq_max_unread=20_000) as opened:
        asking = connected(opened.port, "PUSH")
        for number in range(100):
            asking.sendall(message(b"nobody", b'["a b"]', b"%d" % number, b"1"))
        opened.until(lambda: opened.encoder.heard[99:] != [])
        opened.until(lambda: opened.frontend.drops.counts["answer"] > 50)
        assert opened.frontend._publisher._kept_bytes <= 20_000
        asking.close()


def test_only_this_machine_may_end_the_server(opened: Opened) -> None:
    stock = [b"0", b"TERMINATION", b"0", b"0"]
    opened.call(lambda: opened.frontend._handler.received(Received(stock), "192.0.2.7"))
    assert not opened.ended.is_set()
    sender = connected(opened.port, "PUSH")
    sender.sendall(message(*stock))
    assert opened.ended.wait(60)
    sender.close()


def test_a_client_bears_strange_answers(opened: Opened) -> None:
    transport = BertTransport("127.0.0.1", opened.port, opened.port_out, identity="me")
    for answer in ([b"me"], [b"me", b"{}", b"one"], [b"me2", b"{}", b"1"], [b"me", b"{}", b"7"]):
        transport._deliver(answer)
    for place, answer in enumerate(
        (
            [b"{", b""], [b"{}", b""], [b"[]", b""], [b"{}", b"1234"], [b'{"error": 3}'],
            [b'{"dtype": "float32", "shape": [3], "tokens": ""}', b"1234"], [b'{"dtype": "O", "shape": [1], "tokens": ""}', b"12345678"],
        )
    ):  # fmt: skip
        future = transport.start(EncodeCall(["!wait"]), 20.0)
        transport._deliver([b"me", *answer, b"%d" % (1 + place)])
        with pytest.raises(WeirError, match="something other than vectors"):
            future.result(60)
    assert transport.config(20.0)["max_seq_len"] == 6
    transport.close()
    transport.close()
