"""A server in the program itself, with the methods of the clients: code moves between the two by changing one line.

with weir.inprocess.InProcess(Sums) as client:      # or: with weir.client.HttpClient(url) as client:
    sums = client.infer("sums", {"x": array})["sum"]
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Self

from weir.catalog.loading import ServiceMaker, apply
from weir.catalog.manager import Manager
from weir.catalog.registry import Registry
from weir.catalog.repository.folder import FolderRepository, InlineConfigs
from weir.catalog.sources import ModelToServe, Parameters, TargetRepository, all_sources, open_wanted
from weir.client.calls import Decoder, Metadata, Program, Retry, Streaming
from weir.client.methods import AsyncClient, Client
from weir.errors import Conflict, DeadlineExceeded, ModelNotFound, WeirError, for_caller
from weir.messages import Observer
from weir.model import Model, check_model
from weir.protocols.exchange import Exchange
from weir.protocols.kserve.metadata import EXTENSIONS, device_count, find, model_metadata, server_metadata
from weir.serving.blocking import Background, Lifecycle
from weir.serving.inference import StreamPart
from weir.serving.service import Service
from weir.settings import default_name, read_model_table
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameter

DOOR = "python"  # as that of Service.infer is called
NAME = "weir"

Target = str | type[Model] | type[Service] | Callable[[list[Any]], Any]
# A step of a call: what is awaited for its answer, or gone through for its answers.
Step = Callable[[], Coroutine[Any, Any, Any]]
Steps = Callable[[], AsyncGenerator[StreamPart, None]]


class InProcess(Client):
    """Serves `models` (classes of models, services or chains, functions, or texts like "module:Class") in this program. May be used by many threads at a time.

    `model_repository` is a folder of models, of which `load` names those that run from the start (without it all); `settings`
    are those of Service and hold for every model. Its event loop runs in a thread of its own, from `start`, or the beginning of
    `with`, to `close`. Raises SettingsError for an unusable model or setting.
    """

    def __init__(
        self, *models: Target, model_repository: str | None = None, load: Sequence[str] = (), timeout: float = 60.0,
        retry: Retry | None = None, observers: Sequence[Observer] = (), **settings: Any,
    ) -> None:  # fmt: skip
        self._manager = make_manager(models, model_repository, load, observers, settings)
        self._local = LocalTransport(self._manager)
        super().__init__(LocalCalls(self._manager), self._local, timeout=timeout, retry=retry)

    def start(self) -> Self:
        """Start all models; return when they are ready. Nothing happens if they are, and threads that call it at the same time
        wait for one start.

        Raises what Manager.start does, nothing is left running then; and Conflict in a process that was forked while it ran.
        """
        self._local.start()
        return self

    def __enter__(self) -> Self:
        if not self._local.start():  # whoever leaves first would stop it for the others
            raise Conflict("this server is already running")
        return self


class AsyncInProcess(AsyncClient):
    """The same in the event loop of the program; see InProcess."""

    def __init__(
        self, *models: Target, model_repository: str | None = None, load: Sequence[str] = (), timeout: float = 60.0,
        retry: Retry | None = None, observers: Sequence[Observer] = (), **settings: Any,
    ) -> None:  # fmt: skip
        self._manager = make_manager(models, model_repository, load, observers, settings)
        super().__init__(LocalCalls(self._manager), AsyncLocalTransport(self._manager), timeout=timeout, retry=retry)

    async def start(self) -> Self:
        """Start all models; return when they are ready. Raises what Manager.start does; nothing is left running then."""
        await self._manager.start()
        return self

    async def __aenter__(self) -> Self:
        return await self.start()


class LocalCalls:
    """The calls as steps that ask the models and their manager."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._registry = manager.registry

    def server_metadata(self) -> Program[Metadata]:
        """See Calls."""
        return (yield _value(lambda: server_metadata(NAME, EXTENSIONS)))  # type: ignore[no-any-return]  # a step's answer

    def server_live(self) -> Program[bool]:
        """See Calls."""
        return bool((yield _value(lambda: True)))

    def server_ready(self) -> Program[bool]:
        """See Calls."""
        return bool((yield _value(lambda: self._registry.ready)))

    def model_ready(self, name: str, version: str) -> Program[bool]:
        """See Calls."""
        try:
            return bool((yield _value(lambda: self._registry.get(name, version).ready)))
        except ModelNotFound:
            return False

    def model_metadata(self, name: str, version: str) -> Program[Metadata]:
        """See Calls."""

        return dict((yield _value(lambda: model_metadata(self._registry, name, version))))

    def models(self) -> Program[list[str]]:
        """See Calls."""
        return list((yield _value(lambda: self._registry.services)))

    def has_hardware(self, name: str, count: int) -> Program[bool]:
        """See Calls."""
        return bool((yield _value(lambda: device_count(self._manager.hardware(), name) >= max(1, count))))

    def load_model(self, name: str, config: Mapping[str, Any] | None) -> Program[None]:
        """See Calls."""
        yield lambda: self._manager.load_model(name, config=config)

    def unload_model(self, name: str) -> Program[None]:
        """See Calls."""
        yield lambda: self._manager.unload_model(name)

    def load_worker(self, name: str, parameters: Mapping[str, Parameter]) -> Program[str]:
        """See Calls."""
        return str((yield lambda: self._manager.load_worker(name, parameters)))

    def unload_worker(self, endpoint: str) -> Program[None]:
        """See Calls."""
        yield lambda: self._manager.unload_worker(endpoint)

    def infer(self, request: InferenceRequest) -> Program[InferenceResponse]:
        """See Calls."""

        async def ask() -> InferenceResponse:
            return await Exchange(find(self._registry, request.model, request.version), door=DOOR).infer(request)

        return (yield ask)  # type: ignore[no-any-return]  # a step's answer

    def stream(self, request: InferenceRequest) -> Streaming:
        """See Calls."""

        def ask() -> AsyncGenerator[StreamPart, None]:
            return Exchange(find(self._registry, request.model, request.version), door=DOOR).stream(request)

        def decoder() -> Decoder:
            return lambda part: [part.response]

        return Streaming(ask, decoder)


