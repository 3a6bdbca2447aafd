"""The methods of every client. Those of `Client` block; those of `AsyncClient` are to be awaited.

An asynchronous client may be used in several event loops, one after the other or at once: its connections belong to one loop each.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, suppress
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, overload
from weakref import WeakKeyDictionary, finalize

import msgspec

from weir.client import calls as common
from weir.client.calls import (
    Calls,
    Inputs,
    Metadata,
    ModelCall,
    Program,
    RequestExtras,
    Result,
    Retry,
    Silence,
    Tensors,
    ensemble,
    of_call,
    of_client,
    retried,
    run,
    run_async,
)
from weir.errors import CapacityError
from weir.wire.inference import Parameter

T = TypeVar("T")
P = ParamSpec("P")

INTERVAL = 0.1  # seconds between two checks of what is waited for
AT_ONCE = 32  # requests that are under way at a time


class Transport(Protocol):
    """Does the steps of calls. Many threads may use it at a time."""

    def send(self, step: Any, timeout: float) -> Any:
        """Do a step within `timeout` seconds, and return its result."""

    def chunks(self, step: Any, silence: Silence) -> Generator[Any, None, None]:
        """Do a step with several results, and yield them; closing the generator ends it. Raises DeadlineExceeded when `silence` is
        over."""

    def close(self) -> None:
        """Close all connections."""


class AsyncTransport(Protocol):
    """Does the steps of calls, many at a time. See Transport."""

    async def send(self, step: Any, timeout: float) -> Any:
        """Do a step within `timeout` seconds, and return its result."""

    def chunks(self, step: Any, silence: Silence) -> AsyncGenerator[Any, None]:
        """Do a step with several results, and yield them; closing the generator ends it. The caller waits for each result until
        `silence` is over."""

    async def close(self) -> None:
        """Close all connections."""


class ClientBase(Generic[T]):
    """The base class of clients that block and clients of an event loop: the calls, and the transport that does their steps."""

    def __init__(self, calls: Calls, transport: T, *, timeout: float, retry: Retry | None) -> None:
        self._calls = calls
        self._inference = ModelCall(calls)
        self._transport = transport
        self._timeout = of_client(timeout)
        self._retry = retry or Retry()


class Client(ClientBase[Transport]):
    """The calls to a server.

    Every method raises the WeirError that a caller in the server's process would get; Unreachable if no server listens;
    ConnectionLost if the connection ends before the response; DeadlineExceeded if there is no response within `timeout` seconds;
    and InvalidRequest for a `timeout` that is not a number greater than 0.
    """

    # The server.

    def server_metadata(self) -> Metadata:
        """Return name, version and extensions of the server."""
        return self._retried(self._calls.server_metadata)

    def server_live(self) -> bool:
        """Return whether the server responds."""
        return self._run(common.or_false(self._calls.ask("server_live")))

    def server_ready(self) -> bool:
        """Return whether all models of the server accept requests."""
        return self._run(common.or_false(self._calls.ask("server_ready")))

    def has_extension(self, name: str) -> bool:
        """Return whether the server lists the extension `name`."""
        return self._retried(lambda: common.has_extension(self._calls, name))

    def has_hardware(self, name: str, count: int = 1) -> bool:
        """Return whether the server's machine has at least `count` devices whose kind is `name` ("CPU", "GPU") or whose name
        contains it."""
        return self._retried(lambda: self._calls.ask("has_hardware", {"name": name, "num": count}))

    def wait_until_server_ready(self, timeout: float | None = None, *, interval: float = INTERVAL) -> None:
        """Return when the server listens and all its models accept requests. `interval` is the time between two checks, in
        seconds. Raises DeadlineExceeded."""
        return self._run(common.until_server_ready(self._calls, interval), timeout)

    # Models.

    def models(self) -> list[str]:
        """Return the names of the models that run."""
        return self._retried(self._calls.models)

    def model_ready(self, name: str, version: str = "") -> bool:
        """Return whether a model accepts requests; False if unknown model."""
        return self._run(common.or_false(self._calls.ask("model_ready", model=name, version=version)))

    def model_metadata(self, name: str, version: str = "") -> Metadata:
        """Return name, versions, platform, inputs and outputs of a model."""
        return self._retried(lambda: self._calls.model_metadata(name, version))

    def wait_until_model_ready(
        self, name: str, timeout: float | None = None, *, version: str = "", interval: float = INTERVAL
    ) -> None:
        """Return when a model accepts requests. `interval` is in seconds. Raises DeadlineExceeded."""
        return self._run(common.until_model(self._calls, name, version, True, interval), timeout)

    def wait_until_model_not_ready(
        self, name: str, timeout: float | None = None, *, version: str = "", interval: float = INTERVAL
    ) -> None:
        """Return when a model does not accept requests. `interval` is in seconds. Raises DeadlineExceeded."""
        return self._run(common.until_model(self._calls, name, version, False, interval), timeout)

    # Control.

    def load_model(
        self, name: str, config: Mapping[str, Any] | None = None, *, version: str = "", timeout: float | None = None
    ) -> None:
        """Make the server load a model of its repository again and run it. The former one serves until then. `config` overrides
        the model's own file. With `version`, that version only, besides those that run."""
        body = {"parameters": {} if config is None else {"config": msgspec.json.encode(dict(config)).decode()}}
        return self._retried(lambda: self._calls.do("load_model", body, model=name, version=version), timeout)

    def load_ensemble(
        self,
        name: str,
        models: Sequence[str | Mapping[str, Any]],
        *,
        inputs: Tensors = (),
        outputs: Tensors = (),
        timeout: float | None = None,
    ) -> None:
        """Make the server run a chain of models under the name `name`: each model gets the result of the one before it.

        Arguments:
            name: the name of the chain. A chain that already has it is replaced.
            models: the steps. Each is a model's name, a table `{"model": ..., "inputs": {name in the model: name in the
                chain}, "outputs": {...}}`, or a table of a branch or a switch.
            inputs: for a chain of tensor models, tables of name, datatype and shape of its input tensors.
            outputs: the same for its output tensors.
            timeout: seconds for the call.
        """
        return self.load_model(name, ensemble(models, inputs, outputs), timeout=timeout)

    def unload_model(self, name: str, *, version: str = "", timeout: float | None = None) -> None:
        """Make the server finish a model's accepted requests, and stop the model; with `version`, that version only."""
        return self._retried(lambda: self._calls.do("unload_model", {}, model=name, version=version), timeout)

    def unload_models(self, names: Iterable[str], *, timeout: float | None = None) -> None:
        """Unload models, one after the other. `timeout` holds for each."""
        for name in names:
            self.unload_model(name, timeout=timeout)

    def load_worker(
        self, name: str, parameters: Mapping[str, Parameter] | None = None, *, timeout: float | None = None
    ) -> str:
        """Make the server run a model with these parameters, unless it already does. Return the name of the endpoint, under
        which the model serves."""
        return self._retried(lambda: self._calls.load_worker(name, parameters or {}), timeout)

    def unload_worker(self, endpoint: str, *, timeout: float | None = None) -> None:
        """Make the server stop one worker of an endpoint; the last worker takes the endpoint with it."""
        return self._retried(lambda: self._calls.do("unload_worker", worker=endpoint), timeout)

    # Inference.

    @overload
    def infer(self, model: str, inputs: Inputs, **extras: Unpack[RequestExtras]) -> Result: ...
    @overload
    def infer(self, model: str, inputs: Any, **extras: Unpack[RequestExtras]) -> Any: ...
    def infer(self, model: str, inputs: Any, **extras: Unpack[RequestExtras]) -> Any:
        """Return the result of `model` to `inputs`.

        Arrays by name give a Result. An item for a model of items gives the model's result, as in
        `infer("sentiment", {"text": "good"})`. See RequestExtras for the other arguments.
        """
        return self._retried(lambda: self._inference.infer(model, inputs, extras), extras.get("timeout"))

    def infer_ordered(
        self, model: str, many: Iterable[Any], *, at_once: int = AT_ONCE, **extras: Unpack[RequestExtras]
    ) -> list[Any]:
        """Call `infer` for each of `many`, `at_once` at a time, so that they can share batches; return the results in order.

        Raises the first error in that order; all other requests have ended then.
        """

        def infer(inputs: Any) -> Any:
            return self.infer(model, inputs, **extras)

        with ThreadPoolExecutor(at_once, "weir-client") as threads:
            return [call.result() for call in [threads.submit(infer, inputs) for inputs in many]]

    def infer_ordered_batched(
        self, model: str, many: Iterable[Any], batch_size: int, **extras: Unpack[RequestExtras]
    ) -> list[Any]:
        """Do the same in groups of `batch_size`: a group begins when all requests of the group before it are answered."""
        waiting = list(many)
        groups = [waiting[start : start + batch_size] for start in range(0, len(waiting), batch_size)]
        return [result for group in groups for result in self.infer_ordered(model, group, at_once=batch_size, **extras)]

    def stream(self, model: str, inputs: Any, **extras: Unpack[RequestExtras]) -> Generator[Any, None, None]:
        """Yield the results of `model` as they come: several from a streaming model, one from any other. Closing the generator
        early also ends the request at the model. `timeout` is the longest time between two results, in seconds."""
        prepared = self._retried(lambda: self._inference.prepare(model, inputs, extras), extras.get("timeout"))
        streaming = self._calls.stream(prepared.request)
        timeout = of_call(extras.get("timeout"), self._timeout)
        begun, tried, silence = False, 0, Silence(timeout)
        while True:
            decode = streaming.decoder()
            try:
                with closing(self._transport.chunks(streaming.step, silence)) as chunks:
                    for chunk in chunks:
                        for response in decode(chunk):
                            begun = True
                            silence.pause()
                            yield prepared.result(response)
                            silence.begin()
                return
            except CapacityError as error:
                wait = None if begun else self._retry.wait(error, tried, silence.left)
                if wait is None:
                    raise
            time.sleep(wait)
            tried += 1

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, program: Program[T], timeout: float | None = None) -> T:
        return run(program, self._transport.send, of_call(timeout, self._timeout))

    def _retried(self, attempt: Callable[[], Program[T]], timeout: float | None = None) -> T:
        return self._run(retried(self._retry, attempt), timeout)


def awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    """Return the method of AsyncClient that does what `method` of Client does: there, running a program returns its result; here, it returns
    what is to be awaited for it."""

    @wraps(method)
    async def call(client: "AsyncClient", /, *arguments: P.args, **named: P.kwargs) -> T:
        awaitable: Any = method(client, *arguments, **named)  # type: ignore[arg-type]  # `_run` of both is all that `method` uses
        result: T = await awaitable
        return result

    return call


class AsyncClient(ClientBase[AsyncTransport]):
    """The calls to a server, from an event loop. The methods are those of Client, to be awaited; they raise the same errors."""

    server_metadata = awaited(Client.server_metadata)
    server_live = awaited(Client.server_live)
    server_ready = awaited(Client.server_ready)
    has_extension = awaited(Client.has_extension)
    has_hardware = awaited(Client.has_hardware)
    wait_until_server_ready = awaited(Client.wait_until_server_ready)
    models = awaited(Client.models)
    model_ready = awaited(Client.model_ready)
    model_metadata = awaited(Client.model_metadata)
    wait_until_model_ready = awaited(Client.wait_until_model_ready)
    wait_until_model_not_ready = awaited(Client.wait_until_model_not_ready)
    load_model = awaited(Client.load_model)
    load_ensemble = awaited(Client.load_ensemble)
    unload_model = awaited(Client.unload_model)
    load_worker = awaited(Client.load_worker)
    unload_worker = awaited(Client.unload_worker)

    async def unload_models(self, names: Iterable[str], *, timeout: float | None = None) -> None:
        """Unload models, one after the other. `timeout` holds for each."""
        for name in names:
            await self.unload_model(name, timeout=timeout)

    @overload
    async def infer(self, model: str, inputs: Inputs, **extras: Unpack[RequestExtras]) -> Result: ...
    @overload
    async def infer(self, model: str, inputs: Any, **extras: Unpack[RequestExtras]) -> Any: ...
    async def infer(self, model: str, inputs: Any, **extras: Unpack[RequestExtras]) -> Any:
        """Return the result of `model` to `inputs`.

        Arrays by name give a Result. An item for a model of items gives the model's result, as in
        `infer("sentiment", {"text": "good"})`. See RequestExtras for the other arguments.
        """
        return await self._retried(lambda: self._inference.infer(model, inputs, extras), extras.get("timeout"))

    async def infer_ordered(
        self, model: str, many: Iterable[Any], *, at_once: int = AT_ONCE, **extras: Unpack[RequestExtras]
    ) -> list[Any]:
        """Call `infer` for each of `many`, `at_once` at a time, so that they can share batches; return the results in order.

        Raises the first error; the other requests are cancelled then.
        """
        room = asyncio.Semaphore(at_once)

        async def infer(inputs: Any) -> Any:
            async with room:
                return await self.infer(model, inputs, **extras)

        tasks = [asyncio.ensure_future(infer(inputs)) for inputs in many]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def infer_ordered_batched(
        self, model: str, many: Iterable[Any], batch_size: int, **extras: Unpack[RequestExtras]
    ) -> list[Any]:
        """Do the same in groups of `batch_size`: a group begins when all requests of the group before it are answered."""
        waiting = list(many)
        groups = [waiting[start : start + batch_size] for start in range(0, len(waiting), batch_size)]
        results: list[Any] = []
        for group in groups:
            results += await self.infer_ordered(model, group, at_once=batch_size, **extras)
        return results

    async def stream(self, model: str, inputs: Any, **extras: Unpack[RequestExtras]) -> AsyncGenerator[Any, None]:
        """Yield the results of `model` as they come: several from a streaming model, one from any other. Closing the generator
        early also ends the request at the model. `timeout` is the longest time between two results, in seconds."""
        prepared = await self._retried(lambda: self._inference.prepare(model, inputs, extras), extras.get("timeout"))
        streaming = self._calls.stream(prepared.request)
        timeout = of_call(extras.get("timeout"), self._timeout)
        begun, tried, silence = False, 0, Silence(timeout)
        while True:
            decode = streaming.decoder()
            try:
                async with aclosing(self._transport.chunks(streaming.step, silence)) as chunks:
                    while True:
                        for response in decode(await silence.next_of(chunks)):
                            begun = True
                            yield prepared.result(response)
                            silence.begin()
            except StopAsyncIteration:
                return
            except CapacityError as error:
                wait = None if begun else self._retry.wait(error, tried, silence.left)
                if wait is None:
                    raise
            await asyncio.sleep(wait)
            tried += 1

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, program: Program[T], timeout: float | None = None) -> T:
        return await run_async(program, self._transport.send, of_call(timeout, self._timeout))

    async def _retried(self, attempt: Callable[[], Program[T]], timeout: float | None = None) -> T:
        return await self._run(retried(self._retry, attempt), timeout)


