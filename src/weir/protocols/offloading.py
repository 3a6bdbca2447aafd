"""Bodies whose reading, and answers whose writing, would keep the event loop for too long are read and written in threads of their own.

A stated cost per byte: no parser takes more than 50 ms for a megabyte in one stretch (`python -m benchmarks.parsers` measures the
worst body of each), so what has at most LONG_BODY bytes is read on the loop, within two milliseconds, and what has more
is read here. To write a byte of an answer takes an eighth of that. One thread reads bodies of up to a megabyte and another one the larger
ones, so that no crowd of large bodies delays the others; a third one writes; and none is of the pool that compresses. Two more decompress.
"""

import asyncio
import concurrent.futures
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from weir.errors import Overloaded, WeirError
from weir.protocols.account import charge

LONG_BODY = 32 << 10  # bytes
LONG_ANSWER = 8 * LONG_BODY
_LARGE_BODY = 1 << 20

T = TypeVar("T")


_COUNTS = {"read-long": 1, "read-large": 1, "write": 1, "unpack": 2}


def _executor(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COUNTS[name], thread_name_prefix=f"weir-{name}")


# A thread is started when it is needed first.
_threads = {name: _executor(name) for name in _COUNTS}


def _forget() -> None:
    """Threads do not come along into a forked process."""
    for name in _threads:
        _threads[name] = _executor(name)


os.register_at_fork(after_in_child=_forget)


async def off_loop(size_bytes: int, work: Callable[[], T], *, writes: bool = False) -> T:
    """Return what `work` makes of a body of so many bytes, or, with `writes`, of values that an answer of about so many bytes is made of. Long ones
    are worked on in a thread: `work` must change nothing that others see. Cancelling the task that awaits this lets go of them."""
    if size_bytes <= (LONG_ANSWER if writes else LONG_BODY):
        return work()
    job, begun = _begin(size_bytes, work, writes)
    del work  # the job has it, until it is dropped
    return await _ended(job, begun)


async def unpack(size_bytes: int, work: Callable[[], T]) -> T:
    """Return what `work` makes of a compressed body of so many bytes, in a thread for that. Cancelling the task that awaits this lets go of it, but
    for what has begun."""
    job = _Job(size_bytes, work, "decompress a body")
    del work
    return await _ended(job, _threads["unpack"].submit(job))


async def _ended(job: "_Job[T]", begun: "concurrent.futures.Future[T]") -> T:
    try:
        return await asyncio.wrap_future(begun)
    finally:
        job.drop()


async def written(size_bytes: int, write: Callable[[], T]) -> T:
    """Return what `write` makes of values whose text has about so many bytes. A long answer is charged to the request that is being answered, and written
    in a thread. Raises what Account.take raises."""
    if size_bytes > LONG_ANSWER:
        charge(size_bytes)
    return await off_loop(size_bytes, write, writes=True)


def work_later(
    size_bytes: int, work: Callable[[], T], done: Callable[[T | Exception], None], *, writes: bool = False
) -> Callable[[], bool]:
    """Have a long body, or a long answer, worked on in a thread, and `done` called on the running loop with what `work` returned or raised.

    Returns what cancels it: that tells whether the work had not begun; then `done` is not called.
    """
    job, begun = _begin(size_bytes, work, writes)

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
    """Work for a thread. The thread's queue keeps it until its turn comes, also when its caller has left: `drop` lets go of the work."""

    def __init__(self, size_bytes: int, work: Callable[[], T], verb: str) -> None:
        self._size_bytes = size_bytes
        self._work: Callable[[], T] | None = work
        self._verb = verb

    def drop(self) -> None:
        """Let go of what is to be worked on, unless that has begun."""
        self._work = None

    def __call__(self) -> T:
        """Do the work; let go, in the thread, of what a refused body was decoded to: the traceback of its error has it, and the loop would
        free it."""
        work, self._work = self._work, None
        if work is None:  # it was dropped as its turn came
            raise concurrent.futures.CancelledError
        try:
            return work()
        except WeirError as error:
            bare: WeirError = error.with_traceback(None)
            if bare.__suppress_context__:
                bare.__context__ = None
        except MemoryError:  # what lists of lists become is many times as large as they are
            what = f"to {self._verb} of {self._size_bytes} bytes"
            bare = Overloaded(f"there is no memory now {what}", retry_after=1.0)
        finally:
            del work
        raise bare


def _begin(size_bytes: int, work: Callable[[], T], writes: bool) -> tuple[_Job[T], "concurrent.futures.Future[T]"]:
    job = _Job(size_bytes, work, "write an answer" if writes else "read a body")
    name = "write" if writes else "read-long" if size_bytes <= _LARGE_BODY else "read-large"
    return job, _threads[name].submit(job)
