"""gRPC's core in virtual time: calls without sockets, as the server's side of it sees them (cygrpc), and as clients do.

Only what is below Weir's handlers is simulated: what `weir.frontends.grpc.core` and `call` take from grpcio's private module, and the thread that waits for events.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.simulated.loop import SimulatedLoop
from tests.simulated.transport import Ordered

from weir.frontends.grpc import call as calls
from weir.frontends.grpc import core as cores
from weir.frontends.grpc.core import Core

_kinds: Any = calls.cygrpc.CompletionType
OK, CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE = 0, 1, 4, 14
Pairs = tuple[tuple[str, str], ...]


class _Operation:
    """One operation of the core. `value` is what it sends, or has received."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.value: Any = None

    def message(self) -> bytes | None:
        """Return the message that was received; None if there is no more."""
        body: bytes | None = self.value
        return body

    def cancelled(self) -> bool:
        """Return whether the call ended without its status having been sent."""
        return bool(self.value)


class _SendHead(_Operation): ...


class _SendMessage(_Operation): ...


class _SendStatus(_Operation): ...


class _ReceiveMessage(_Operation): ...


class _ReceiveClose(_Operation): ...


class _Batch:
    """Operations that were started together, and make one event when all have ended."""

    def __init__(self, operations: tuple[_Operation, ...], done: Callable[[Any], None], tag: Any) -> None:
        self._left, self._success = len(operations), True
        self._operations, self._done, self._tag = operations, done, tag

    def ended(self, *, success: bool = True) -> None:
        """One of the operations has ended."""
        self._left -= 1
        self._success &= success
        if not self._left:
            event = _event(self._tag, success=self._success)
            event.batch_operations = self._operations
            self._done(event)


class SimulatedCall:
    """One call, from both sides: the server's is `start_server_batch`, `cancel` and `peer`; the client's are `message` and `ended` of `listener`, which must not call the server at once. `window`: how many messages its client takes before it reads again."""

    def __init__(
        self, server: "_Server", peer: str, method: str, metadata: Pairs, deadline: float, listener: Any, window: float
    ) -> None:  # fmt: skip
        self.details = SimpleNamespace(method=method.encode())
        self.deadline = deadline  # of the loop's clock; the core tells it by the wall clock
        self.metadata, self._server, self._peer = metadata, server, peer
        self._listener, self._window = listener, window
        self._incoming: deque[bytes] = deque()
        self._half_closed = False
        self._reading: tuple[_Operation, _Batch] | None = None
        self._sending: deque[tuple[_Operation, _Batch]] = deque()  # messages and the status, in order
        self._watching: list[tuple[_Operation, _Batch]] = []
        self.over = False  # for the core
        self._told = False  # for the client
        self.was_cut = False  # by the end of the server's process
        self.queue: _Queue  # of its operations, from when the server has it

    # The client's side. What the client does counts at once; the server's process notices it when it runs.

    def send(self, body: bytes) -> None:
        """Send a message."""
        if not self.over:
            self._incoming.append(body)
            self._server.do(self._read)

    def half_close(self) -> None:
        """Send no more."""
        self._half_closed = True
        self._server.do(self._read)

    def take(self, count: float) -> None:
        """Take so many messages more."""
        self._window += count
        self._server.do(self._write)

    def leave(self, code: int = CANCELLED) -> None:
        """End the call: the client cancels it, or its connection or its time is over."""
        self._tell(code, "", ())
        self._server.do(self._cut)

    def cut_off(self) -> None:
        """The server's process has ended."""
        self.was_cut = True
        self._tell(UNAVAILABLE, "", ())

    def _tell(self, code: int, text: str, trailers: Pairs) -> None:
        if not self._told:
            self._told = True
            self._server.at_client(self._listener.ended, code, text, trailers)

    # The server's side.

    def peer(self) -> bytes:
        """See cygrpc."""
        return self._peer.encode()

    def start_server_batch(self, operations: tuple[_Operation, ...], tag: Any) -> None:
        """See cygrpc."""
        batch = _Batch(operations, self.queue.put, tag)
        for each in operations:
            if isinstance(each, _SendHead):
                batch.ended(success=not self.over)
            elif isinstance(each, _ReceiveClose):
                self._watching.append((each, batch))
            elif isinstance(each, _ReceiveMessage):
                if self._reading is not None:
                    raise RuntimeError("only one message may be received at a time")
                self._reading = each, batch
            else:
                self._sending.append((each, batch))
        self._read()
        self._write()
        if self.over:
            self._end_all(cancelled=True)

    def cancel(self) -> None:
        """See cygrpc."""
        self._tell(CANCELLED, "", ())
        self._cut()

    def _read(self) -> None:
        if self._reading is None or not (self._incoming or self._half_closed or self.over):
            return
        (operation, batch), self._reading = self._reading, None
        operation.value = self._incoming.popleft() if self._incoming and not self.over else None
        batch.ended()

    def _write(self) -> None:
        while self._sending and not self.over:
            operation, batch = self._sending[0]
            if isinstance(operation, _SendMessage):
                if self._window < 1:
                    return
                self._window -= 1
                if not self._told:  # the client may have left while this process was stopped
                    self._server.at_client(self._listener.message, operation.arguments[0])
            else:
                trailers, code, text, _ = operation.arguments
                self._tell(code, text.decode(), tuple(trailers))
            self._sending.popleft()
            batch.ended()
            if isinstance(operation, _SendStatus):
                self.over = True
                self._end_all(cancelled=False)

    def _cut(self) -> None:
        """End the call without a status."""
        if not self.over:
            self.over = True
            self._end_all(cancelled=True)

    def _end_all(self, *, cancelled: bool) -> None:
        self._read()
        while self._sending:
            self._sending.popleft()[1].ended(success=False)
        while self._watching:
            operation, batch = self._watching.pop()
            operation.value = cancelled
            batch.ended()
        self._server.ended(self)


