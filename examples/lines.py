"""A frontend of one's own: a TCP port where each line is an item in JSON, and each answer a line.

The package that brings it says in its pyproject.toml:

    [project.entry-points."weir.frontends"]
    lines = "examples.lines:LineFrontend"

and `weir serve examples.square:Square --frontend lines=7000` opens it: `echo 3 | nc -q 1 localhost 7000`.
"""

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from typing import Any

from weir.errors import Draining, WeirError
from weir.frontends.frontend import FrontendContext
from weir.protocols.exchange import Exchange


class LineFrontend:
    """Serves the first model at the TCP port that is its option."""

    def __init__(self, context: FrontendContext) -> None:
        self.registry, self.host, self.port = context.registry, context.settings.http.host, int(context.options)
        self.callers: set[asyncio.Task[None]] = set()
        self.replies: set[asyncio.Task[None]] = set()
        self.refusing = False

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"tcp://{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen."""
        self.server = await asyncio.start_server(self.connected, self.host, self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begin to serve one caller."""
        remembered(self.callers, self.serve(reader, writer))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one caller, line by line, until there are no more."""
        with contextlib.suppress(OSError, ValueError), contextlib.closing(writer):  # gone, or a line too long
            while line := await reader.readline():
                await remembered(self.replies, self.reply(line, writer))

    async def reply(self, item: bytes, writer: asyncio.StreamWriter) -> None:
        """Ask the model and write the answer; an error is one too."""
        try:
            if self.refusing:
                raise Draining("the server is shutting down")
            service = next(iter(self.registry.services.values()))
            answer = await Exchange(service, frontend="lines").infer_item(item)
        except WeirError as error:
            answer = json.dumps({"error": error.message}).encode()
        writer.write(answer + b"\n")
        await writer.drain()

    def refuse(self) -> None:
        """Refuse new lines."""
        self.refusing = True

    async def drain(self, drain_timeout: float | None = None) -> bool:
        """Take no more callers, and wait until nobody awaits an answer."""
        self.server.close()
        return not self.replies or not (await asyncio.wait(self.replies, timeout=drain_timeout))[1]

    async def stop(self) -> None:
        """Close everything."""
        for caller in self.callers:
            caller.cancel()


def remembered(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Return a task that is in `tasks` until it has ended."""
    tasks.add(task := asyncio.create_task(work))
    task.add_done_callback(tasks.discard)
    return task
