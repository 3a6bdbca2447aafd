"""A server with every protocol and a probe of its event loop: `python -m benchmarks.runs.parsing [BYTES [CERTIFICATE KEY]]`. Its
first line says its ports. Requests and answers may hold so many bytes (0: what there is room for). With a certificate it serves
HTTP over TLS too, on a port of its own. Nobody may control it.

The probe is asked over TCP: `reset` forgets, `longest` answers with the longest stretches between two turns, in seconds: of CPU time of the
loop's thread, and of CPU time of the whole process while the loop's thread was not waiting for a processor; so what is longer in the second is
what another thread kept the interpreter. `held` answers with the bytes and the connections in the account.
"""

import asyncio
import dataclasses
import gc
import json
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import uvloop

import weir
from benchmarks import models
from benchmarks.models import Grid, Words
from weir.catalog.registry import Registry
from weir.embedding.bert_as_service.http import Encode, bert_paths
from weir.embedding.bert_as_service.settings import ZeroMqSettings
from weir.embedding.bert_as_service.status import Status
from weir.embedding.bert_as_service.zeromq import ZeroMqDoor
from weir.embedding.calling import EmbeddingContext, Models
from weir.embedding.metrics import TextCounts
from weir.embedding.openai import OpenAI, openai_paths
from weir.embedding.texts import Encoded, Text
from weir.protocols.access import Control, ControlSettings
from weir.protocols.account import Account
from weir.protocols.grpc.server import GrpcServer
from weir.protocols.grpc.settings import GrpcSettings
from weir.protocols.kserve.context import KServeContext as KserveSite
from weir.protocols.rest import Added, make_app
from weir.protocols.server import HttpServer
from weir.protocols.settings import HttpSettings
from weir.protocols.websocket import WebSockets

BEAT = 0.001  # seconds


class Length(models.Length):
    """Says how long an item is that has a length."""

    def predict(self, batch: list[Any]) -> list[int]:
        return [len(item) if hasattr(item, "__len__") else 0 for item in batch]


class Lengths:
    """Encodes every text as its length and a zero: what is measured is what comes before."""

    name, dimensions, max_length = "lengths", 2, 512

    async def encode(self, texts: Sequence[Text], **said: Any) -> Encoded:
        """Return a vector for each text."""
        count = len(texts)
        vectors = np.zeros((count, 2), np.float32)
        vectors[:, 0] = list(map(len, texts))
        return Encoded(vectors, [1] * count, [False] * count)


class Probe:
    """Notes the longest stretches in which the loop did not come to its next turn; made in the loop's own thread."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._scheduling = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._loop = asyncio.get_running_loop()
        self.reset()
        self._beat()

    def reset(self) -> None:
        """Forget."""
        self.on_loop = self.in_process = 0.0
        self._times = self._now()

    def _now(self) -> tuple[float, float, float]:
        """Return the seconds that the thread has computed, that the process has, and that the thread neither has nor could have: because it
        waited for something else than a processor, or has computed."""
        waited = int(os.pread(self._scheduling, 100, 0).split()[1]) / 1e9
        return time.thread_time(), time.process_time(), time.monotonic() - waited

    def _beat(self) -> None:
        before, self._times = self._times, self._now()
        on_loop, in_process, passed = (after - then for after, then in zip(self._times, before, strict=True))
        self.on_loop = max(self.on_loop, on_loop)
        self.in_process = max(self.in_process, min(in_process, passed))
        self._loop.call_later(BEAT, self._beat)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer questions on one connection."""
        while question := await reader.readline():
            if question == b"reset\n":
                self.reset()
            longest = [self.on_loop, self.in_process]
            held = [self._account.held_bytes, self._account.connections]
            writer.write(json.dumps(held if question == b"held\n" else longest).encode() + b"\n")


def nobody() -> Control:
    """Return who may control the server: nobody, for the token is known to none."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(secrets.token_hex().encode())
        file.flush()
        return Control(ControlSettings(control_token_file=file.name))


async def serve(waiting_bytes: str = "0", *files: str) -> None:
    """Serve until the standard input ends; over TLS too if there are `files` with a certificate and its key."""
    services = [weir.Service(model, workers=1) for model in (Length, Grid, Words)]
    http = HttpSettings(port=0, max_waiting_bytes=int(waiting_bytes) or None, body_timeout=20.0)
    registry, encoder, control = Registry(services), Lengths(), nobody()
    site = KserveSite(registry, http, control)
    texts = EmbeddingContext(Models({encoder.name: encoder}), http, 100_000, TextCounts())
    status = Status(texts.models.encoders, texts.clients)
    routes = [*OpenAI(texts).routes(), *Encode(texts, status, control=control, end=lambda: None).routes()]
    sockets = WebSockets(registry, http, site.account)
    app = make_app(
        registry, http, site=site, websockets=sockets, added=Added(routes, {**openai_paths(), **bert_paths()})
    )
    servers: list[Any] = [
        registry,
        HttpServer(registry, app, http, site=site, websockets=sockets),
        GrpcServer(site, GrpcSettings(grpc_port=0), http),
        ZeroMqDoor({encoder.name: encoder}, ZeroMqSettings(zmq_port=0), http, control=control, account=site.account),
    ]
    if files:
        certified = dataclasses.replace(http, tls_certfile=files[0], tls_keyfile=files[1])
        servers.append(HttpServer(registry, app, certified, site=site, websockets=sockets))
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        gc.collect()
        gc.freeze()  # as `weir serve` does
        probe = await asyncio.start_server(Probe(site.account).answer, "127.0.0.1", 0)
        ports = {
            "http": servers[1].port, "grpc": servers[2].port, "zmq": servers[3].port,
            "zmq_out": servers[3].port_out, "probe": probe.sockets[0].getsockname()[1], "tls": servers[-1].port,
        }  # fmt: skip
        print(json.dumps(ports), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        probe.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(*sys.argv[1:]))