class _Queue:
    """A queue of events, which the server's thread or its loop takes."""

    def __init__(self) -> None:
        self.events: deque[Any] = deque()
        self.heard: Callable[[], None] | None = None  # called when there is an event

    def put(self, event: Any) -> None:
        """Add an event."""
        self.events.append(event)
        if self.heard is not None:
            self.heard()

    def poll(self, until: float | None) -> Any:
        """See cygrpc. Nobody waits here."""
        return self.events.popleft() if self.events else SimpleNamespace(completion_type=_kinds.queue_timeout)

    def shutdown(self) -> None:
        """See cygrpc."""
        self.put(SimpleNamespace(completion_type=_kinds.queue_shutdown))


class _Server:
    """A server of the core. Clients connect and call."""

    def __init__(self, machine: "SimulatedCygrpc", *_: Any) -> None:
        self._machine = machine
        self.queue: _Queue
        self.address = ""
        self.connections: dict[str, None] = {}
        self._places: deque[Any] = deque()  # tags that wait for a call, and the queues of its operations
        self._waiting: deque[SimulatedCall] = deque()  # calls that wait for a tag
        self._calls: Any = Ordered()
        self._shut: Any = None
        self.listens = False
        self.process = machine.loop.process.get()
        if self.process is not None:
            self.process.at_end.append(self._die)
        machine.servers.append(self)

    def do(self, step: Callable[..., object], *arguments: Any) -> None:
        """Have the server's process do a step."""
        self._machine.loop.do(self.process, step, *arguments)

    def at_client(self, step: Callable[..., object], *arguments: Any) -> None:
        """Have a client do a step, which is not in the server's process."""
        self._machine.loop.at_client(self.process, step, *arguments)

    def _die(self) -> None:
        """The process has ended, and with it all connections."""
        self.listens = False
        self.connections.clear()
        self.destroy()
        for call in list(self._calls):
            call.cut_off()

    # The clients' side.

    def call(self, peer: str, method: str, metadata: Pairs, deadline: float, listener: Any, window: float) -> SimulatedCall:  # fmt: skip
        """Begin a call from a client that is connected as `peer`. Who asks must know that the server listens."""
        made = SimulatedCall(self, peer, method, metadata, deadline, listener, window)
        self.connections[peer] = None
        self._calls.add(made)
        if deadline < math.inf:
            loop = self._machine.loop
            loop.call_at(deadline, made.leave, DEADLINE_EXCEEDED, context=loop.outside.copy())
        self._waiting.append(made)
        self.do(self._match)
        return made

    def disconnect(self, peer: str) -> None:
        """A client closes its connection, on which it has no calls."""
        self.connections.pop(peer, None)

    def ended(self, call: SimulatedCall) -> None:
        """A call has ended."""
        self._calls.discard(call)
        self._look_for_end()

    def _look_for_end(self) -> None:
        if self._shut is not None and not self._calls:
            tag, self._shut = self._shut, None
            self.queue.put(_event(tag))

    def _match(self) -> None:
        while self._places and self._waiting:
            call = self._waiting.popleft()
            if call.over:
                continue
            tag, call.queue = self._places.popleft()
            event = _event(tag)
            call.details.deadline = call.deadline + self._machine.loop.wall() - self._machine.loop.now
            event.call, event.call_details, event.invocation_metadata = call, call.details, call.metadata
            self.queue.put(event)

    # The server's side.

    def register_completion_queue(self, queue: _Queue) -> None:
        """See cygrpc."""
        self.queue = queue

    def add_http2_port(self, address: bytes, *_: Any) -> int:
        """See cygrpc."""
        self.address = address.decode()
        return 1

    def start(self) -> None:
        """See cygrpc."""
        self.listens = True

    def request_call(self, operations: _Queue, _: _Queue, tag: Any) -> None:
        """See cygrpc."""
        self._places.append((tag, operations))
        self._match()

    def shutdown(self, _: _Queue, tag: Any) -> None:
        """See cygrpc."""
        self.listens = False
        while self._places:
            self.queue.put(_event(self._places.popleft()[0], success=False))
        self._shut = tag
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.leave(UNAVAILABLE)
        self._look_for_end()

    def cancel_all_calls(self) -> None:
        """See cygrpc."""
        for call in list(self._calls):
            call.leave(UNAVAILABLE)

    def destroy(self) -> None:
        """See cygrpc. Idempotent."""
        if self in self._machine.servers:
            self._machine.servers.remove(self)


