"""The solving process, seen from the server: started by the first wish, asked again and again, and ended whatever happens.

It stays because a start is what disturbs a server most: a new process loads its libraries and gives its memory back at the
end, and for that the kernel takes CPUs for milliseconds, whatever the process's priority.
"""

import asyncio
import os
import socket
import sys
from contextlib import ExitStack, suppress
from typing import Any

from weir.errors import ModelError, SettingsError
from weir.manager.solving import ANSWER, REFUSED, REQUEST, Wish
from weir.manager.spawning import Spawned
from weir.policy.bank import Bank
from weir.workers.launch import THREAD_VARIABLES, python_path

PROGRAM = "weir.manager.solving"
PIECE_BYTES = 64 << 10  # of an answer, read in one turn of the loop


class SolvingProcess:
    """Solves one wish after the other, on one event loop until `close`."""

    def __init__(self) -> None:
        self._child: _Child | None = None

    async def solve(self, wish: Wish, limit: float) -> Bank:
        """Return the bank that `wish` asks for.

        Raises SettingsError with the reason when there can be none, ModelError when the process ends, and TimeoutError
        after `limit` seconds. A process that has not answered is ended before this returns, also when it is cancelled; the
        next wish gets another.
        """
        answered = False
        try:
            if self._child is None:
                self._child = _Child()
            async with asyncio.timeout(limit):
                code, answer = await self._child.ask(wish.to_json())
            answered = True
        except TimeoutError:
            raise
        except OSError as error:
            raise ModelError(f"no process could be started to solve in: {error}") from error
        finally:
            if not answered:
                await self.close()
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


class _Child:
    """One process with its socket and its log."""

    def __init__(self) -> None:
        with ExitStack() as stack:
            self._ours, self._theirs = (stack.enter_context(end) for end in socket.socketpair())
            self._ours.setblocking(False)
            self._log = os.memfd_create("weir-solving-log")
            stack.callback(os.close, self._log)
            environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
            environment["PYTHONPATH"] = python_path(os.environ.get("PYTHONPATH", ""))
            command = [sys.executable, "-P", "-m", PROGRAM, str(os.getpid())]
            self._process = Spawned(command, environment, [self._theirs.fileno(), self._log, self._log])
            self._process.start()
            self._files = stack.pop_all()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Return the code and the answer. Raises ModelError when the process ends, OSError when it could not be started."""
        exchange = asyncio.ensure_future(self._exchange(request))
        try:
            first: list[asyncio.Future[Any]] = [exchange, self._process.ended]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if exchange.done():
                return exchange.result()
            code = self._process.ended.result()
        finally:
            exchange.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([exchange])
        lines = os.pread(self._log, os.fstat(self._log).st_size, 0).decode(errors="replace").strip().splitlines()
        raise ModelError(f"the solving process ended with {code}{': ' + lines[-1] if lines else ''}")

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        self._process.kill()
        await asyncio.wait([self._process.ended])
        self._process.ended.exception()  # one that prevented its start has been told
        self._files.close()

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        await asyncio.get_running_loop().sock_sendall(self._ours, REQUEST.pack(len(request)) + request)
        code, length = ANSWER.unpack(await self._receive(ANSWER.size))
        return code, await self._receive(length)

    async def _receive(self, count: int) -> bytes:
        loop, got = asyncio.get_running_loop(), bytearray()
        while len(got) < count:
            got += await loop.sock_recv(self._ours, min(PIECE_BYTES, count - len(got)))
        return bytes(got)
