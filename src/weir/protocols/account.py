"""One account of what all clients of a server hold together: bytes of their requests and answers, and connections.

Bytes are charged before memory is taken for them: what is received, what a body becomes when it is decompressed, what
waits in queues, and answers that have not been read yet. What would go beyond the limit is refused with Overloaded, or is
not read from its socket; so no crowd of clients can take more memory than the limit says.
"""

import asyncio
import os
import resource
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Self

from starlette.types import ASGIApp, Receive, Scope, Send

from weir.errors import Overloaded, TooLarge
from weir.protocols.settings import HttpSettings

# The part of the memory of this process that requests and answers may take where it is not set. What is charged
# once may be there four times: a body, its copy on the way to a worker, the result on its way back, and the answer.
_PART = 8

# The part of the limit that one connection with many requests under way may hold.
_CONNECTION_PART = 8

# Bodies that are decompressed at the same time. They are charged as what they may become, so many may not begin at once.
_UNPACKED_AT_ONCE = 2

# Files that a server may have open beside its connections: models, workers, logs.
_OTHER_FILES = 128

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Account:
    """Counts the bytes and the connections of all clients of one server; for one event loop."""

    __slots__ = ("_pressed", "counters", "held_bytes", "max_bytes", "max_connections", "refused", "unpacking")

    def __init__(self, settings: HttpSettings) -> None:
        self.max_bytes = settings.max_waiting_bytes or max(usable_memory() // _PART, 4 * settings.max_body_size)
        self.max_connections = settings.max_connections
        self.held_bytes = 0
        self.counters: list[Callable[[], int]] = []  # one for each kind of connection: how many are open
        self.refused = 0  # times that bytes were refused
        self.unpacking = asyncio.Semaphore(_UNPACKED_AT_ONCE)
        self._pressed = False

    def take(self, size_bytes: int) -> None:
        """Charge so many bytes. Raises Overloaded if the limit does not allow them now, TooLarge if it never does."""
        held = self.held_bytes + size_bytes
        if held > self.max_bytes:
            self.refused += 1
            self._pressed = True
            if size_bytes > self.max_bytes:
                raise TooLarge(f"{size_bytes} bytes: must be at most {self.max_bytes} (max_waiting_bytes)")
            raise Overloaded(
                f"requests and answers hold {self.held_bytes} bytes, {size_bytes} more would exceed {self.max_bytes} "
                "(max_waiting_bytes)",
                retry_after=1.0,
            )
        self.held_bytes = held

    def add(self, size_bytes: int) -> None:
        """Charge so many bytes that are there whether or not the limit allows it: an answer that is not read as it is written."""
        self.held_bytes += size_bytes
        self._pressed |= self.held_bytes > self.max_bytes

    def give(self, size_bytes: int) -> None:
        """Give back so many bytes that were charged."""
        self.held_bytes -= size_bytes

    def claim(self) -> "Claim":
        """Return what one request, or one connection, holds: nothing yet."""
        return Claim(self)

    @property
    def max_connection_bytes(self) -> int:
        """How many bytes the requests of one connection that has several under way may hold; one more may always come."""
        return self.max_bytes // _CONNECTION_PART

    @property
    def connections(self) -> int:
        """How many connections are open, of every kind."""
        return sum(count() for count in self.counters)

    @property
    def over(self) -> bool:
        """Whether more bytes are charged than the limit allows, by those that were there already."""
        return self.held_bytes > self.max_bytes

    @property
    def full(self) -> bool:
        """Whether as many connections are open as may be."""
        return self.connections >= self.max_connections

    def pressed(self) -> bool:
        """Tell whether bytes were refused since the last call: slow clients then make room for others."""
        pressed, self._pressed = self._pressed, False
        return pressed


class Claim:
    """The bytes that one request, or one connection, holds of an account. Leaving it as a context gives all back."""

    __slots__ = ("account", "held_bytes")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.held_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Charge so many bytes. Raises what Account.take raises."""
        self.account.take(size_bytes)
        self.held_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """Give back so many of them."""
        self.account.give(size_bytes)
        self.held_bytes -= size_bytes

    def hold(self, size_bytes: int) -> None:
        """Hold so many bytes from now on, more or fewer than before. Raises what Account.take raises."""
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


# What the request that is being answered in this context holds; None where nothing is counted.
CLAIM: ContextVar[Claim | None] = ContextVar("weir_claim", default=None)


def charge(size_bytes: int) -> None:
    """Charge bytes to the request that is being answered in this context. Raises what Account.take raises."""
    claim = CLAIM.get()
    if claim is not None:
        claim.take(size_bytes)


@asynccontextmanager
async def unpacking(max_size_bytes: int) -> AsyncGenerator[None, None]:
    """Wait until a body may be decompressed, and charge, meanwhile, what it may become; what it has become is charged afterwards, by `charge`.
    Raises what Account.take raises."""
    claim = CLAIM.get()
    if claim is None:
        yield
        return
    async with claim.account.unpacking:
        with claim.account.claim() as most:
            most.take(max_size_bytes)
            yield


class Counted:
    """ASGI middleware that gives each request a claim on `account`, which ends with its answer."""

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
                await self._app(scope, receive, send)
            finally:
                CLAIM.reset(token)


def allow_descriptors(account: Account) -> str:
    """Have the system allow as many open files as the connections of `account` need, or, where it does not, let there be fewer connections.
    Return what to warn of; "" where all is well."""
    wanted = account.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return ""
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    if allowed >= wanted:
        return ""
    account.max_connections = max(1, allowed - _OTHER_FILES)
    return f"max_connections: this process may open {allowed} files (ulimit -n), so {account.max_connections} connections may be open"


def usable_memory() -> int:
    """Return how many bytes of memory this process may have: those of the machine, or of its container or its own limits
    where they are lower."""
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
