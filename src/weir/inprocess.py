"""A server in the program itself, with the methods of the clients: changing one line moves code between the two.

with weir.inprocess.InProcess(Sums) as client:      # or: with weir.client.HttpClient(url) as client:
    sums = client.infer("sums", {"x": array})["sum"]
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self, Unpack

from weir.catalog.loading import ServiceMaker
from weir.catalog.manager import Manager, opened_manager
from weir.catalog.repository.folder import FolderRepository, InlineConfigs
from weir.catalog.residency import make_residency, to_start
from weir.catalog.sources import (
    ON_DEMAND_SETTINGS,
    ModelToServe,
    RepositorySettings,
    TargetRepository,
    all_sources,
    default_name,
    platform_of_target,
    target_of,
)
from weir.client.calls import Calls, Decoder, Program, Retry, Silence, Streaming
from weir.client.methods import AsyncClient, Client, blocking_chunks
from weir.errors import Conflict, DeadlineExceeded, WeirError, for_caller
from weir.messages import Observer
from weir.model import Model
from weir.protocols import HttpSettings
from weir.protocols.data_plane import DataPlane, find
from weir.protocols.exchange import Exchange, StreamPart, once_read
from weir.protocols.kserve import KserveContext
from weir.serving.blocking import Background, Lifecycle
from weir.serving.service import Service
from weir.settings import read_model_table
from weir.wire.data_plane import DATA_PLANE
from weir.wire.inference import InferenceRequest, InferenceResponse

if TYPE_CHECKING:
    from weir.keywords import InProcessKeywords

FRONTEND = "python"  # the same name as for calls of Service.infer

Target = str | type[Model] | type[Service] | Callable[[list[Any]], Any]
# A step of a call: a function whose result is awaited for the response, or iterated for several responses.
Step = Callable[[], Coroutine[Any, Any, Any]]
Steps = Callable[[], AsyncGenerator[StreamPart, None]]


class LocalCalls(Calls):
    """Calls whose steps run in the models' event loop and use the models and their manager directly."""

    def __init__(self, manager: Manager) -> None:
        self._registry = manager.registry
        self._plane = DataPlane(KserveContext(manager.registry, HttpSettings(), manager=manager))

    def call(self, name: str, body: Mapping[str, Any] | None = None, /, **path: str) -> Program[Any]:
        """See Calls."""
        return (yield lambda: self._plane.respond(DATA_PLANE[name], path, body))

    def infer(self, request: InferenceRequest) -> Program[InferenceResponse]:
        """See Calls."""

        async def infer() -> InferenceResponse:
            return await (await self._exchange(request)).infer(request)

        return (yield infer)  # type: ignore[no-any-return]  # a step's response

    def stream(self, request: InferenceRequest) -> Streaming:
        """See Calls."""

        async def parts() -> AsyncGenerator[StreamPart, None]:
            async with aclosing((await self._exchange(request)).stream(request)) as found:
                async for part in found:
                    yield part

        def decoder() -> Decoder:
            return lambda part: [part.response]

        return Streaming(parts, decoder)

    async def _exchange(self, request: InferenceRequest) -> Exchange:
        handle = await once_read(lambda: find(self._registry, request.model, request.version))
        return Exchange(handle, frontend=FRONTEND)


class AsyncLocalTransport:
    """An AsyncTransport that runs steps in the running event loop."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def send(self, step: Step, timeout: float) -> Any:
        """Run a step and return its response. Raises DeadlineExceeded after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await step()
        except WeirError as error:
            raise for_caller(error) from error.__cause__
        except TimeoutError:
            raise DeadlineExceeded(f"no response within {timeout:g} s") from None

    def chunks(self, step: Steps, silence: Silence) -> AsyncGenerator[StreamPart, None]:
        """Run a step and yield its responses; each request has its own timeout."""
        return _for_caller(step())

    async def close(self) -> None:
        """Drain and stop all models."""
        await self._manager.stop()


