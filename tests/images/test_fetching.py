"""Images come from URLs of allowed hosts and public addresses only, within bounds."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

import pytest
from tests.frontends.http.sockets import TLS
from tests.rings import subcases
from tests.waiting import turns

from weir.errors import InvalidRequest, Overloaded
from weir.images import ImageLimits
from weir.images.fetching import Fetcher, is_public

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nimage"
RESPONSES = {
    "/image?a=%20b": OK,
    "/chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nim\r\n3\r\nage\r\n0\r\n\r\n",
    "/moved": b"HTTP/1.1 302 Found\r\nlocation: /image?a=%20b\r\n\r\n",
    "/round": b"HTTP/1.1 302 Found\r\nlocation: /round\r\n\r\n",
    "/away": b"HTTP/1.1 307 Away\r\nlocation: http://169.254.169.254/latest/meta-data\r\n\r\n",
    "/wrong": b"HTTP/1.1 302 Found\r\nlocation: http://[\r\n\r\n",
    "/file": b"HTTP/1.1 301 Away\r\nlocation: file:///etc/passwd\r\n\r\n",
    "/large": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(300_000),
    "/head": b"HTTP/1.1 200 OK\r\n" + b"a:\r\n" * 50_000,
    "/trailers": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"a:\r\n" * 50_000,
    "/crumbs": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000,
    "/cut": OK[:-1],
    "/missing": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    "/garbage": b"SSH-2.0-OpenSSH\r\n",
    "/silent": b"",
}


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Yield the port on 127.0.0.1 of a server that sends RESPONSES."""
    calls = set()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.add(asyncio.current_task())
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        writer.write(RESPONSES[path])
        if path == "/silent":
            await reader.read()
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*filter(None, calls), return_exceptions=True)


def fetcher(*hosts: str, charge: Callable[[int], object] = id, **options: Any) -> Fetcher:
    return Fetcher(ImageLimits(max_image_bytes=100_000, allow_url=list(hosts)), charge, **options)


@subcases("path", ["/image?a= b", "/chunks", "/moved"])
async def test_an_image_is_fetched_from_an_address_that_is_allowed_itself(path: str) -> None:
    async with serving() as port:
        assert await fetcher(f"127.0.0.1:{port}").fetch(f"http://127.0.0.1:{port}{path}") == b"image"


