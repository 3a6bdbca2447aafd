"""Connections that go on under uvicorn's protocol."""

import asyncio

import pytest
from tests.protocols.fastlane.kit import Got, answers, post, settled, site

UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
CHUNKED = b"POST /elsewhere HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"


async def exchanged(received: bytes) -> tuple[list[Got], bool]:
    """Return the answers to `received`, which comes at once, and whether the connection was closed after them."""
    async with site() as here:
        transport = here.connect()
        transport.receive(received)
        await settled()
        return answers(transport.sent), transport.is_closing()


def test_bodies_are_kept_when_the_client_would_like_another_protocol() -> None:
    requests = [post(b"[%d]" % number, *UPGRADE, path="/elsewhere") for number in range(3)]
    received, closed = asyncio.run(exchanged(b"".join(requests)))
    bodies = [b"/elsewhere [0]", b"/elsewhere [1]", b"/elsewhere [2]"]
    assert ([answer.body for answer in received], closed) == (bodies, False)


@pytest.mark.parametrize("rest", [b"GARBAGE\r\n\r\n", b"\x00", post() + b"GARBAGE\r\n\r\n"])
def test_requests_before_garbage_are_answered(rest: bytes) -> None:
    (first, *_), closed = asyncio.run(exchanged(post(b"[3]", path="/elsewhere") + rest))
    assert (first.status, first.body, closed) == (200, b"/elsewhere [3]", True)


def test_a_body_that_is_framed_wrongly_is_refused_as_everywhere() -> None:
    (answer,), closed = asyncio.run(exchanged(CHUNKED + b"Z\r\n3\r\n0\r\n\r\n"))
    assert (answer.status, answer.headers["content-type"], closed) == (400, "application/json", True)
    assert b'"type":"InvalidRequest"' in answer.body


def test_it_is_refused_in_the_form_of_the_protocol_that_was_meant() -> None:
    (answer,), _ = asyncio.run(
        exchanged(CHUNKED.replace(b"/elsewhere", b"/v2/models/square/infer") + b"Z\r\n3\r\n0\r\n\r\n")
    )
    assert (answer.status, answer.body[:19]) == (400, b'{"error":"request: ')
