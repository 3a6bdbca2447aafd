"""The hooks `before_batch` and `after_batch`: steps of a service in the server process, before and after the worker's.

With hooks, each worker counts as having EXTRA more places than it has. A batch in an extra place is either in `before_batch`, or
waits for a real place, or its worker has finished it and `after_batch` runs. So no worker waits for a hook while another batch is
prepared, and new batches are formed meanwhile.

Hooks get decoded items, and responses before they are encoded. Bodies of a model's own content types stay bytes, as only the
worker can decode them. An error in the place of an item or response fails only that entry.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from weir.errors import ModelError, WeirError
from weir.messages import LENT, OBJECT, Batch, EventKind, Events, Timing
from weir.wire.values import DECODE, decode
from weir.workers.executor import discard, is_block
from weir.workers.run.steps import ResultWriter, copies, model_error, responses_of
from weir.workers.timer import end_tasks

logger = logging.getLogger("weir")

MISSING = object()
_VALUES = frozenset({OBJECT, LENT, *DECODE})  # what `after_batch` gets as values, and is written after it


class HookedBatch:
    """A batch and its state between the hooks and the worker.

    With `encodes`, the worker returns values, and they are encoded here after the hook. `handed` tells whether the batch has gone
    to its worker, or needs none; `returned` is done when it is back. `task` takes it from its start to its end.
    """

    def __init__(self, worker: int, batch: Batch, *, encodes: bool) -> None:
        count = len(batch.payloads)
        self.worker = worker
        self.batch_id = batch.batch_id
        self.handed = False
        self.returned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None]
        self._like = replace(batch, payloads=[])  # without what it holds
        self._content_types = _each(batch.content_types, count)
        self._accepts = _each(batch.accepts, count)
        self._encodes = encodes
        self._payloads = list(batch.payloads)
        self._outputs: list[Any] = [MISSING] * count
        self._kinds: dict[int, int] = {}  # the EventKind of an output, by index
        self._cancelled: set[int] = set()
        self._inner: list[int] = []  # our index of each entry that the worker has, by the worker's index
        self._timing: Timing | None = None
        self._blocks = [payload for payload in batch.payloads if is_block(payload)]
        for block in self._blocks:
            block.retain()

    def release(self) -> None:
        """Give back the shares in the payloads' Blocks."""
        for block in self._blocks:
            discard(block)
        self._blocks = []

    def cancel(self, indices: Sequence[int]) -> list[int]:
        """Drop these entries, whose callers have left; return the worker's indices of those that the worker has."""
        self._cancelled.update(indices)
        return [position for position, index in enumerate(self._inner) if index in indices]

    # Before the worker.

    def decode(self) -> None:
        """Decode payloads in JSON or msgpack; the error of a payload that cannot be decoded is its response."""
        for index, content_type in enumerate(self._content_types):
            payload = self._payloads[index]
            if content_type not in DECODE:
                continue
            try:
                self._payloads[index] = decode(payload.view if is_block(payload) else payload, content_type)
                self._content_types[index] = OBJECT
            except WeirError as error:
                self._outputs[index] = error

    @property
    def items(self) -> list[Any]:
        """The argument of `before_batch`: the decoded items of all entries that have no response yet."""
        return [self._payloads[index] for index in self._open()]

    def put_items(self, items: list[Any]) -> None:
        """Store the result of `before_batch`; an error in it is the response of its entry."""
        for index, item in zip(self._open(), items, strict=True):
            if isinstance(item, WeirError):
                self._outputs[index] = item
            else:
                self._payloads[index] = item

    def inner(self) -> Batch | None:
        """Return the batch for the worker, or None when no entry needs it."""
        self._inner = [index for index in self._open() if index not in self._cancelled]
        if not self._inner:
            return None
        accepts = [self._accepts[index] for index in self._inner]
        if self._encodes:
            accepts = [OBJECT if accept in _VALUES else accept for accept in accepts]
        payloads = [self._payloads[index] for index in self._inner]
        content_types = [self._content_types[index] for index in self._inner]
        like, known = self._like, self._like.requests  # none, where a model is measured
        requests = [known[index] for index in self._inner] if known else known
        return replace(
            like, payloads=payloads, content_types=_joined(content_types), accepts=_joined(accepts), requests=requests
        )

    # After the worker.

    def gather(self, events: Events) -> Events | None:
        """Store the worker's outputs. Those of a streaming model whose batch has not ended are returned instead, as Events to be
        passed on at once."""
        positions = range(len(events.outputs)) if events.indices is None else events.indices
        entries = [self._inner[position] for position in positions]
        kinds = events.kinds or [EventKind.DONE] * len(events.outputs)
        if not events.final:
            return Events(self.batch_id, events.outputs, indices=entries, kinds=kinds, final=False)
        for entry, kind, output in zip(entries, kinds, events.outputs, strict=True):
            self._outputs[entry] = output
            self._kinds[entry] = kind
        self._timing = events.timing or self._timing
        return None

    @property
    def responses(self) -> list[Any]:
        """The argument of `after_batch`: the responses, in order, without the errors."""
        return [self._outputs[index] for index in self._with_response()]

    def put_responses(self, responses: list[Any]) -> None:
        """Store the result of `after_batch`."""
        for index, response in zip(self._with_response(), responses, strict=True):
            self._outputs[index] = response

    def encode(self, writer: ResultWriter) -> None:
        """Encode the responses in the content types that their callers accept. A response that is not as declared, or has no such form,
        becomes a ModelError."""
        for index in self._with_response():
            accept, output = self._accepts[index], self._outputs[index]
            if accept in _VALUES and not is_block(output):
                (self._outputs[index],) = writer.write([output], accept)

    def fail(self, error: Exception) -> None:
        """End every entry with `error`, whatever it has."""
        failure = error if isinstance(error, WeirError) else ModelError(f"the batch could not be run: {error!r}")
        self._outputs = list(copies(failure, len(self._outputs)))
        self._kinds.clear()

    def events(self) -> Events:
        """Return the final events of the batch."""
        indices = [index for index, output in enumerate(self._outputs) if output is not MISSING]
        outputs = [self._outputs[index] for index in indices]
        kinds = [self._kinds.get(index, EventKind.DONE) for index in indices]
        whole = None if len(indices) == len(self._outputs) else indices
        return Events(
            self.batch_id, outputs, indices=whole, kinds=kinds if EventKind.END in kinds else None, timing=self._timing
        )

    def _open(self) -> list[int]:
        return [index for index, output in enumerate(self._outputs) if output is MISSING]

    def _with_response(self) -> list[int]:
        return [
            index
            for index, output in enumerate(self._outputs)
            if output is not MISSING and not isinstance(output, WeirError)
        ]


