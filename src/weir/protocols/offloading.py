"""Bodies whose reading would keep the event loop for too long are read in threads of their own.

A stated cost per byte: no parser takes more than 50 ms for a megabyte in one stretch (`python -m benchmarks.parsers` measures the
worst body of each), so what has at most LONG_BODY bytes is read on the loop, within two milliseconds, and what has more
is read here. One thread reads bodies of up to a megabyte and another one the larger ones, so that no crowd of large bodies delays
the others; and neither is of the pool that compresses and decompresses.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from weir.errors import Overloaded, WeirError

LONG_BODY = 32 << 10  # bytes
_LARGE_BODY = 1 << 20

T = TypeVar("T")


def _executor(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=f"weir-read-{name}")


_threads = {"long": _executor("long"), "large": _executor("large")}  # a thread is started when it is needed first


def _forget() -> None:
    """Threads do not come along into a forked process."""
    for name in _threads:
        _threads[name] = _executor(name)


os.register_at_fork(after_in_child=_forget)


async def off_loop(size_bytes: int, read: Callable[[], T]) -> T:
    """Return what `read` makes of a body of so many bytes. A long one is read in a thread: `read` must change nothing that others see."""
    if size_bytes <= LONG_BODY:
        return read()
    return await _begun(size_bytes, read)


def read_later(size_bytes: int, read: Callable[[], T], done: Callable[[T | WeirError | Exception], None]) -> None:
    """Have a long body read in a thread, and `done` called on the running loop with what `read` returned or raised."""

    def ended(future: "asyncio.Future[T]") -> None:
        if not future.cancelled():
            error = future.exception()
            done(future.result() if error is None else error if isinstance(error, Exception) else RuntimeError(error))

    _begun(size_bytes, read).add_done_callback(ended)


def _begun(size_bytes: int, read: Callable[[], T]) -> "asyncio.Future[T]":
    threads = _threads["long" if size_bytes <= _LARGE_BODY else "large"]
    return asyncio.get_running_loop().run_in_executor(threads, _bare, size_bytes, read)


def _bare(size_bytes: int, read: Callable[[], T]) -> T:
    """Let go, in the thread, of what a refused body was decoded to: the traceback of its error has it, and the loop would free it."""
    try:
        return read()
    except WeirError as error:
        bare: WeirError = error.with_traceback(None)
        if bare.__suppress_context__:
            bare.__context__ = None
    except MemoryError:  # what lists of lists become is many times as large as they are
        bare = Overloaded(f"there is no memory now to read a body of {size_bytes} bytes", retry_after=1.0)
    raise bare
