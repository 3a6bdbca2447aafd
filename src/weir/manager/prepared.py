"""One batch on its way through the hooks: which entries go to the worker, what they became, what came back."""

from collections.abc import Sequence
from typing import Any

from weir.errors import ModelError, WeirError
from weir.manager.delivery import discard, is_block
from weir.messages import LENT, OBJECT, Batch, EventKind, Events, Timing
from weir.wire.values import DECODE, UNWRITABLE, decode, encode

MISSING = object()


class Prepared:
    """A batch on its way. `encodes`: answers come back as values and are encoded here, after a hook has seen them."""

    def __init__(self, worker: int, batch: Batch, *, encodes: bool) -> None:
        count = len(batch.payloads)
        self.worker = worker
        self.batch_id = batch.batch_id
        self.handed = False  # to the worker, or past it
        self._attempt = batch.attempt
        self._content_types = _each(batch.content_types, count)
        self._accepts = _each(batch.accepts, count)
        self._encodes = encodes
        self._payloads = list(batch.payloads)
        self._outputs: list[Any] = [MISSING] * count
        self._kinds: dict[int, int] = {}  # as the worker said of outputs
        self._cancelled: set[int] = set()
        self._inner: list[int] = []  # entries that the worker has, by its indices
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
        """Nobody waits for these entries any more; return the worker's indices of those that it has."""
        self._cancelled.update(indices)
        return [place for place, index in enumerate(self._inner) if index in indices]

    # Before the worker.

    def decode(self) -> None:
        """Decode what is JSON or msgpack; an entry that cannot be decoded has its answer."""
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
        """What `before_batch` gets: the decoded items of all entries that have no answer yet."""
        return [self._payloads[index] for index in self._open()]

    def place_items(self, items: list[Any]) -> None:
        """Take what `before_batch` returned; an error among them is its entry's answer."""
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
            accepts = [OBJECT if accept in DECODE or accept == LENT else accept for accept in accepts]
        payloads = [self._payloads[index] for index in self._inner]
        content_types = [self._content_types[index] for index in self._inner]
        return Batch(self.batch_id, payloads, _joined(content_types), _joined(accepts), self._attempt)

    # After the worker.

    def gather(self, events: Events) -> Events | None:
        """Take what the worker says; return what a streaming model gives before its batch ends, to be passed on at once."""
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
        """What `after_batch` gets: the answers, in order, without the errors."""
        return [self._outputs[index] for index in self._answered()]

    def place_answers(self, answers: list[Any]) -> None:
        """Take what `after_batch` returned."""
        for index, answer in zip(self._answered(), answers, strict=True):
            self._outputs[index] = answer

    def encode(self) -> None:
        """Encode the answers as their callers want them."""
        for index in self._answered():
            accept, output = self._accepts[index], self._outputs[index]
            if accept not in DECODE or is_block(output):
                continue
            try:
                self._outputs[index] = encode(output, accept)
            except UNWRITABLE as error:
                self._outputs[index] = ModelError(f"the answer has no form in {accept}: {error}")

    def events(self) -> Events:
        """Return the final events of the batch."""
        indices = [index for index, output in enumerate(self._outputs) if output is not MISSING]
        outputs = [self._outputs[index] for index in indices]
        kinds = [self._kind(index) for index in indices]
        whole = None if len(indices) == len(self._outputs) else indices
        return Events(
            self.batch_id,
            outputs,
            indices=whole,
            kinds=kinds if any(kind != EventKind.DONE for kind in kinds) else None,
            timing=self._timing,
        )

    def _kind(self, index: int) -> int:
        if isinstance(self._outputs[index], WeirError):
            return EventKind.ERROR
        return EventKind.END if self._kinds.get(index) == EventKind.END else EventKind.DONE

    def _open(self) -> list[int]:
        return [index for index, output in enumerate(self._outputs) if output is MISSING]

    def _answered(self) -> list[int]:
        return [
            index for index, output in enumerate(self._outputs)
            if output is not MISSING and not isinstance(output, WeirError)
        ]  # fmt: skip


def _each(types: str | list[str], count: int) -> list[str]:
    return [types] * count if isinstance(types, str) else list(types)


def _joined(types: list[str]) -> str | list[str]:
    return types[0] if types.count(types[0]) == len(types) else types
