"""The hooks `before_batch` and `after_batch`: steps of a service in the server process, before and after the worker's.

A HookedExecutor around the real executor reports EXTRA more places for each worker than the worker has. A batch in an extra
place is either in `before_batch`, or waits for a real place, or its worker has finished it and `after_batch` runs. So no worker
waits for a hook while another batch is prepared, and new batches are formed meanwhile.

Hooks get decoded items, and answers before they are encoded. Bodies of a model's own content types stay bytes, as only the
worker can decode them. An error in the place of an item or answer fails only that entry.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from weir.errors import ModelError, WeirError
from weir.messages import LENT, OBJECT, Batch, EventKind, Events, Timing
from weir.metrics import MetricReport
from weir.serving.delivery import discard, is_block
from weir.wire.values import DECODE, decode
from weir.workers.executor import Block, Executor, Listener, WorkerState, for_all_work
from weir.workers.run.steps import AnswerWriter, answers_of, copies, model_error

logger = logging.getLogger("weir")

MISSING = object()
_VALUES = frozenset({OBJECT, LENT, *DECODE})  # what `after_batch` gets as values, and is written after it


class HookedBatch:
    """A batch and its state between the hooks and the worker.

    With `encodes`, the worker returns values, and they are encoded here after the hook. `handed` tells whether the batch has gone
    to its worker, or needs none.
    """

    def __init__(self, worker: int, batch: Batch, *, encodes: bool) -> None:
        count = len(batch.payloads)
        self.worker = worker
        self.batch_id = batch.batch_id
        self.handed = False
        self._like = batch.replaced(payloads=[])  # without what it holds
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
        return [place for place, index in enumerate(self._inner) if index in indices]

    # Before the worker.

    def decode(self) -> None:
        """Decode payloads in JSON or msgpack; the error of a payload that cannot be decoded is its answer."""
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
        """The argument of `before_batch`: the decoded items of all entries that have no answer yet."""
        return [self._payloads[index] for index in self._open()]

    def place_items(self, items: list[Any]) -> None:
        """Store the result of `before_batch`; an error in it is the answer of its entry."""
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
        known = self._like.requests  # none, where a model is measured
        requests = [known[index] for index in self._inner] if known else known
        return self._like.replaced(
            payloads=payloads, content_types=_joined(content_types), accepts=_joined(accepts), requests=requests
        )

    # After the worker.

    def gather(self, events: Events) -> Events | None:
        """Store the worker's outputs. Those of a streaming model whose batch has not ended are returned instead, as Events to be
        passed on at once."""
        places = range(len(events.outputs)) if events.indices is None else events.indices
        entries = [self._inner[place] for place in places]
        kinds = events.kinds or [EventKind.DONE] * len(events.outputs)
        if not events.final:
            return Events(self.batch_id, events.outputs, indices=entries, kinds=kinds, final=False)
        for entry, kind, output in zip(entries, kinds, events.outputs, strict=True):
            self._outputs[entry] = output
            self._kinds[entry] = kind
        self._timing = events.timing or self._timing
        return None

    @property
    def answers(self) -> list[Any]:
        """The argument of `after_batch`: the answers, in order, without the errors."""
        return [self._outputs[index] for index in self._answered()]

    def place_answers(self, answers: list[Any]) -> None:
        """Store the result of `after_batch`."""
        for index, answer in zip(self._answered(), answers, strict=True):
            self._outputs[index] = answer

    def encode(self, writer: AnswerWriter) -> None:
        """Encode the answers in the content types that their callers accept. An answer that is not as declared, or has no such form,
        becomes a ModelError."""
        for index in self._answered():
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

    def _answered(self) -> list[int]:
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
Step = Callable[[HookedBatch], Coroutine[Any, Any, None]]

EXTRA = 2  # places per worker: one batch may be in each hook besides those that the worker has


class WorkerSlots:
    """The free places of one worker, and the prepared batches that wait for one."""

    def __init__(self, places: int) -> None:
        self.free = places
        self.waiting: deque[HookedBatch] = deque()


class HookedExecutor:
    """An executor that runs hooks around the executor `inner`, whose Listener it is. See the protocols Executor and Listener.

    `writer` writes the answers after a hook. `handed` is called with the batch id when a batch goes to its worker, or needs none because the hook answered every entry.
    """

    def __init__(
        self,
        inner: Executor,
        before: Hook | None,
        after: Hook | None,
        handed: Callable[[int], None],
        writer: AnswerWriter,
    ) -> None:
        self._inner = inner
        self._writer = writer
        self._before = before
        self._after = after
        self._handed = handed
        self._slots: dict[int, WorkerSlots] = {}
        self._batches: dict[int, HookedBatch] = {}
        self._tasks: dict[asyncio.Task[None], int] = {}  # running hooks, and the index of their worker

    # The Executor protocol.

    async def start(self, listener: Listener) -> None:
        """Start the inner executor."""
        self._listener = listener
        await self._inner.start(self)

    def run(self, worker: int, batch: Batch) -> None:
        """Run `before_batch`, and then hand the batch to `worker` when the worker has a free place."""
        prepared = HookedBatch(worker, batch, encodes=self._after is not None)
        self._batches[batch.batch_id] = prepared
        self._do(prepared, self._prepare)

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Drop these entries, here or at the worker."""
        batch = self._batches.get(batch_id)
        if batch is None:
            return
        inner = batch.cancel(indices)
        if inner:
            self._inner.cancel(worker, batch_id, inner)

    def reserve(self, size_bytes: int) -> Block | None:
        """Return a place in the shared memory of the inner executor, or None."""
        return self._inner.reserve(size_bytes)

    async def stop(self) -> None:
        """Cancel the running hooks and stop the inner executor."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._inner.stop()
        for batch in self._batches.values():
            batch.release()
        self._batches.clear()
        self._slots.clear()

    async def add_worker(self) -> None:
        """Add a worker to the inner executor."""
        await self._inner.add_worker()

    async def remove_worker(self, worker: int | None = None) -> None:
        """Remove a worker of the inner executor. The listener has already given up the worker's batches."""
        index = for_all_work(self._inner.states())[-1].index if worker is None else worker
        self._forget(index)
        await self._inner.remove_worker(index)

    def states(self) -> Sequence[WorkerState]:
        """Return the states of the real workers."""
        return self._inner.states()

    def gauges(self) -> dict[str, Any]:
        """Return the numbers of the inner executor."""
        return self._inner.gauges()

    # The Listener protocol, for the inner executor.

    def worker_ready(self, worker: int, places: int, *, bulk: bool = False) -> None:
        """Report the worker with EXTRA more places."""
        self._slots[worker] = WorkerSlots(places)
        self._listener.worker_ready(worker, places + EXTRA, bulk=bulk)

    def worker_lost(self, worker: int, reason: str) -> None:
        """Forget all batches of this worker, including those in hooks: the listener runs them again."""
        self._forget(worker)
        self._listener.worker_lost(worker, reason)

    def worker_leaves(self, worker: int) -> None:
        """Pass it on."""
        self._listener.worker_leaves(worker)

    def measured(self, worker: int, reports: Sequence[MetricReport]) -> None:
        """Pass it on."""
        self._listener.measured(worker, reports)

    def _forget(self, worker: int) -> None:
        self._slots.pop(worker, None)
        for task, owner in self._tasks.items():
            if owner == worker:
                task.cancel()
        for batch in [batch for batch in self._batches.values() if batch.worker == worker]:
            if not batch.handed:
                self._note_handed(batch)
            batch.release()
            del self._batches[batch.batch_id]

    def received(self, worker: int, events: Events) -> None:
        """Store outputs of a batch; with its last outputs, free the worker's place and run `after_batch`."""
        if events.final and worker in self._slots:
            self._slots[worker].free += 1
            self._feed(worker)
        batch = self._batches.get(events.batch_id)
        if batch is None:
            for output in events.outputs:
                discard(output)
            return
        try:
            part = batch.gather(events)
        except Exception as error:  # outputs that are not those of the batch
            return self._fail(batch, error)
        if part is not None:
            self._listener.received(worker, part)
        if events.final:
            self._do(batch, self._finish)

    def unavailable(self, reason: str) -> None:
        """Pass the report on."""
        self._listener.unavailable(reason)

    async def _prepare(self, batch: HookedBatch) -> None:
        batch.decode()
        if self._before is not None:
            batch.place_items(await hooked(self._before, batch.items))
        slots = self._slots.get(batch.worker)
        if slots is not None:
            slots.waiting.append(batch)
            self._feed(batch.worker)

    async def _finish(self, batch: HookedBatch) -> None:
        if self._after is not None:
            answers = batch.answers
            if answers:
                batch.place_answers(await hooked(self._after, answers))
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
        self._listener.received(batch.worker, batch.events())

    def _feed(self, worker: int) -> None:
        """Hand prepared batches to `worker` while it has places."""
        slots = self._slots[worker]
        while slots.free and slots.waiting:
            batch = slots.waiting.popleft()
            self._note_handed(batch)
            inner = batch.inner()
            if inner is None:
                self._do(batch, self._finish)
                continue
            slots.free -= 1
            try:
                self._inner.run(worker, inner)
            except Exception as error:
                slots.free += 1
                self._fail(batch, error)
            batch.release()

    def _note_handed(self, batch: HookedBatch) -> None:
        batch.handed = True
        self._handed(batch.batch_id)

    def _do(self, batch: HookedBatch, step: Step) -> None:
        task = asyncio.ensure_future(self._tried(batch, step))
        self._tasks[task] = batch.worker
        task.add_done_callback(self._tasks.pop)

    async def _tried(self, batch: HookedBatch, step: Step) -> None:
        try:
            await step(batch)
        except Exception as error:
            self._fail(batch, error)


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
        # Not the hook was cancelled, but something that it awaited. The callers still wait for answers.
        return list(copies(model_error(hook.__name__, error), len(values)))
    except Exception as error:
        return list(copies(model_error(hook.__name__, error), len(values)))
    try:
        return answers_of(returned, len(values), hook.__name__)
    except ModelError as error:
        return list(copies(error, len(values)))