async def test_an_image_is_fetched_over_tls_from_whom_a_certificate_is_trusted() -> None:
    own, theirs = ssl.create_default_context(cafile=TLS / "certificate.pem"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    async with serving(theirs) as port:
        host, url = f"127.0.0.1:{port}", f"https://127.0.0.1:{port}/chunks"
        assert await fetcher(host, tls=own).fetch(url) == b"image"
        with pytest.raises(InvalidRequest, match=r"no response .*certificate"):
            await fetcher(host).fetch(url)


@subcases(
    ("url", "rule"),
    [
        ("{url}/away", "169.254.169.254:80 is not allowed on this server (allow_url)"),
        ("{url}/file", "must be http://HOST/PATH or https://HOST/PATH, without a user"),
        ("{url}/wrong", "is no URL, or leads to none: Invalid IPv6 URL"),
        ("http://\u2488.0.0.1/", "is no URL, or leads to none: "),
        ("{url}/round", "the server responded with status 302"),
        ("{url}/missing", "the server responded with status 404"),
        ("{url}/large", "bytes; at most 100,000 (max_image_bytes)"),
        ("{url}/head", "bytes of the response are not the image"),
        ("{url}/trailers", "bytes of the response are not the image"),
        ("{url}/crumbs", "bytes of the response are not the image"),
        ("{url}/cut", "no response (connection closed)"),
        ("{url}/garbage", "no response (garbage)"),
        ("http://localhost:{port}/chunks", "localhost has no public address"),
        ("http://127.0.0.1/", "127.0.0.1 has no public address"),
        ("http://127.0.0.2:{port}/", "is not allowed on this server (allow_url)"),
        ("ftp://127.0.0.1:{port}/", "must be http://HOST/PATH or https://HOST/PATH, without a user"),
        ("http://me:secret@127.0.0.1:{port}/", "must be http://HOST/PATH or https://HOST/PATH, without a user"),
        ("http://[::1/", "is no URL: "),
        ("http://a:99999/", "is no URL: "),
        ("http://" + "a" * 99, "is no URL: "),
        ("http://10.0.0.1/", "10.0.0.1 has no public address"),
        ("http://" + "a." * 4000, "is not allowed on this server (allow_url)"),
        ("http://" + "a." * 200_000, "has 400,007 characters, must have at most 8,192"),
    ],
)
async def test_what_is_not_fetched(url: str, rule: str) -> None:
    async with serving() as port:
        own = f"127.0.0.1:{port}"
        url = url.format(url=f"http://{own}", port=port)
        with pytest.raises(InvalidRequest, match=re.escape(rule)) as raised:
            await fetcher(own, f"localhost:{port}", "*.0.0.1").fetch(url)
    assert raised.value.message.startswith(repr(url)[:200])


async def test_bytes_are_charged_as_they_arrive() -> None:
    charged: list[int] = []

    def charge(size: int) -> None:
        charged.append(size)
        if sum(charged) > 20_000:
            raise Overloaded("full")

    async with serving() as port:
        one = fetcher(f"127.0.0.1:{port}", charge=charge)
        assert await one.fetch(f"http://127.0.0.1:{port}/moved") == b"image"
        assert sum(charged) == len(OK) + len(RESPONSES["/moved"])
        with pytest.raises(Overloaded, match="full"):
            await one.fetch(f"http://127.0.0.1:{port}/large")
    assert sum(charged) < 100_000


async def test_a_silent_server_ends_the_call_in_time() -> None:
    async with serving() as port:
        with pytest.raises(InvalidRequest, match=r"no response within 0.01 s"):
            await fetcher(f"127.0.0.1:{port}", timeout=0.01).fetch(f"http://127.0.0.1:{port}/silent")


async def test_a_slow_host_does_not_stop_images_of_others() -> None:
    async with serving() as slow, serving() as other:
        one = fetcher(f"127.0.0.1:{slow}", f"127.0.0.1:{other}", timeout=3600.0)
        waiting = [asyncio.ensure_future(one.fetch(f"http://127.0.0.1:{slow}/silent")) for _ in range(99)]
        try:
            async with asyncio.timeout(20.0):
                await turns(30)
                assert await one.fetch(f"http://127.0.0.1:{other}/chunks") == b"image"
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def test_without_hosts_nothing_is_fetched() -> None:
    with pytest.raises(InvalidRequest, match=r"example.org:443 is not allowed on this server \(allow_url\)"):
        await fetcher().fetch("https://example.org/cat.png")


async def test_the_address_that_was_checked_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a name with several addresses, the private ones are passed over; and the name is not looked up again."""
    called: list[object] = []

    async def found(*_: object, **__: object) -> list[object]:
        return [(0, 0, 0, "", (address, 80)) for address in ("10.1.2.3", "::ffff:127.0.0.1", "8.8.8.8")]

    async def opened(address: str, port: int, **tls: object) -> None:
        called.append((address, port, tls.get("server_hostname")))
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    monkeypatch.setattr(asyncio, "open_connection", opened)
    for scheme in ("http", "https"):
        with pytest.raises(InvalidRequest, match="no response"):
            await fetcher("*").fetch(f"{scheme}://pictures.example/")
    assert called == [("8.8.8.8", 80, None), ("8.8.8.8", 443, "pictures.example")]


@subcases(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("fec0::1", False), ("127.0.0.1", False), ("10.0.0.1", False), ("172.16.0.1", False),
        ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False),
        ("240.0.0.1", False), ("255.255.255.255", False), ("::", False), ("::1", False), ("fe80::1", False), ("fd00::1", False), ("ff02::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:8.8.8.8", True), ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("2001::1", False),
    ],
)  # fmt: skip
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public
