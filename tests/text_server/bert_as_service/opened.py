"""A frontend that is open in a thread of its own, on uvloop as in a server: clients block, and so do tests."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop
from tests.served import until
from tests.text_server.bert_as_service.hashing import Hashing

from weir.client import EmbeddingClient
from weir.protocols import HttpSettings
from weir.protocols.access import Control, ControlSettings
from weir.protocols.account import Account
from weir.text_server.bert_as_service.client import BertTransport
from weir.text_server.bert_as_service.http import Status
from weir.text_server.bert_as_service.zeromq import ZeroMqFrontend
from weir.text_server.exchange import EmbeddingContext
from weir.text_server.metrics import TextCounts
from weir.text_server.server_settings import ZeroMqSettings

T = TypeVar("T")
Connect = Callable[..., Any]  # returns a client of a frontend


class Opened:
    """A frontend with a hashing encoder. After `with` it is closed."""

    def __init__(
        self, *, port: int = 0, port_out: int | None = None, http: HttpSettings | None = None, control: ControlSettings | None = None,
        account: Account | None = None, clock: Callable[[], float] = time.monotonic, **settings: Any,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._account = account or Account(http or HttpSettings())
        self._settings = ZeroMqSettings(zmq_port=port, zmq_port_out=port_out, **settings)
        self._http = http or HttpSettings()
        self._control = Control(control)
        self.ended = threading.Event()  # somebody has asked the server to end
        self.encoder = Hashing()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    async def _start(self) -> None:
        self.encoder = Hashing()
        self.counts = TextCounts()
        context = EmbeddingContext({"hashing": self.encoder, "other": Hashing()}, self._http, 1, self.counts)
        self.frontend = ZeroMqFrontend(
            context, self._settings, control=self._control, status=Status(context.encoders, context.clients),
            terminate=self.ended.set, account=self._account, clock=self._clock,
        )  # fmt: skip
        await self.frontend.start()
        self.port, self.port_out = self.frontend.port, self.frontend.port_out

    def __enter__(self) -> Self:
        self._thread.start()
        self.run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self.frontend.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        """For a client."""
        return f"tcp://127.0.0.1:{self.port}"

    def client(self, identity: str | None = None, timeout: float = 60.0, **options: Any) -> EmbeddingClient:
        """Return a client that is connected: Weir's methods, over ZeroMQ as bert-as-service speaks it."""
        transport = BertTransport("127.0.0.1", self.port, self.port_out, identity=identity)
        return EmbeddingClient(timeout=timeout, ignore_all_checks=True, transport=transport, **options)

    def run(self, awaitable: Any) -> Any:
        """Run a coroutine in the frontend's loop."""
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result(60)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the frontend's loop."""
        called: Future[T] = Future()
        self._loop.call_soon_threadsafe(lambda: called.set_result(function()))
        return called.result(60)

    def until(self, holds: Callable[[], bool], seconds: float = 60.0) -> None:
        """Return when something holds, seen from the frontend's loop."""
        until(lambda: self.call(holds), seconds)
