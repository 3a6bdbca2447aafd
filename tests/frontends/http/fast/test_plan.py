"""How heads are read, and what they mean to the fast path."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.frontends.http.fast.kit import Square, site
from tests.rings import subcases

from weir.errors import InvalidRequest, ModelNotFound, TooLarge, WeirError
from weir.frontends.http.fast.plan import ANY_LENGTH, MAX_LINES, HeadReader, RoutePlan, check_beginning, make_plan
from weir.messages import OCTETS
from weir.model import Measure, Model, Tensor
from weir.protocols.access import Access


class Words(Model):
    """Items of different size."""

    def predict(self, batch: list[str]) -> list[int]:
        return [len(item) for item in batch]

    @classmethod
    def measure(cls, item: Any) -> Measure:
        return Measure(rows=len(item.split()))


class Sum(Model):
    """Tensors."""

    inputs = (Tensor("a", "FP32", [-1, 2]),)
    outputs = (Tensor("sum", "FP32", [-1]),)

    def predict(self, batch: Any) -> Any:
        return {"sum": batch["a"].sum(axis=1)}


def plan(
    *headers: str,
    line: str = "POST /infer/square HTTP/1.1",
    size: int = 3,
    model: type[Model] = Square,
    **settings: Any,
) -> RoutePlan:
    """Return the plan for a head, while numbers are squared at /infer/square."""

    async def planned() -> RoutePlan:
        async with site(model=model, **settings) as here:
            head = "\r\n".join((line, "Host: t", *headers, f"Content-Length: {size}"))
            return make_plan(
                HeadReader().read(head.encode()), here.shared.route_handlers, here.shared.settings, Access()
            )

    return asyncio.run(planned())


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
def test_what_the_asgi_application_does(line: str, headers: tuple[str, ...]) -> None:
    assert plan(*headers, line=line, cors_origins=["*"]).hand_over


def test_an_upgrade_to_another_protocol_is_ignored() -> None:
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    made = plan(*upgrade)
    assert (made.hand_over, made.error, made.keep_alive) == (False, None, True)


def test_http_1_0_knows_no_100_continue() -> None:
    assert not plan("Expect: 100-continue", line="POST /infer/square HTTP/1.0").expects_continue


def test_tensors_are_for_the_asgi_application() -> None:
    assert plan(model=Sum).hand_over


@subcases("path", ["/infer/square", "/inference", "/infer/s%71uare", "/infer/square?a=b"])
def test_the_model_is_found(path: str) -> None:
    made = plan("Content-Type: application/octet-stream", "Origin: http://a.example", line=f"POST {path} HTTP/1.1")
    assert (made.hand_over, made.error, made.memorable, made.length) == (False, None, True, 3)
    assert made.head.content_type == OCTETS
    assert made.plain_up_to == ANY_LENGTH


@subcases(
    ("line", "size", "error", "named"),
    [
        ("POST /infer/nobody HTTP/1.1", 3, ModelNotFound, False),
        ("POST /infer/square HTTP/1.1", 2000, TooLarge, True),
        ("POST /infer/square HTTP/1.1", 0, InvalidRequest, True),
    ],
)
def test_what_is_wrong_is_in_the_plan(line: str, size: int, error: type[WeirError], named: bool) -> None:
    made = plan(line=line, size=size, max_body_size=1000)
    assert isinstance(made.error, error)
    assert (made.service is not None) is named
    assert not made.memorable


@subcases(
    ("header", "up_to"),
    [
        ("X-Explain: 1", -1),
        ("X-Request-Id: 5", -1),
        ("Connection: close", -1),
        ("Accept-Encoding: gzip", 1024),
        ("Accept-Encoding: identity", ANY_LENGTH),
    ],
)
def test_which_answers_are_plain(header: str, up_to: int) -> None:
    assert plan(header).plain_up_to == up_to


@subcases("header", ["Cookie: a=b", "Proxy-Authorization: x", "Expect: 100-continue"])
def test_what_is_never_remembered(header: str) -> None:
    made = plan(header)
    assert not made.hand_over
    assert not made.memorable


def test_measured_items_are_decoded_here() -> None:
    made = plan(model=Words)
    assert not made.hand_over
    assert not made.head.plain


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


@subcases("beginning", [b"POST / HTTP/1.1\n", b"\n", b"P\r\nHost: x\nY", b" POST", b"post", b"\x16\x03"])
def test_what_cannot_become_a_head(beginning: bytes) -> None:
    with pytest.raises(InvalidRequest):
        check_beginning(bytearray(beginning), 0)


@subcases("beginning", [b"P", b"POST / HTTP/1.1\r", b"POST / HTTP/1.1\r\nHost: x\r\n\r"])
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