def _each(types: str | list[str], count: int) -> list[str]:
    return [types] * count if isinstance(types, str) else list(types)


def _joined(types: list[str]) -> str | list[str]:
    return types[0] if types.count(types[0]) == len(types) else types


Hook = Callable[[list[Any]], Coroutine[Any, Any, list[Any]]]

EXTRA = 2  # places per worker: one batch may be in each hook besides those that the worker has


class ServiceHooks(NamedTuple):
    """The hooks of a service; None where it has none."""

    before: Hook | None = None
    after: Hook | None = None


class HookUser(Protocol):
    """The driver of the batches that hooks change."""

    def hand(self, worker: int, batch: Batch) -> None:
        """Give a prepared batch to `worker`, which has a free place for it."""

    def handed(self, batch_id: int) -> None:
        """Note that a batch goes to its worker now, or needs none because the hook answered every entry."""

    def deliver(self, worker: int, events: Events) -> None:
        """Give the callers what `events` has for them."""


class HookedBatches:
    """The batches of `user` that are in a hook, wait for a worker, or are at one. `writer` writes the responses after a hook."""

    def __init__(self, hooks: ServiceHooks, writer: ResultWriter, user: HookUser) -> None:
        self._before, self._after = hooks
        self._writer = writer
        self._user = user
        self._places: dict[int, asyncio.Semaphore] = {}  # the free ones of each worker
        self._batches: dict[int, HookedBatch] = {}

    def run(self, worker: int, batch: Batch) -> None:
        """Run `before_batch`, hand the batch to `worker` when the worker has a free place, and run `after_batch` when it is back."""
        begun = self._batches[batch.batch_id] = HookedBatch(worker, batch, encodes=self._after is not None)
        begun.task = asyncio.ensure_future(self._tried(begun))

    def cancel(self, batch_id: int, indices: Sequence[int]) -> list[int]:
        """Drop these entries; return the worker's indices of those that the worker has."""
        batch = self._batches.get(batch_id)
        return [] if batch is None else batch.cancel(indices)

    async def stop(self) -> None:
        """Cancel the running hooks, and forget all batches."""
        await end_tasks(*[batch.task for batch in self._batches.values()])
        for batch in self._batches.values():
            batch.release()
        self._batches.clear()
        self._places.clear()

    def worker_ready(self, worker: int, places: int) -> int:
        """Return how many batches a worker with `places` places may have, with those in hooks."""
        self._places[worker] = asyncio.Semaphore(places)
        return places + EXTRA

    def worker_lost(self, worker: int) -> None:
        """Forget all batches of this worker, including those in hooks: the user runs them again."""
        self._places.pop(worker, None)
        for batch in [batch for batch in self._batches.values() if batch.worker == worker]:
            batch.task.cancel()
            if not batch.handed:
                self._note_handed(batch)
            batch.release()
            del self._batches[batch.batch_id]

    def received(self, worker: int, events: Events) -> Events | None:
        """Store the outputs of a batch; with its last outputs, free the worker's place and run `after_batch`. Return what need not wait for that."""
        if events.final and worker in self._places:
            self._places[worker].release()
        batch = self._batches.get(events.batch_id)
        if batch is None:
            for output in events.outputs:
                discard(output)
            return None
        try:
            part = batch.gather(events)
        except Exception as error:  # outputs that are not those of the batch
            batch.task.cancel()
            self._fail(batch, error)
            return None
        if events.final:
            batch.returned.set_result(None)
        return part

    async def _tried(self, batch: HookedBatch) -> None:
        try:
            await self._run(batch)
        except Exception as error:
            self._fail(batch, error)

    async def _run(self, batch: HookedBatch) -> None:
        batch.decode()
        if self._before is not None:
            batch.put_items(await hooked(self._before, batch.items))
        places = self._places[batch.worker]
        await places.acquire()
        self._note_handed(batch)
        inner = batch.inner()
        try:
            if inner is not None:
                self._user.hand(batch.worker, inner)
        except Exception:
            places.release()
            raise
        batch.release()
        if inner is None:
            places.release()
        else:
            await batch.returned
        if self._after is not None:
            responses = batch.responses
            if responses:
                batch.put_responses(await hooked(self._after, responses))
            batch.encode(self._writer)
        self._deliver(batch)

    def _fail(self, batch: HookedBatch, error: Exception) -> None:
        """End a batch for which a step has failed: no caller waits for ever. A batch that has its end is left alone."""
        if self._batches.get(batch.batch_id) is not batch:
            return
        logger.error("batch %d of worker %d could not be run", batch.batch_id, batch.worker, exc_info=error)
        if not batch.handed:
            self._note_handed(batch)
        batch.release()
        batch.fail(error)
        self._deliver(batch)

    def _deliver(self, batch: HookedBatch) -> None:
        del self._batches[batch.batch_id]
        self._user.deliver(batch.worker, batch.events())

    def _note_handed(self, batch: HookedBatch) -> None:
        batch.handed = True
        self._user.handed(batch.batch_id)


async def hooked(hook: Hook, values: list[Any]) -> list[Any]:
    """Return the result of `hook` for `values`, which has as many entries. If the hook fails, each entry is an error."""
    try:
        returned = await hook(values)
    except WeirError as error:
        return list(copies(error, len(values)))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Not the hook was cancelled, but something that it awaited. The callers still wait for responses.
        return list(copies(model_error(hook.__name__, error), len(values)))
    except Exception as error:
        return list(copies(model_error(hook.__name__, error), len(values)))
    try:
        return responses_of(returned, len(values), hook.__name__)
    except ModelError as error:
        return list(copies(error, len(values)))
