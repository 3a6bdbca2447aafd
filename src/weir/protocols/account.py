"""One account of what all clients of a server hold together: the bytes of their requests and responses, and connections.

Bytes are charged before memory is allocated for them: bytes received, a body that is decompressed, requests that wait in a queue, and responses that the
client has not read yet. A request that would exceed the limit is refused with Overloaded, or is not read from its socket. So the clients together cannot
take more memory than the limit, however many they are.

A charged byte stands for _COPIES bytes of memory. So what is held once counts a quarter: the values that a thread reads from a long body. Their size
follows from the body, for each format from counts of a few bytes (`values_bytes`, `typed_bytes`), and `charge_values` charges it until the body has been
read. Values that live on are charged as what they have become: arrays and texts. What workers decode is not the server's.

With several fronts, there is one account of all processes of the server: each has a row of figures in shared memory, which it alone writes and all read. So
`max_connections` and `max_waiting_bytes` are those of the whole server. Processes that charge at the same instant may exceed a limit by what each of them
charges then.
"""

import array
import asyncio
import mmap
import os
import resource
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weir.errors import Overloaded, TooLarge, WeirError
from weir.protocols import HttpSettings

# By default requests and responses may take one eighth of the memory of this process. Bytes that are charged once may exist four times:
# as a body, as its copy on the way to a worker, as the output on its way back, and as the response.
_PART = 8
_COPIES = 4

# One connection with many requests under way may hold one eighth of the limit.
_CONNECTION_PART = 8

# Copies of a head while its request is under way: its bytes, its headers, and its path in two forms.
_HEAD_COPIES = 3
_FREE_HEAD = 4 << 10  # bytes of a head that are not charged: most heads are shorter

# How many bodies are decompressed at the same time. Each is charged with the largest size that it may reach, so only a few can start at once.
_UNPACKED_AT_ONCE = 2

RESERVED = 8  # connections of each process that may exceed `max_connections`, for probes

# How many files a server may have open in addition to its connections: models, workers, logs, and the connections of probes.
_OTHER_FILES = 128

_LOOK = 1.0  # seconds after which a body that does not come is looked at again
# A client that has been silent has its whole patience back after this many bytes of a body. At 60 s a body may arrive at 17 KiB/s, however long it is.
_RESTORING = 1 << 20

