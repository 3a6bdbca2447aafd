import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import uvloop

from weir.messages import OBJECT, Batch
from weir.wire import frames
from weir.workers.process.channel import Channel, ChildChannel

BOTH_LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])


class Ends:
    """A channel and the other end of its socket."""

    def __init__(self) -> None:
        self.ours, self.other = socket.socketpair()
        self.frames: list[frames.Frame] = []
        self.reasons: list[str] = []
        self.close_after = 0  # frames, after which the channel is closed
        self.heard = asyncio.Event()
        self.channel = Channel(self.ours, frames.FrameParser(), self.on_frame, self.on_end)
        self.channel.open(asyncio.get_running_loop())

    def on_frame(self, frame: frames.Frame) -> None:
        self.frames.append(frame)
        self.heard.set()
        if len(self.frames) == self.close_after:
            self.channel.close()

    def on_end(self, reason: str) -> None:
        self.reasons.append(reason)
        self.heard.set()

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.heard.clear()
                await self.heard.wait()


@asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    pair = Ends()
    yield pair
    pair.channel.close()
    pair.channel.close()
    pair.other.close()


@BOTH_LOOPS
def test_what_the_socket_does_not_take_at_once_is_sent_later_in_order(run: Callable[[Any], None]) -> None:
    def read_all(other: socket.socket, count: int) -> list[int]:
        parser = frames.FrameParser()
        ids: list[int] = []
        while len(ids) < count:
            ids += [frame.batch_id for frame in parser.feed(other.recv(100_000)) if isinstance(frame, Batch)]
        return ids

    async def main() -> None:
        async with ends() as pair:
            for number in range(20):
                pair.channel.send(frames.encode_batch(Batch(number, [b"x" * 300_000], OBJECT, OBJECT)))
            ids = await asyncio.to_thread(read_all, pair.other, 20)
            assert ids == list(range(20))
            assert not asyncio.get_running_loop().remove_writer(pair.ours.fileno())
            pair.channel.send(frames.encode_batch(Batch(20, [1], OBJECT, OBJECT)))
            assert await asyncio.to_thread(read_all, pair.other, 1) == [20]

    run(main())


@BOTH_LOOPS
def test_the_end_is_reported_once_and_sending_then_is_harmless(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with ends() as pair:
            pair.other.send(frames.encode_control(frames.Ready()))
            pair.other.close()
            await pair.wait(lambda: bool(pair.reasons))
            pair.channel.receive_rest()
            assert pair.frames == [frames.Ready()]
            assert pair.reasons == ["it closed its channel"]
            pair.channel.send(frames.encode_control(frames.Stop()))

    run(main())


async def test_the_rest_is_read_without_the_loop_and_nothing_after_closing() -> None:
    async with ends() as pair:
        pair.other.send(frames.encode_control(frames.Ready()) * 3)
        pair.channel.receive_rest()
        assert len(pair.frames) == 3
        pair.close_after = 4
        pair.other.send(frames.encode_control(frames.Ready()) * 3)
        pair.channel.receive_rest()
        assert len(pair.frames) == 4


class VirtualSocket:
    """A socket on which a frame comes so many seconds after the one before was read, by a clock of its own."""

    LOOK = 0.0001  # seconds that a look takes

    def __init__(self) -> None:
        self.now = 0.0
        self.due = 0.0
        self.looks = 0

    def perf_counter(self) -> float:
        return self.now

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0) -> int:
        if flags & socket.MSG_DONTWAIT:
            self.looks += 1
            self.now += self.LOOK
            if self.now < self.due:
                raise BlockingIOError
        self.now = max(self.now, self.due)
        frame = frames.encode_control(frames.Start(b"", {}))
        buffer[: len(frame)] = frame
        return len(frame)


def test_the_worker_polls_only_where_frames_come_soon_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = VirtualSocket()
    monkeypatch.setattr("weir.workers.process.channel.time", virtual)
    channel = ChildChannel(cast(socket.socket, virtual), frames.FrameParser(), None)
    channel.spin = 0.001

    def looks(wait: float) -> int:
        """Receive a frame that comes after `wait` seconds; return how often it was looked for in vain or not."""
        virtual.due, virtual.looks = virtual.now + wait, 0
        assert isinstance(channel.receive(), frames.Start)
        return virtual.looks

    assert [looks(0.0005) > 0 for _ in range(10)] == [True] * 10
    assert [looks(0.1) > 0 for _ in range(20)][-10:] == [False] * 10
    assert [looks(0.0005) > 0 for _ in range(20)][-10:] == [True] * 10
    assert looks(0.1) > 0 and looks(0.0005) > 0  # one pause changes nothing


@pytest.mark.parametrize("spin", [0.0, 0.001])
def test_a_server_that_leaves_without_reading_the_last_answer_means_stop(spin: float) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = ChildChannel(theirs, frames.FrameParser(), None)
        channel.spin = spin
        channel.send(b"answer")
        ours.close()
        assert channel.receive() == frames.Stop()