def _event(tag: Any, *, success: bool = True) -> Any:
    return SimpleNamespace(completion_type=_kinds.operation_complete, success=success, tag=tag)


class SimulatedCygrpc:
    """What stands for the module `grpc._cython.cygrpc`."""

    CompletionType = _kinds
    CompletionQueue = _Queue
    SendInitialMetadataOperation = _SendHead
    SendMessageOperation = _SendMessage
    SendStatusFromServerOperation = _SendStatus
    ReceiveMessageOperation = _ReceiveMessage
    ReceiveCloseOnServerOperation = _ReceiveClose

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.servers: list[_Server] = []  # of all processes
        self.Server = partial(_Server, self)

    def listening(self) -> list[_Server]:
        """Return the servers at which clients may call: not those of other servers' own."""
        return [each for each in self.servers if each.listens and not each.address.startswith("unix")]

    def channelz_get_servers(self, _: int) -> bytes:
        """See cygrpc."""
        own = [each for each in self.servers if each.process is self.loop.process.get()]
        return json.dumps({"server": [{"ref": {"serverId": id(each)}} for each in own]}).encode()

    def channelz_get_server_sockets(self, number: int, _: int, __: int) -> bytes:
        """See cygrpc."""
        found = [each for each in self.servers if id(each) == number]
        sockets = [{"socketId": at} for each in found for at in range(len(each.connections))]
        return json.dumps({"socketRef": sockets, "end": True}).encode()


class _Thread:
    """The thread that waits for events while the loop has none (Completions._wait), and the lock with which the loop gives it the queue."""

    def __init__(self, events: Any, loop: SimulatedLoop) -> None:
        self._events, self._loop, self._queue = events, loop, events.queue
        self._waits = False
        self._context = copy_context()  # of the server's process

    def start(self) -> None:
        """See Thread."""
        self._queue.heard = self._look

    def join(self) -> None:
        """See Thread."""

    def release(self) -> None:
        """The queue is the thread's again."""
        self._waits = True
        self._look()

    def _look(self) -> None:
        if self._waits and self._queue.events:
            self._waits = False
            self._events._handed = self._queue.events.popleft()
            self._loop.call_soon(self._events._take, context=self._context.copy())


class SimulatedCore(Core):
    """Core, but for its thread and its clocks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        loop: Any = self._loop
        for each in self._queues:
            thread: Any = _Thread(each, loop)
            each.thread = each._given = thread
        self._intake._clock = self._connected._clock = loop.time


@contextmanager
def simulated_core(loop: SimulatedLoop) -> Iterator[SimulatedCygrpc]:
    """Have gRPC's core be simulated while the block runs."""
    made = SimulatedCygrpc(loop)
    clock = SimpleNamespace(time=loop.wall, monotonic=loop.time)
    with (
        patch.object(calls, "cygrpc", made),
        patch.object(cores, "cygrpc", made),
        patch.object(cores, "Core", SimulatedCore),
        patch.object(calls, "time", clock),
    ):
        yield made
