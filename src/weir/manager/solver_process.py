"""One solving process, seen from the server: started, awaited, and ended whatever happens.

Its ends are anonymous files rather than pipes, so that nothing has to be pumped: the request lies ready when it starts,
the answer is read when it has ended. It is started by `subprocess`, which needs 0.3 ms of the loop however large this
process is; uvloop's own way needs 3 to 5 ms.
"""

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack

from weir.errors import ModelError, SettingsError
from weir.manager.solving import REFUSED, Wish
from weir.policy.bank import Bank
from weir.workers.launch import THREAD_VARIABLES, python_path

PROGRAM = "weir.manager.solving"


async def solve_outside(wish: Wish, limit: float) -> Bank:
    """Return the bank that `wish` asks for.

    Raises SettingsError with the reason when there can be none, ModelError when the process ends otherwise, and
    TimeoutError after `limit` seconds. Also when it is cancelled, no process is left when it returns.
    """
    try:
        code, answer, log = await _ask(wish.to_json(), limit)
    except TimeoutError:
        raise
    except OSError as error:
        raise ModelError(f"no process could be started to solve in: {error}") from error
    if code == REFUSED:
        raise SettingsError(answer.decode())
    if code:
        lines = log.decode(errors="replace").strip().splitlines()
        raise ModelError(f"the solving process ended with {code}{': ' + lines[-1] if lines else ''}")
    try:
        return Bank.from_bytes(answer, "the solving process's answer", profile=wish.profile)
    except SettingsError as error:
        raise ModelError(error.message) from error


async def _ask(request: bytes, limit: float) -> tuple[int, bytes, bytes]:
    """Return the exit code, the answer and the log."""
    with ExitStack() as stack:
        files = [_anonymous_file(name, stack) for name in ("request", "answer", "log")]
        os.write(files[0], request)
        os.lseek(files[0], 0, os.SEEK_SET)
        code = await _run(_start(*files), limit)
        return code, _content(files[1]), _content(files[2])


def _start(request: int, answer: int, log: int) -> "subprocess.Popen[bytes]":
    # Called on the loop's thread: the kernel ends the process with the thread that started it.
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
    environment["PYTHONPATH"] = python_path(os.environ.get("PYTHONPATH", ""))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM, str(os.getpid())],
        stdin=request, stdout=answer, stderr=log, env=environment, process_group=0,
    )  # fmt: skip


async def _run(process: "subprocess.Popen[bytes]", limit: float) -> int:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = -1
    try:
        descriptor = os.pidfd_open(process.pid)
        loop.add_reader(descriptor, ended.set)
        async with asyncio.timeout(limit):
            await ended.wait()
    finally:
        if descriptor >= 0:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        process.kill()  # until it is reaped its number is its own
        process.wait()
    return process.returncode


def _anonymous_file(name: str, stack: ExitStack) -> int:
    descriptor = os.memfd_create(f"weir-solving-{name}")
    stack.callback(os.close, descriptor)
    return descriptor


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
