"""Starts programs of Weir (`python -m weir...`) by forking a process that has imported Weir already.

To load Python, numpy and Weir takes half a second of processor time, and the tests start hundreds of servers and workers. What a fork runs is that program
all the same: a child of the process that starts it, with its own directory, environment, arguments, descriptors and exit code. An environment that means
something to the interpreter, or to the loader of libraries, needs an interpreter of its own: see `can_fork`.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, NoReturn

# Read before the first line of Python runs, or by libraries when they are loaded.
_OF_THE_INTERPRETER = ("PYTHON", "LD_", "GRPC_", "SSL_")
_ROOT = Path(__file__).parents[1]
_NEUTRAL = ("", str(_ROOT), str(_ROOT / "src"))  # in PYTHONPATH they only say where modules are found
# A program that is started ignores what its parent ignores.
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_LARGEST = 200_000  # bytes of a message: the arguments and the environment
_CLONE_PARENT = 0x8000  # linux/sched.h: the new process is a child of the parent of the one that forks
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())  # the number of this system call
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}  # malloc.h
# How the names of programs begin that load libraries of models, and these: they are forked from a process of their own, as a server must not find any loaded.
_PROGRAMS = ("weir.text_models.", "weir.catalog.repository.", "tests.text_models.")
_LIBRARIES = ("onnx", "safetensors.numpy", "huggingface_hub.hf_api")  # they start no thread
_PYTHON = sys.executable
TITLE = "tests.template"  # a process that forks; see `rename`
_fork_exec: Callable[..., int] = vars(subprocess)["_fork_exec"]


def _paths(env: Mapping[str, str]) -> list[str]:
    return env.get("PYTHONPATH", "").split(os.pathsep)


def _meaning(env: Mapping[str, str]) -> dict[str, str | list[str]]:
    meant = {name: value for name, value in env.items() if name.startswith(_OF_THE_INTERPRETER)}
    return meant | {"PYTHONPATH": [each for each in _paths(env) if each not in _NEUTRAL]}


_MEANING = _meaning(os.environ)


def can_fork(env: Mapping[str, str]) -> bool:
    """Return whether a process with this environment may be forked from one with that which this process had at its start."""
    return _CLONE is not None and _meaning(env) == _MEANING


def install(requests: socket.socket, for_models: socket.socket | None = None) -> None:
    """From now on, have programs of Weir that this process starts forked by the one that listens at the other end of `requests`; those that
    load libraries of models by that of `for_models`."""

    def start(*given: Any) -> int:
        """Start a program as the function of `subprocess` does, whose arguments these are; return the process id."""
        words = [os.fsdecode(each) for each in given[0]]
        env = dict(os.environ if given[5] is None else (os.fsdecode(each).split("=", 1) for each in given[5]))
        options = [each for each in words[1:4] if each != "-P"]
        is_ours = words[0] == _PYTHON and options[:1] == ["-m"] and options[1].partition(".")[0] in ("weir", "tests")
        if not is_ours or not given[2] or given[17:22] != (None, None, None, -1, None) or not can_fork(env):
            return _fork_exec(*given)
        forking = (for_models or requests) if options[1].startswith(_PROGRAMS) else requests
        cwd = os.getcwd() if given[4] is None else os.fsdecode(given[4])
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # Where it reads, writes, and writes errors; then what it inherits.
            standard = [number if pipe < 0 else pipe for number, pipe in enumerate((given[6], given[9], given[11]))]
            kept = [each for each in given[3] if each != given[13]]
            message = {
                "words": words, "path": [] if "-P" in words[1:2] else [cwd], "env": env, "cwd": cwd, "numbers": [0, 1, 2, *kept],
                "ignored": [each for each in _SIGNALS if signal.getsignal(each) is signal.SIG_IGN],
                "session": given[15], "group": given[16],
                "cpus": [*os.sched_getaffinity(0)], "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            }  # fmt: skip
            socket.send_fds(forking, [json.dumps(message).encode()], [theirs.fileno(), *standard, *kept])
            theirs.close()
            answer = ours.recv(16)
        if not answer:
            raise ChildProcessError("the process that the tests fork programs from has ended")
        return int(answer)

    setattr(subprocess, "_fork_exec", start)  # noqa: B010 - it is not declared
    setattr(subprocess, "_USE_POSIX_SPAWN", False)  # noqa: B010 - from Python 3.13 on, that would start programs instead


@cache
def start() -> None:
    """Start the processes that fork, which load Weir at the first request, and `install` them. They end with this process.

    The kernel takes what they fork for children of this thread, and so ends workers with it.
    """
    if _CLONE is not None:
        _MEANING.update(_meaning(os.environ))  # conftest.py sets variables after it has imported this
        install(_started(), _started(*_LIBRARIES))


def _started(*libraries: str) -> socket.socket:
    """Start a process that forks, and loads these libraries too; return the socket for requests to it."""
    ours, theirs = _pair()
    command = [sys.executable, __file__, str(theirs.fileno()), *libraries, " " * 1000]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # with threads, it could not be forked
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=DEVNULL, stdout=DEVNULL, env=env)
    process.returncode = 0  # nobody waits for it
    theirs.close()
    atexit.register(ours.close)
    return ours


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
    return pair


def _serve_forks(requests: socket.socket, *libraries: str) -> str:
    """Fork a process for each of `requests`, and return in it, ready to run the module that is returned. Exit when the other end has closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the tests end first
    rename([sys.executable, "-m", TITLE])
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, 253)
        if not message:
            os._exit(0)
        _load(*libraries)
        if not (pid := _fork_sibling()):
            requests.detach()
            return _become(descriptors[1:], **json.loads(message))
        os.write(descriptors[0], str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_sibling() -> int:
    """Do what os.fork does, but the new process is a child of the parent of this one."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = ctypes.pythonapi.syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    (ctypes.pythonapi.PyOS_AfterFork_Parent if pid else ctypes.pythonapi.PyOS_AfterFork_Child)()
    assert pid >= 0
    return pid


@cache
def _load(*libraries: str) -> None:
    """Load what servers, workers and fronts load, but nothing of a model or a library that is optional, except these."""
    for name in (
        "weir.console", "weir.commands.options", "weir.frontends.websocket", "weir.catalog.loading",
        "weir.workers.process.program", "weir.fronts.front", "weir.simulation.banks",
    ):  # fmt: skip
        import_module(name)
    with suppress(ImportError):  # not every environment of the tests has what texts need
        import_module("weir.text_server.server")
    for name in libraries:
        with suppress(ImportError):
            import_module(name)
    # As in the process of the tests: see conftest.py.
    import_module("weir.tuning").SolvingProcess.__init__.__defaults__ = (0,)
    gc.collect()
    gc.freeze()  # the collector would write into each page, and so copy it


def rename(words: Sequence[str]) -> None:
    """Show `words` as the command line of this process, which was started with one that is long enough."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = int(fields[45]), int(fields[46])
    line = "\0".join(words).encode()[: last - first - 1]
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, line, len(line))