class AsyncLocalTransport:
    """Does steps in the running event loop."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def send(self, step: Step, timeout: float) -> Any:
        """Return the answer to one step."""
        try:
            async with asyncio.timeout(timeout):
                return await step()
        except WeirError as error:
            raise for_caller(error) from error.__cause__
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {timeout:g} s") from None

    def chunks(self, step: Steps, timeout: float) -> AsyncGenerator[StreamPart, None]:
        """Yield the answers to one."""
        return _for_caller(step())

    async def close(self) -> None:
        """Drain and stop all models."""
        await self._manager.stop()


class LocalTransport:
    """Does steps in an event loop of its own, for any thread."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._inner = AsyncLocalTransport(manager)
        self._lifecycle = Lifecycle("weir-inprocess", _nothing, _nothing)

    def start(self) -> bool:
        """Start the loop and all models; return False if another thread did, or had done, that."""
        if self._lifecycle.forked_from is not None:
            raise _forked(self._lifecycle.forked_from)
        return self._lifecycle.start(lambda: self._manager)

    def send(self, step: Step, timeout: float) -> Any:
        """Return the answer to one step."""
        return self._running.run(self._inner.send(step, timeout))

    def chunks(self, step: Steps, timeout: float) -> Generator[StreamPart, None, None]:
        """Yield the answers to one."""
        background, parts = self._running, _for_caller(step())
        try:
            with suppress(StopAsyncIteration):
                while True:
                    yield background.run(_next(parts))
        finally:
            background.run(parts.aclose())

    def close(self) -> None:
        """Drain and stop all models, and end the loop."""
        self._lifecycle.stop()

    @property
    def _running(self) -> Background:
        background, parent = self._lifecycle.running, self._lifecycle.forked_from
        if background is not None:
            return background
        raise (
            Conflict("this server is not running: start it, or use it in `with`") if parent is None else _forked(parent)
        )


class Given:
    """Makes services of the classes that the program has given, by target; of all others as a server does."""

    def __init__(self, kinds: Mapping[str, Any], observers: Sequence[Observer]) -> None:
        self._kinds = kinds
        self._observers = observers
        self._make = ServiceMaker(observers)

    def __call__(self, model: ModelToServe, parameters: Parameters | None = None, *, fresh: bool = False) -> Service:
        """Return a service, not started."""
        kind = self._kinds.get(model.target)
        if kind is None:
            return self._make(model, parameters, fresh=fresh)
        if isinstance(kind, type) and issubclass(kind, Service):
            return kind(name=model.name, params=model.params, observers=self._observers, **model.settings)
        if parameters:
            model = apply(parameters, model, check_model(kind))
        return Service(kind, name=model.name, params=model.params, observers=self._observers, **model.settings)


def make_manager(
    models: Sequence[Target], model_repository: str | None, load: Sequence[str], observers: Sequence[Observer],
    settings: Mapping[str, Any],
) -> Manager:  # fmt: skip
    """Return the manager of these models, none of which has been started."""
    kinds = {_target(model): model for model in models if not isinstance(model, str)}
    said = dict(settings)
    params = said.pop("params", {})
    known = [ModelToServe(_target(model), default_name(_target(model)), params, [], said) for model in models]
    reading = (read_model_table, lambda own: {**said, **own})
    folder = None if model_repository is None else FolderRepository(model_repository, *reading)
    sources = all_sources(TargetRepository(known), folder, InlineConfigs(*reading))
    make = Given(kinds, observers)
    opened = open_wanted(sources, load, make)
    return Manager(Registry(opened.services, None, opened.defaults), sources, make, allow_files=True)


def _target(model: Target) -> str:
    if isinstance(model, str):
        return model
    name = getattr(model, "__qualname__", type(model).__qualname__)
    return f"{getattr(model, '__module__', None)}:{name}"


def _value(look: Callable[[], Any]) -> Step:
    """Return the step that takes a look, in the event loop."""

    async def answer() -> Any:
        return look()

    return answer


async def _for_caller(parts: AsyncGenerator[StreamPart, None]) -> AsyncGenerator[StreamPart, None]:
    async with aclosing(parts):
        try:
            async for part in parts:
                yield part
        except WeirError as error:
            raise for_caller(error) from error.__cause__


async def _next(parts: AsyncGenerator[StreamPart, None]) -> StreamPart:
    return await anext(parts)


def _forked(parent: int) -> Conflict:
    return Conflict(
        f"this server was started in process {parent}, from which this one was forked; make one in this process"
    )


def _nothing(value: Any) -> None:
    """Nothing is posted to the loop."""
