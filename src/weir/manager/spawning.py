"""Starts a program, and waits for its end, without ever holding up the threads of this process.

`subprocess` starts one in 0.3 ms, however large this process is, but all Python threads stand still until the child has
become the other program: on a machine whose CPUs are all busy that can take 20 ms. (uvloop's own way copies the page
tables, 3 to 5 ms and more.) The C library's posix_spawn, called by ctypes, which lets go of the interpreter meanwhile,
stops nobody but the thread that calls it. That thread then waits for the end, and must: the kernel ends a process that
asked for it (PR_SET_PDEATHSIG) together with the thread that started it.
"""

import _thread
import asyncio
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from weir.workers.launch import unpinned

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