def blocking_chunks(
    run: Callable[[Coroutine[Any, Any, Any]], Any], chunks: AsyncGenerator[T, None], silence: Silence
) -> Generator[T, None, None]:
    """Yield `chunks`, which an event loop in another thread iterates; `run` runs a coroutine there and returns its result. Raises
    DeadlineExceeded when `silence` is over."""
    try:
        with suppress(StopAsyncIteration):
            while True:
                yield run(silence.next_of(chunks))
    finally:
        run(chunks.aclose())


class BlockingTransport:
    """A Transport that runs `transport` in an event loop in a thread of its own, which starts with the first step."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._running: _LoopThread | None = None

    def send(self, step: Any, timeout: float) -> Any:
        """See Transport."""
        return self._started().run(self._transport.send(step, timeout))

    def chunks(self, step: Any, silence: Silence) -> Generator[Any, None, None]:
        """See Transport."""
        return blocking_chunks(self._started().run, self._transport.chunks(step, silence), silence)

    def close(self) -> None:
        """See Transport."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.end(self._transport)
            running.join()

    def _started(self) -> "_LoopThread":
        with self._lock:
            if self._running is None or self._running.process != os.getpid():  # a fork has no threads
                self._running = _LoopThread()
                finalize(self, self._running.end, self._transport).atexit = False  # for who never closes it
            return self._running


