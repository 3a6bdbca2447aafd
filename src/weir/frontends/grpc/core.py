"""A gRPC server built directly on the completion queue of gRPC's core, as both servers of grpcio are.

grpcio's asyncio server spends most of a small call on futures, tasks and a lock for each step, and its other server uses a thread for each call. Here the
event loop polls the queue itself as long as there are events. Only while there are none, a thread waits for the queue, and gives it back to the loop with
the next event. So a burst of calls wakes the loop once, and no two threads work on calls at the same time.

New calls have a queue of their own, and so have the operations of all calls. Most operations end while the loop starts them, so it finds their events without
the thread of their queue, which waits only while an operation takes longer.

The module underneath (grpc._cython.cygrpc) is not public. Only this file and call.py use it.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from msgspec.json import decode

from weir.errors import Overloaded, RequestTimeout, TooLarge, WeirError
from weir.frontends.grpc.call import Handler, IncomingCall, Left, cygrpc, message_in
from weir.frontends.http.fast.plan import MAX_LINES
from weir.protocols.account import Account
from weir.workers.timer import outcome_of

# Limits that gRPC's core does not have: of calls, of messages that are being received, and of responses that clients do not read.
#
# The core allocates memory for a message as soon as it is to receive it, up to the largest allowed size. So only some messages are received at a time,
# and at most half of them on one connection. The other messages wait in their clients, and connections take turns. While others wait, a client that has
# begun a message and does not send the rest loses its turn; its connection then gets one turn at a time. Otherwise a few such connections would hold all turns.


Receive = Callable[[], None]

# Seconds that a message may take to arrive while others wait for their turn.
PATIENCE = 5.0

_LOOK_EVERY = 1.0  # seconds between two checks for slow clients

_COUNT_EVERY = 1.0  # least number of seconds between two counts of connections
_COUNT_SHARE = 100  # a count of connections may take this fraction of the time: 1/100

# While the account is over its limit, clients get only this fraction of the time to read: 1/10.
_PATIENCE_DIVISOR = 10


class Intake:
    """Limits calls to as many as `account` may have connections, and messages that are being received at the same time to `most_messages`. `refuse` ends a call with an error. Without an account, calls are limited elsewhere.

    It belongs to one event loop.
    """

    def __init__(
        self,
        account: Account | None,
        most_messages: int,
        refuse: Callable[[WeirError, "IncomingCall"], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._account = account
        self._most_messages = most_messages
        self._refuse = refuse
        self._clock = clock
        self._peers: dict[str, int] = {}  # calls in flight, by connection
        self._late: set[str] = set()  # connections with calls in flight that have lost a turn
        self._share = max(1, most_messages // 2)  # messages that one connection may have received at the same time
        self._receiving: dict[IncomingCall, tuple[float, str]] = {}  # instant of the start and connection, oldest first
        self._waiting: dict[str, deque[tuple[IncomingCall, Receive]]] = {}  # by connection, in the order of turns

    @property
    def connections(self) -> int:
        """The number of connections with calls in flight."""
        return len(self._peers)

    @property
    def waits(self) -> bool:
        """Whether a call waits for its turn. `look` must be called from time to time then."""
        return bool(self._waiting)

    def begin(self, peer: str) -> Overloaded | None:
        """Count one more call from `peer`, until `end`. Return the error that refuses it if there are too many, else None."""
        self._peers[peer] = self._peers.get(peer, 0) + 1
        account = self._account
        if account is None or account.count_call(1) <= account.max_connections:
            return None
        return Overloaded(
            f"{account.max_connections} calls are in flight, which is the limit (max_connections)", retry_after=1.0
        )

    def end(self, peer: str, event: Any = None) -> None:
        """Count one call from `peer` less: the core has reported its end with `event`."""
        if self._account is not None:
            self._account.count_call(-1)
        left = self._peers[peer] - 1
        if left:
            self._peers[peer] = left
        else:
            del self._peers[peer]
            self._late.discard(peer)

    def receive(self, call: "IncomingCall", peer: str, receive: Receive) -> bool:
        """Call `receive` when it is the turn of the message of `call`, which came from `peer`. The caller must call `received` when it has arrived.

        Return whether it was its turn at once. If not, `look` must be called from time to time.
        """
        receiving = len(self._receiving)
        is_turn = receiving < self._most_messages and (
            (receiving < self._share and peer not in self._late) or self._may(peer)
        )
        if is_turn:
            self._begin(call, peer, receive)
        else:
            call.watch()  # its caller may leave before its turn
            self._waiting.setdefault(peer, deque()).append((call, receive))
            self.look()
        return is_turn

    def received(self, call: "IncomingCall") -> None:
        """Give the next messages their turn: the message of `call` has arrived, or never will."""
        self._receiving.pop(call, None)
        while self._waiting and len(self._receiving) < self._most_messages:
            peer = next((peer for peer in self._waiting if self._may(peer)), None)
            if peer is None:
                return
            waiting = self._waiting.pop(peer)
            following, receive = waiting.popleft()
            if waiting:
                self._waiting[peer] = waiting  # after the other connections
            if not following.over:
                self._begin(following, peer, receive)

    def _may(self, peer: str) -> bool:
        """Return whether one more message from `peer` may be received at the same time."""
        share = 1 if peer in self._late else self._share
        return sum([each == peer for _, each in self._receiving.values()]) < share

    def _begin(self, call: "IncomingCall", peer: str, receive: Receive) -> None:
        self._receiving[call] = self._clock(), peer
        receive()

    def look(self) -> None:
        """End calls whose messages take too long while others wait."""
        if not self._waiting:
            return
        late = self._clock() - PATIENCE
        slow = [(call, peer) for call, (since, peer) in self._receiving.items() if since < late]
        self._late.update([peer for _, peer in slow if peer in self._peers])
        for call, _ in slow:
            error = RequestTimeout(f"the message must arrive within {PATIENCE:g} s while others wait for their turn")
            self._refuse(error, call)
            self.received(call)


class Connected:
    """Counts the clients that are connected to a server of the core, with calls or without. The core's channelz service has the numbers.

    The count is made on demand, but so seldom that it takes at most a hundredth of the time. `least` returns a lower bound that is always up to date.
    """

    def __init__(self, least: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._least = least
        self._clock = clock
        self._before = _server_ids()
        self._server: int | None = None
        self._count = 0
        self._due = 0.0

    def begin(self) -> None:
        """Find the server: it is the one that was created after this object."""
        made = _server_ids() - self._before
        self._server = made.pop() if len(made) == 1 else None

    def __call__(self) -> int:
        """Return how many clients are connected. Those without calls may be those of the last count."""
        now = self._clock()
        if self._server is not None and now >= self._due:
            try:
                self._count = sum(_pages(self._server))
            except ValueError:  # the core has freed the server, and with it all clients
                self._server, self._count = None, 0
            self._due = self._clock() + max(_COUNT_EVERY, _COUNT_SHARE * (self._clock() - now))
        return max(self._count, self._least())


def _server_ids() -> set[int]:
    return {int(each["ref"]["serverId"]) for each in _decoded(cygrpc.channelz_get_servers(0)).get("server", ())}


def _pages(server: int) -> Iterator[int]:
    """Yield the number of sockets on each page of channelz."""
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
    """Responses that clients have not read. They are charged to `account`.

    A call is aborted after `patience` seconds, or after a tenth of that while the account is over its limit. It belongs to one event loop.
    """

    def __init__(self, account: Account, patience: float) -> None:
        self._account = account
        self.patience = patience
        self._numbers = count()
        self._responses: dict[int, tuple[Any, int, float]] = {}  # the core's call, bytes and since when, oldest first
        self._looking: asyncio.TimerHandle | None = None

    def add(self, call: Any, size_bytes: int) -> int:
        """Note that the core is sending a response of `size_bytes`. Return its number; `remove` must be called with it later."""
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        self._account.add(size_bytes)
        self._responses[number] = call, size_bytes, loop.time()
        if self._looking is None:
            self._looking = loop.call_later(_LOOK_EVERY, self._look)
        return number

    def remove(self, number: int) -> None:
        """Forget a response that has been sent, or never will be."""
        _, size_bytes, _ = self._responses.pop(number)
        self._account.give(size_bytes)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        late = loop.time() - (self.patience / _PATIENCE_DIVISOR if self._account.over else self.patience)
        for call, _, since in self._responses.values():
            if since >= late:
                break
            call.cancel()
        self._looking = loop.call_later(_LOOK_EVERY, self._look) if self._responses else None


_log = logging.getLogger("weir.grpc")

_REQUESTED = 4  # calls that the core may accept before the loop requests further ones
_UNIMPLEMENTED = 12
_EVENTS_AT_ONCE = 64  # events handled in one iteration of the loop; a call has three, each of some tens of microseconds
_ENTRIES = 100  # of metadata, which take as long as an event: a client may send hundreds of thousands
_LOOP_LOOK_EVERY = 1.0  # seconds between two checks of the thread whether the loop was closed

_TIMEOUT, _SHUTDOWN = cygrpc.CompletionType.queue_timeout, cygrpc.CompletionType.queue_shutdown

# A unary call is watched for a caller that leaves only after this many seconds. Most calls are over by then, and watching costs a fourth
# event besides a call's three.
_WATCHED_AFTER = 0.01

# The messages that are received at the same time may take a quarter of the account, but at least 16 messages are.
_MESSAGES_PART = 4
_LEAST_MESSAGES = 16


class Completions:
    """The events of one completion queue of the core. An event's tag is the function to call with it.

    While the loop expects events and finds none, a thread waits for the next one. `lost` is called for an event that could not be read, which may have been a new call. `last` is the tag
    of the event that also matters when the loop is closed. `ended` is done when the queue has no more events. It belongs to one event loop.
    """

    def __init__(self, last: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self.queue = cygrpc.CompletionQueue()
        self._next: Callable[[float | None], Any] = self.queue.poll
        self._last = last
        self._lost = lost
        self._closed = False
        self._over = False  # the queue has no more events
        self._expected = 0
        self._rests = True  # no event is expected, so neither the loop nor the thread polls
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._handed: Any = None  # an event that the thread has handed to the loop and the loop has not taken
        self._given = threading.Lock()  # released when the thread has the queue
        self._given.acquire()
        self.thread = threading.Thread(target=self._wait, name="weir-grpc", daemon=True)

    def expect(self) -> None:
        """Poll, because something was started that has one event."""
        self._expected += 1
        if self._rests and not self._loop.is_closed():
            self._rests = False
            self._loop.call_soon(self._turn)

    def start(self, call: Any, operations: tuple[Any, ...], heard: Callable[[Any], None]) -> None:
        """Start operations on one of the core's calls; `heard` is called when they have ended. Raises Left after `close`: they would abort the process."""
        if self._closed:
            raise Left
        call.start_server_batch(operations, heard)
        self.expect()

    def close(self) -> None:
        """End the queue after the events that are expected."""
        self._closed = True
        self.queue.shutdown()
        self.expect()

    # The thread that has the queue while there are no events.

    def _wait(self) -> None:
        while self._has_turn():
            self._handed = self._poll()
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._take)

    def _has_turn(self) -> bool:
        """Wait until the loop has given the queue or was closed. Return whether the queue has more events."""
        while not (closed := self._loop.is_closed()) and not self._given.acquire(timeout=_LOOP_LOOK_EVERY):
            pass
        if closed:
            self._hear_alone()
        return not self._over

    def _hear_alone(self) -> None:
        """Handle an event whose loop is closed: only the end of the server still matters."""
        event, self._handed = self._handed, None
        if event is None:
            return
        if event.completion_type == _SHUTDOWN:
            self._over = True
        elif event.tag == self._last:
            self._last(event)

    def _poll(self, until: float | None = None) -> Any:
        """Return the next event; None if it was lost."""
        try:
            return self._next(until)
        except Exception:  # above all MemoryError: the call of that event gets no more events; all other calls continue
            _log.exception("a gRPC event was lost")
            return None

    # On the event loop.

    def _take(self) -> None:
        """Take the queue over from the thread, with the event that has just come."""
        event, self._handed = self._handed, None
        self._hear(event)
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Handle the events that are there, and poll again in the next iteration of the loop. Without events, give the queue to the thread if one is expected."""
        heard = 0
        while self._expected and heard < _EVENTS_AT_ONCE and not self._over:
            event = self._poll(0.0)
            if event is not None and event.completion_type == _TIMEOUT:
                break
            heard += 1 + len(getattr(event, "invocation_metadata", None) or ()) // _ENTRIES
            self._hear(event)
        if self._over or (self._expected and not heard):
            self._given.release()
        elif self._expected:
            self._loop.call_soon(self._turn)
        else:
            self._rests = True

    def _hear(self, event: Any) -> None:
        if event is None:
            return self._lost()  # perhaps it is still to come, so it is still expected
        self._expected -= 1
        if event.completion_type == _SHUTDOWN:
            self._over = True
            self.ended.set_result(None)
            return
        try:
            event.tag(event)
        except Exception:
            _log.exception("a gRPC call could not be answered")


class Core:
    """A gRPC server.

    `handlers` maps the paths of methods to their handlers. `options` are gRPC's own. `admit` returns whether a call to a path may go on, and ends it
    otherwise. `refuse` ends a call with an error. Messages are charged to `account`. A client may take `patience` seconds to read a response. Without
    `has_clients`, calls come from a server that has counted them and their clients.
    """

    def __init__(
        self,
        handlers: dict[str, Handler],
        options: Sequence[tuple[str, int]],
        admit: Callable[[str, IncomingCall], bool],
        refuse: Callable[[WeirError, IncomingCall], None],
        account: Account,
        *,
        max_message_size: int,
        patience: float,
        has_clients: bool = True,
    ) -> None:
        self._handlers = handlers
        self._admit = admit
        self._refuse = refuse
        self._account = account
        self._unsent = Unsent(account, patience)
        most = max(_LEAST_MESSAGES, account.max_bytes // (_MESSAGES_PART * max_message_size * account.sharers))
        self._intake = Intake(account if has_clients else None, most, refuse)
        self._connected = Connected(lambda: self._intake.connections)
        if has_clients:
            account.counters.append(self._connected)
        self._arrivals, self._operations = self._queues = [Completions(self._shut, self._request) for _ in range(2)]
        self._server = cygrpc.Server(tuple(options), False)
        self._connected.begin()
        self._server.register_completion_queue(self._arrivals.queue)
        self._young: deque[tuple[float, IncomingCall]] = deque()  # when unary calls began that are not watched yet
        self._watching: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._ending = False
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.gather(*[each.ended for each in self._queues])

    def listen(self, address: str, credentials: Any) -> int:
        """Listen at `address`. Return the port, or 0 if the address is in use or invalid. `credentials` None: without TLS."""
        secured = () if credentials is None else (credentials._credentials,)
        try:
            return int(self._server.add_http2_port(address.encode(), *secured))
        except RuntimeError:
            return 0

    async def start(self) -> None:
        """Accept calls from now on."""
        self._server.start()
        for _ in range(_REQUESTED):
            self._request()
        for each in self._queues:
            each.thread.start()

    def discard(self) -> None:
        """Free a server that was not started."""
        self._server.destroy()

    async def stop(self, grace: float) -> None:
        """Accept no more calls. Return when the calls in flight have ended; after `grace` seconds they are cancelled."""
        if not self._ending:
            self._ending = True
            self._server.shutdown(self._arrivals.queue, self._shut)
            self._arrivals.expect()
        try:
            async with asyncio.timeout(grace):
                await outcome_of(self._ended)
        except TimeoutError:
            self._server.cancel_all_calls()
            await outcome_of(self._ended)
        for each in self._queues:
            each.thread.join()
        self._server.destroy()

    def _request(self) -> None:
        """Accept one more call, unless the server ends. A call that came just before the end is handled as others in flight are."""
        if not self._ending:
            self._server.request_call(self._operations.queue, self._arrivals.queue, self._arrived)
            self._arrivals.expect()

    def _shut(self, event: Any) -> None:
        """Shut the queues down: all calls have ended."""
        for each in self._queues:
            each.close()

    def _arrived(self, event: Any) -> None:
        if not event.success:
            return
        self._request()
        path = event.call_details.method.decode("latin-1")
        handler = self._handlers.get(path)
        peer = event.call.peer().decode("latin-1")
        call = IncomingCall(event, self._operations, self._account, self._unsent, partial(self._intake.end, peer))
        refusal: WeirError | None = self._intake.begin(peer)
        # The core's limit counts the bytes of one frame only, and the client may send many.
        if len(call.metadata) > MAX_LINES:
            refusal, call.metadata = TooLarge(f"metadata: must have at most {MAX_LINES} entries"), ()
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
            receive = partial(call.await_message, partial(self._received, handler.begin, call))
            if not self._intake.receive(call, peer, receive) and self._looking is None:
                self._looking = self._loop.call_later(_LOOK_EVERY, self._look)

    def _look(self) -> None:
        self._intake.look()
        self._looking = self._loop.call_later(_LOOK_EVERY, self._look) if self._intake.waits else None

    def _received(self, begin: Callable[[IncomingCall, bytes], None], call: IncomingCall, event: Any) -> None:
        self._intake.received(call)
        body = message_in(event)
        if body is None or call.over:
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
        """Watch the calls that are old enough now. Run again later if there are younger ones."""
        young, before = self._young, self._loop.time() - _WATCHED_AFTER
        while young and (young[0][1].over or young[0][0] <= before):
            call = young.popleft()[1]
            if not call.over:
                call.watch()
        self._watching = self._loop.call_later(_WATCHED_AFTER, self._watch) if young else None
