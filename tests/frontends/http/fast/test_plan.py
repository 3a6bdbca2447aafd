"""How heads are read, and what they mean to the fast path."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.frontends.http.fast.kit import Square, site
from tests.frontends.http.models import Add
from tests.rings import subcases

from weir.errors import InvalidRequest
from weir.frontends.http.fast.plan import MAX_LINES, HeadReader, RoutePlan, check_beginning, make_plan
from weir.model import Model
from weir.protocols.access import Access


async def plan(*headers: str, line: str = "POST /infer/square HTTP/1.1", model: type[Model] = Square) -> RoutePlan:
    """Return the plan for a head, while numbers are squared at /infer/square."""
    async with site(model=model, cors_origins=["*"]) as here:
        head = HeadReader().read("\r\n".join((line, "Host: t", *headers, "Content-Length: 3")).encode())
        return make_plan(head, here.shared.route_handlers, here.shared.settings, Access())


@subcases(
    ("line", "headers"),
    [
        ("GET / HTTP/1.1", ()),
        ("GET /infer/square HTTP/1.1", ()),
        ("OPTIONS /infer/square HTTP/1.1", ()),
        ("POST /somewhere HTTP/1.1", ()),
        ("POST /infer/square/batch HTTP/1.1", ()),
        ("POST http://t/infer/square HTTP/1.1", ()),
        ("POST /infer/square HTTP/1.1", ("Content-Encoding: gzip",)),
        ("POST /infer/square HTTP/1.1", ("Origin: http://a.example",)),
        ("POST /infer/square HTTP/1.1", ("Expect: a-miracle",)),
        ("POST /infer/square HTTP/1.1", ("Connection: upgrade", "Upgrade: WebSocket")),
    ],
)
async def test_what_the_asgi_application_does(line: str, headers: tuple[str, ...]) -> None:
    assert (await plan(*headers, line=line)).hand_over
    assert (await plan(model=Add)).hand_over


async def test_an_upgrade_to_another_protocol_is_ignored() -> None:
    made = await plan("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    assert (made.hand_over, made.error, made.keep_alive, made.memorable) == (False, None, True, True)


async def test_http_1_0_knows_no_100_continue() -> None:
    assert not (await plan("Expect: 100-continue", line="POST /infer/square HTTP/1.0")).expects_continue


@subcases("header", ["Cookie: a=b", "Proxy-Authorization: x", "Expect: 100-continue"])
async def test_what_is_never_remembered(header: str) -> None:
    made = await plan(header)
    assert (made.hand_over, made.memorable) == (False, False)


GOOD = b"POST /infer/x?y=1 HTTP/1.1\r\nHost: test\r\nContent-Length: 3\r\nX-Thing: a: b "


def test_reads_what_it_says() -> None:
    head = HeadReader().read(GOOD)
    assert (head.method, head.url, head.version) == ("POST", b"/infer/x?y=1", "1.1")
    assert head.headers[:2] == [(b"host", b"test"), (b"content-length", b"3")]
    assert (head.length, head.keep_alive, head.upgrade) == (3, True, False)


@subcases(
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


@subcases("beginning", [b"POST / HTTP/1.1\n", b"\n", b"P\r\nHost: x\nY", b" POST", b"post", b"\x16\x03"])
def test_what_cannot_become_a_head(beginning: bytes) -> None:
    with pytest.raises(InvalidRequest):
        check_beginning(bytearray(beginning), 0)


@subcases("beginning", [b"P", b"POST / HTTP/1.1\r", b"POST / HTTP/1.1\r\nHost: x\r\n\r"])
def test_what_can(beginning: bytes) -> None:
    for start in range(len(beginning)):
        check_beginning(bytearray(beginning), start)


def test_a_head_has_a_bounded_number_of_lines() -> None:
    reader, head = HeadReader(), b"GET / HTTP/1.1\r\nHost: t"
    assert len(reader.read(head + b"\r\na:" * (MAX_LINES - 1)).headers) == MAX_LINES
    with pytest.raises(InvalidRequest, match=f"has more than {MAX_LINES} lines"):
        reader.read(head + b"\r\na:" * MAX_LINES)
    assert reader.read(head).url == b"/"