class _LoopThread:
    """An event loop that runs in a thread of `process`."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="weir-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which ends if this is interrupted. Raises its error."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def end(self, transport: AsyncTransport) -> None:
        """Close `transport`, and end the thread; do not wait for that. Idempotent."""
        if self.process == os.getpid() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.create_task, self._last(transport))

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self.process == os.getpid():
            self._thread.join()

    async def _last(self, transport: AsyncTransport) -> None:
        try:
            await transport.close()
        finally:
            self._loop.stop()


class PerLoop(Generic[T]):
    """A value for each event loop, made by `make` in that loop when it is first needed.

    `end` closes it in the same loop: at `close`, or when the loop ends as asyncio.run ends it.
    """

    def __init__(self, make: Callable[[], T], end: Callable[[T], Awaitable[None]]) -> None:
        self._make = make
        self._end = end
        # The loop closes asynchronous generators that still run when it ends, so each value lives in one.
        self._of: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[T, None]]] = WeakKeyDictionary()

    async def get(self) -> T:
        """Return the value of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._of:
            living = self._living()
            self._of[loop] = await anext(living), living
        return self._of[loop][0]

    async def close(self) -> None:
        """Close the value of the running event loop, if it has one."""
        _, living = self._of.pop(asyncio.get_running_loop(), (None, None))
        if living is not None:
            await living.aclose()

    async def _living(self) -> AsyncGenerator[T, None]:
        value = self._make()
        try:
            yield value
        finally:
            await self._end(value)
