"""What happens to a batch inside a worker: bytes in, bytes out, and one bad item fails alone.

payloads ─ read ─ preprocess ─┤ prepare         (decode, validate)
                    predict ─┐
   postprocess ─ write ──────┤ compute          (validate, encode)
"""

import itertools
import logging
import math
from collections.abc import Callable, Container, Generator, Iterator
from time import perf_counter
from typing import Any, NamedTuple

from weir.errors import Cancelled, WeirError
from weir.messages import OBJECT, Batch, EventKind, Events, Timing
from weir.model import Example, Model, is_tensor_model
from weir.workers.faults import ENDS_THE_PROCESS
from weir.workers.run.codecs import Reader, Writer
from weir.workers.run.steps import Prediction, ValuesOrErrors, has_failed, takes_first
from weir.workers.run.streaming import StreamingRun

# Warm-up: the model's examples, at several batch sizes, before anybody is served.


def warmup_batches(model: type[Model], max_batch_size: int) -> Iterator[Batch]:
    """Return a batch of each warm-up size, filled with the examples in turn; none if there are no examples.

    An entry of a tensor model has as many rows as its example, so a batch may be smaller than its size says.
    """
    items = [example.item if isinstance(example, Example) else example for example in model.examples]
    if not items:
        return
    for size in warmup_sizes(model, max_batch_size):
        yield Batch(0, list(_filled(model, items, size)), OBJECT, OBJECT)


def warmup_sizes(model: type[Model], max_batch_size: int) -> list[int]:
    """Return the sizes to warm up at, in rising order."""
    if model.warmup_sizes is not None:
        return sorted({min(size, max_batch_size) for size in model.warmup_sizes})
    return sorted({1, math.isqrt(max_batch_size), max_batch_size})


def _filled(model: type[Model], items: list[Any], size: int) -> Iterator[Any]:
    if not is_tensor_model(model):
        return itertools.islice(itertools.cycle(items), size)
    from weir.workers.run.tensors import repeated

    return iter(repeated(model, items[0], size))  # one example, for all rows of a batch have the same shape


logger = logging.getLogger("weir")


class PreparedBatch(NamedTuple):
    """A batch that has been decoded, validated and preprocessed."""

    batch_id: int
    accepts: str | list[str]
    column: ValuesOrErrors
    heads: ValuesOrErrors | None  # what the Writer must know of the entries besides their answers
    seconds: float  # that it took


