"""The solving process, seen from the server: started by the first wish, asked again and again, and ended whatever happens.

It stays because a start is what disturbs a server most: a new process loads its libraries and gives its memory back at the
end, and for that the kernel takes CPUs for milliseconds, whatever the process's priority.
"""

import _thread
import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from weir.errors import ModelError, SettingsError
from weir.policy.solve.bank import Bank
from weir.tuning.solving import ANSWER, REFUSED, REQUEST, SolveRequest
from weir.workers.launch import THREAD_VARIABLES, python_path, unpinned
from weir.workers.template import KILL_GRACE

SETPGROUP = 2  # spawn.h: in a process group of its own
STRUCT_BYTES = 1024  # more than any C library needs for its posix_spawn structures


class Spawned:
    """A program that runs, from `start` on. `ended` becomes its exit code (negative: minus the signal), or the OSError that
    prevented its start."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int]) -> None:
        """`files` are the descriptors that become its standard input, output and error."""
        self._loop = asyncio.get_running_loop()
        self._plan = SpawnPlan(arguments, environment, files)
        self._lock = _thread.allocate_lock()
        self._pid = 0  # while it runs
        self._killed = False
        self.ended: asyncio.Future[int] = self._loop.create_future()

    def start(self) -> None:
        """Start it, soon."""
        _thread.start_new_thread(self._attend, ())  # threading.Thread would wait until the thread has got a CPU

    def kill(self) -> None:
        """End it, also if it has not started yet."""
        with self._lock:
            self._killed = True
            if self._pid:
                os.kill(self._pid, signal.SIGKILL)

    def _attend(self) -> None:
        # As little as can be: whoever waits for the interpreter waits for this thread, also when it has lost its CPU.
        if cpus := unpinned():
            os.sched_setaffinity(0, cpus)  # of this thread, and so of the program
        try:
            self._pid = self._plan.spawn()
        except OSError as error:
            self._say(error)
            return
        if self._killed:
            self.kill()
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)  # until it is reaped its number is its own
        with self._lock:
            _, status = os.waitpid(self._pid, 0)
            self._pid = 0
        self._say(os.waitstatus_to_exitcode(status))

    def _say(self, end: int | OSError) -> None:
        with suppress(RuntimeError):  # the loop has gone
            self._loop.call_soon_threadsafe(self._settle, end)

    def _settle(self, end: int | OSError) -> None:
        if isinstance(end, OSError):
            self.ended.set_exception(end)
        else:
            self.ended.set_result(end)


class SpawnPlan:
    """What is to be started, as posix_spawn wants it."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int]) -> None:
        self._libc = libc = ctypes.CDLL(None)
        self._program = arguments[0]
        self._pid = ctypes.c_int()
        self._actions, self._attributes = (ctypes.create_string_buffer(STRUCT_BYTES) for _ in range(2))
        libc.posix_spawn_file_actions_init(self._actions)
        libc.posix_spawnattr_init(self._attributes)
        for target, descriptor in enumerate(files):
            libc.posix_spawn_file_actions_adddup2(self._actions, descriptor, target)
        libc.posix_spawnattr_setflags(self._attributes, ctypes.c_short(SETPGROUP))
        variables = _array([f"{name}={value}" for name, value in environment.items()])
        program = ctypes.c_char_p(os.fsencode(self._program))
        self._call = (
            ctypes.byref(self._pid), program, self._actions, self._attributes, _array(arguments), variables
        )  # fmt: skip

    def spawn(self) -> int:
        """Start the program, once, and return its process number; other threads run on meanwhile. Raises OSError."""
        error = self._libc.posix_spawn(*self._call)
        self._libc.posix_spawn_file_actions_destroy(self._actions)
        self._libc.posix_spawnattr_destroy(self._attributes)
        if error:
            raise OSError(error, os.strerror(error), self._program)
        return self._pid.value


def _array(texts: Sequence[str]) -> "ctypes.Array[ctypes.c_char_p]":
    """Return a C array of C strings, ended by a null."""
    return (ctypes.c_char_p * (len(texts) + 1))(*map(os.fsencode, texts), None)


logger = logging.getLogger("weir")

PROGRAM = "weir.tuning.solving"
NICENESS = 10
DROPPED_LIMIT = 2.0  # seconds: a bank for one worker takes less, and is quicker solved to its end than in a new process
PIECE_BYTES = 64 << 10  # of an answer, read in one turn of the loop


