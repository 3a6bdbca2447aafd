"""Heads of requests, read by one parser after another."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.errors import InvalidRequest
from weir.frontends.http.fast.plan import MAX_LINES, HeadReader, check_beginning

GOOD = b"POST /infer/x?y=1 HTTP/1.1\r\nHost: test\r\nContent-Length: 3\r\nX-Thing: a: b "


def test_reads_what_it_says() -> None:
    head = HeadReader().read(GOOD)
    assert (head.method, head.url, head.version) == ("POST", b"/infer/x?y=1", "1.1")
    assert head.headers[:2] == [(b"host", b"test"), (b"content-length", b"3")]
    assert (head.length, head.keep_alive, head.upgrade) == (3, True, False)


@pytest.mark.parametrize(
    ("head", "keep_alive"),
    [
        (b"GET / HTTP/1.1\r\nHost: t", True),
        (b"GET / HTTP/1.1\r\nHost: t\r\nConnection: close", False),
        (b"GET / HTTP/1.1\r\nHost: t\r\nConnection: keep-alive, close", False),
        (b"GET / HTTP/1.0", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive", False),
    ],
)
def test_keep_alive(head: bytes, keep_alive: bool) -> None:
    assert HeadReader().read(head).keep_alive is keep_alive


def test_an_upgrade_is_seen() -> None:
    assert HeadReader().read(b"GET / HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket").upgrade


BEFORE = (
    GOOD,
    GOOD.replace(b"Length: 3", b"Length: 70000"),
    GOOD.replace(b"Length: 3", b"Length: 99999999999"),
    b"GET / HTTP/1.1\r\nHost: t",
    b"GET / HTTP/1.0",
    b"GET / HTTP/1.1\r\nHost: t\r\nConnection: close",
    b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked",
    b"GET / HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket",
    b"POST / HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 5",
    b"GET / HTTP/1.1",
    b"GET / HTTP/3.0",
    b"nonsense",
)


@given(st.lists(st.sampled_from(BEFORE), max_size=8))
def test_a_head_means_the_same_whatever_came_before(before: list[bytes]) -> None:
    reader = HeadReader()
    for head in before:
        with suppress(InvalidRequest):
            reader.read(head)
    after = reader.read(GOOD)
    assert (after.url, after.length, len(after.headers)) == (b"/infer/x?y=1", 3, 3)


@pytest.mark.parametrize("beginning", [b"POST / HTTP/1.1\n", b"\n", b"P\r\nHost: x\nY", b" POST", b"post", b"\x16\x03"])
def test_what_cannot_become_a_head(beginning: bytes) -> None:
    with pytest.raises(InvalidRequest):
        check_beginning(bytearray(beginning), 0)


@pytest.mark.parametrize("beginning", [b"P", b"POST / HTTP/1.1\r", b"POST / HTTP/1.1\r\nHost: x\r\n\r"])
def test_what_can(beginning: bytes) -> None:
    for start in range(len(beginning)):
        check_beginning(bytearray(beginning), start)


def test_a_head_has_a_bounded_number_of_lines() -> None:
    reader = HeadReader()
    head = b"GET / HTTP/1.1\r\nHost: t"
    assert len(reader.read(head + b"\r\na:" * (MAX_LINES - 1)).headers) == MAX_LINES
    with pytest.raises(InvalidRequest, match=f"has more than {MAX_LINES} lines"):
        reader.read(head + b"\r\na:" * MAX_LINES)
    assert reader.read(head).url == b"/"
