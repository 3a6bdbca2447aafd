"""When a stream of events gets comments, in virtual time."""

import asyncio
import selectors
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import pytest

from weir.frontends.http.asgi import EventStream


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is to do."""

    def __init__(self) -> None:
        self.now = 0.0
        loop = self

        class Jumping(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> Any:
                ready = super().select(0)
                loop.now += 0.0 if ready else timeout or 0.0
                return ready

        super().__init__(Jumping())

    def time(self) -> float:
        return self.now


class Source:
    """Gives an event at each of these times."""

    def __init__(self, *times: float) -> None:
        self._times = times
        self.parts = self._parts()

    def headers(self) -> list[tuple[bytes, bytes]]:
        return []

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        for time in self._times:
            await asyncio.sleep(time - loop.time())
            yield b"1"


@pytest.mark.parametrize("times", [(0.5, 100.0), (2.9, 3.1, 5.0, 100.0), (100.0,), (3.0, 6.0, 9.0)])
def test_a_comment_comes_when_the_silence_is_as_long_as_the_setting_says(times: tuple[float, ...]) -> None:
    sent: list[tuple[float, bytes]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        async def receive() -> Any:
            await loop.create_future()  # the client stays

        async def send(message: Any) -> None:
            if body := message.get("body"):
                sent.append((loop.time(), body))

        source: Any = Source(*times)
        await EventStream(
            source, lambda error: pytest.fail(str(error)), lambda answer: answer, receive, send, 3.0
        ).run()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    moments = [0.0, *[moment for moment, _ in sent]]
    gaps = [after - before for before, after in pairwise(moments)]
    assert max(gaps) == pytest.approx(3.0)
    comments = [before for before, (_, body) in zip(gaps, sent, strict=True) if body.startswith(b":")]
    assert all(gap == pytest.approx(3.0) for gap in comments)
    assert [moment for moment, body in sent if body.startswith(b"data")] == pytest.approx(times)
