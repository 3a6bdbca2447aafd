"""Starts worker processes: each as a program of its own, in a thread, or forked from a template process.

`start_process` starts a program without holding up the event loop. A `Template` is the server's view of a process that has imported the model and called
`load_shared`. What it has loaded lies in memory once, for all workers, as long as nobody writes to it. It has one thread, and only forks and reaps.
"""

import _thread
import asyncio
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from weir.wire.frames import Start, encode_control

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


# Forking and reaping take milliseconds. A template that takes longer hangs, and is given up.
PATIENCE = 10.0
# What a killed process gets to be gone. One in uninterruptible sleep (a disk, a driver) takes longer, and is left behind.
KILL_GRACE = 5.0
READY = b"1"

logger = logging.getLogger("weir")


class Process(Protocol):
    """What the server needs of a process that it has started, by itself or from a template."""

    @property
    def pid(self) -> int:
        """Its number."""

    def reap(self, done: Callable[[int | None], None]) -> None:
        """Reap it, once it has ended, without waiting. `done` hears its code, at once or soon; None where that cannot be
        learnt."""


class Own:
    """A process that is this one's child."""

    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self.pid = popen.pid
        self._popen = popen

    def reap(self, done: Callable[[int | None], None]) -> None:
        """See Process."""
        done(self._popen.wait())


class Forked:
    """A process that came of a template, which alone can reap it."""

    def __init__(self, pid: int, template: "Template") -> None:
        self.pid = pid
        self._template = template

    def reap(self, done: Callable[[int | None], None]) -> None:
        """See Process."""
        self._template.reap(self.pid, done)


class Question(NamedTuple):
    """What a template is asked. `done` hears the number that it answers, or None if it is gone."""

    asked: dict[str, Any]
    descriptors: Sequence[int]
    done: Callable[[int | None], None]


class Template:
    """Forks workers, once `start` has returned True. One question is under way at a time, and nothing here waits for its
    answer: the process may hang."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = (
            self._loop.create_future()
        )  # done when the process is gone that `close` has ended
        self._killed = False
        self._starting: asyncio.Future[None] | None = None
        self._questions: deque[Question] = deque()  # the first one has been asked
        self._limit: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The process's number, while there is one."""
        return None if self._popen is None else self._popen.pid

    async def start(self, start: Start, environment: dict[str, str], niceness: int, cpus: Sequence[int] = ()) -> bool:
        """Start the process, and have it load what is shared. Return whether it has; if not, it has said why on stderr.

        Called on the thread that is to outlive it. Raises OSError when the system refuses. `close` it also when this is cancelled.
        """
        loop = self._loop
        ours, theirs = socket.socketpair()
        self._socket = ours
        ours.setblocking(False)
        described = map(str, (start.options["name"], os.getpid(), niceness, ",".join(map(str, cpus)), theirs.fileno()))
        self._starting = loop.create_future()
        start_process(
            [sys.executable, "-P", "-m", "weir.workers.forking", *described], environment, [theirs.fileno()],
            partial(self._started, theirs, self._starting),
        )  # fmt: skip
        await self._starting
        try:
            await loop.sock_sendall(ours, encode_control(start))
            loaded = await loop.sock_recv(ours, 1) == READY
        except ConnectionError:
            loaded = False
        if loaded:
            self.attach(ours)
        else:
            self.close()
        return loaded

    def attach(self, ours: socket.socket) -> None:
        """Ask what is at the other end of `ours` from now on."""
        self._socket = ours
        ours.setblocking(False)
        self._loop.add_reader(ours.fileno(), self._answered)

    def fork(
        self, arguments: dict[str, Any], descriptors: Sequence[int], done: Callable[[Forked | OSError | None], None]
    ) -> None:
        """Have a process forked that is told `arguments` and gets the descriptors, which stay open until `done` is called: with
        the process, with the refusal of the system, or with None when there is no template any more."""

        def answered(answer: int | None) -> None:
            if answer is None:
                done(None)
            else:
                done(Forked(answer, self) if answer >= 0 else OSError(-answer, os.strerror(-answer)))

        self._ask(Question({"fork": arguments}, descriptors, answered))

    def reap(self, pid: int, done: Callable[[int | None], None]) -> None:
        """Have the process `pid`, which has ended, reaped; `done` hears its code. Without a template init reaps it; the kernel has
        killed it then."""
        self._ask(Question({"reap": pid}, (), lambda code: done(-signal.SIGKILL if code is None else code)))

    def close(self) -> None:
        """End the process, without waiting for that; those that came of it end with it. Whoever waits for an answer hears
        that there is none. Idempotent."""
        if self._limit is not None:
            self._limit.cancel()
        if self._socket is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._popen is not None:
            self._popen.kill()
            when_gone(self._popen, self.closed, self._loop)
            self._popen, self._killed = None, True
        elif not self._killed and self._starting is None and not self.closed.done():
            self.closed.set_result(None)
        questions, self._questions = self._questions, deque()
        for question in questions:
            question.done(None)

    def _started(self, theirs: socket.socket, starting: asyncio.Future[None], result: Popen | OSError) -> None:
        theirs.close()
        self._starting = None
        if not isinstance(result, OSError):
            self._popen = result
        if self._socket is None:  # closed meanwhile
            self.close()
        if starting.done():  # cancelled
            return
        if isinstance(result, OSError):
            starting.set_exception(result)
        else:
            starting.set_result(None)

    def _ask(self, question: Question) -> None:
        if self._socket is None:
            question.done(None)
            return
        self._questions.append(question)
        if len(self._questions) == 1:
            self._send()

    def _send(self) -> None:
        question = self._questions[0]
        self._limit = self._loop.call_later(PATIENCE, self.close)
        try:
            assert self._socket is not None
            socket.send_fds(self._socket, [json.dumps(question.asked).encode()], question.descriptors)
        except OSError:  # it is gone
            self.close()

    def _answered(self) -> None:
        assert self._socket is not None
        try:
            answer = int(self._socket.recv(32))
        except BlockingIOError:
            return
        except (OSError, ValueError):  # it is gone
            self.close()
            return
        if self._limit is not None:
            self._limit.cancel()
        question = self._questions.popleft()
        if self._questions:
            self._send()
        question.done(answer)


def when_gone(popen: "subprocess.Popen[bytes]", done: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
    """Reap a process that was killed, once it is gone. `done` is then, or after KILL_GRACE seconds."""
    try:
        pidfd = os.pidfd_open(popen.pid)
    except OSError:  # no descriptor is left, and the next process that is started reaps it
        done.set_result(None)
        return

    def gone() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        popen.wait()
        finish()

    def stays() -> None:
        logger.warning("process %d, which workers are forked from, does not end although it was killed", popen.pid)
        finish()

    def finish() -> None:
        limit.cancel()
        if not done.done():
            done.set_result(None)

    limit = loop.call_later(KILL_GRACE, stays)
    loop.add_reader(pidfd, gone)
