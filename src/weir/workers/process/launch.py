"""Starts worker processes with their environment, CPUs and descriptors, as programs of their own or forked from a template.

`start_process` starts a program in a thread, so that the event loop goes on meanwhile. A `Template` is the server's view of a process that has
imported the model and called `load_shared` (see program.py): what it has loaded lies in memory once, for all workers that are forked from it,
as long as nobody writes to it. The template has one thread, and only forks and reaps.
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
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import weir
from weir.config import SILENCE
from weir.wire.frames import Start, encode_control
from weir.workers.cpus import THREAD_VARIABLES, share_of_cpus, unpinned
from weir.workers.executor import Turns
from weir.workers.settings import WorkerSettings, for_worker
from weir.workers.timer import resolve

Popen = subprocess.Popen[bytes]
Done = Callable[[Popen | OSError], None]

# Keep the memory that a batch frees for the next batch. By default glibc gives blocks of over 128 KB back to the system at once, and to get
# them again costs more than all other work: 16 bodies of 600 KB took 375 µs each, and take 25 µs with this. Other C libraries ignore it.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}


class Starter:
    """A thread that starts processes for the thread that makes it, and ends with that thread: the kernel then kills those processes (see
    entry.die_with)."""

    def __init__(self) -> None:
        self._starts: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._pid = os.getpid()
        _thread.start_new_thread(_work, (self._starts,))  # threading.Thread would wait until the new thread runs

    def __del__(self) -> None:
        self._starts.put(None)

    @property
    def is_alive(self) -> bool:
        """Whether the thread exists: a fork of this process does not have it."""
        return self._pid == os.getpid()

    def start(self, start: Callable[[], Popen], loop: asyncio.AbstractEventLoop, done: Done) -> None:
        """Call `start` in the thread, then `done` on `loop` with what it returned, or with the OSError that it raised.

        If the loop has been closed meanwhile, the process is killed.
        """
        self._starts.put(partial(_start, start, loop, done))


_of_thread = threading.local()


def start_process(
    arguments: Sequence[str],
    environment: dict[str, str],
    descriptors: Sequence[int],
    done: Done,
) -> None:
    """Start a process in a process group of its own, which inherits `descriptors`; the caller keeps them open until `done` is called.

    `done` is called on the running loop with the process, or with the error if the system refuses. The kernel kills the process when the calling thread ends.
    """

    def start() -> Popen:
        return subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, env=environment, pass_fds=descriptors, process_group=0
        )

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
        del start  # and with it the callback that it holds


def _start(start: Callable[[], Popen], loop: asyncio.AbstractEventLoop, done: Done) -> None:
    try:
        result: Popen | OSError = start()
    except OSError as error:
        result = error
    except ValueError as error:  # a null character in the environment
        result = OSError(str(error))
    try:
        loop.call_soon_threadsafe(done, result)
    except RuntimeError:  # the loop is closed: nobody else would ever end the process
        if not isinstance(result, OSError):
            result.kill()
            result.wait()


# To fork or to reap takes milliseconds. A template that takes longer than this many seconds hangs, and is given up.
PATIENCE = 10.0
# Seconds that a killed process gets to end. One in uninterruptible sleep (a disk, a driver) takes longer, and is left behind.
KILL_GRACE = 5.0
READY = b"1"

ENTRY = "weir.workers.process.entry"  # the module that all processes run

logger = logging.getLogger("weir")


class Process(NamedTuple):
    """A worker process that was started. `reap` reaps it, once it has ended, and passes its exit code on, at once or soon; None where the
    code cannot be known."""

    pid: int
    reap: Callable[[Callable[[int | None], None]], None]


def _own_child(popen: Popen) -> Process:
    return Process(popen.pid, lambda done: done(popen.wait()))


class TemplateRequest(NamedTuple):
    """One request to a template. `done` gets the number that the template returns, or None if that has ended."""

    request: dict[str, Any]
    descriptors: Sequence[int]
    done: Callable[[int | None], None]


class Template:
    """Forks workers, once `start` has returned True. It gets one request at a time, and nothing here waits for the response: the process may
    hang. `module` has its `run_template`; see entry.py."""

    def __init__(self, module: str = "weir.workers.process.program") -> None:
        self._module = module
        self._socket: socket.socket | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()  # done when the process has ended after `close`
        self._killed = False
        self._starting: asyncio.Future[None] | None = None
        self._requests: deque[TemplateRequest] = deque()  # the first one has been sent
        self._limit: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        return None if self._popen is None else self._popen.pid

    async def start(self, start: Start, environment: dict[str, str], cpus: Sequence[int] = ()) -> bool:
        """Start the process, and have it load what is shared. Return whether it has; if not, it has written why to stderr.

        Raises OSError when the system refuses a process. The kernel kills the process when the calling thread ends. The caller must `close` the
        template also when this is cancelled.
        """
        loop = self._loop
        ours, theirs = socket.socketpair()
        self._socket = ours
        ours.setblocking(False)
        self._starting = loop.create_future()
        arguments = command("template", start.options["name"], cpus, self._module, theirs.fileno())
        start_process(arguments, environment, [theirs.fileno()], partial(self._started, theirs, self._starting))
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
        """Send requests through the socket `ours` from now on."""
        self._socket = ours
        ours.setblocking(False)
        self._loop.add_reader(ours.fileno(), self._replied)

    def fork(
        self, arguments: dict[str, Any], descriptors: Sequence[int], done: Callable[[Process | OSError | None], None]
    ) -> None:
        """Have a process forked that gets `arguments` (see program.py) and the descriptors, which the caller keeps open until `done` is called.

        `done` gets the process, the error if the system refuses, or None when the template has ended.
        """

        def replied(reply: int | None) -> None:
            if reply is None:
                done(None)
            else:
                refused = OSError(-reply, os.strerror(-reply))
                done(Process(reply, partial(self.reap, reply)) if reply >= 0 else refused)

        self._request(TemplateRequest({"fork": arguments}, descriptors, replied))

    def reap(self, pid: int, done: Callable[[int | None], None]) -> None:
        """Have the process `pid`, which has ended, reaped; `done` gets its exit code. If the template has ended, the kernel has killed the
        process, and init reaps it."""
        self._request(TemplateRequest({"reap": pid}, (), lambda code: done(-signal.SIGKILL if code is None else code)))

    def close(self) -> None:
        """Kill the process, without waiting for its end. Its workers end with it, and each open request gets None. Idempotent."""
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
        elif not self._killed and self._starting is None:
            resolve(self.closed, None)
        requests, self._requests = self._requests, deque()
        for request in requests:
            request.done(None)

    def _started(self, theirs: socket.socket, starting: asyncio.Future[None], result: Popen | OSError) -> None:
        theirs.close()
        self._starting = None
        if not isinstance(result, OSError):
            self._popen = result
        if self._socket is None:  # closed meanwhile
            self.close()
        resolve(starting, result if isinstance(result, OSError) else None)

    def _request(self, request: TemplateRequest) -> None:
        if self._socket is None:
            request.done(None)
            return
        self._requests.append(request)
        if len(self._requests) == 1:
            self._send()

    def _send(self) -> None:
        first = self._requests[0]
        self._limit = self._loop.call_later(PATIENCE, self.close)
        try:
            assert self._socket is not None
            socket.send_fds(self._socket, [json.dumps(first.request).encode()], first.descriptors)
        except OSError:  # the template has ended
            self.close()

    def _replied(self) -> None:
        assert self._socket is not None
        try:
            reply = int(self._socket.recv(32))
        except BlockingIOError:
            return
        except (OSError, ValueError):  # the template has ended
            self.close()
            return
        if self._limit is not None:
            self._limit.cancel()
        request = self._requests.popleft()
        if self._requests:
            self._send()
        request.done(reply)


def when_gone(
    popen: "subprocess.Popen[bytes]",
    done: asyncio.Future[None],
    loop: asyncio.AbstractEventLoop,
    grace: float = KILL_GRACE,
) -> None:
    """Reap a process when it has ended. `done` is set then, or after `grace` seconds, within which it should have ended."""
    try:
        pidfd = os.pidfd_open(popen.pid)
    except OSError:  # no descriptor is left; the start of the next process reaps this one
        done.set_result(None)
        return

    def gone() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        popen.wait()
        finish()

    def stays() -> None:
        logger.warning("process %d, which workers depend on, is still running after it was killed", popen.pid)
        finish()

    def finish() -> None:
        limit.cancel()
        resolve(done, None)

    limit = loop.call_later(grace, stays)
    loop.add_reader(pidfd, gone)


@dataclass(frozen=True)
class Launch:
    """Everything that the processes of one worker, which replace each other, have in common.

    `source` is the model (see source.py). `request_fd` is the descriptor of the request arena, -1 without one. `lends` says that results are
    arrays, which may be read where they lie in shared memory. `template` is what the processes are forked from, if they are. A `bulk` worker runs bulk
    work only, at idle priority. Its warm-up takes `turns`.
    """

    name: str
    index: int
    source: bytes
    settings: WorkerSettings
    max_batch_size: int
    request_fd: int = -1
    request_bytes: int = 0
    result_bytes: int = 0
    lends: bool = False
    template: Template | None = None
    bulk: bool = False
    turns: Turns | None = None
    path: Sequence[str] = field(default_factory=lambda: list(sys.path))

    def options(self) -> dict[str, Any]:
        """Return the options of the Start frame, which the process needs before it imports the model."""
        return {
            "name": self.name,
            "index": self.index,
            "bulk": self.bulk,
            "path": list(self.path),
            "max_batch_size": self.max_batch_size,
            "retry_in_halves": self.settings.retry_in_halves,
            "pipeline_depth": self.settings.pipeline_depth,
            "concurrency": self.settings.worker_concurrency,
            "spin": self.settings.spin,
            "takes_turns": self.turns is not None,
        }

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the process's environment. The thread limit overrides what is `inherited`; the worker's own settings override both.

        Without a limit, numeric libraries have as many threads as OMP_NUM_THREADS says, or else the worker's share of the CPUs.
        """
        own = {**inherited, **self.variables()}
        count = own.get("OMP_NUM_THREADS") or str(share_of_cpus(self.settings, self.index))
        limit = dict.fromkeys(THREAD_VARIABLES, count)
        environment = {
            **MALLOC,
            **SILENCE,
            **limit,
            **inherited,
            "PYTHONPATH": python_path(inherited.get("PYTHONPATH", "")),
        }
        if not environment["PYTHONPATH"]:
            del environment["PYTHONPATH"]
        return environment | self.variables()

    def variables(self) -> dict[str, str]:
        """Return the environment variables that the settings say: the thread limit, and over it the worker's own."""
        threads = self.settings.threads
        limit = {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
        return limit | (for_worker(self.settings.env, self.index) or {})

    def fork(self, end: int, result_fd: int, done: Callable[[Process | OSError | None], None]) -> bool:
        """Have the template fork a process; return False if there is no template. The arguments are those of `spawn`.

        `done` also gets None: the template has ended. See Template.fork.
        """
        if self.template is None:
            return False
        options = {
            "cpus": self._cpus,
            "request_bytes": self.request_bytes if self.request_fd >= 0 else 0,
            "result_bytes": self.result_bytes if result_fd >= 0 else 0,
        }
        self.template.fork(options, [fd for fd in (end, self.request_fd, result_fd) if fd >= 0], done)
        return True

    def spawn(self, end: int, result_fd: int, done: Callable[[Process | OSError], None]) -> None:
        """Start a process as a program of its own.

        It inherits the descriptors `end` (of its socket) and `result_fd` (of its arena, or -1). The caller keeps them open until `done` is
        called, with the process, or with the error if the system refuses. The kernel kills the process when the calling thread ends.
        """
        numbers = (end, self.request_fd, self.request_bytes, result_fd, self.result_bytes)
        start_process(
            command("worker", f"{self.name}/{self.index}", self._cpus, *numbers),
            self.environment(os.environ),
            [fd for fd in (end, self.request_fd, result_fd) if fd >= 0],
            lambda result: done(result if isinstance(result, OSError) else _own_child(result)),
        )

    @property
    def _cpus(self) -> list[int]:
        return for_worker(self.settings.cpu_affinity, self.index) or unpinned()


class Templates:
    """Templates without a model, from which the workers of any model are forked: one for each environment. An interpreter, Weir and the
    modules `imports` are loaded in them once, so such a worker starts in a fraction of the time that a program takes, and of its memory."""

    def __init__(self, imports: Sequence[str] = ("numpy",)) -> None:
        self._imports = list(imports)
        self._templates: dict[frozenset[tuple[str, str]], Template] = {}
        self._starting = asyncio.Lock()

    async def find(self, launch: Launch) -> Template | None:
        """Return what the processes of `launch` may be forked from; None if each must be a program of its own, since it has variables of
        its own, which libraries read when they are loaded, or since no template starts."""
        if launch.settings.env:
            return None
        environment = launch.environment(os.environ)
        key = frozenset(environment.items())
        async with self._starting:
            template = self._templates.get(key)
            if template is None or template.pid is None:
                self._templates[key] = template = Template()
                options = {"name": "models", "path": list(launch.path), "imports": self._imports}
                try:
                    await template.start(Start(b"", options), environment, unpinned())
                except OSError:  # the system refuses a process, and the worker's own start says so
                    template.close()
                except BaseException:
                    template.close()
                    raise
            return None if template.pid is None else template

    async def prepare(self) -> None:
        """Start the template of workers whose settings are the defaults."""
        await self.find(Launch("models", 0, b"", WorkerSettings(), 1))

    async def close(self) -> None:
        """End all templates, and the workers that were forked from them. Idempotent."""
        templates = list(self._templates.values())
        self._templates.clear()
        for template in templates:
            template.close()
        for template in templates:
            await template.closed


def command(role: str, name: str, cpus: Sequence[int], *others: object) -> list[str]:
    """Return the command line of a process with the arguments that `entry.main` describes."""
    arguments = (role, name, os.getpid(), ",".join(map(str, cpus)), *others)
    # -P: without it the current directory would come first on the path and could hide any module.
    return [sys.executable, "-P", "-m", ENTRY, *map(str, arguments)]


def python_path(inherited: str) -> str:
    """Return a PYTHONPATH on which a new process finds this copy of weir, even if it is not installed. `inherited` is that of this process."""
    root = str(Path(weir.__file__).parents[1])
    known = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *inherited.split(os.pathsep))
    return inherited if root in known else os.pathsep.join(filter(None, (root, inherited)))
