"""Starts processes in a thread of its own: whoever starts one stands still until that has begun its own program, on a busy machine for
many milliseconds."""

import _thread
import asyncio
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

Popen = subprocess.Popen[bytes]
Done = Callable[[Popen | OSError], None]


class Starter:
    """A thread that starts processes for the thread that makes it, and ends with it: the kernel then ends those processes (see
    process.die_with)."""

    def __init__(self) -> None:
        self._starts: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._pid = os.getpid()
        _thread.start_new_thread(_work, (self._starts,))  # threading.Thread would wait until the thread has got a CPU

    def __del__(self) -> None:
        self._starts.put(None)

    @property
    def is_alive(self) -> bool:
        """Whether it can start anything: a fork of this process has no such thread any more."""
        return self._pid == os.getpid()

    def start(self, start: Callable[[], Popen], loop: asyncio.AbstractEventLoop, done: Done) -> None:
        """Call `start` in the thread; `done` hears on `loop` what it returned, or the OSError that it raised. A process of a loop that has
        been closed meanwhile is ended."""
        self._starts.put(partial(_start, start, loop, done))


_of_thread = threading.local()


def start_process(
    arguments: Sequence[str], environment: dict[str, str], descriptors: Sequence[int], done: Done, *,
    begun: Callable[[int], None] = lambda _: None,
) -> None:  # fmt: skip
    """Start a process in a group of its own that inherits `descriptors`, which stay open until `done` is called, on the running loop.
    `begun` hears its number, in another thread, before.

    Called on the thread that is to outlive the process: the kernel ends the process with that thread.
    """

    def start() -> Popen:
        popen = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, env=environment, pass_fds=descriptors, process_group=0
        )
        begun(popen.pid)
        return popen

    loop = asyncio.get_running_loop()
    starter: Starter | None = getattr(_of_thread, "starter", None)
    if starter is None or not starter.is_alive:
        try:
            starter = _of_thread.starter = Starter()
        except RuntimeError as error:  # the system gives no thread
            loop.call_soon(done, OSError(errno.EAGAIN, str(error)))
            return
    starter.start(start, loop, done)


def _work(starts: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (start := starts.get()) is not None:
        start()
        del start  # with whatever hears of it


def _start(start: Callable[[], Popen], loop: asyncio.AbstractEventLoop, done: Done) -> None:
    try:
        result: Popen | OSError = start()
    except OSError as error:
        result = error
    except ValueError as error:  # a null character in the environment
        result = OSError(str(error))
    try:
        loop.call_soon_threadsafe(done, result)
    except RuntimeError:  # the loop is closed: nobody would ever end it
        if not isinstance(result, OSError):
            result.kill()
            result.wait()
