"""The methods of every client: `Client` blocks, `AsyncClient` is the same to be awaited."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack, overload

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

INTERVAL = 0.1  # seconds between two looks at what is waited for
AT_ONCE = 32


class Transport(Protocol):
    """Does the steps of calls. May be used by many threads at a time."""

    def send(self, step: Any, timeout: float) -> Any:
        """Do one step."""

    def chunks(self, step: Any, timeout: float) -> Generator[Any, None, None]:
        """Do a step with several answers; closing the generator ends it."""

    def close(self) -> None:
        """End it."""


class Client:
    """The calls to a server. Every method raises the WeirError that a caller in process would get, Unreachable where
    no server listens, DeadlineExceeded when there is no answer within `timeout` seconds, and InvalidRequest for a `timeout` that is no
    number of seconds greater than 0."""

    def __init__(self, calls: Calls, transport: Transport, *, timeout: float, retry: Retry | None) -> None:
        self._calls = calls
        self._inference = ModelCall(calls)
        self._transport = transport
        self._timeout = of_client(timeout)
        self._retry = retry or Retry()

    # The server.

    def server_metadata(self) -> Metadata:
        """Return name, version and extensions of the server."""
        return self._retried(self._calls.server_metadata)

    def server_live(self) -> bool:
        """Tell whether the server answers."""
        return self._run(common.or_false(self._calls.server_live()))

    def server_ready(self) -> bool:
        """Tell whether all its models take requests."""
        return self._run(common.or_false(self._calls.server_ready()))

    def has_extension(self, name: str) -> bool:
        """Tell whether the server lists that extension."""
        return self._retried(lambda: common.has_extension(self._calls, name))

    def has_hardware(self, name: str, count: int = 1) -> bool:
        """Tell whether the server's machine has that many devices of a kind ("CPU", "GPU") or with `name` in theirs."""
        return self._retried(lambda: self._calls.has_hardware(name, count))

    def wait_until_server_ready(self, timeout: float | None = None, *, interval: float = INTERVAL) -> None:
        """Return when the server listens and all its models take requests. Raises DeadlineExceeded."""
        self._run(common.until_server_ready(self._calls, interval), timeout)

    # Models.

    def models(self) -> list[str]:
        """Return the names of the models that run."""
        return self._retried(self._calls.models)

    def model_ready(self, name: str, version: str = "") -> bool:
        """Tell whether a model takes requests; one that there is not does not."""
        return self._run(common.or_false(self._calls.model_ready(name, version)))

    def model_metadata(self, name: str, version: str = "") -> Metadata:
        """Return name, versions, platform, inputs and outputs of a model."""
        return self._retried(lambda: self._calls.model_metadata(name, version))

    def wait_until_model_ready(
        self, name: str, timeout: float | None = None, *, version: str = "", interval: float = INTERVAL
    ) -> None:
        """Return when a model takes requests. Raises DeadlineExceeded."""
        self._run(common.until_model(self._calls, name, version, True, interval), timeout)

    def wait_until_model_not_ready(
        self, name: str, timeout: float | None = None, *, version: str = "", interval: float = INTERVAL
    ) -> None:
        """Return when a model takes no requests. Raises DeadlineExceeded."""
        self._run(common.until_model(self._calls, name, version, False, interval), timeout)

    # Control.

    def load_model(self, name: str, config: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> None:
        """Have a model of the repository read anew and run; what ran before serves until then. `config` goes before its file."""
        self._retried(lambda: self._calls.load_model(name, config), timeout)

    def load_ensemble(
        self, name: str, models: Sequence[str | Mapping[str, Any]], *, inputs: Tensors = (), outputs: Tensors = (),
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        """Have models that run serve as one, under a name of its own: each gets what the one before it answers.

        A step is a model's name, or a table: `{"model": ..., "inputs": {its name: ours}, "outputs": {its name: ours}}`, or a
        branch or a switch. A chain of tensor models says its own `inputs` and `outputs`: tables of name, datatype and shape.
        Loading the name anew replaces it.
        """
        self.load_model(name, ensemble(models, inputs, outputs), timeout=timeout)

    def unload_model(self, name: str, *, timeout: float | None = None) -> None:
        """Have a model finish what it has accepted, and end."""
        self._retried(lambda: self._calls.unload_model(name), timeout)

    def unload_models(self, names: Iterable[str], *, timeout: float | None = None) -> None:
        """Have models end, one after the other."""
        for name in names:
            self.unload_model(name, timeout=timeout)

    def load_worker(
        self, name: str, parameters: Mapping[str, Parameter] | None = None, *, timeout: float | None = None
    ) -> str:
        """Have a model run with these parameters, or join where it does, and return the endpoint: the name to ask."""
        return self._retried(lambda: self._calls.load_worker(name, parameters or {}), timeout)

    def unload_worker(self, endpoint: str, *, timeout: float | None = None) -> None:
        """Have one worker of an endpoint end; with the last one the endpoint goes."""
        self._retried(lambda: self._calls.unload_worker(endpoint), timeout)

    # Inference.

    @overload
    def infer(self, model: str, inputs: Inputs, **asking: Unpack[RequestExtras]) -> Result: ...
    @overload
    def infer(self, model: str, inputs: Any, **asking: Unpack[RequestExtras]) -> Any: ...
    def infer(self, model: str, inputs: Any, **asking: Unpack[RequestExtras]) -> Any:
        """Return what `model` answers: a Result to arrays by name, or the plain answer to a plain item, such as
        `infer("sentiment", {"text": "good"})`, of a model that takes items. See Asking for the rest."""
        return self._retried(lambda: self._inference.infer(model, inputs, asking), asking.get("timeout"))

    def infer_ordered(
        self, model: str, many: Iterable[Any], *, at_once: int = AT_ONCE, **asking: Unpack[RequestExtras]
    ) -> list[Any]:
        """Ask for each of `many`, `at_once` at a time, so that they can share batches; return the answers in order.

        Raises the first error, in that order; the others have run to their ends then.
        """

        def ask(inputs: Any) -> Any:
            return self.infer(model, inputs, **asking)

        with ThreadPoolExecutor(at_once, "weir-client") as threads:
            return [call.result() for call in [threads.submit(ask, inputs) for inputs in many]]

    def infer_ordered_batched(
        self, model: str, many: Iterable[Any], batch_size: int, **asking: Unpack[RequestExtras]
    ) -> list[Any]:
        """Do the same, `batch_size` together, and the next only when all of these are answered."""
        waiting = list(many)
        groups = [waiting[start : start + batch_size] for start in range(0, len(waiting), batch_size)]
        return [result for group in groups for result in self.infer_ordered(model, group, at_once=batch_size, **asking)]

    def stream(self, model: str, inputs: Any, **asking: Unpack[RequestExtras]) -> Generator[Any, None, None]:
        """Yield the answers of `model` as they come: several of one that streams, otherwise one. Closing the generator ends
        them at the model too."""
        prepared = self._retried(lambda: self._inference.prepare(model, inputs, asking), asking.get("timeout"))
        streaming = self._calls.stream(prepared.request)
        timeout = of_call(asking.get("timeout"), self._timeout)
        begun, tried = False, 0
        while True:
            decode = streaming.decoder()
            try:
                with closing(self._transport.chunks(streaming.step, timeout)) as chunks:
                    for chunk in chunks:
                        for response in decode(chunk):
                            begun = True
                            yield prepared.answer(response)
                return
            except CapacityError as error:
                wait = None if begun else self._retry.wait(error, tried)
                if wait is None:
                    raise
            time.sleep(wait)
            tried += 1

    # Its life.

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, program: Program[T], timeout: float | None = None) -> T:
        return run(program, self._transport.send, of_call(timeout, self._timeout))

    def _retried(self, attempt: Callable[[], Program[T]], timeout: float | None = None) -> T:
        return self._run(retried(self._retry, attempt), timeout)


# The methods of every client for an event loop: those of synchronous.Client, to be awaited.


class AsyncTransport(Protocol):
    """Does the steps of calls, many at a time."""

    async def send(self, step: Any, timeout: float) -> Any:
        """Do one step."""

    def chunks(self, step: Any, timeout: float) -> AsyncGenerator[Any, None]:
        """Do a step with several answers; closing the generator ends it."""

    async def close(self) -> None:
        """End it."""


class AsyncClient:
    """The calls to a server. Every method raises the WeirError that a caller in process would get, Unreachable where
    no server listens, DeadlineExceeded when there is no answer within `timeout` seconds, and InvalidRequest for a `timeout` that is no
    number of seconds greater than 0."""

    def __init__(self, calls: Calls, transport: AsyncTransport, *, timeout: float, retry: Retry | None) -> None:
        self._calls = calls
        self._inference = ModelCall(calls)
        self._transport = transport
        self._timeout = of_client(timeout)
        self._retry = retry or Retry()

    # The server.

    async def server_metadata(self) -> Metadata:
        """Return name, version and extensions of the server."""
        return await self._retried(self._calls.server_metadata)

    async def server_live(self) -> bool:
        """Tell whether the server answers."""
        return await self._run(common.or_false(self._calls.server_live()))

    async def server_ready(self) -> bool:
        """Tell whether all its models take requests."""
        return await self._run(common.or_false(self._calls.server_ready()))

    async def has_extension(self, name: str) -> bool:
        """Tell whether the server lists that extension."""
        return await self._retried(lambda: common.has_extension(self._calls, name))

    async def has_hardware(self, name: str, count: int = 1) -> bool:
        """Tell whether the server's machine has that many devices of a kind ("CPU", "GPU") or with `name` in theirs."""
        return await self._retried(lambda: self._calls.has_hardware(name, count))

    async def wait_until_server_ready(self, timeout: float | None = None, *, interval: float = INTERVAL) -> None:
        """Return when the server listens and all its models take requests. Raises DeadlineExceeded."""
        await self._run(common.until_server_ready(self._calls, interval), timeout)

    # Models.

    async def models(self) -> list[str]:
        """Return the names of the models that run."""
        return await self._retried(self._calls.models)

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Tell whether a model takes requests; one that there is not does not."""
        return await self._run(common.or_false(self._calls.model_ready(name, version)))

    async def model_metadata(self, name: str, version: str = "") -> Metadata:
        """Return name, versions, platform, inputs and outputs of a model."""
        return await self._retried(lambda: self._calls.model_metadata(name, version))

    async def wait_until_model_ready(
        self, name: str, timeout: float | None = None, *, version: str = "", interval: float = INTERVAL
    ) -> None:
        """Return when a model takes requests. Raises DeadlineExceeded."""
        await self._run(common.until_model(self._calls, name, version, True, interval), timeout)

    async def wait_until_model_not_ready(
        self, name: str, timeout: float | None = None, *, version: str = "", interval: float = INTERVAL
    ) -> None:
        """Return when a model takes no requests. Raises DeadlineExceeded."""
        await self._run(common.until_model(self._calls, name, version, False, interval), timeout)

    # Control.

    async def load_model(
        self, name: str, config: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> None:
        """Have a model of the repository read anew and run; what ran before serves until then. `config` goes before its file."""
        await self._retried(lambda: self._calls.load_model(name, config), timeout)

    async def load_ensemble(
        self, name: str, models: Sequence[str | Mapping[str, Any]], *, inputs: Tensors = (), outputs: Tensors = (),
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        """Have models that run serve as one, under a name of its own: each gets what the one before it answers.

        A step is a model's name, or a table: `{"model": ..., "inputs": {its name: ours}, "outputs": {its name: ours}}`, or a
        branch or a switch. A chain of tensor models says its own `inputs` and `outputs`: tables of name, datatype and shape.
        Loading the name anew replaces it.
        """
        await self.load_model(name, ensemble(models, inputs, outputs), timeout=timeout)

    async def unload_model(self, name: str, *, timeout: float | None = None) -> None:
        """Have a model finish what it has accepted, and end."""
        await self._retried(lambda: self._calls.unload_model(name), timeout)

    async def unload_models(self, names: Iterable[str], *, timeout: float | None = None) -> None:
        """Have models end, one after the other."""
        for name in names:
            await self.unload_model(name, timeout=timeout)

    async def load_worker(
        self, name: str, parameters: Mapping[str, Parameter] | None = None, *, timeout: float | None = None
    ) -> str:
        """Have a model run with these parameters, or join where it does, and return the endpoint: the name to ask."""
        return await self._retried(lambda: self._calls.load_worker(name, parameters or {}), timeout)

    async def unload_worker(self, endpoint: str, *, timeout: float | None = None) -> None:
        """Have one worker of an endpoint end; with the last one the endpoint goes."""
        await self._retried(lambda: self._calls.unload_worker(endpoint), timeout)

    # Inference.

    @overload
    async def infer(self, model: str, inputs: Inputs, **asking: Unpack[RequestExtras]) -> Result: ...
    @overload
    async def infer(self, model: str, inputs: Any, **asking: Unpack[RequestExtras]) -> Any: ...
    async def infer(self, model: str, inputs: Any, **asking: Unpack[RequestExtras]) -> Any:
        """Return what `model` answers: a Result to arrays by name, or the plain answer to a plain item, such as
        `infer("sentiment", {"text": "good"})`, of a model that takes items. See Asking for the rest."""
        return await self._retried(lambda: self._inference.infer(model, inputs, asking), asking.get("timeout"))

    async def infer_ordered(
        self, model: str, many: Iterable[Any], *, at_once: int = AT_ONCE, **asking: Unpack[RequestExtras]
    ) -> list[Any]:
        """Ask for each of `many`, `at_once` at a time, so that they can share batches; return the answers in order.

        Raises the first error; the others are withdrawn then.
        """
        room = asyncio.Semaphore(at_once)

        async def ask(inputs: Any) -> Any:
            async with room:
                return await self.infer(model, inputs, **asking)

        tasks = [asyncio.ensure_future(ask(inputs)) for inputs in many]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def infer_ordered_batched(
        self, model: str, many: Iterable[Any], batch_size: int, **asking: Unpack[RequestExtras]
    ) -> list[Any]:
        """Do the same, `batch_size` together, and the next only when all of these are answered."""
        waiting = list(many)
        groups = [waiting[start : start + batch_size] for start in range(0, len(waiting), batch_size)]
        answers: list[Any] = []
        for group in groups:
            answers += await self.infer_ordered(model, group, at_once=batch_size, **asking)
        return answers

    async def stream(self, model: str, inputs: Any, **asking: Unpack[RequestExtras]) -> AsyncGenerator[Any, None]:
        """Yield the answers of `model` as they come: several of one that streams, otherwise one. Closing the generator ends
        them at the model too."""
        prepared = await self._retried(lambda: self._inference.prepare(model, inputs, asking), asking.get("timeout"))
        streaming = self._calls.stream(prepared.request)
        timeout = of_call(asking.get("timeout"), self._timeout)
        begun, tried = False, 0
        while True:
            decode = streaming.decoder()
            try:
                async with aclosing(self._transport.chunks(streaming.step, timeout)) as chunks:
                    async for chunk in chunks:
                        for response in decode(chunk):
                            begun = True
                            yield prepared.answer(response)
                return
            except CapacityError as error:
                wait = None if begun else self._retry.wait(error, tried)
                if wait is None:
                    raise
            await asyncio.sleep(wait)
            tried += 1

    # Its life.

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, program: Program[T], timeout: float | None = None) -> T:
        return await run_async(program, self._transport.send, of_call(timeout, self._timeout))

    async def _retried(self, attempt: Callable[[], Program[T]], timeout: float | None = None) -> T:
        return await self._run(retried(self._retry, attempt), timeout)
