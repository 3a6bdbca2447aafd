"""gRPC between the processes of a simulated server: what stands for grpc.aio's channel, with which a front passes calls on to the dispatcher."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any
from unittest.mock import patch

import grpc
import grpc.aio
from tests.simulated.grpc_core import CANCELLED, DEADLINE_EXCEEDED, OK, Pairs, SimulatedCall, SimulatedCygrpc
from tests.simulated.transport import Ordered

LATENCIES = (0.0, 0.0001, 0.002)  # seconds of a connection
_TRY_EVERY = 0.05  # seconds between two attempts to connect
_OWN_END = "Locally cancelled by application!"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class SimulatedChannel:
    """A connection to the server at `target`, of the process that makes it. What is sent arrives after a while, in order."""

    def __init__(self, machine: SimulatedCygrpc, draw: random.Random, target: str) -> None:
        self.loop = machine.loop
        self.process = machine.loop.process.get()
        self.calls: Any = Ordered()
        self.latency = draw.choice(LATENCIES)
        self._machine = machine
        self._target = target
        self.peer = f"unix:{draw.random()}"
        if self.process is not None:
            self.process.at_end.append(self._end)

    def stream_stream(self, path: str) -> Callable[..., "OnwardCall"]:
        """See grpc.aio.Channel."""
        return partial(OnwardCall, self, path)

    def server(self) -> Any:
        """Return the server, if it listens."""
        return next((each for each in self._machine.servers if each.listens and each.address == self._target), None)

    def _end(self) -> None:
        """The connection is lost."""
        for call in list(self.calls):
            call.leave()
        if (server := self.server()) is not None:
            server.disconnect(self.peer)

    async def close(self) -> None:
        """See grpc.aio.Channel."""
        for call in list(self.calls):
            call.cancel()
        self._end()


class OnwardCall:
    """One call of a channel, as its client sees it: what stands for grpc.aio.StreamStreamCall. It is the listener of a SimulatedCall.

    Like gRPC's, it takes the next message only when the one before has been read.
    """

    def __init__(
        self, channel: SimulatedChannel, path: str, *, timeout: float | None, metadata: Sequence[Any], wait_for_ready: bool
    ) -> None:  # fmt: skip
        assert wait_for_ready
        self._channel = channel
        self._loop = loop = channel.loop
        self._path = path
        self._metadata = tuple(metadata)
        self._deadline = inf if timeout is None else loop.now + timeout
        self._call: Any = None  # the server's side, once it has begun
        self._last_there = self._last_here = 0.0  # when what was sent last arrives
        self._outgoing: deque[Callable[[], None]] = deque()  # what is done at the server when the call has begun
        self._incoming: deque[bytes | tuple[int, str, Pairs]] = deque()  # has arrived; the process has not seen it
        self._messages: deque[bytes] = deque()
        self._status: tuple[int, str, Pairs] | None = None
        self._left = False
        self._changed = asyncio.Event()
        channel.calls.add(self)
        self._there(self._begin)
        if self._deadline < inf:
            loop.call_at(self._deadline, self._expire)

    # At the server's end, in no process.

    def _there(self, step: Callable[[], None]) -> None:
        """Do a step at the server when what was sent before has arrived."""
        self._last_there = max(self._last_there, self._loop.now + self._channel.latency)
        self._loop.call_at(self._last_there, step, context=self._loop.outside.copy())

    def _begin(self) -> None:
        if self._left:
            return
        server = self._channel.server()
        if server is None:
            self._loop.call_later(_TRY_EVERY, self._begin)
            return
        deadline = self._deadline + self._channel.latency  # what travels is the time that is left
        self._call = server.call(self._channel.peer, self._path, self._metadata, deadline, self, 1)
        while self._outgoing:
            self._outgoing.popleft()()

    def _at_call(self, step: Callable[..., None], *arguments: Any) -> None:
        """Do a step of the server's side; if that has not begun yet, then."""
        if self._call is None:
            self._outgoing.append(partial(self._at_call, step, *arguments))
        else:
            step(self._call, *arguments)

    def message(self, body: bytes) -> None:
        """See Listener."""
        self._here(body)

    def ended(self, code: int, text: str, trailers: Pairs) -> None:
        """See Listener."""
        self._here((code, text, trailers))

    def _here(self, item: bytes | tuple[int, str, Pairs]) -> None:
        self._last_here = max(self._last_here, self._loop.now + self._channel.latency)
        self._loop.call_at(self._last_here, self._arrive, item, context=self._loop.outside.copy())

    def _arrive(self, item: bytes | tuple[int, str, Pairs]) -> None:
        self._incoming.append(item)
        self._loop.do(self._channel.process, self._look)

    def leave(self) -> None:
        """The client's end of the call is over."""
        if not self._left:
            self._left = True
            self._channel.calls.discard(self)
            self._there(self._leave)

    def _leave(self) -> None:
        if self._call is not None:
            self._call.leave()

    # At the client's end.

    def _look(self) -> None:
        """Take what has arrived."""
        while self._incoming:
            item = self._incoming.popleft()
            if isinstance(item, bytes):
                self._messages.append(item)
                self._changed.set()
            else:
                self._left = True
                self._channel.calls.discard(self)
                self._finish(*item)

    def _finish(self, code: int, text: str, trailers: Pairs) -> None:
        if self._status is None:
            self._status = code, text, trailers
            self._changed.set()
            self.leave()

    def _expire(self) -> None:
        self._finish(DEADLINE_EXCEEDED, "Deadline Exceeded", ())

    def cancel(self) -> None:
        """See grpc.aio.StreamStreamCall."""
        self._finish(CANCELLED, _OWN_END, ())

    async def write(self, body: bytes) -> None:
        """See grpc.aio.StreamStreamCall."""
        self._check_open()
        self._there(partial(self._at_call, SimulatedCall.send, body))

    async def done_writing(self) -> None:
        """See grpc.aio.StreamStreamCall."""
        self._check_open()
        self._there(partial(self._at_call, SimulatedCall.half_close))

    def _check_open(self) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")

    def __aiter__(self) -> "OnwardCall":
        return self

    async def __anext__(self) -> bytes:
        while not self._messages and self._status is None:
            await self._wait()
        if self._messages:
            self._there(partial(self._at_call, SimulatedCall.take, 1))
            return self._messages.popleft()
        code, text, trailers = await self._ended()
        if code == CANCELLED and text == _OWN_END:
            raise asyncio.CancelledError
        if code != OK:
            raise grpc.aio.AioRpcError(_CODES[code], grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), text, "")
        raise StopAsyncIteration

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _ended(self) -> tuple[int, str, Pairs]:
        while self._status is None:
            await self._wait()
        return self._status

    async def code(self) -> grpc.StatusCode:
        """See grpc.aio.StreamStreamCall."""
        return _CODES[(await self._ended())[0]]

    async def details(self) -> str:
        """See grpc.aio.StreamStreamCall."""
        return (await self._ended())[1]

    async def trailing_metadata(self) -> Pairs:
        """See grpc.aio.StreamStreamCall."""
        return (await self._ended())[2]


@contextmanager
def simulated_channels(machine: SimulatedCygrpc, draw: random.Random) -> Iterator[None]:
    """Have the channels of grpc.aio be simulated while the block runs."""

    def made(target: str, **_: Any) -> SimulatedChannel:
        return SimulatedChannel(machine, draw, target)

    with patch.object(grpc.aio, "insecure_channel", made):
        yield
