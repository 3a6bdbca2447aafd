"""A server of text models: the product that adds texts to a server, and a server in a thread of a program.

with weir.embedding.serve("./bge-small-en", port=0) as server:
    print(server.url)
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

from prometheus_client.registry import Collector

from weir.app import App, ServerThread
from weir.catalog.sources import ModelToServe
from weir.errors import SettingsError
from weir.frontends.frontend import Frontend, FrontendContext, ProductInFronts
from weir.frontends.http.application import AddedEndpoints
from weir.frontends.http.fast.plan import RouteHandler
from weir.images import ImageLimits
from weir.messages import Observer
from weir.protocols.access import is_loopback
from weir.protocols.account import Account
from weir.serving.delivery import methods_of
from weir.settings import Settings
from weir.text_server.bert_as_service.http import Encode, Status, stock_fields
from weir.text_server.bert_as_service.zeromq import ZeroMqFrontend
from weir.text_server.calibration import Budget, Progress, no_progress
from weir.text_server.encoder import Encoder
from weir.text_server.exchange import EmbeddingContext
from weir.text_server.http import FastTexts, TextApi
from weir.text_server.metrics import PaddingMetrics, RunShapes, TextClients, TextCounts
from weir.text_server.protocols import text_apis
from weir.text_server.protocols.kserve import TextInference
from weir.text_server.server_settings import BERT_PORT, CallerSettings, ZeroMqSettings, given_settings
from weir.text_server.text_model import IMAGES, ServedTextModel, read_model, with_shares

if TYPE_CHECKING:
    from weir.client.embedding import EmbeddingTransport
    from weir.frontends.grpc.services import AddedCalls
    from weir.serving.handle import ModelHandle, Models


def with_short_names(models: Sequence[ModelToServe]) -> list[ModelToServe]:
    """Return the models, each of which also answers to the last part of a name with slashes, as one of the hub does, unless that may mean another model."""
    names = [{model.name, *model.aliases} for model in models]
    short = [{name.rpartition("/")[2] for name in own} for own in names]
    known = Counter(name for own, parts in zip(names, short, strict=True) for name in own | parts)
    return [
        model._replace(aliases=(*model.aliases, *sorted(part for part in parts - own if known[part] == 1)))
        for model, own, parts in zip(models, names, short, strict=True)
    ]


# What a row for a client shows, by its name in TextClients.table.
_CLIENT_ROW = {"client": "identity", "frontend": "frontend", "requests": "num_request", "texts": "num_total_seq"}


def added_by(apis: Sequence[TextApi]) -> AddedEndpoints:
    """Return what `apis` add to HTTP."""
    return AddedEndpoints([each for api in apis for each in api.endpoints()])


class EmbeddingProduct:
    """The Product that adds text models to a server: their encoders, endpoints, metrics and the ZeroMQ frontend; see weir.app.

    `models` have the directories of text models, or their ids on the Hugging Face Hub, as targets, and the settings of text models among their settings.
    """

    def __init__(
        self, models: Sequence[ModelToServe], callers: CallerSettings, zeromq: ZeroMqSettings, images: ImageLimits
    ) -> None:
        """Download what is named by its id, and read the models' files. Raises SettingsError naming the file of a model that cannot be used."""
        specs = [read_model(model)._replace(images=images) for model in with_short_names(models)]
        self._specs = with_shares(specs)
        self._models = [ServedTextModel(spec) for spec in self._specs]
        self._callers = callers
        self._images = images
        self._zeromq = zeromq
        self._clients = TextClients()
        self._counts = TextCounts(self._clients, self._transferred)
        self._padding = PaddingMetrics()
        self._budgets: dict[str, Budget] = {}
        self._encoders: dict[str, Encoder] = {}
        self._inferences: dict[str, TextInference] = {}
        self._zeromq_frontend: ZeroMqFrontend | None = None
        self._labels: dict[str, str] = {}
        self._byte_meters: Sequence[Callable[[str, str, int, int], None]] = []  # of the observers that count bytes
        self._apis: Sequence[TextApi] = ()
        self._context: FrontendContext
        self._shared: EmbeddingContext
        self._status: Status

    async def calibrate(self, progress: Callable[[str], Progress]) -> None:
        """Measure how large the batches of each model should be. It is optional; call it before `models`.

        `progress` takes the name of a model, and returns the callable to which the progress of its measurement is reported. Raises the error with
        which a worker fails to start.
        """
        for model in self._models:
            for label in model.labels:
                budget = await model.budget(label, progress(label))
                if budget is not None:
                    self._budgets[label] = budget

    @property
    def models(self) -> list[ModelToServe]:
        """The models for the server's registry, in the measured batches."""
        return [each for model in self._models for each in model.served(self._budgets)]

    def observers(self) -> Sequence[Observer]:
        """Return the observer that counts padding."""
        for model in self._models:
            served, *towers = model.served(self._budgets)
            self._padding.models[model.name] = model.run_shapes(served.params["share"])
            self._padding.models.update({tower.label: RunShapes(model=model.name) for tower in towers})
        return [self._padding]

    def added(self, context: FrontendContext) -> AddedEndpoints:
        """Return the HTTP endpoints of all protocols of texts. The services of the models must be in the registry."""
        self._context = context
        self._encoders = {
            model.name: model.encoder(
                context.registry.get(model.name), self._budgets, images=self._tower_of(context.registry, model.name)
            )
            for model in self._models
        }
        self._status = Status(self._encoders, self._clients, self._stock_fields)
        most, http, aliases = self._callers.max_texts, context.settings.http, context.registry.aliases
        self._shared = shared = EmbeddingContext(
            self._encoders, http, most, self._counts, self._clients, aliases, images=self._images
        )
        self._inferences = {model.name: model.inference(shared, self._encoders[model.name]) for model in self._models}
        self._byte_meters = methods_of(context.observers, "transferred")
        self._attach()
        context.registry.changed.append(self._attach)
        encode = Encode(shared, self._status, control=context.control, end=context.end)
        self._apis = [*text_apis(shared), encode]
        return added_by(self._apis)

    def fast_routes(self, context: FrontendContext) -> Sequence[RouteHandler]:
        """Return the handlers for the fast path. They answer requests with small responses, so none for vectors of tokens."""
        models = {model.name for model in self._models if model.has_small_responses}
        return [FastTexts(api.texts, models) for api in self._apis]

    def in_fronts(self) -> ProductInFronts:
        """Return the parts of it in a server with several fronts."""
        from weir.text_server.fronts import TextsInFronts  # most servers have one front: themselves

        specs = [spec._replace(pool=None) for spec in self._specs]
        return ProductInFronts(TextsInFronts(specs, self._budgets, self._callers.max_texts, self._images), self)

    def turns(self, handle: "ModelHandle") -> Encoder | None:
        """See DispatcherProduct."""
        return self._encoders.get(handle.facts.name)

    def reported(self, data: bytes) -> None:
        """See DispatcherProduct."""
        from weir.text_server.fronts import add_counted

        add_counted(data, self._counts, self._clients)

    def grpc_calls(self, context: FrontendContext, most: int) -> "AddedCalls":
        """Return TEI's services."""
        from weir.frontends.grpc.services import AddedCalls
        from weir.text_server.protocols.tei_grpc import SERVICES, handlers  # grpcio is optional

        return AddedCalls(SERVICES, handlers(self._shared, most, development=context.settings.http.development))

    def frontends(self, context: FrontendContext) -> Sequence[Frontend]:
        """Return the ZeroMQ frontend, if its port is set.

        Raises SettingsError if an API key is required and the host is not a loopback address, as ZeroMQ cannot send keys.
        """
        if self._zeromq.zmq_port is None:
            return []
        host = context.settings.http.host
        if context.access.required and not is_loopback(host):
            raise SettingsError(
                f"api_key, zmq_port={self._zeromq.zmq_port}, host={host!r}: ZeroMQ cannot send a key: with api_key, host must be a "
                "loopback address, or zmq_port must not be set"
            )
        account = Account(context.settings.http) if context.kserve is None else context.kserve.account
        control, status, end = context.control, self._status, context.end
        self._zeromq_frontend = ZeroMqFrontend(
            self._shared, self._zeromq, control=control, status=status, terminate=end, account=account
        )
        return [self._zeromq_frontend]

    def to_try(self, curl: str, url: str) -> Sequence[str]:
        """Return command lines that call each HTTP endpoint, and the URL of the dashboard. `curl` is the command with its options."""
        texts = '{"id": 1, "texts": ["First do it", "then do it right"]}'
        return [
            f"  {curl} -d '{texts}' {url}/encode",
            f"  {curl} -H 'Content-Type: application/json' -d '{{\"input\": \"First do it\"}}' {url}/v1/embeddings",
            f"  {url}/dashboard",
        ]

    def collectors(self) -> Sequence[Collector]:
        """Return the collectors of metrics: calls, texts and padding."""
        return [self._counts, self._padding]

    def clients(self) -> Sequence[Mapping[str, Any]]:
        """Return a row for each active client, the one that sent the latest request first."""
        rows = [row for row in self._clients.table() if row["active"]]
        shown = [{name: row[key] for name, key in _CLIENT_ROW.items()} for row in rows]
        return [{**each, "seconds ago": round(row["last"], 1)} for each, row in zip(shown, rows, strict=True)]

    async def start(self) -> None:
        """Remove graphs from a cache that is too large. The models of this server are loaded and keep theirs."""
        for model in self._models:
            await asyncio.to_thread(model.prune)

    async def drain(self) -> bool:
        """Finish the requests for vectors. Return False if some have not ended after the drain_timeout of their service."""
        return all(await asyncio.gather(*[encoder.drain() for encoder in self._encoders.values()]))

    async def stop(self) -> None:
        """End the threads that tokenize."""
        for encoder in self._encoders.values():
            encoder.close()

    def _attach(self) -> None:
        """Attach encoders and inference to the current services, as a model may have been loaded again."""
        for name, encoder in self._encoders.items():
            service = self._context.registry.services.get(name)
            if service is not None:
                self._labels[name] = service.facts.label
                images = self._tower_of(self._context.registry, name)
                for each in (service, images or service):
                    each.inference = self._inferences[name]
                encoder.serve(service, images)

    @staticmethod
    def _tower_of(models: "Models", name: str) -> "ModelHandle | None":
        """Return the tower for images of a model; None if it has none."""
        return models.versions(name).get(IMAGES)

    def _transferred(self, model: str, frontend: str, received_bytes: int, sent_bytes: int) -> None:
        label = self._labels[model]
        for transferred in self._byte_meters:
            transferred(label, frontend, received_bytes, sent_bytes)

    def _stock_fields(self) -> Mapping[str, Any]:
        spec, model = self._specs[0], self._models[0]
        service = self._context.registry.get(model.name)
        settings, zeromq = self._context.settings.http, self._zeromq_frontend
        ports = None if zeromq is None else (zeromq.port, zeromq.port_out)
        return stock_fields(service, spec, model, settings, ports, show_tokens=self._zeromq.zmq_show_tokens)