class Runner:
    """Owns one instance of a model and runs batches through it, from any thread, one `compute` at a time.

    `fatal` are the exceptions that are passed on, as they end the place that the runner is in; every other that the
    model raises is some entry's error. `label` is what the model is served as (Service.label). `open_place` returns shared
    memory for a result, of so many bytes, if there is room. `shared` is the model if it has been made already, and has loaded what
    its workers share.
    """

    def __init__(
        self, model_class: type[Model], params: dict[str, Any], *, worker_index: int, max_batch_size: int,
        retry_in_halves: bool, fatal: tuple[type[BaseException], ...] = ENDS_THE_PROCESS, label: str = "",
        open_place: Callable[[int], memoryview | None] | None = None, shared: Model | None = None,
    ) -> None:  # fmt: skip
        self._class = model_class
        self._params = params
        self._worker_index = worker_index
        self._max_batch_size = max_batch_size
        self._retry_in_halves = retry_in_halves
        self._fatal = fatal
        self._label = label
        self._open_place = open_place
        self._shared = shared
        self._model: Model
        self._reader: Reader
        self._prediction: Prediction
        self._writer: Writer
        self._streaming: StreamingRun
        self.streaming = model_class.streaming

    def start(self) -> None:
        """Construct the model, `load` it and warm it up. Raises whatever the model raises; in the warm-up, the WeirError
        that an example got for an answer."""
        model = self._class(**self._params) if self._shared is None else self._shared
        model.worker_index = self._worker_index
        model.max_batch_size = self._max_batch_size  # type: ignore[misc]  # what holds here, not the class's default
        if self._open_place is not None and is_tensor_model(self._class):
            from weir.workers.run.tensors import allocator

            model._allocate = allocator(self._open_place)
        if self._shared is None:
            model.load_shared()
        model.load()
        self._model = model
        self._reader = Reader(model, self._fatal)
        self._prediction = Prediction(
            model, retry_in_halves=self._retry_in_halves, fatal=self._fatal, max_batch_size=self._max_batch_size
        )
        self._writer = Writer(model, self._fatal, self._label)
        self._streaming = StreamingRun(
            model, self._prediction, self._writer, retry_in_halves=self._retry_in_halves, fatal=self._fatal
        )
        try:
            for batch in warmup_batches(self._class, self._max_batch_size):
                self._warm_up(batch)
        except BaseException as error:
            self.end(error)
            raise

    @property
    def borrows(self) -> bool:
        """Whether arrays may be lent to the model, which neither writes to them nor keeps them."""
        if not is_tensor_model(self._class):
            return False
        return not (self._class.streaming and self._class.owns_inputs)  # otherwise the arrays are copied when joined

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Decode, validate and preprocess. May run in another thread while `compute` runs for the batch before."""
        began = perf_counter()
        items = self._reader.read(batch.payloads, batch.content_types)
        heads = self._reader.heads(items, batch.content_types)
        column = self._prediction.preprocess(items)
        return PreparedBatch(batch.batch_id, batch.accepts, column, heads, perf_counter() - began)

    def compute(
        self, prepared: PreparedBatch, cancelled: Container[int] = (), restarted: Callable[[], None] | None = None
    ) -> Events:
        """Predict, postprocess, validate and encode: the batch's final Events, one for each entry.

        Entries in `cancelled` are left out of `predict`. `restarted` is called before `predict` is called again for
        a part of the batch: a limit on its time starts anew.
        """
        column = _without(prepared.column, cancelled) if cancelled else prepared.column
        began = perf_counter()
        answers = self._prediction.predict(column, restarted)
        predicted = perf_counter()
        answers = self._prediction.postprocess(answers, column)
        outputs = self._writer.write(answers, prepared.accepts, prepared.heads)
        timing = Timing(prepared.seconds, predicted - began, perf_counter() - predicted)
        kinds = _kinds(outputs) if has_failed(outputs) else None
        return Events(prepared.batch_id, outputs, kinds=kinds, timing=timing)

    def stream(
        self, prepared: PreparedBatch, cancelled: Container[int] = (), restarted: Callable[[], None] | None = None
    ) -> Generator[Events, None, None]:
        """Do what `compute` does for a streaming model: yield Events as `predict` gives answers, the final ones last.

        `cancelled` may grow meanwhile: the model is told. `restarted` is called when `predict` yields nothing for anybody,
        or is called again.
        """
        return self._streaming.run(
            prepared.batch_id, prepared.column, prepared.accepts, prepared.heads, prepared.seconds, cancelled, restarted
        )

    def stop(self) -> None:
        """Unload the model. Raises whatever it raises."""
        if takes_first(self._model.unload, "error"):
            self._model.unload(None)  # type: ignore[call-arg]  # as it has declared
        else:
            self._model.unload()

    def end(self, error: BaseException) -> None:
        """Unload a model that wants to know what ended its worker; others hear nothing of that. What it raises is logged."""
        if takes_first(self._model.unload, "error"):
            try:
                self._model.unload(error)  # type: ignore[call-arg]  # as it has declared
            except Exception:
                logger.exception("worker %d of %r: unload raised", self._worker_index, self._label)

    def _warm_up(self, batch: Batch) -> None:
        size = len(batch.payloads)
        prepared = self.prepare(batch)
        if self.streaming:
            pairs = [
                pair
                for events in self.stream(prepared)
                for pair in zip(events.indices or (), events.outputs, strict=True)
            ]
        else:
            pairs = list(enumerate(self.compute(prepared).outputs))
        for index, output in pairs:
            if isinstance(output, WeirError):
                output.message = f"warm-up, example {index} of {size} at once: {output.message}"
                output.args = (output.message,)
                raise output


def _without(column: ValuesOrErrors, cancelled: Container[int]) -> ValuesOrErrors:
    return [
        Cancelled("nobody waits for it any more") if index in cancelled else value for index, value in enumerate(column)
    ]


def _kinds(outputs: ValuesOrErrors) -> list[EventKind]:
    return [EventKind.ERROR if isinstance(output, WeirError) else EventKind.DONE for output in outputs]
