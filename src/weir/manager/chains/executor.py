"""What runs the batches of a chain: no worker, but the lines of other services.

A batch is what left the chain's own line in one turn of the loop; each of its entries goes its own way, and leaves as soon as
it has its end. How the entries of many batches are put together again is up to the models that are asked.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from weir.batching.collate import entries_of
from weir.errors import WeirError
from weir.messages import Batch, Dispatch, EventKind, Events, Request, Timing
from weir.model import Model
from weir.workers.executor import Block, FixedWorkers, Listener
from weir.workers.faults import model_error
from weir.workers.local.common import LocalState, no_arena
from weir.workers.run.codecs import Reader, Writer

PLACES = 4096  # batches under way at a time; what the models' own lines hold is the true limit

Way = Callable[[Request, Any], Awaitable[Any]]


class UnderWay:
    """A batch: the task of each entry that has no end yet."""

    def __init__(self, batch: Batch, began: float) -> None:
        self.batch = batch
        self.began = began
        self.tasks: dict[int, asyncio.Task[None]] = {}


class ChainExecutor(FixedWorkers):
    """Sends every item `way`, which returns its answer or raises. `dispatch_of` knows the requests of a batch; `now` is the
    service's clock; `model` declares what is read and written. See the Executor protocol."""

    def __init__(
        self, model: type[Model], label: str, way: Way, dispatch_of: Callable[[int], Dispatch | None],
        now: Callable[[], float], check: Callable[[], None],
    ) -> None:  # fmt: skip
        self._way = way
        self._dispatch_of = dispatch_of
        self._now = now
        self._check = check
        self._batches: dict[int, UnderWay] = {}
        self._state = LocalState(0)
        self._listener: Listener
        self._reader = Reader(model(), (KeyboardInterrupt,))
        self._writer = Writer(model(), (KeyboardInterrupt,), label)

    async def start(self, listener: Listener) -> None:
        """See that the steps can be. Raises SettingsError."""
        self._listener = listener
        self._state.state = "starting"
        self._check()
        self._state.state = "ready"
        listener.worker_ready(0, PLACES)

    def run(self, worker: int, batch: Batch) -> None:
        """Send the entries of `batch` on their way."""
        dispatch = self._dispatch_of(batch.batch_id)
        if dispatch is None:
            return
        under_way = self._batches[batch.batch_id] = UnderWay(batch, self._now())
        self._state.in_flight += 1
        for index, (request, _, _) in enumerate(entries_of(dispatch)):
            under_way.tasks[index] = asyncio.ensure_future(self._enter(under_way, index, request))

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Withdraw these entries from the lines that they are in."""
        under_way = self._batches.get(batch_id)
        for index in indices:
            task = under_way.tasks.pop(index, None) if under_way is not None else None
            if task is not None and under_way is not None:
                task.cancel()
                self._ended(under_way, [], [])

    def reserve(self, size_bytes: int) -> Block | None:
        """Return None: there is no shared memory."""
        return None

    async def stop(self) -> None:
        """Withdraw all that is under way."""
        self._state.state = "stopped"
        tasks = [task for each in self._batches.values() for task in each.tasks.values()]
        self._batches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def states(self) -> Sequence[LocalState]:
        """Return the state of what stands for the worker."""
        return [self._state]

    def gauges(self) -> dict[str, Any]:
        """Return zeros: there is no arena and nothing to restart."""
        return no_arena()

    async def _enter(self, under_way: UnderWay, index: int, request: Request) -> None:
        batch = under_way.batch
        try:
            output = await self._output(
                request, batch.payloads[index], _of(batch.content_types, index), _of(batch.accepts, index)
            )
        except WeirError as error:
            output = error
        except Exception as error:
            output = model_error("the chain", error)
        if under_way.tasks.pop(index, None) is not None and self._batches.get(batch.batch_id) is under_way:
            self._ended(under_way, [index], [output])

    async def _output(self, request: Request, payload: Any, content_type: str, accept: str) -> Any:
        column = self._reader.read([payload], content_type)
        if isinstance(column[0], WeirError):
            return column[0]
        heads = self._reader.heads(column, content_type)
        answer = await self._way(request, column[0])
        return self._writer.write([answer], accept, heads)[0]

    def _ended(self, under_way: UnderWay, indices: list[int], outputs: list[Any]) -> None:
        final = not under_way.tasks
        batch_id = under_way.batch.batch_id
        kinds = [EventKind.ERROR if isinstance(output, WeirError) else EventKind.DONE for output in outputs]
        timing = Timing(0.0, self._now() - under_way.began, 0.0) if final else None
        if final:
            del self._batches[batch_id]
            self._state.in_flight -= 1
        if final or indices:
            events = Events(batch_id, outputs, indices=indices, kinds=kinds, final=final, timing=timing)
            # Not at once: whoever cancelled is in the middle of it.
            asyncio.get_running_loop().call_soon(self._listener.received, 0, events)


def _of(types: str | list[str], index: int) -> str:
    return types if isinstance(types, str) else types[index]
