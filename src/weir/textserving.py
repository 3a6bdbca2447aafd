"""A server of text models in a thread of a program: what `weir embed serve` is, without a command line.

with weir.embedding.serve("./bge-small-en", port=0) as server:
    print(server.url)
"""

import asyncio
import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import uvloop

from weir.app import App
from weir.embedding.bert_as_service.zeromq import ZeroMqDoor
from weir.embedding.calibration import nothing
from weir.errors import SettingsError
from weir.textserver import compose, given_settings

if TYPE_CHECKING:
    from weir.client.embedding import EmbeddingTransport

_ZMQ_PORT = 5555  # of bert-as-service


class EmbeddingServer:
    """Serves the models of `directories` (DIRECTORY or NAME=DIRECTORY; none: the small one that can be installed) with the settings of
    `weir embed serve` as keyword arguments. Neither variables nor a file are read.

    A context manager: serves when its block begins, and has finished what it accepted when the block ends. Or call `start`, wait for
    `is_ready`, and `close`. Raises SettingsError before anything is started. Where a model has to be measured first, that is done when this is
    made, and raises what the start of a worker raises.
    """

    def __init__(self, *directories: str | os.PathLike[str], **settings: Any) -> None:
        said = given_settings([os.fspath(directory) for directory in directories], settings)
        with ThreadPoolExecutor(1) as aside:  # here a loop may be running
            server = aside.submit(asyncio.run, compose(said, lambda name: nothing)).result()
        self._app = App(server.settings, product=server.product)
        self._runner: asyncio.Runner
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.is_ready = threading.Event()
        self._settled = threading.Event()  # ready, or ended without ever having been

    @property
    def url(self) -> str:
        """Where HTTP is served."""
        return self._app.server.address

    @property
    def addresses(self) -> list[str]:
        """Where each door is, HTTP first."""
        return [door.address for door in self._app.frontends]

    @property
    def zmq_ports(self) -> tuple[int, int] | None:
        """The ports of the ZeroMQ door, for requests and for answers; None if there is no such door."""
        doors = [door for door in self._app.frontends if isinstance(door, ZeroMqDoor)]
        return (doors[0].port, doors[0].port_out) if doors else None

    def start(self) -> None:
        """Begin to serve, in a thread; does not wait for the models."""
        if self._thread is not None:
            raise SettingsError("this server has been started already")
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="weir-embedding-server", daemon=True)
        self._thread.start()

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Return when all models are loaded. Raises what ended the start, and TimeoutError after `timeout` seconds."""
        if not self._settled.wait(timeout):
            raise TimeoutError(f"the models are not loaded after {timeout:g} s")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Finish what was accepted, and end. Idempotent."""
        if self._thread is None:
            return
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._app.end)
        self._thread.join()

    @staticmethod
    def shutdown(
        url: str = "http://localhost:8000", *, token: str | None = None, port_out: int | None = None, timeout: float = 5.0
    ) -> None:  # fmt: skip
        """Have the server at `url` finish what it has accepted, and end, wherever it runs; `tcp://HOST:PORT` is ZeroMQ. Does not wait for the end.

        It asks for its control token, or to be asked on its own machine; over ZeroMQ no token can be sent: raises Unauthorized or Forbidden then; Unreachable where nobody listens, and
        DeadlineExceeded after `timeout` seconds without an answer.
        """
        from weir.client.embedding import EmbeddingClient, EmbeddingTransport

        transport: EmbeddingTransport | None = None
        if url.lower().startswith("tcp://"):
            transport = _over_zeromq(url, token, port_out)
            port_out = None
        with EmbeddingClient(
            url, token=token, port_out=port_out, timeout=timeout, ignore_all_checks=True, transport=transport
        ) as client:
            client.terminate()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended: by `close`, or because somebody who may had it end."""
        if self._thread is not None:
            self._thread.join(timeout)

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._app.run(self._ready, signals=False))
        except BaseException as error:
            self._error = error
        finally:
            self._settled.set()

    def _ready(self) -> None:
        self.is_ready.set()
        self._settled.set()


def _over_zeromq(url: str, token: str | None, port_out: int | None) -> "EmbeddingTransport":
    from weir.embedding.bert_as_service.client import BertTransport

    if token is not None:
        raise SettingsError(
            f"{url}, token: over ZeroMQ no token can be sent: name the server's HTTP address, such as http://localhost:8000"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or _ZMQ_PORT
    except ValueError as error:
        raise SettingsError(f"{url}: {error}") from None
    if not host:
        raise SettingsError(f"{url}: must be tcp://HOST:PORT")
    return BertTransport(host, port, port_out)


def serve(*directories: str | os.PathLike[str], **settings: Any) -> EmbeddingServer:
    """Return a server of the models in `directories`, not started; see EmbeddingServer."""
    return EmbeddingServer(*directories, **settings)
