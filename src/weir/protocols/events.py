"""Streams over HTTP: answers as Server-Sent Events, through any ASGI server.

The status is decided by what comes first: an error before any answer is an ordinary error answer; later ones are events
named `error`. Once `stream_keep_alive` has passed without either, the status is 200.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from starlette.types import Receive, Send

from weir.errors import WeirError
from weir.protocols.bodies import disconnected
from weir.protocols.response import Headers, HttpResponse
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
    refusal: Callable[[WeirError], HttpResponse]
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
        self._writing = asyncio.Lock()
        self._started = False
        self._spoke = False  # since it was looked at last

    async def run(self) -> None:
        """Send until the answers end or the client leaves."""
        leaving = asyncio.ensure_future(disconnected(self._receive))
        pumping = asyncio.ensure_future(self._pump())
        try:
            while not (pumping.done() or leaving.done()):
                self._spoke = False
                waited = (pumping, leaving)
                done, _ = await asyncio.wait(waited, timeout=self._keep_alive, return_when=asyncio.FIRST_COMPLETED)
                if not (done or self._spoke or self._writing.locked()):
                    await self._write(write_comment("keep-alive"))
            if pumping.done():
                pumping.result()
        finally:
            for task in (leaving, pumping):
                task.cancel()
            await asyncio.wait((leaving, pumping))

    async def _pump(self) -> None:
        try:
            async for data in self._source.answers:
                await self._write(write_event(data))
        except WeirError as error:
            if not self._started:
                self._started = True
                answer = self._source.refusal(error)
                self.sent_bytes += len(answer.body)
                await send_answer(self._send, answer)
                return
            await self._write(write_event(self._source.failure(error), "error"))
        await self._write(b"", more=False)

    async def _write(self, event: bytes, *, more: bool = True) -> None:
        async with self._writing:
            self._spoke = True
            if not self._started:
                self._started = True
                headers = [*HEAD, *self._source.headers()]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.sent_bytes += len(event)
            await self._send({"type": "http.response.body", "body": event, "more_body": more})
