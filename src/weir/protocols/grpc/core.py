"""gRPC's core, taken where both servers of grpcio take it: one thread waits for it, and one event loop answers.

Of those two, the one for asyncio spends most of a small call on futures, tasks and a lock for each step, and the other one
a thread. Here a thread waits for what happens, and tells the event loop of all that came meanwhile at once. The module
underneath is not public: all that is used of it is in this file and call.py.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from weir.errors import Overloaded, WeirError
from weir.protocols.account import Account
from weir.protocols.grpc.call import Call, Gate, cygrpc
from weir.protocols.grpc.intake import Intake, Unsent

Step = Callable[[], None]

_log = logging.getLogger("weir.grpc")

_REQUESTED = 4  # calls that can be taken from the core without asking it for the next
_UNIMPLEMENTED = 12
_STEPS_AT_ONCE = 32  # that the event loop takes in one turn; a call has one or two, of a few tenths of a millisecond

# A caller that leaves a unary call is noticed from so many seconds on: most calls are over by then, and to hear of the end of each
# would be a fourth event, where a call has three.
_WATCHED_AFTER = 0.01

# Messages that may be received at the same time may have this part of the account, one in so many; and there are so many at least.
_MESSAGES_PART = 4
_LEAST_MESSAGES = 16


class Handler(NamedTuple):
    """What answers calls of one method: `begin` is called on the event loop, with the message of a unary request, or with
    none if the client sends a stream."""

    begin: Callable[[Call, bytes], None]
    takes_stream: bool = False


class Core:
    """A server of gRPC. `handlers` are by the methods' paths; `options` are the core's own. `admit`, told the path, tells whether a call may go
    on, or ends it, and `refuse` ends it with an error; both are called on another thread. Messages are charged to `account`."""

    def __init__(
        self, handlers: dict[str, Handler], options: Sequence[tuple[str, int]], admit: Callable[[str, Call], bool],
        refuse: Callable[[WeirError, Call], None], account: Account, *, max_message_size: int, patience: float,
    ) -> None:  # fmt: skip
        self._handlers = handlers
        self._admit = admit
        self._refuse = refuse
        self._account = account
        self._unsent = Unsent(account, patience)
        most = max(_LEAST_MESSAGES, account.max_bytes // (_MESSAGES_PART * max_message_size))
        self._intake = Intake(account.max_connections, most, refuse)
        account.counters.append(lambda: self._intake.connections)
        # Bytes of messages that the thread has told of, and that the loop has heard of: each is counted by one of the two.
        self._told_bytes = self._heard_bytes = 0
        self._queue = cygrpc.CompletionQueue()
        self._gate = Gate()
        self._server = cygrpc.Server(tuple(options), False)
        self._server.register_completion_queue(self._queue)
        self._steps: deque[Step] = deque()
        self._young: deque[tuple[float, Call]] = deque()  # unary calls that are not watched yet, and when they began
        self._watching: asyncio.TimerHandle | None = None
        self._told = False  # whether the loop knows that there are steps
        self._ending = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._wait, name="weir-grpc", daemon=True)

    def listen(self, address: str, credentials: Any) -> int:
        """Return the port that was taken, 0 if the address cannot be had. `credentials` None: without TLS."""
        try:
            if credentials is None:
                return int(self._server.add_http2_port(address.encode()))
            return int(self._server.add_http2_port(address.encode(), credentials._credentials))
        except RuntimeError:
            return 0

    def start(self) -> None:
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

    def tell(self, step: Step) -> None:
        """Have the event loop take `step`. May be called on any thread."""
        self._steps.append(step)
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._take_steps)

    def _take_steps(self) -> None:
        self._told = False
        for _ in range(min(len(self._steps), _STEPS_AT_ONCE)):
            try:
                self._steps.popleft()()
            except Exception:
                _log.exception("a call of gRPC could not be answered")
        if self._steps and not self._told:  # others have their turn first: workers with answers, above all
            self._told = True
            self._loop.call_soon(self._take_steps)

    # On the thread that waits. What happened says itself what is to be done with it.

    def _wait(self) -> None:
        while True:
            try:
                event = self._poll()
            except MemoryError:  # the call that it was about hears nothing more; all others go on
                _log.exception("an event of gRPC is lost")
                if not self._ending:
                    self._request()  # it may have been the one by which calls arrive
                continue
            if event.completion_type == cygrpc.CompletionType.queue_timeout:
                self._intake.look()
                continue
            if event.completion_type == cygrpc.CompletionType.queue_shutdown:
                break
            try:
                event.tag(event)
            except Exception:  # the loop has been closed, or a call ends in the middle of its beginning
                if not self._loop.is_closed():
                    _log.exception("an event of gRPC could not be heard")
            event = None  # nor its call kept alive while waiting for the next
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended.set_result, None)

    def _poll(self) -> Any:
        return self._queue.poll(time.time() + 1.0) if self._intake.waits else self._queue.poll()

    def _request(self) -> None:
        self._server.request_call(self._queue, self._queue, self._arrived)

    def _shut(self, event: Any) -> None:
        """All calls have ended."""
        self._gate.close()
        try:
            self.tell(self._queue.shutdown)
        except RuntimeError:  # the loop is closed, and starts no operation any more
            self._queue.shutdown()

    def _arrived(self, event: Any) -> None:
        if not event.success or self._ending:
            return
        self._request()
        path = event.call_details.method.decode("latin-1")
        handler = self._handlers.get(path)
        peer = event.call.peer().decode("latin-1")
        call = Call(self.tell, event, self._gate, self._account, self._unsent, partial(self._intake.end, peer))
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
            self.tell(lambda: handler.begin(call, b""))
        else:
            self._intake.receive(call, peer, partial(call.await_message, partial(self._heard, handler.begin)))

    def _heard(self, begin: Callable[[Call, bytes], None], call: Call, body: bytes | None) -> None:
        self._intake.received(call)
        size = 0 if body is None else len(body)
        if self._told_bytes - self._heard_bytes + size > self._account.max_bytes:
            self._refuse(
                Overloaded("messages come faster than they are read (max_waiting_bytes)", retry_after=1.0), call
            )
            return
        self._told_bytes += size
        self.tell(partial(self._begin, begin, call, body))

    # On the event loop again.

    def _begin(self, begin: Callable[[Call, bytes], None], call: Call, body: bytes | None) -> None:
        if body is None:
            call.lacks_message()
            return
        self._heard_bytes += len(body)
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
