"""Every client, asked in the same way: those that are awaited are run to their ends by an event loop of their own."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.served import Served

from weir import client as clients
from weir.inprocess import AsyncInProcess, InProcess

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = str(ROOT / "examples" / "repository")
MODELS = Path(__file__).with_name("models.py")
STREAMING = ROOT / "tests" / "streaming_models.py"
TARGETS = (f"{MODELS}:Every", f"{MODELS}:Moody", f"{MODELS}:Scale", f"{STREAMING}:Count", f"{STREAMING}:Script")


class Running(NamedTuple):
    """A server, and where it listens."""

    served: Served
    url: str
    grpc: str


class Awaited:
    """An asynchronous client with the methods of a blocking one."""

    def __init__(self, client: Any, loop: asyncio.Runner) -> None:
        self.client = client
        self._loop = loop

    def stream(self, *arguments: Any, **asking: Any) -> Iterator[Any]:
        """Yield the answers."""
        answers = self.client.stream(*arguments, **asking)
        try:
            while True:
                try:
                    yield self._loop.run(_next(answers))
                except StopAsyncIteration:
                    return
        finally:
            self._loop.run(answers.aclose())

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        return lambda *arguments, **asking: self._loop.run(_awaited(method, arguments, asking))


async def _next(answers: AsyncGenerator[Any, None]) -> Any:
    return await anext(answers)


async def _awaited(method: Any, arguments: Any, asking: Any) -> Any:
    return await method(*arguments, **asking)


MAKE: dict[str, Callable[..., Any]] = {
    "http": lambda server, **said: clients.HttpClient(server.url, **said),
    "http-json": lambda server, **said: clients.HttpClient(server.url, binary=False, **said),
    "http-async": lambda server, **said: clients.AsyncHttpClient(server.url, **said),
    "grpc": lambda server, **said: clients.GrpcClient(server.grpc, **said),
    "grpc-async": lambda server, **said: clients.AsyncGrpcClient(server.grpc, **said),
    "websocket": lambda server, **said: clients.WebSocketClient(server.url, **said),
    "websocket-async": lambda server, **said: clients.AsyncWebSocketClient(server.url, **said),
    "inprocess": lambda _, **said: InProcess(*TARGETS, model_repository=REPOSITORY, **said),
    "inprocess-async": lambda _, **said: AsyncInProcess(*TARGETS, model_repository=REPOSITORY, **said),
}
REMOTE = [name for name in MAKE if not name.startswith("inprocess")]


@contextmanager
def serving(*more: object, targets: tuple[str, ...] = TARGETS) -> Iterator[Running]:
    """Run a server until the block ends."""
    with Served(*targets, "--model-repository", REPOSITORY, "--grpc-port", "0", *more) as served:
        served.until_logged(r"listening.*?address=\S*grpc://")
        grpc = re.findall(r"grpc://(\S+:\d+)", served.log)[0]
        served.until_ready()
        yield Running(served, served.url, grpc)


@contextmanager
def asking(name: str, server: Any, **said: Any) -> Iterator[Any]:
    """Give the client of that name until the block ends."""
    client = MAKE[name](server, **said)
    if isinstance(client, clients.Client):
        with client:
            yield client
        return
    with asyncio.Runner() as loop:
        loop.run(client.__aenter__())
        try:
            yield Awaited(client, loop)
        finally:
            loop.run(client.close())
