"""gRPC's core, taken where both servers of grpcio take it: its completion queue, which tells of all that happens.

Of those two servers, the one for asyncio spends most of a small call on futures, tasks and a lock for each step, and the other one
a thread. Here the event loop itself asks the queue for what has happened, as long as something does. Only while nothing does, a
thread waits for the queue, and hands it back to the loop with the first event: so a burst of calls wakes the loop once, and no
two threads work on calls at the same time. The module underneath is not public: all that is used of it is in this file and call.py.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from msgspec.json import decode

from weir.errors import DeadlineExceeded, Overloaded, WeirError
from weir.frontends.grpc.call import GrpcGate, Handler, IncomingCall, cygrpc
from weir.protocols.account import Account

if TYPE_CHECKING:
    from weir.frontends.grpc.call import IncomingCall


# Which calls of gRPC are taken, whose messages are received, and whose answers are waited for: its core bounds none of these.
#
# The core keeps a message in memory while it comes, up to the largest that may come, as soon as it is asked for it. So only
# some messages are asked for at a time, half of them on one connection at most; the others wait in their clients, and connections
# take turns. While others wait, a client that does not send what it has begun loses its turn.


Receive = Callable[[], None]

# Seconds that a message may take to come while others wait for their turn.
PATIENCE = 5.0

_LOOK_EVERY = 1.0  # seconds

_COUNT_EVERY = 1.0  # seconds between two counts of connections, at least
_COUNT_SHARE = 100  # how many times as long as a count takes passes before the next, at least

# While memory is short, clients get so many times less time to read.
_HASTE = 10


class Intake:
    """At most `most_calls` are under way, and at most `most_messages` messages are being received. `refuse` ends a call with an error.

    To be used on the event loop.
    """

    def __init__(
        self,
        most_calls: int,
        most_messages: int,
        refuse: Callable[[WeirError, "IncomingCall"], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calls = 0
        self._most_calls = most_calls
        self._most_messages = most_messages
        self._refuse = refuse
        self._clock = clock
        self._peers: dict[str, int] = {}  # how many calls each has under way
        self._share = max(1, most_messages // 2)  # of one connection
        self._receiving: dict[IncomingCall, tuple[float, str]] = {}  # since when and from where, oldest first
        self._waiting: dict[str, deque[tuple[IncomingCall, Receive]]] = {}  # by connection, in the order of their turns

    @property
    def connections(self) -> int:
        """How many connections have calls under way."""
        return len(self._peers)

    @property
    def waits(self) -> bool:
        """Whether a call waits for its turn, so that `look` should be called."""
        return bool(self._waiting)

    def begin(self, peer: str) -> Overloaded | None:
        """Count a call more from `peer`; return what to refuse it with if it is one too many. It is counted until `end`."""
        self.calls += 1
        self._peers[peer] = self._peers.get(peer, 0) + 1
        if self.calls <= self._most_calls:
            return None
        return Overloaded(
            f"{self._most_calls} calls are under way; that is the limit (max_connections)", retry_after=1.0
        )

    def end(self, peer: str) -> None:
        """A call from `peer` is over."""
        self.calls -= 1
        left = self._peers[peer] - 1
        if left:
            self._peers[peer] = left
        else:
            del self._peers[peer]

    def receive(self, call: "IncomingCall", peer: str, receive: Receive) -> None:
        """Have the message of `call`, from `peer`, received by `receive` when it is its turn; `received` must follow."""
        if len(self._receiving) < self._share or (len(self._receiving) < self._most_messages and self._may(peer)):
            self._begin(call, peer, receive)
        else:
            call.watch()  # it may leave before its turn
            self._waiting.setdefault(peer, deque()).append((call, receive))
            self.look()

    def received(self, call: "IncomingCall") -> None:
        """The message of `call` has come, or never will: the next ones have their turn."""
        self._receiving.pop(call, None)
        while self._waiting and len(self._receiving) < self._most_messages:
            peer = next((peer for peer in self._waiting if self._may(peer)), None)
            if peer is None:
                return
            line = self._waiting.pop(peer)
            following, receive = line.popleft()
            if line:
                self._waiting[peer] = line  # behind the others
            if not following.over:
                self._begin(following, peer, receive)

    def _may(self, peer: str) -> bool:
        """Tell whether a message more from `peer` may be received beside those that are."""
        return sum([each == peer for _, each in self._receiving.values()]) < self._share

    def _begin(self, call: "IncomingCall", peer: str, receive: Receive) -> None:
        self._receiving[call] = self._clock(), peer
        receive()

    def look(self) -> None:
        """End the calls whose messages take too long while others wait."""
        if not self._waiting:
            return
        late = self._clock() - PATIENCE
        for call in [call for call, (since, _) in self._receiving.items() if since < late]:
            error = DeadlineExceeded(f"the message must arrive within {PATIENCE:g} s while others wait for their turn")
            self._refuse(error, call)
            self.received(call)


class Connected:
    """How many clients are connected to a server of the core, with calls or without, by the core's own account of its sockets (channelz).

    It is looked up on demand, but so seldom that it takes a hundredth of the time; `least`, which costs nothing, is always up to date.
    """

    def __init__(self, least: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._least = least
        self._clock = clock
        self._before = _server_ids()
        self._server: int | None = None
        self._count = 0
        self._due = 0.0

    def begin(self) -> None:
        """The server has been made since this was."""
        made = _server_ids() - self._before
        self._server = made.pop() if len(made) == 1 else None

    def __call__(self) -> int:
        """Return how many there are; those without calls as of late."""
        now = self._clock()
        if self._server is not None and now >= self._due:
            self._count = sum(_pages(self._server))
            self._due = self._clock() + max(_COUNT_EVERY, _COUNT_SHARE * (self._clock() - now))
        return max(self._count, self._least())


def _server_ids() -> set[int]:
    return {int(each["ref"]["serverId"]) for each in _decoded(cygrpc.channelz_get_servers(0)).get("server", ())}


def _pages(server: int) -> Iterator[int]:
    """Yield how many sockets there are on each page of the core's account."""
    start, is_last = 0, False
    while not is_last:
        page = _decoded(cygrpc.channelz_get_server_sockets(server, start, 0))
        sockets = page.get("socketRef", [])
        yield len(sockets)
        is_last = not sockets or bool(page.get("end"))
        start = 0 if is_last else int(sockets[-1]["socketId"]) + 1


