"""Who gets which answer of a WebSocket, and how many are kept."""

import asyncio
import socket
import ssl
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from weir.client import NEVER, AsyncWebSocketClient, ConnectionLost, Unreachable
from weir.client.websocket import MAX_KEPT, Received, ResponseRouter, connect_options
from weir.errors import Overloaded
from weir.wire.websocket import ErrorMessage

RESETS = 20


def answered(box: asyncio.Queue[Received]) -> list[Received]:
    return [box.get_nowait() for _ in range(box.qsize())]


def test_each_answer_goes_to_whoever_waits_for_it() -> None:
    mail, one, two = ResponseRouter("ws://x"), asyncio.Queue[Received](), asyncio.Queue[Received]()
    first, second = mail.expect(one), mail.expect(two)
    for own in (second, "somebody else's", first):
        assert mail.deliver(f'{{"id": "{own}", "error": "no {own}", "status": 400}}')
    mail.forget(second)
    assert mail.deliver(f'{{"id": "{second}", "error": "late"}}')
    assert answered(one) == [ErrorMessage(f"no {first}", id=first, status=400)]
    assert answered(two) == [ErrorMessage(f"no {second}", id=second, status=400)]


def test_a_reader_who_stays_behind_holds_back_nobody() -> None:
    mail, slow, quick = ResponseRouter("ws://x"), asyncio.Queue[Received](), asyncio.Queue[Received]()
    own, other = mail.expect(slow), mail.expect(quick)
    for _ in range(MAX_KEPT + 100):
        assert mail.deliver(f'{{"id": "{own}", "error": "x"}}')
    assert mail.deliver(f'{{"id": "{other}", "error": "x"}}')
    kept = answered(slow)
    assert len(kept) == MAX_KEPT + 1
    assert isinstance(kept[-1], Overloaded)
    assert quick.qsize() == 1


def test_the_end_reaches_those_who_wait_and_those_who_come_late() -> None:
    mail, early, late = ResponseRouter("ws://x"), asyncio.Queue[Received](), asyncio.Queue[Received]()
    mail.expect(early)
    assert not mail.deliver("{no JSON")
    mail.close()
    mail.expect(late)
    for box in (early, late):
        (end,) = answered(box)
        assert isinstance(end, ConnectionLost)
        assert "cannot be read" in end.message


def test_certificates_are_verified_unless_tls_is_false() -> None:
    own = ssl.create_default_context()
    assert connect_options("https://a", True, {})["ssl"].verify_mode is ssl.CERT_REQUIRED
    assert connect_options("https://a", False, {})["ssl"].verify_mode is ssl.CERT_NONE
    assert connect_options("https://a", own, {})["ssl"] is own
    assert "ssl" not in connect_options("http://a", False, {})


async def test_a_connection_reset_during_the_handshake_was_not_made() -> None:
    def reset() -> None:
        for _ in range(RESETS):
            connection, _ = listening.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        listening.settimeout(20.0)
        resetting, url = pool.submit(reset), f"http://127.0.0.1:{listening.getsockname()[1]}"
        inputs = {"x": numpy.zeros(1, "f4")}
        async with AsyncWebSocketClient(url, retry=NEVER) as client:
            for _ in range(RESETS):
                with pytest.raises(Unreachable):
                    await client.infer("x", inputs)
        resetting.result()
