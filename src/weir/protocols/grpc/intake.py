"""Which calls of gRPC are taken, whose messages are received, and whose answers are waited for: its core bounds none of these.

The core keeps a message in memory while it comes, up to the largest that may come, as soon as it is asked for it. So only
some messages are asked for at a time, half of them on one connection at most; the others wait in their clients, and connections
take turns. While others wait, a client that does not send what it has begun loses its turn.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from msgspec.json import decode

from weir.errors import DeadlineExceeded, Overloaded, WeirError
from weir.protocols.account import Account
from weir.protocols.grpc.call import cygrpc

if TYPE_CHECKING:
    from weir.protocols.grpc.call import GrpcCall

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
        refuse: Callable[[WeirError, "GrpcCall"], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calls = 0
        self._most_calls = most_calls
        self._most_messages = most_messages
        self._refuse = refuse
        self._clock = clock
        self._peers: dict[str, int] = {}  # how many calls each has under way
        self._share = max(1, most_messages // 2)  # of one connection
        self._receiving: dict[GrpcCall, tuple[float, str]] = {}  # since when and from where, oldest first
        self._waiting: dict[str, deque[tuple[GrpcCall, Receive]]] = {}  # by connection, in the order of their turns

    @property
    def connections(self) -> int:
        """How many connections have calls under way."""
        return len(self._peers)

    @property
    def waits(self) -> bool:
        """Whether a call waits for its turn, so that somebody should look whether another has lost it."""
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

    def receive(self, call: "GrpcCall", peer: str, receive: Receive) -> None:
        """Have the message of `call`, from `peer`, received by `receive` when it is its turn; `received` must follow."""
        if len(self._receiving) < self._share or (len(self._receiving) < self._most_messages and self._may(peer)):
            self._begin(call, peer, receive)
        else:
            call.watch()  # it may leave before its turn
            self._waiting.setdefault(peer, deque()).append((call, receive))
            self.look()

    def received(self, call: "GrpcCall") -> None:
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

    def _begin(self, call: "GrpcCall", peer: str, receive: Receive) -> None:
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
    """How many clients are connected to a server of the core, with calls or without, as the core's own account of its sockets (channelz) says.

    It is looked up when somebody asks, but so seldom that it takes a hundredth of the time; `least`, which costs nothing, is always up to date.
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
    return {int(each["ref"]["serverId"]) for each in _told(cygrpc.channelz_get_servers(0)).get("server", ())}


def _pages(server: int) -> Iterator[int]:
    """Yield how many sockets there are on each page of the core's account."""
    start, is_last = 0, False
    while not is_last:
        page = _told(cygrpc.channelz_get_server_sockets(server, start, 0))
        sockets = page.get("socketRef", [])
        yield len(sockets)
        is_last = not sockets or bool(page.get("end"))
        start = 0 if is_last else int(sockets[-1]["socketId"]) + 1


def _told(document: bytes) -> dict[str, Any]:
    told: dict[str, Any] = decode(document)
    return told


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
