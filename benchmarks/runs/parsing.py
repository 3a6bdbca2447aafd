"""A server with every protocol and a probe of its event loop: `python -m benchmarks.runs.parsing`. Its first line says its ports.

The probe is asked over TCP: `reset` forgets, `longest` answers with the longest stretches, in seconds: of CPU time of the loop's
thread in one turn, and of CPU time of the whole process between two turns, in which another thread kept the interpreter.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import uvloop

import weir
from benchmarks.models import Grid, Length, Words
from weir.embedding.calling import Models, Site
from weir.embedding.counts import Counts
from weir.embedding.encode import Encode
from weir.embedding.openai import OpenAI
from weir.embedding.openapi import text_paths
from weir.embedding.status import Status
from weir.embedding.texts import Encoded, Text
from weir.embedding.zeromq.door import ZeroMqDoor
from weir.embedding.zeromq.settings import ZeroMqSettings
from weir.manager.registry import Registry
from weir.protocols.control import Control
from weir.protocols.grpc.server import GrpcServer
from weir.protocols.grpc.settings import GrpcSettings
from weir.protocols.kserve.site import Site as KserveSite
from weir.protocols.rest import Added, make_app
from weir.protocols.server import HttpServer
from weir.protocols.settings import HttpSettings
from weir.protocols.websocket import WebSockets

BEAT = 0.001  # seconds


class Zeros:
    """Encodes every text as two zeros: what is measured is what comes before."""

    name, dimensions, max_length = "zeros", 2, 512

    async def encode(self, texts: Sequence[Text], **said: Any) -> Encoded:
        """Return a vector for each text."""
        count = len(texts)
        return Encoded(np.zeros((count, 2), np.float32), [1] * count, [False] * count)


class Probe:
    """Notes the longest stretches in which the loop did not come to its next turn."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reset()
        self._beat()

    def reset(self) -> None:
        """Forget."""
        self.on_loop = self.in_process = 0.0
        self._times = time.thread_time(), time.process_time()

    def _beat(self) -> None:
        before, self._times = self._times, (time.thread_time(), time.process_time())
        self.on_loop = max(self.on_loop, self._times[0] - before[0])
        self.in_process = max(self.in_process, self._times[1] - before[1])
        self._loop.call_later(BEAT, self._beat)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer questions on one connection."""
        while question := await reader.readline():
            if question == b"reset\n":
                self.reset()
            writer.write(json.dumps([self.on_loop, self.in_process]).encode() + b"\n")


async def serve() -> None:
    """Serve until the standard input ends."""
    services = [weir.Service(model, workers=1) for model in (Length, Grid, Words)]
    registry, http, encoder = Registry(services), HttpSettings(port=0), Zeros()
    site = KserveSite(registry, http)
    texts = Site(Models({encoder.name: encoder}), http, 100_000, Counts())
    status = Status(texts.models.encoders, texts.clients)
    routes = [*OpenAI(texts).routes(), *Encode(texts, status, control=Control(), end=lambda: None).routes()]
    sockets = WebSockets(registry, http, site.account)
    app = make_app(registry, http, site=site, websockets=sockets, added=Added(routes, text_paths()))
    servers: list[Any] = [
        registry,
        HttpServer(registry, app, http, site=site, websockets=sockets),
        GrpcServer(site, GrpcSettings(grpc_port=0), http),
        ZeroMqDoor({encoder.name: encoder}, ZeroMqSettings(zmq_port=0), http),
    ]
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        probe = await asyncio.start_server(Probe().answer, "127.0.0.1", 0)
        ports = {
            "http": servers[1].port, "grpc": servers[2].port, "zmq": servers[3].port,
            "zmq_out": servers[3].port_out, "probe": probe.sockets[0].getsockname()[1],
        }  # fmt: skip
        print(json.dumps(ports), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        probe.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