def _become(
    descriptors: list[int], *, words: list[str], path: list[str], env: dict[str, str], cwd: str, numbers: list[int],
    ignored: list[int], session: bool, group: int, cpus: list[int], files: tuple[int, int],
) -> str:  # fmt: skip
    above = max(*descriptors, *numbers) + 1
    for copy, number in zip([fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors], numbers, strict=True):
        os.dup2(copy, number)
    for each in map(int, os.listdir("/proc/self/fd")):
        if each not in numbers:
            with suppress(OSError):  # the one that listed them
                os.close(each)
    if session:
        os.setsid()
    if group >= 0:
        os.setpgid(0, group)
    os.sched_setaffinity(0, cpus)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    for signal_number in _SIGNALS:
        usual = signal.default_int_handler if signal_number == signal.SIGINT else signal.SIG_DFL
        signal.signal(signal_number, signal.SIG_IGN if signal_number in ignored else usual)
    for name, option in _MALLOPT.items():
        if name in env:
            ctypes.pythonapi.mallopt(option, int(env[name]))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    rename(words)
    sys.path[:1] = [*path, *filter(None, _paths(env))]
    module, *sys.argv[1:] = words[words.index("-m") + 1 :]
    return module


def _main(requests: socket.socket, *libraries: str) -> None:
    module, own = _serve_forks(requests, *libraries), os.getpid()
    while module == "weir":  # it starts programs itself
        ours, theirs = _pair()
        if os.fork():
            theirs.close()
            install(ours)
            break
        ours.close()
        import_module("weir.workers.process.entry").die_with(own)
        module, own = _serve_forks(theirs), os.getpid()
    sys.modules.pop(module, None)  # it runs anew, as __main__
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            raise
    _end(code)


def _end(code: int) -> NoReturn:
    """Exit as the interpreter does, but take nothing apart: each page that this process shares with the one it was forked from would be copied."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:-1])
