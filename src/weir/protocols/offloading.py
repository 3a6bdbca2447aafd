"""Spares the event loop what takes long: heads that were seen before are not parsed again, and threads read long bodies and write long responses.

No parser takes more than 50 ms per megabyte without a break (`python -m benchmarks.parsers` measures the worst body of each). So a body of at most
LONG_BODY bytes is read on the event loop, in at most two milliseconds, and a longer one in a thread. Writing takes an eighth of that per byte.

One thread reads bodies of up to a megabyte and a second one the larger bodies, so that many large bodies cannot delay the others. A third thread writes,
and two more decompress. Compression has threads of its own.
"""

import asyncio
import concurrent.futures
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from weir.errors import Overloaded, WeirError
from weir.messages import JSON, MSGPACK
from weir.protocols.account import CLAIM, Account, charge, charge_values, reading
from weir.protocols.response import is_msgpack
from weir.wire.values import values_bytes

Meaning = TypeVar("Meaning")

_MAX_HEAD_BYTES = 4 << 10


class HeadMemo(Generic[Meaning]):
    """A bounded cache from the exact bytes of a head to its meaning.

    A head is stored when it is offered for the second time, so that a head that contains a unique id costs only a hash. A full cache drops its oldest
    entry.
    """

    def __init__(self, max_entries: int = 1024, max_bytes: int = 1 << 20, max_seen: int = 4096) -> None:
        self._entries: dict[bytes, Meaning] = {}
        self._seen: set[int] = set()
        self._bytes = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_seen = max_seen
        self.find = self._entries.get  # the hot path: one dictionary look-up without a Python call around it

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, head: bytes, meaning: Meaning) -> None:
        """Store `meaning` for `head` if this head has been offered before."""
        if len(head) > _MAX_HEAD_BYTES:
            return
        mark = hash(head)
        if mark not in self._seen:
            if len(self._seen) >= self._max_seen:
                self._seen.clear()
            self._seen.add(mark)
        elif head not in self._entries:
            self._insert(head, meaning)

    def _insert(self, head: bytes, meaning: Meaning) -> None:
        while self._entries and (len(self._entries) >= self._max_entries or self._bytes + len(head) > self._max_bytes):
            oldest = next(iter(self._entries))
            del self._entries[oldest]
            self._bytes -= len(oldest)
        self._entries[head] = meaning
        self._bytes += len(head)

    def clear(self) -> None:
        """Drop all entries: the routes or the settings have changed."""
        self._entries.clear()
        self._seen.clear()
        self._bytes = 0


LONG_BODY = 32 << 10  # bytes
LONG_RESPONSE = 8 * LONG_BODY
_LARGE_BODY = 1 << 20

T = TypeVar("T")


_COUNTS = {"read-long": 1, "read-large": 1, "write": 1, "unpack": 2}


def _executor(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COUNTS[name], thread_name_prefix=f"weir-{name}")


# Each thread starts when it is first needed.
_threads = {name: _executor(name) for name in _COUNTS}


def _forget() -> None:
    """Make new executors: threads do not survive a fork."""
    for name in _threads:
        _threads[name] = _executor(name)


os.register_at_fork(after_in_child=_forget)


async def off_loop(size_bytes: int, work: Callable[[], T], *, writes: bool = False) -> T:
    """Return the result of `work`, which reads a body of `size_bytes`, or with `writes` makes a response of about `size_bytes`.

    `work` runs in a thread if the size is long, so it must not change anything that others see; what it decodes it charges with `charge_values`. Cancelling
    the task that awaits this frees the body, unless `work` has begun. Raises what `work` raises, and Overloaded if there is not enough memory.
    """
    if size_bytes <= (LONG_RESPONSE if writes else LONG_BODY):
        return work()
    claim = CLAIM.get()
    job, begun = _begin(size_bytes, work, writes, None if claim is None or claim.beyond else claim.account)
    del work  # only the job refers to it now, until it is dropped
    return await _ended(job, begun)