class SolvingProcess:
    """Solves one wish after the other, on one event loop until `close`. With `niceness` its process leaves the CPUs to others."""

    def __init__(self, niceness: int = NICENESS) -> None:
        self._niceness = niceness
        self._child: _Child | None = None

    async def solve(self, wish: SolveRequest, limit: float) -> Bank:
        """Return the bank that `wish` asks for.

        Raises SettingsError with the reason when there can be none, ModelError when the process ends, and TimeoutError
        after `limit` seconds. Wishes are fulfilled in their order, also those whose caller was cancelled: one of those is left
        DROPPED_LIMIT seconds before the process is ended for the next, which gets another.
        """
        try:
            async with asyncio.timeout(limit):
                code, answer = await (await self._free_child()).ask(wish.to_json())
        except asyncio.CancelledError:
            raise
        except OSError as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise
            raise ModelError(f"no process could be started to solve in: {error}") from error
        except ModelError:
            await self.close()
            raise
        if code == REFUSED:
            raise SettingsError(answer.decode())
        try:
            return Bank.from_bytes(answer, "the solving process's answer", profile=wish.profile)
        except SettingsError as error:
            raise ModelError(error.message) from error

    async def close(self) -> None:
        """End the process, if there is one; it is gone when this returns. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    async def _free_child(self) -> "_Child":
        if self._child is not None and not await self._child.free(DROPPED_LIMIT):
            await self.close()
        if self._child is None:
            self._child = _Child(self._niceness)
        return self._child


class _Child:
    """One process with its socket and its log."""

    def __init__(self, niceness: int) -> None:
        self._asked: deque[asyncio.Future[tuple[int, bytes]]] = (
            deque()
        )  # in order; nobody waits for those that are cancelled
        self._progress: asyncio.Future[None] | None = None
        with ExitStack() as stack:
            self._ours, self._theirs = (stack.enter_context(end) for end in socket.socketpair())
            self._ours.setblocking(False)
            self._log = os.memfd_create("weir-solving-log")
            stack.callback(os.close, self._log)
            environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
            environment["PYTHONPATH"] = python_path(os.environ.get("PYTHONPATH", ""))
            command = [sys.executable, "-P", "-m", PROGRAM, str(os.getpid()), str(niceness)]
            self._process = Spawned(command, environment, [self._theirs.fileno(), self._log, self._log])
            self._process.start()
            self._files = stack.pop_all()
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Return the code and the answer. Raises ModelError when the process ends, OSError when it could not be started."""
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        # Whole, whoever loses interest meanwhile.
        sending = asyncio.ensure_future(
            asyncio.get_running_loop().sock_sendall(self._ours, REQUEST.pack(len(request)) + request)
        )
        await asyncio.shield(sending)
        await self._first(answer)
        if answer.done():
            return answer.result()
        code = self._process.ended.result()
        lines = os.pread(self._log, os.fstat(self._log).st_size, 0).decode(errors="replace").strip().splitlines()
        raise ModelError(f"the solving process ended with {code}{': ' + lines[-1] if lines else ''}")

    async def free(self, limit: float) -> bool:
        """Tell whether it has answered all that it was asked, within so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while self._asked and not self._process.ended.done():
                    self._progress = asyncio.get_running_loop().create_future()
                    await self._first(self._progress)
        return not (self._asked or self._process.ended.done())

    async def close(self) -> None:
        """End the process and wait until it is gone; not longer than KILL_GRACE."""
        self._process.kill()
        self._listening.cancel()
        await asyncio.wait([self._process.ended], timeout=KILL_GRACE)
        await asyncio.wait([self._listening])
        if self._process.ended.done():
            self._process.ended.exception()  # one that prevented its start has been told
        else:
            logger.warning("the solving process does not end although it was killed; it is left behind")
        self._files.close()

    async def _first(self, future: "asyncio.Future[Any]") -> None:
        """Wait for `future` or the end of the process; cancel what was not waited for to the end."""
        try:
            await asyncio.wait([future, self._process.ended], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            future.cancel()
            raise

    async def _listen(self) -> None:
        while True:
            code, length = ANSWER.unpack(await self._receive(ANSWER.size))
            answer = code, await self._receive(length)
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_result(answer)
            if self._progress is not None and not self._progress.done():
                self._progress.set_result(None)

    async def _receive(self, count: int) -> bytes:
        loop, got = asyncio.get_running_loop(), bytearray()
        while len(got) < count:
            got += await loop.sock_recv(self._ours, min(PIECE_BYTES, count - len(got)))
        return bytes(got)