class LocalTransport:
    """A Transport that runs steps in an event loop in a thread of its own."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._inner = AsyncLocalTransport(manager)
        self._lifecycle = Lifecycle("weir-inprocess", _nothing, _nothing)

    def start(self) -> bool:
        """Start the event loop and all models; return False if another thread does that, or has done it. Raises Conflict in a forked
        process."""
        if self._lifecycle.forked_from is not None:
            raise _forked(self._lifecycle.forked_from)
        return self._lifecycle.start(lambda: self._manager)

    def send(self, step: Step, timeout: float) -> Any:
        """See AsyncLocalTransport.send."""
        return self._running.run(self._inner.send(step, timeout))

    def chunks(self, step: Steps, silence: Silence) -> Generator[StreamPart, None, None]:
        """See AsyncLocalTransport.chunks. Raises DeadlineExceeded when `silence` is over."""
        return blocking_chunks(self._running.run, _for_caller(step()), silence)

    def close(self) -> None:
        """Drain and stop all models, and end the event loop."""
        self._lifecycle.stop()

    @property
    def _running(self) -> Background:
        background, parent = self._lifecycle.running, self._lifecycle.forked_from
        if background is not None:
            return background
        if parent is not None:
            raise _forked(parent)
        raise Conflict("this server is not running: start it, or use it in `with`")


class OverManager:
    """The base class of the clients of models in this program. Each has the class of its `transport`.

    Arguments:
        models: classes of models, services or chains, functions, or texts like "module:Class".
        model_repository: a folder of further models.
        load: the names of the models that run from the start; by default all.
        timeout: seconds for each call that has no timeout of its own.
        retry: which calls are sent again; by default Retry().
        observers: are notified of what happens.
        settings: those of Service, for all models; and `model_control`, `model_memory` and `model_gpu_memory` of a server.

    Raises SettingsError for an unusable model or setting.
    """

    transport: Callable[[Manager], Any]

    def __init__(
        self,
        *models: Target,
        model_repository: str | None = None,
        load: Sequence[str] = (),
        timeout: float = 60.0,
        retry: Retry | None = None,
        observers: Sequence[Observer] = (),
        **settings: "Unpack[InProcessKeywords]",
    ) -> None:
        self._manager = make_manager(models, model_repository, load, observers, settings)
        self._local = type(self).transport(self._manager)
        made: Any = super()
        made.__init__(LocalCalls(self._manager), self._local, timeout=timeout, retry=retry)


class InProcess(OverManager, Client):
    """Serves models in this program, with the methods of Client. Many threads may use it at a time. See OverManager for the arguments.

    Its event loop runs in a thread of its own, from `start` or the beginning of a `with` block to `close` or its end.
    """

    transport = LocalTransport

    def start(self) -> Self:
        """Start all models; return when they are ready. If they already run, nothing happens. Threads that call this at the same
        time wait for one start.

        Raises what Manager.start raises, after which nothing is left running; and Conflict in a process that was forked while the
        models ran.
        """
        self._local.start()
        return self

    def __enter__(self) -> Self:
        # Several `with` blocks cannot share it: the first one to end would stop it for the others.
        if not self._local.start():
            raise Conflict("this server is already running")
        return self


class AsyncInProcess(OverManager, AsyncClient):
    """InProcess for an event loop of the program: the methods are to be awaited."""

    transport = AsyncLocalTransport

    async def start(self) -> Self:
        """Start all models; return when they are ready. Raises what Manager.start raises; nothing is left running then."""
        await self._manager.start()
        return self

    async def __aenter__(self) -> Self:
        return await self.start()


def make_manager(
    models: Sequence[Target],
    model_repository: str | None,
    load: Sequence[str],
    observers: Sequence[Observer],
    settings: Mapping[str, Any],
) -> Manager:
    """Return the manager of these models, none of which is started; see InProcess for the arguments. Raises SettingsError."""
    kinds = {target_of(model): model for model in models if not isinstance(model, str)}
    general = dict(settings)
    params = general.pop("params", {})
    of_repository = {name: general.pop(name) for name in ON_DEMAND_SETTINGS if name in general}
    repository = RepositorySettings(model_repository=model_repository, load=list(load), **of_repository)
    known = [_described(target_of(model), params, general) for model in models]
    reading = (read_model_table, lambda own: {**general, **own})
    folder = None if model_repository is None else FolderRepository(model_repository, *reading)
    sources = all_sources(TargetRepository(known), folder, InlineConfigs(*reading))
    residency = make_residency(repository, known)
    make = ServiceMaker(observers, kinds, on_demand=residency)
    return opened_manager(sources, to_start(repository, residency), make, allow_files=True, residency=residency)


def _described(target: str, params: dict[str, Any], settings: dict[str, Any]) -> ModelToServe:
    return ModelToServe(target, default_name(target), params, [], settings, platform=platform_of_target(target))


async def _for_caller(parts: AsyncGenerator[StreamPart, None]) -> AsyncGenerator[StreamPart, None]:
    async with aclosing(parts):
        try:
            async for part in parts:
                yield part
        except WeirError as error:
            raise for_caller(error) from error.__cause__


def _forked(parent: int) -> Conflict:
    return Conflict(
        f"this server was started in process {parent}, from which this one was forked; make one in this process"
    )


def _nothing(value: Any) -> None:
    """Do nothing: no value is posted to the event loop."""
