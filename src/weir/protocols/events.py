"""Streams over HTTP: answers as Server-Sent Events, through any ASGI server.

The status is decided by what comes first: an error before any answer is an ordinary error answer; later ones are events
named `error`. Once `stream_keep_alive` has passed without either, the status is 200.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import NamedTuple

from starlette.types import Receive, Send

from weir.errors import WeirError
from weir.protocols.answers import Answer, Headers
from weir.protocols.bodies import disconnected
from weir.protocols.sending import send_answer
from weir.wire.sse import CONTENT_TYPE, write_comment, write_event

HEAD: Headers = [
    (b"content-type", f"{CONTENT_TYPE}; charset=utf-8".encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies that collect answers (nginx) shall pass on each event
]


class Source(NamedTuple):
    """What is to be sent. `answers` yields the data of each event and raises the WeirError that ends them; `refusal` makes a
    whole answer of an error that comes first, `failure` the data of an event of one that comes later; `headers` are
    asked for with the first event."""

    answers: AsyncIterator[bytes]
    refusal: Callable[[WeirError], Answer]
    failure: Callable[[WeirError], bytes]
    headers: Callable[[], Headers]


class EventStream:
    """One answer that is a stream. `sent_bytes` counts its body."""

    def __init__(self, source: Source, receive: Receive, send: Send, keep_alive: float) -> None:
        self.sent_bytes = 0
        self._source = source
        self._receive = receive
        self._send = send
        self._keep_alive = keep_alive
        self._started = False

    async def run(self) -> None:
        """Send until the answers end or the client leaves."""
        leaving = asyncio.ensure_future(disconnected(self._receive))
        reading = asyncio.ensure_future(self._next())
        try:
            while True:
                waited = (reading, leaving)
                done, _ = await asyncio.wait(waited, timeout=self._keep_alive, return_when=asyncio.FIRST_COMPLETED)
                if leaving in done:
                    return
                if not done:
                    await self._write(write_comment("keep-alive"))
                elif await self._take(reading):
                    return
                else:
                    reading = asyncio.ensure_future(self._next())
        finally:
            leaving.cancel()
            reading.cancel()
            await asyncio.wait((reading,))
            with suppress(asyncio.CancelledError, WeirError):
                reading.result()

    async def _next(self) -> bytes | None:
        return await anext(self._source.answers, None)

    async def _take(self, reading: "asyncio.Future[bytes | None]") -> bool:
        """Send what was read; tell whether it is the end."""
        try:
            data = reading.result()
        except WeirError as error:
            if not self._started:
                answer = self._source.refusal(error)
                self.sent_bytes += len(answer.body)
                await send_answer(self._send, answer)
                return True
            await self._write(write_event(self._source.failure(error), "error"))
        else:
            if data is not None:
                await self._write(write_event(data))
                return False
            await self._begin()
        await self._send({"type": "http.response.body", "body": b""})
        return True

    async def _write(self, event: bytes) -> None:
        await self._begin()
        self.sent_bytes += len(event)
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def _begin(self) -> None:
        if not self._started:
            self._started = True
            headers = [*HEAD, *self._source.headers()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
