"""A server of text models: the product that adds texts to a server, and a server in a thread of a program.

with weir.embedding.serve("./bge-small-en", port=0) as server:
    print(server.url)
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

import uvloop
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute

from weir.app import App
from weir.catalog.sources import ModelToServe
from weir.embedding.bert_as_service.http import ENCODE, Encode, bert_paths
from weir.embedding.bert_as_service.settings import ZeroMqSettings
from weir.embedding.bert_as_service.status import Status, stock_fields
from weir.embedding.bert_as_service.zeromq import ZeroMqFrontend
from weir.embedding.calibration import Budget, Progress, nothing
from weir.embedding.encoder import Encoder
from weir.embedding.exchange import EmbeddingContext
from weir.embedding.http import FastTexts, HttpTexts
from weir.embedding.inference import TextInference
from weir.embedding.metrics import PaddingMetrics, TextClients, TextCounts
from weir.embedding.openai import OPENAI, OpenAI, openai_paths
from weir.embedding.recipe import Pooling
from weir.embedding.server_settings import given_settings
from weir.embedding.settings import CallerSettings
from weir.embedding.text_model import ServedTextModel, read_model
from weir.errors import SettingsError
from weir.frontends.frontend import Frontend, FrontendContext
from weir.frontends.http.auth_middleware import Refuse
from weir.frontends.http.fast.plan import RouteHandler
from weir.messages import Observer
from weir.protocols.access import is_loopback
from weir.settings import Settings

if TYPE_CHECKING:
    from weir.client.embedding import EmbeddingTransport


_ZMQ_PORT = 5555  # of bert-as-service


class EmbeddingProduct:
    """Serves the vectors of texts: `models` have directories as their targets, and settings of texts among theirs.

    Raises SettingsError naming the file of a model that cannot be used.
    """

    def __init__(self, models: Sequence[ModelToServe], callers: CallerSettings, zeromq: ZeroMqSettings) -> None:
        self._specs = [read_model(model) for model in models]
        self._models = [ServedTextModel(spec) for spec in self._specs]
        self._callers = callers
        self._zeromq = zeromq
        self._clients = TextClients()
        self._counts = TextCounts(self._clients, self._transferred)
        self._padding = PaddingMetrics()
        self._budgets: dict[str, Budget] = {}
        self._encoders: dict[str, Encoder] = {}
        self._inferences: dict[str, TextInference] = {}
        self._zeromq_frontend: ZeroMqFrontend | None = None
        self._texts: list[HttpTexts] = []
        self._context: FrontendContext
        self._shared: EmbeddingContext
        self._status: Status

    async def calibrate(self, progress: Callable[[str], Progress]) -> None:
        """Measure how large the batches of each model should be. Call it, if at all, before `models`.

        `progress` takes the name of a model, and returns what is told how far its measurement is. Raises what the start of a worker raises.
        """
        for model in self._models:
            budget = await model.budget(progress(model.name))
            if budget is not None:
                self._budgets[model.name] = budget

    @property
    def models(self) -> list[ModelToServe]:
        """What the server is to run."""
        return [spec.served(self._budgets.get(spec.name)) for spec in self._specs]

    def observers(self) -> Sequence[Observer]:
        """Return what counts padding."""
        for model, served in zip(self._models, self.models, strict=True):
            params = served.params
            self._padding.models[model.name] = model.computing(params["run_tokens"], params["padding_cost"])
        return [self._padding]

    def routes(self, context: FrontendContext) -> Sequence[BaseRoute]:
        """Return the routes of the HTTP endpoints."""
        self._context = context
        self._encoders = {
            model.name: model.encoder(context.registry.get(model.name), self._budgets.get(model.name))
            for model in self._models
        }
        self._status = Status(self._encoders, self._clients, self._stock_fields)
        self._shared = shared = EmbeddingContext(
            self._encoders, context.settings.http, self._callers.max_texts, self._counts, self._clients
        )
        self._inferences = {model.name: model.inference(shared, self._encoders[model.name]) for model in self._models}
        self._renew()
        context.registry.changed.append(self._renew)
        self._texts = [HttpTexts(protocol, shared) for protocol in (OPENAI, ENCODE)]
        encode = Encode(shared, self._status, control=context.control, end=context.end)
        return [*OpenAI(shared).routes(), *encode.routes()]

    def fast_routes(self, context: FrontendContext) -> Sequence[RouteHandler]:
        """Return how the fast path answers small requests of models that have one vector for each text."""
        models = {model.name for model in self._models if model.recipe.pooling is not Pooling.NONE}
        return [FastTexts(texts, models) for texts in self._texts]

    def paths(self) -> Mapping[str, Any]:
        """Describe them."""
        return {**openai_paths(), **bert_paths()}

    def refusals(self) -> Mapping[str, Refuse]:
        """Return how each of them says what is wrong."""
        as_openai, as_bert = (texts.refusal for texts in self._texts)
        return {"/v1": as_openai, **dict.fromkeys(("/encode", "/status", "/terminate"), as_bert)}

    def frontends(self, context: FrontendContext) -> Sequence[Frontend]:
        """Return the ZeroMQ frontend, if there is to be one. It has no keys: with one it is for this machine alone."""
        if self._zeromq.zmq_port is None:
            return []
        host = context.settings.http.host
        if context.access.required and not is_loopback(host):
            raise SettingsError(
                f"api_key, zmq_port={self._zeromq.zmq_port}, host={host!r}: over ZeroMQ nobody can be asked for a key; with one, host must be a "
                "loopback address, or there must be no ZeroMQ"
            )
        self._zeromq_frontend = ZeroMqFrontend(
            self._shared, self._zeromq, control=context.control, status=self._status, terminate=context.end,
            account=None if context.kserve is None else context.kserve.account,
        )  # fmt: skip
        return [self._zeromq_frontend]

    def to_try(self, curl: str, url: str) -> Sequence[str]:
        """Return an example call of each HTTP endpoint."""
        texts = '{"id": 1, "texts": ["First do it", "then do it right"]}'
        return [
            f"  {curl} -d '{texts}' {url}/encode",
            f"  {curl} -H 'Content-Type: application/json' -d '{{\"input\": \"First do it\"}}' {url}/v1/embeddings",
            f"  {url}/dashboard",
        ]

    def collectors(self) -> Sequence[Collector]:
        """Return what counts calls, texts and padding."""
        return [self._counts, self._padding]

    def clients(self) -> Sequence[Mapping[str, Any]]:
        """Return those that are active, the one heard of last first."""
        return [
            {
                "client": row["identity"], "door": row["door"], "requests": row["num_request"], "texts": row["num_total_seq"],
                "seconds ago": round(row["last"], 1),
            }
            for row in self._clients.table() if row["active"]
        ]  # fmt: skip

    async def prepare(self) -> None:
        """Nothing is to be made beforehand: the first worker makes the graphs, in a process of its own."""

    async def start(self) -> None:
        """Remove graphs that no model uses any more: the models of this server hold theirs now."""
        for model in self._models:
            await asyncio.to_thread(model.prune)

    async def drain(self) -> bool:
        """Finish the requests for vectors."""
        return all(await asyncio.gather(*[encoder.drain() for encoder in self._encoders.values()]))

    async def stop(self) -> None:
        """End the threads that read texts."""
        for encoder in self._encoders.values():
            encoder.close()

    def _renew(self) -> None:
        """Attach encoders and inference to the services that run now: a model may have been loaded again."""
        for name, encoder in self._encoders.items():
            service = self._context.registry.services.get(name)
            if service is not None:
                service.inference = self._inferences[name]
                encoder.serve(service)

    def _transferred(self, model: str, door: str, received_bytes: int, sent_bytes: int) -> None:
        label = self._context.registry.get(model).label
        for observer in self._context.observers:
            observer.transferred(label, door, received_bytes, sent_bytes)

    def _stock_fields(self) -> Mapping[str, Any]:
        spec, model = self._specs[0], self._models[0]
        service = self._context.registry.get(model.name)
        settings, zeromq = self._context.settings.http, self._zeromq_frontend
        ports = None if zeromq is None else (zeromq.port, zeromq.port_out)
        return stock_fields(service, spec, model, settings, ports, show_tokens=self._zeromq.zmq_show_tokens)


class TextServer(NamedTuple):
    """The settings of a server, its models among them, and the product that it serves."""

    settings: Settings
    product: EmbeddingProduct


async def compose(settings: Settings, progress: Callable[[str], Progress]) -> TextServer:
    """Return the server that `settings` of the kind TEXTS make, after its models have been measured where they have to be.

    `progress` takes the name of a model, and returns what is told how far its measurement is. Raises SettingsError naming the file of a model that
    cannot be used, and what the start of a worker raises.
    """
    from weir.embedding.server import EmbeddingProduct  # loads a server, which the command line does not need

    product = EmbeddingProduct(settings.models, settings.more["Callers"], settings.more["ZeroMQ"])
    await product.calibrate(progress)
    return TextServer(settings._replace(models=product.models), product)


class EmbeddingServer:
    """Serves the models of `directories` (DIRECTORY or NAME=DIRECTORY; none: the small one that can be installed) with the settings of
    `weir embed serve` as keyword arguments. Neither variables nor a file are read.

    A context manager: serves when its block begins, and has finished what it accepted when the block ends. Or call `start`, wait for
    `is_ready`, and `close`. Raises SettingsError before anything is started. Where a model has to be measured first, that is done when this is
    made, and raises what the start of a worker raises.
    """

    def __init__(self, *directories: str | os.PathLike[str], **settings: Any) -> None:
        chosen = given_settings([os.fspath(directory) for directory in directories], settings)
        with ThreadPoolExecutor(1) as aside:  # here a loop may be running
            server = aside.submit(asyncio.run, compose(chosen, lambda name: nothing)).result()
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
        """Where each frontend is, HTTP first."""
        return [frontend.address for frontend in self._app.frontends]

    @property
    def zmq_ports(self) -> tuple[int, int] | None:
        """The ports of the ZeroMQ frontend, for requests and for answers; None if there is none."""
        opened = [each for each in self._app.frontends if isinstance(each, ZeroMqFrontend)]
        return (opened[0].port, opened[0].port_out) if opened else None

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


# The service of sentence vectors as a product: its models, its endpoints, and what they share.