T = TypeVar("T")

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Account:
    """Counts the bytes and the connections of all clients of one server. It belongs to one event loop."""

    __slots__ = (
        "_full", "_lock", "calls", "counters", "held_bytes", "max_bytes", "max_connections", "reading_bytes", "refused", "unpacking",
    )  # fmt: skip

    def __init__(self, settings: HttpSettings) -> None:
        self.max_bytes = settings.max_waiting_bytes or max(usable_memory() // _PART, 4 * settings.max_body_size)
        self.max_connections = settings.max_connections
        self.held_bytes = 0
        self.reading_bytes = 0  # of values, in threads
        self._lock = threading.Lock()  # for `reading_bytes`
        self.counters: list[Callable[[], int]] = []  # one per kind of connection: returns how many are open
        self.calls = 0  # of gRPC that are under way
        self.refused = 0  # how many times bytes were refused
        self.unpacking = asyncio.Semaphore(_UNPACKED_AT_ONCE)
        self._full = False

    def take(self, size_bytes: int) -> None:
        """Charge `size_bytes`. Raises Overloaded if the limit does not allow that now, and TooLarge if it never will; then nothing is charged."""
        if (total := self.total_bytes) + size_bytes > self.max_bytes:
            raise self._refusal(size_bytes, total)
        self.held_bytes += size_bytes

    def take_values(self, size_bytes: int, body_bytes: int) -> int:
        """Charge the values of a body of `body_bytes`, which take `size_bytes` of memory. Return what is charged, for `give_values`.

        Any thread may call this. Raises what `take` raises: TooLarge if body and values together never have room.
        """
        size = size_bytes // _COPIES
        with self._lock:
            if self.total_bytes + size > self.max_bytes:
                raise self._refusal(size, self.total_bytes, body_bytes)
            self.reading_bytes += size
        return size

    def give_values(self, size: int) -> None:
        """Give back what `take_values` has charged. Any thread may call this."""
        with self._lock:
            self.reading_bytes -= size

    def _refusal(self, size_bytes: int, held_bytes: int, body_bytes: int = 0) -> WeirError:
        """Count a refusal of `size_bytes` while `held_bytes` are charged, and return its error. With `body_bytes`, they are the values of such a body."""
        self.refused += 1
        self._full = True
        if size_bytes + body_bytes > self.max_bytes:
            what = (
                f"a body of {body_bytes} bytes and its values take {size_bytes + body_bytes}"
                if body_bytes
                else f"{size_bytes} bytes"
            )
            return TooLarge(f"{what}: must be at most {self.max_bytes} (max_waiting_bytes)")
        values = f" for the values of a body of {body_bytes} bytes" if body_bytes else ""
        return Overloaded(
            f"requests and responses hold {held_bytes} bytes, {size_bytes} more{values} would exceed {self.max_bytes} (max_waiting_bytes)",
            retry_after=1.0,
        )

    def add(self, size_bytes: int) -> None:
        """Charge `size_bytes` that exist already, even beyond the limit: a response that the client reads more slowly than it is written."""
        self.held_bytes += size_bytes
        self._full |= self.over

    def give(self, size_bytes: int) -> None:
        """Give back `size_bytes` that were charged."""
        self.held_bytes -= size_bytes

    def claim(self) -> "Claim":
        """Return a new claim, for one request or one connection. It holds no bytes yet."""
        return Claim(self)

    def connection_set(self) -> set[Any]:
        """Return a set for connections that are counted. The caller adds its `__len__` to `counters`, and uses only its `add` and `discard`."""
        return set()

    def count_call(self, change: int) -> int:
        """Add `change` to the calls of gRPC under way; return their number, in all processes of the server."""
        self.calls += change
        return self.calls

    @property
    def sharers(self) -> int:
        """The number of processes that keep this account together."""
        return 1

    @property
    def total_bytes(self) -> int:
        """The number of bytes that are charged, in all processes of the server."""
        return self.held_bytes + self.reading_bytes

    @property
    def total_refused(self) -> int:
        """The number of times that bytes were refused, in all processes of the server."""
        return self.refused

    @property
    def max_connection_bytes(self) -> int:
        """The most bytes that the requests of one connection may hold before it must wait. A connection without requests under way may always send one."""
        return self.max_bytes // _CONNECTION_PART

    @property
    def connections(self) -> int:
        """The number of open connections of all kinds."""
        return sum(count() for count in self.counters)

    @property
    def over(self) -> bool:
        """Whether more bytes are charged than the limit allows, which `add` makes possible."""
        return self.total_bytes > self.max_bytes

    @property
    def exceeded(self) -> bool:
        """Whether more connections are open than may be. A process counts a new one before it asks, or two processes would each admit the last one."""
        return self.connections > self.max_connections

    @property
    def reserve_full(self) -> bool:
        """Whether even more are open than the reserve may hold: connections of probes, see frontends/http/server.py. A new one is counted, too."""
        return self.connections > self.max_connections + RESERVED * self.sharers

    def note_full(self) -> None:
        """Note that other memory for bodies has reached its limit."""
        self._full = True

    def was_full(self) -> bool:
        """Return whether the limit was reached since the last call. Slow clients are then disconnected to make room for others."""
        full, self._full = self._full, False
        return full


class Claim:
    """The bytes that one request or one connection holds of an account. It is a context manager, which gives all of them back at its end.

    `response_bytes` of them are those of the response. While it is `beyond`, it is charged even beyond the limit, and values are not.
    """

    __slots__ = ("account", "response_bytes", "beyond", "held_bytes")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.response_bytes = 0
        self.beyond = False
        self.held_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Charge `size_bytes` more. Raises what Account.take raises."""
        if self.beyond:
            self.account.add(size_bytes)
        else:
            self.account.take(size_bytes)
        self.held_bytes += size_bytes

    def add(self, size_bytes: int) -> None:
        """Charge `size_bytes` that exist already, even beyond the limit."""
        self.account.add(size_bytes)
        self.held_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """Give back `size_bytes` of them."""
        self.account.give(size_bytes)
        self.held_bytes -= size_bytes

    def adopt(self, other: "Claim") -> None:
        """Hold what `other` holds, too; `other` then holds nothing."""
        self.held_bytes += other.held_bytes
        other.held_bytes = 0

    def hold(self, size_bytes: int) -> None:
        """Hold exactly `size_bytes` from now on. Raises what Account.take raises; then the claim holds what it held before."""
        if size_bytes > self.held_bytes:
            self.take(size_bytes - self.held_bytes)
        else:
            self.give(self.held_bytes - size_bytes)

    def close(self) -> None:
        """Give all back. Idempotent."""
        self.give(self.held_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pace:
    """Tells whether one body arrives too slowly. A client may wait for `within` seconds in all; what arrives gives the time back, a MiB all of it.

    So neither a silent client nor one that sends a byte a minute holds a connection for long, and a long body may take as long as it needs.
    """

    __slots__ = ("_arrived", "_now", "_spent")

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._arrived = 0
        self._spent = 0.0  # of the time that the client has: 0 to 1

    def too_slow(self, now: float, arrived: int, within: float) -> bool:
        """Return whether the client has used its time up by `now`, when `arrived` bytes of the body have come. `within` may change meanwhile."""
        self._came(arrived - self._arrived)
        self._arrived = arrived
        self._spent += (now - self._now) / within
        self._now = now
        return self._spent > 1.0

    async def next(self, receive: Callable[[], Awaitable[T]], size: Callable[[T], int], within: float) -> T:
        """Return what `receive` returns, the next part of the body, which has `size` bytes. Raises TimeoutError once the client has used its time up."""
        loop = asyncio.get_running_loop()
        left = (1.0 - self._spent) * within
        while True:
            began, most = loop.time(), min(left, _LOOK)
            try:
                async with asyncio.timeout(most):
                    part = await receive()
                break
            except TimeoutError:
                left -= most  # and no more, though it may be later: then the server has stood still
                if left <= 0.0:
                    raise
        self._spent = 1.0 - (left - min(loop.time() - began, most)) / within
        self._came(size(part))
        return part

    def _came(self, size_bytes: int) -> None:
        self._spent = max(0.0, self._spent - size_bytes / _RESTORING)


def head_bytes(size: int) -> int:
    """Return how many bytes are charged for a head that took `size` bytes on the wire."""
    return _HEAD_COPIES * size if size > _FREE_HEAD else 0


# The claim of the request that this context answers. None where nothing is counted.
CLAIM: ContextVar[Claim | None] = ContextVar("weir_claim", default=None)


def charge(size_bytes: int) -> None:
    """Charge `size_bytes` to the request that this context answers. Raises what Account.take raises."""
    claim = CLAIM.get()
    if claim is not None:
        claim.take(size_bytes)


def charge_response(size_bytes: int) -> None:
    """Charge the response to the request of this context before it is sent, so that it can be refused. Raises what Account.take raises."""
    charge(size_bytes)
    claim = CLAIM.get()
    if claim is not None:
        claim.response_bytes += size_bytes


def release(size_bytes: int) -> None:
    """Give back `size_bytes` of the body of the request of this context: they have been written away, or dropped."""
    claim = CLAIM.get()
    if claim is not None:
        claim.give(size_bytes)


@contextmanager
def room(size_bytes: int) -> Iterator[None]:
    """Charge `size_bytes` while the block runs, if the context answers a request. Raises what Account.take raises."""
    claim = CLAIM.get()
    if claim is None:
        yield
        return
    with claim.account.claim() as more:
        more.take(size_bytes)
        yield


class _Reading(threading.local):
    """The charge of a thread that reads a long body for `account`, for its values. There is no account while it reads none."""

    account: Account | None = None
    charged = 0


_reading = _Reading()


@contextmanager
def reading(account: Account | None) -> Iterator[None]:
    """Let `charge_values` charge the values of a body to `account` while the block runs in this thread."""
    _reading.account = account
    try:
        yield
    finally:
        if account is not None:
            account.give_values(_reading.charged)
        _reading.account, _reading.charged = None, 0


def charge_values(body_bytes: int, count: Callable[[], int]) -> None:
    """Charge what `count` returns, the memory that the values of a body of `body_bytes` take, if this thread reads long bodies.

    Whatever decodes a body calls this before. It costs nothing where short bodies are read. Raises what Account.take_values raises.
    """
    if _reading.account is not None:
        _reading.charged += _reading.account.take_values(count(), body_bytes)


@asynccontextmanager
async def unpacking(max_size_bytes: int) -> AsyncGenerator[None, None]:
    """Wait until a body may be decompressed. Charge `max_size_bytes` while it is decompressed; the caller charges its real size afterwards, with `charge`.

    Raises what Account.take raises.
    """
    claim = CLAIM.get()
    if claim is None:
        yield
        return
    async with claim.account.unpacking:
        with room(max_size_bytes):
            yield


class Counted:
    """ASGI middleware that gives each HTTP request a claim on `account`. The claim ends when the request has been answered.

    It charges each body as it arrives, and each response as it is sent, whatever route reads the one and makes the other: no route can forget it. A route
    that does not keep a body in memory gives its bytes back, with `release`, and one that can refuse a long response charges it before, with `charge_response`.
    """

    def __init__(self, app: ASGIApp, account: Account) -> None:
        self._app = app
        self._account = account

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        with self._account.claim() as claim:
            token = CLAIM.set(claim)
            try:
                await self._app(scope, partial(_received, claim, receive), partial(_sent, claim, send))
            finally:
                CLAIM.reset(token)


async def _received(claim: Claim, receive: Receive) -> Message:
    message = await receive()
    if body := message.get("body"):
        claim.take(len(body))
    return message


async def _sent(claim: Claim, send: Send, message: Message) -> None:
    size = len(message.get("body", b""))
    if size <= claim.response_bytes:
        return await send(message)
    claim.add(size)
    try:
        await send(message)
    finally:
        claim.give(size)


def allow_descriptors(account: Account, *, others: int = 0, each: int = 1) -> str:
    """Raise this process's limit of open files to what the connections of `account` need. If the system does not allow that, lower `max_connections`.

    A connection takes `each` files, and the process opens `others` besides those of any server. Returns a warning, or "" if nothing was lowered.
    """
    others += _OTHER_FILES
    wanted = each * account.max_connections + others
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return ""
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    if allowed >= wanted:
        return ""
    account.max_connections = max(1, (allowed - others) // each)
    return f"max_connections: this process may open {allowed} files (ulimit -n), so {account.max_connections} connections may be open"


def usable_memory() -> int:
    """Return how many bytes of memory this process may use: the least of the machine's memory, its container's limit and its own limits."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits_of_container()]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits)


def _limits_of_container() -> Iterator[int]:
    for name in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # there is no such file, or it holds "max"
            yield int(Path(name).read_text())


# Places in a row, which fills a line of the CPU's cache. The process of the row writes all but the last, which the dispatcher writes.
_CONNECTIONS, _BYTES, _REFUSED, _CALLS, _TAKEN, _FIELDS = 0, 1, 2, 3, 4, 8
_WORD = 8  # bytes


class SharedFigures:
    """Rows of numbers in shared memory, which has the descriptor `fd`: one for each of `count` processes."""

    def __init__(self, fd: int, count: int) -> None:
        self._memory: mmap.mmap | None = mmap.mmap(fd, table_bytes(count))
        self.count = count
        self._numbers: memoryview | array.array[int] = memoryview(self._memory).cast("q")

    def put(self, index: int, field: int, number: int) -> None:
        """Set a number in the row of a process."""
        self._numbers[index * _FIELDS + field] = number

    def total(self, field: int) -> int:
        """Return the sum of a column."""
        return sum(self._numbers[field::_FIELDS].tolist())

    def connections(self, index: int) -> int:
        """Return how many connections a process has, with those that it has passed on and that nobody has taken yet."""
        return self._numbers[index * _FIELDS + _CONNECTIONS] - self._numbers[index * _FIELDS + _TAKEN]

    def took(self, index: int) -> None:
        """Note that a connection which that process has passed on is counted here from now on, or is closed."""
        self._numbers[index * _FIELDS + _TAKEN] += 1

    def total_connections(self) -> int:
        """Return how many connections all processes have, each once: whoever passes one on counts it until another process does."""
        return self.total(_CONNECTIONS) - self.total(_TAKEN)

    def clear(self, index: int) -> None:
        """Note that a process has ended: it has no connections and no calls, and holds no bytes."""
        for field in (_CONNECTIONS, _BYTES, _CALLS, _TAKEN):
            self.put(index, field, 0)

    def close(self) -> None:
        """Give the memory back. The numbers stay as they are, for this process alone. Idempotent."""
        if self._memory is not None and isinstance(self._numbers, memoryview):
            numbers, self._numbers = self._numbers, array.array("q", self._numbers.tolist())
            numbers.release()
            self._memory.close()
            self._memory = None


def table_bytes(count: int) -> int:
    """Return how many bytes of shared memory `count` processes need."""
    return count * _FIELDS * _WORD


class SharedAccount(Account):
    """The account of one process, whose limits are those of all. `index` is its row."""

    __slots__ = ("_figures", "_held", "_index", "_passed_on")

    def __init__(self, settings: HttpSettings, figures: SharedFigures, index: int) -> None:
        self._figures = figures
        self._index = index
        super().__init__(settings)
        self._passed_on = 0

    @property
    def held_bytes(self) -> int:
        """See Account: shown to the other processes."""
        return self._held

    @held_bytes.setter
    def held_bytes(self, size_bytes: int) -> None:
        self._held = size_bytes
        self._figures.put(self._index, _BYTES, size_bytes)

    def connection_set(self) -> set[Any]:
        """See Account."""
        return _Published(self.publish)

    def pass_on(self, change: int = 1) -> None:
        """Count a connection that is passed on to another process, until that one notes that it has taken it: see SharedFigures.took. -1: it was lost."""
        self._passed_on += change
        self.publish()

    def count_call(self, change: int) -> int:
        """See Account."""
        self._figures.put(self._index, _CALLS, super().count_call(change))
        return self._figures.total(_CALLS)

    @property
    def sharers(self) -> int:
        """See Account."""
        return self._figures.count

    @property
    def total_bytes(self) -> int:
        """See Account."""
        return self._figures.total(_BYTES) + self.reading_bytes

    @property
    def total_refused(self) -> int:
        """See Account."""
        self._figures.put(self._index, _REFUSED, self.refused)
        return self._figures.total(_REFUSED)

    @property
    def connections(self) -> int:
        """See Account."""
        self.publish()
        return self._figures.total_connections()

    def publish(self) -> None:
        """Show the other processes what only `counters` know: they are asked, and notify nobody. A process does this once a second."""
        own = sum([count() for count in self.counters])
        self._figures.put(self._index, _CONNECTIONS, own + self._passed_on)
        self._figures.put(self._index, _REFUSED, self.refused)


class _Published(set[T]):
    """A set that reports when it has changed. Only `add` and `discard` change it."""

    def __init__(self, changed: Callable[[], None], members: Iterable[T] = ()) -> None:
        super().__init__(members)
        self._changed = changed

    def add(self, member: T, /) -> None:
        """Add a member."""
        super().add(member)
        self._changed()

    def discard(self, member: object, /) -> None:
        """Remove a member, if it is one."""
        super().discard(member)
        self._changed()