def _decoded(document: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = decode(document)
    return decoded


class Unsent:
    """Answers that their clients have not read. They are charged to `account`, and given up after `patience` seconds, or a tenth of that while
    the account is over its limit. For the event loop."""

    def __init__(self, account: Account, patience: float) -> None:
        self._account = account
        self._patience = patience
        self._numbers = count()
        self._answers: dict[int, tuple[Any, int, float]] = {}  # the core's call, bytes and since when, oldest first
        self._looking: asyncio.TimerHandle | None = None

    def add(self, call: Any, size_bytes: int) -> int:
        """An answer of so many bytes has been given to the core. Return its number, for `remove`, which must follow."""
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        self._account.add(size_bytes)
        self._answers[number] = call, size_bytes, loop.time()
        if self._looking is None:
            self._looking = loop.call_later(_LOOK_EVERY, self._look)
        return number

    def remove(self, number: int) -> None:
        """It has been sent, or never will be."""
        _, size_bytes, _ = self._answers.pop(number)
        self._account.give(size_bytes)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        late = loop.time() - (self._patience / _HASTE if self._account.over else self._patience)
        for call, _, since in self._answers.values():
            if since >= late:
                break
            call.cancel()
        self._looking = loop.call_later(_LOOK_EVERY, self._look) if self._answers else None


_log = logging.getLogger("weir.grpc")

_REQUESTED = 4  # calls that can be taken from the core without asking it for the next
_UNIMPLEMENTED = 12
_EVENTS_AT_ONCE = 64  # that the event loop handles in one turn; a call has three, of some tens of microseconds
_LOOP_LOOK_EVERY = 1.0  # seconds between two looks of the thread whether the loop that has the queue was closed

_TIMEOUT, _SHUTDOWN = cygrpc.CompletionType.queue_timeout, cygrpc.CompletionType.queue_shutdown

# A caller that leaves a unary call is noticed from so many seconds on: most calls are over by then, and an event for the end of each
# would be a fourth event, where a call has three.
_WATCHED_AFTER = 0.01

# Messages that may be received at the same time may have this part of the account, one in so many; and there are so many at least.
_MESSAGES_PART = 4
_LEAST_MESSAGES = 16


class Core:
    """A server of gRPC. `handlers` are by the methods' paths; `options` are the core's own. `admit` takes the path and returns whether a call may go
    on, or ends it, and `refuse` ends it with an error. Messages are charged to `account`."""

    def __init__(
        self, handlers: dict[str, Handler], options: Sequence[tuple[str, int]], admit: Callable[[str, IncomingCall], bool],
        refuse: Callable[[WeirError, IncomingCall], None], account: Account, *, max_message_size: int, patience: float,
    ) -> None:  # fmt: skip
        self._handlers = handlers
        self._admit = admit
        self._refuse = refuse
        self._account = account
        self._unsent = Unsent(account, patience)
        most = max(_LEAST_MESSAGES, account.max_bytes // (_MESSAGES_PART * max_message_size))
        self._intake = Intake(account.max_connections, most, refuse)
        self._connected = Connected(lambda: self._intake.connections)
        account.counters.append(self._connected)
        self._queue = cygrpc.CompletionQueue()
        self._next: Callable[[float | None], Any] = self._queue.poll
        self._gate = GrpcGate()
        self._server = cygrpc.Server(tuple(options), False)
        self._connected.begin()
        self._server.register_completion_queue(self._queue)
        self._young: deque[tuple[float, IncomingCall]] = (
            deque()
        )  # unary calls that are not watched yet, and when they began
        self._watching: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._ending = False
        self._over = False  # the queue will never tell of anything again
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._handed: Any = None  # the event that the thread has handed to the loop, until the loop takes it
        self._given = threading.Lock()  # released when the thread has the queue again
        self._given.acquire()
        self._thread = threading.Thread(target=self._wait, name="weir-grpc", daemon=True)

    def listen(self, address: str, credentials: Any) -> int:
        """Return the port that was taken, 0 if the address cannot be had. `credentials` None: without TLS."""
        try:
            if credentials is None:
                return int(self._server.add_http2_port(address.encode()))
            return int(self._server.add_http2_port(address.encode(), credentials._credentials))
        except RuntimeError:
            return 0

    async def start(self) -> None:
        """Take calls."""
        self._server.start()
        for _ in range(_REQUESTED):
            self._request()
        self._thread.start()

    def discard(self) -> None:
        """Let go of a server that was not started."""
        self._server.destroy()

    async def stop(self, grace: float) -> None:
        """Take no more calls; return when those under way have ended. After `grace` seconds they are cancelled."""
        if not self._ending:
            self._ending = True
            self._server.shutdown(self._queue, self._shut)
        try:
            async with asyncio.timeout(grace):
                await asyncio.shield(self._ended)
        except TimeoutError:
            self._server.cancel_all_calls()
            await asyncio.shield(self._ended)
        self._thread.join()
        self._server.destroy()

    # The thread that has the queue while nothing happens.

    def _wait(self) -> None:
        while not self._over:
            self._handed = self._poll()
            try:
                self._loop.call_soon_threadsafe(self._take)
            except RuntimeError:  # the loop is closed
                self._hear_alone()
                continue
            while not self._given.acquire(timeout=_LOOP_LOOK_EVERY):
                if self._loop.is_closed():  # before it took the event, or before its next turn: it gives nothing back
                    self._hear_alone()
                    break

    def _hear_alone(self) -> None:
        """Handle an event that no loop will take any more: go on with the end of the server."""
        event, self._handed = self._handed, None
        if event is None:
            return
        if event.completion_type == _SHUTDOWN:
            self._over = True
        elif event.tag == self._shut:
            self._shut(event)

    def _poll(self, until: float | None = None) -> Any:
        """Return the next event; None for one that is lost."""
        try:
            return self._next(until)
        except MemoryError:  # its call gets no more events; all others go on
            _log.exception("an event of gRPC is lost")
            return None

    # On the event loop.

    def _take(self) -> None:
        """Have the queue, from the thread, with the event that has just come."""
        event, self._handed = self._handed, None
        self._hear(event)
        event = None  # nor its call kept alive while others are handled
        self._turn()

    def _turn(self) -> None:
        """Hear what has happened by now, and look again in the next turn of the loop; if it was nothing, give the queue to the thread."""
        heard = 0
        while heard < _EVENTS_AT_ONCE and not self._over:
            event = self._poll(0.0)
            if event is not None and event.completion_type == _TIMEOUT:
                break
            self._hear(event)
            heard += 1
        if heard and not self._over:
            self._loop.call_soon(self._turn)
        else:
            self._given.release()

    def _hear(self, event: Any) -> None:
        """Handle an event: its tag is the function to call."""
        if event is None:
            if not self._ending:
                self._request()  # it may have been the one by which calls arrive
        elif event.completion_type == _SHUTDOWN:
            self._over = True
            if not self._ended.done():
                self._ended.set_result(None)
        else:
            try:
                event.tag(event)
            except Exception:
                _log.exception("a call of gRPC could not be answered")

    def _request(self) -> None:
        self._server.request_call(self._queue, self._queue, self._arrived)

    def _shut(self, event: Any) -> None:
        """All calls have ended."""
        self._gate.close()
        self._queue.shutdown()

    def _arrived(self, event: Any) -> None:
        if not event.success or self._ending:
            return
        self._request()
        path = event.call_details.method.decode("latin-1")
        handler = self._handlers.get(path)
        peer = event.call.peer().decode("latin-1")
        call = IncomingCall(event, self._gate, self._account, self._unsent, partial(self._intake.end, peer))
        refusal = self._intake.begin(peer)
        if refusal is not None:
            self._refuse(refusal, call)
            return
        if not self._admit(path, call):
            return
        if handler is None:
            call.end(_UNIMPLEMENTED, "Method not found!")
        elif handler.takes_stream:
            call.watch()
            handler.begin(call, b"")
        else:
            self._intake.receive(call, peer, partial(call.await_message, partial(self._received, handler.begin)))
            if self._intake.waits and self._looking is None:
                self._looking = self._loop.call_later(_LOOK_EVERY, self._look)

    def _look(self) -> None:
        self._intake.look()
        self._looking = self._loop.call_later(_LOOK_EVERY, self._look) if self._intake.waits else None

    def _received(self, begin: Callable[[IncomingCall, bytes], None], call: IncomingCall, body: bytes | None) -> None:
        self._intake.received(call)
        if body is None:
            call.lacks_message()
            return
        try:
            call.charge(len(body))
        except WeirError as error:
            self._refuse(error, call)
        else:
            begin(call, body)
            if not call.over:
                self._young.append((self._loop.time(), call))
                if self._watching is None:
                    self._watching = self._loop.call_later(_WATCHED_AFTER, self._watch)

    def _watch(self) -> None:
        """Watch the calls that have been under way for long enough, and look again as long as there are others."""
        young, before = self._young, self._loop.time() - _WATCHED_AFTER
        while young and (young[0][1].over or young[0][0] <= before):
            young.popleft()[1].watch()
        self._watching = self._loop.call_later(_WATCHED_AFTER, self._watch) if young else None
