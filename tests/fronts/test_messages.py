"""Both ends of a link: what is sent, and how what came is read."""

import asyncio
import socket
from typing import Any

from weir.fronts.messages import (
    Alive,
    CallerLeft,
    Link,
    Outputs,
    Submit,
    frame_of,
    reader_of_dispatcher,
    reader_of_front,
)
from weir.wire.frames import FrameReader


def received(reader: FrameReader[list[Any]], *frames: list[Any]) -> list[list[Any]]:
    """Send all `frames` before the other end reads, and return what that gets at a time."""

    async def main() -> list[list[Any]]:
        ours, theirs = socket.socketpair()
        with theirs:
            for messages in frames:
                theirs.sendall(frame_of(messages))
            got: list[list[Any]] = []
            link: Link[Any] = Link(ours, asyncio.get_running_loop(), reader, got.append, print)
            link.receive_rest()
            link.close()
        return got

    return asyncio.run(main())


def test_frames_that_come_together_are_one_message() -> None:
    requests = Submit(4, 0, [1.0, 2.0], [b"a", b"b"]), Submit(6, 0, [2.0], [b"c"]), Submit(7, 0, [3.0], [b"d"])
    ((message,),) = received(reader_of_front(), *[[each] for each in requests])
    assert message == Submit(4, 0, [1.0, 2.0, 2.0, 3.0], [b"a", b"b", b"c", b"d"])
    frames = [Outputs([1, 3], [b"1", b"9"])], [Outputs([2], [b"4"])]
    assert received(reader_of_dispatcher(), *frames) == [[Outputs([1, 3, 2], [b"1", b"9", b"4"])]]


def test_what_one_message_could_not_have_sent_stays_apart() -> None:
    messages = [
        Submit(1, 0, [1.0], [b"a"]),
        Submit(2, 5, [2.0], [b"of another form"]),
        Submit(9, 5, [3.0], [b"with another number"]),
        Submit(10, 5, [2.5], [b"that arrived before"]),
        Submit(11, 5, [], []),
        Submit(11, 5, [4.0], [b"after none"]),
        Alive(),
        CallerLeft(11),
        CallerLeft(10),
        Submit(12, 5, [5.0], [b"z"]),
    ]
    assert received(reader_of_front(), *([message] for message in messages)) == [messages]
