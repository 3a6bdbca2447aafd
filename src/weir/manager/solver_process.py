"""One solving process, seen from the server: started, awaited, and ended whatever happens.

Its ends are anonymous files rather than pipes, so that nothing has to be pumped: the request lies ready when it starts,
the answer is read when it has ended.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from weir.errors import ModelError, SettingsError
from weir.manager.solving import REFUSED, Wish
from weir.manager.spawning import Spawned
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
        code = await _run(files, limit)
        return code, _content(files[1]), _content(files[2])


async def _run(files: Sequence[int], limit: float) -> int:
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
    environment["PYTHONPATH"] = python_path(os.environ.get("PYTHONPATH", ""))
    process = Spawned([sys.executable, "-P", "-m", PROGRAM, str(os.getpid())], environment, files)
    process.start()
    try:
        async with asyncio.timeout(limit):
            return await asyncio.shield(process.ended)
    finally:
        process.kill()
        await asyncio.wait([process.ended])


def _anonymous_file(name: str, stack: ExitStack) -> int:
    descriptor = os.memfd_create(f"weir-solving-{name}")
    stack.callback(os.close, descriptor)
    return descriptor


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
