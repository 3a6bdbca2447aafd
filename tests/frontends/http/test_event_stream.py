"""A stream of events, on loops whose timers are early as those of uvloop are."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from tests.simulated.loop import SimulatedLoop

from weir.frontends.http.asgi import EventStream
from weir.protocols.exchange import EventSource
from weir.protocols.response import HttpResponse

KEEP_ALIVE = 0.0204  # a timer of uvloop's fires after 20 ms


class _Counting(SimulatedLoop):
    turns = 0

    def _run_once(self) -> None:
        self.turns += 1
        super()._run_once()


def test_a_stream_that_is_silent_does_not_spin_until_its_comment_is_due() -> None:
    loop, sent = _Counting(coarse=True), []

    async def parts() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.2)
        yield b"1"

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    def refusal(error: BaseException) -> HttpResponse:
        raise AssertionError(error)

    source = EventSource(parts(), lambda _: b"", lambda: [])
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(EventStream(source, refusal, lambda answer: answer, receive, send, KEEP_ALIVE).run())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    assert sum(b"keep-alive" in each for each in sent) == 9
    assert loop.turns < 200
