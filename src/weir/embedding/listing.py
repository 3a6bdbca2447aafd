"""Answers in JSON that are a list of vectors and a few words beside it. A long one is written bit by bit, as its reader reads: what he
has not read yet is held as numbers, which take a fifth of what they take as text."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
from starlette.types import Send

from weir.messages import JSON
from weir.protocols.response import Headers, HttpResponse

_NUMBERS_AT_ONCE = 65_536  # about a megabyte as text
_AS_JSON = (b"content-type", JSON.encode())


class Listing(NamedTuple):
    """An object whose fields are `lead`, at least one, and behind them `name`: a list of `length` items, of `numbers` numbers each.
    `items` returns those from one place up to another."""

    lead: dict[str, Any]
    name: str
    length: int
    numbers: int
    items: Callable[[int, int], list[Any]]

    def parts(self) -> Iterator[bytes]:
        """Return it as JSON, bit by bit."""
        step = max(1, _NUMBERS_AT_ONCE // self.numbers)
        opening = msgspec.json.encode(self.lead)[:-1] + b',"%b":[' % self.name.encode()
        for start in range(0, self.length, step):
            yield opening + msgspec.json.encode(self.items(start, min(start + step, self.length)))[1:-1]
            opening = b","
        yield b"]}"

    def whole(self) -> HttpResponse:
        """Return the answer that it is."""
        if self.length * self.numbers <= _NUMBERS_AT_ONCE:
            body = msgspec.json.encode({**self.lead, self.name: self.items(0, self.length)})
        else:
            body = b"".join(self.parts())
        return HttpResponse(200, [_AS_JSON], body)


async def send_listing(send: Send, listing: Listing, headers: Headers) -> int:
    """Send `listing` bit by bit, with `headers` beside its own; return how many bytes it was. Each bit is made in a thread when
    most of the one before has been read."""
    headers = [_AS_JSON, *headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    parts, sent = listing.parts(), 0
    while part := await asyncio.to_thread(next, parts, b""):
        await send({"type": "http.response.body", "body": part, "more_body": True})
        sent += len(part)
    await send({"type": "http.response.body", "body": b""})
    return sent
