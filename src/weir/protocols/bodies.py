"""Reading a request's body from an ASGI server, within bounds."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope

from weir.errors import DeadlineExceeded, TooLarge
from weir.protocols.account import charge, unpacking
from weir.protocols.compression import decompress
from weir.protocols.native import too_large
from weir.protocols.offloading import LONG_BODY, unpack

T = TypeVar("T")

_LINGER = 0.5  # seconds that the sender of a refused body may pause before the connection is closed
_SMALL_BODY = 65536  # bytes that are read and forgotten rather than closing the connection over them


class Body:
    """The body of one request. `unread` tells whether more of it may come."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.unread = True

    async def read(self, max_body_size: int, within: float) -> bytes | None:
        """Return the whole body, or None if the client left.

        Raises TooLarge once it has more than `max_body_size` bytes, DeadlineExceeded after `within` seconds, and Overloaded when the
        account of the server has no room for it.
        """
        try:
            async with asyncio.timeout(within):
                return await self._read(max_body_size)
        except TimeoutError:
            raise DeadlineExceeded(f"body: must arrive within {within:g} s (body_timeout)") from None

    async def unless_left(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what `work` makes of the whole body, or None, and nothing goes on, if the client leaves."""
        return await unless_left(work, self._receive)

    async def _read(self, max_body_size: int) -> bytes | None:
        whole = bytearray()  # a list of what may be millions of crumbs would be many times as large
        while self.unread:
            message = await self._receive()
            if message["type"] != "http.request":
                return None
            self.unread = message.get("more_body", False)
            chunk: bytes = message.get("body", b"")
            if len(whole) + len(chunk) > max_body_size:
                raise too_large(f"of {len(whole) + len(chunk)} bytes or more", max_body_size)
            charge(len(chunk))
            if not whole and not self.unread:
                return chunk
            whole += chunk
        return bytes(whole)


async def unpacked(body: bytes, coding: str, max_size: int, within: float) -> bytes:
    """Return `body`, which is in `coding`, decompressed and charged to the account of the server.

    What is short before and after is decompressed at once. All else waits for its turn, a few at a time, and is decompressed in a
    thread; so whoever sends short bodies never waits for those who send what becomes large.

    Raises what `decompress` raises, DeadlineExceeded after `within` seconds, and Overloaded where the account has no room.
    """
    plain = _unpacked_if_short(body, coding, max_size)
    if plain is None:
        try:
            async with asyncio.timeout(within), unpacking(max_size):
                plain = await unpack(len(body), partial(decompress, body, coding, max_size))
        except TimeoutError:
            raise DeadlineExceeded(f"body: could not be decompressed within {within:g} s") from None
    charge(len(plain))
    return plain


def _unpacked_if_short(body: bytes, coding: str, max_size: int) -> bytes | None:
    if len(body) > LONG_BODY:
        return None
    try:
        return decompress(body, coding, min(max_size, LONG_BODY))
    except TooLarge:
        return None


async def discard_body(receive: Receive, within: float) -> None:
    """Read on while more comes, at most `within` seconds: a connection closed over unread bytes takes the answer with it.

    A sender who pauses has had time to read the answer.
    """
    try:
        async with asyncio.timeout(within):
            message: Message = {"more_body": True}
            while message.get("more_body", False):
                async with asyncio.timeout(_LINGER):
                    message = await receive()
    except TimeoutError:
        return


async def unless_left(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Return what `work` returns, or None, and nothing goes on, if the client leaves; the body must have been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
    return working.result() if working.done() else None


async def disconnected(receive: Receive) -> None:
    """Return when the client has left; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def has_large_body(scope: Scope) -> bool:
    """Tell whether a request's body is too large, or of unknown length, to be read only to be forgotten."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or not length.isdigit() or int(length[:20]) > _SMALL_BODY