async def parsed(body: bytes, read: Callable[[], T]) -> T:
    """Return the result of `read`, which reads a `body` of JSON, in a thread if it is long. Its values are charged meanwhile.

    Raises what `read` raises and what `charge_values` raises.
    """

    def work() -> T:
        charge_body(body, JSON)
        return read()

    return await off_loop(len(body), work)


def charge_body(body: bytes, content_type: str) -> None:
    """Charge the values of a `body` of JSON or msgpack, see `charge_values`, before it is decoded. Raises what `charge_values` raises."""
    charge_values(len(body), partial(values_bytes, body, MSGPACK if is_msgpack(content_type) else JSON))


async def unpack(size_bytes: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, which decompresses a body of `size_bytes` in a thread.

    Cancelling the task that awaits this frees the body, unless `work` has begun. Raises what `work` raises, and Overloaded if there is not enough memory.
    """
    job = _Job(size_bytes, work, "decompress a body")
    del work
    return await _ended(job, _threads["unpack"].submit(job))


async def _ended(job: "_Job[T]", begun: "concurrent.futures.Future[T]") -> T:
    try:
        return await asyncio.wrap_future(begun)
    finally:
        job.drop()


async def written(size_bytes: int, write: Callable[[], T]) -> T:
    """Return the result of `write`, which makes a response of about `size_bytes`. A long response is charged to the current request, and written in a thread.

    Raises what `write` raises and what Account.take raises.
    """
    if size_bytes > LONG_RESPONSE:
        charge(size_bytes)
    return await off_loop(size_bytes, write, writes=True)


def work_later(
    size_bytes: int,
    work: Callable[[], T],
    done: Callable[[T | Exception], None],
    *,
    account: Account,
    writes: bool = False,
) -> Callable[[], bool]:
    """Run `work` in a thread: it reads a long body, or with `writes` makes a long response. Then call `done` on the running loop with its result or error,
    which is that of `charge_values` if the body's values have no room.

    Returns a function that cancels `work`. That function returns True if `work` had not begun; then `done` is never called.
    """
    job, begun = _begin(size_bytes, work, writes, account)

    def ended(future: "asyncio.Future[T]") -> None:
        if not future.cancelled():
            error = future.exception()
            done(future.result() if error is None else error if isinstance(error, Exception) else RuntimeError(error))

    def cancel() -> bool:
        if not begun.cancel():
            return False
        job.drop()
        return True

    asyncio.wrap_future(begun).add_done_callback(ended)
    return cancel


class _Job(Generic[T]):
    """One piece of work for a thread. The thread's queue keeps a job until its turn comes, even if its caller has left; `drop` frees the work before that."""

    def __init__(self, size_bytes: int, work: Callable[[], T], verb: str, account: Account | None = None) -> None:
        self._size_bytes = size_bytes
        self._account = account
        self._work: Callable[[], T] | None = work
        self._verb = verb

    def drop(self) -> None:
        """Free the work, unless it has begun."""
        self._work = None

    def __call__(self) -> T:
        """Do the work. Free what a refused body was decoded to here: the error's traceback refers to it, and freeing it would block the event loop."""
        work, self._work = self._work, None
        if work is None:  # dropped just before its turn
            raise concurrent.futures.CancelledError
        try:
            with reading(self._account):
                return work()
        except WeirError as error:
            bare: WeirError = error.with_traceback(None)
            if bare.__suppress_context__:
                bare.__context__ = None
        except MemoryError:  # decoded nested lists are many times as large as their text
            what = f"to {self._verb} of {self._size_bytes} bytes"
            bare = Overloaded(f"not enough memory available {what}", retry_after=1.0)
        finally:
            del work
        raise bare


def _begin(
    size_bytes: int, work: Callable[[], T], writes: bool, account: Account | None
) -> tuple[_Job[T], "concurrent.futures.Future[T]"]:
    if writes:
        job = _Job(size_bytes, work, "write a response")
    else:
        job = _Job(size_bytes, work, "read a body", account)
    name = "write" if writes else "read-long" if size_bytes <= _LARGE_BODY else "read-large"
    return job, _threads[name].submit(job)