class TextServer(NamedTuple):
    """The settings of a server, which include its models, and the product that it serves."""

    settings: Settings
    product: EmbeddingProduct


async def compose(settings: Settings, progress: Callable[[str], Progress]) -> TextServer:
    """Return the server with `settings` of the kind TEXTS, after measuring the models where that is necessary.

    For `progress` see `EmbeddingProduct.calibrate`. Raises SettingsError naming the file of a model that cannot be used, and the error with which a
    worker fails to start.
    """
    product = EmbeddingProduct(settings.models, *map(settings.more.__getitem__, ("Callers", "ZeroMQ", "Images")))
    await product.calibrate(progress)
    return TextServer(settings._replace(models=product.models), product)


class EmbeddingServer(ServerThread):
    """A server of text models in a thread of this process.

    Each of `directories` is DIRECTORY or NAME=DIRECTORY, where an id on the Hugging Face Hub may stand for the directory; without any, the small model that can be installed is served. The settings are those of
    `weir embed serve`, as keyword arguments. Environment variables and files are not read.

    As a context manager, the server is ready when the block begins, and has finished all accepted requests when the block ends. Otherwise call `start`,
    wait for `is_ready`, and call `close`.
    """

    def __init__(self, *directories: str | os.PathLike[str], **settings: Any) -> None:
        """Read the models, and measure them where that is necessary.

        Raises SettingsError naming the setting or the file and the rule, and the error with which a worker fails to start.
        """
        checked = given_settings([os.fspath(directory) for directory in directories], settings)
        with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this thread
            server = thread.submit(asyncio.run, compose(checked, lambda name: no_progress)).result()
        super().__init__(App(server.settings, product=server.product), "weir-embedding-server")

    @property
    def url(self) -> str:
        """The URL of the HTTP frontend."""
        return self._app.server.address

    @property
    def zmq_ports(self) -> tuple[int, int] | None:
        """The ports of the ZeroMQ frontend for requests and for responses; None without such a frontend."""
        zeromq_frontends = [each for each in self._app.frontends if isinstance(each, ZeroMqFrontend)]
        return (zeromq_frontends[0].port, zeromq_frontends[0].port_out) if zeromq_frontends else None

    def start(self) -> None:
        """Begin to serve, without waiting for the models. Raises SettingsError if it was called before."""
        if not self.begin():
            raise SettingsError("this server has been started already")

    def close(self) -> None:
        """Finish all accepted requests, and end the server. Idempotent."""
        self.end()

    @staticmethod
    def shutdown(
        url: str = "http://localhost:8000",
        *,
        token: str | None = None,
        port_out: int | None = None,
        timeout: float = 5.0,
    ) -> None:
        """Make a server finish its accepted requests and end, without waiting for the end. It need not be a server of this process.

        Args:
            url: the address of the server: http://HOST:PORT, or tcp://HOST:PORT for ZeroMQ.
            token: the server's control token. A server without one can be ended from its own machine only. ZeroMQ cannot send a token.
            port_out: the port for responses, with ZeroMQ; by default the next one.
            timeout: seconds to wait for the response.

        Raises Unauthorized or Forbidden if the server refuses, Unreachable if no server listens there, and DeadlineExceeded without a response in time.
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
        """Wait until the server has ended, by `close` or by a request, for at most `timeout` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def __enter__(self) -> Self:
        self.start()
        return self.loaded()


def _over_zeromq(url: str, token: str | None, port_out: int | None) -> "EmbeddingTransport":
    from weir.text_server.bert_as_service.client import BertTransport

    if token is not None:
        rule = "over ZeroMQ no token can be sent: name the server's HTTP address, such as http://localhost:8000"
        raise SettingsError(f"{url}, token: {rule}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or BERT_PORT
    except ValueError as error:
        raise SettingsError(f"{url}: {error}") from None
    if not host:
        raise SettingsError(f"{url}: must be tcp://HOST:PORT")
    return BertTransport(host, port, port_out)


def serve(*directories: str | os.PathLike[str], **settings: Any) -> EmbeddingServer:
    """Return a server of the models in `directories`, not started yet; see EmbeddingServer."""
    return EmbeddingServer(*directories, **settings)
