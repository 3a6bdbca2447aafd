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
from typing import Any

from weir.errors import Cancelled, WeirError
from weir.messages import OBJECT, Batch, EventKind, Events, Timing
from weir.model import Example, Model, is_tensor_model
from weir.workers.run.codecs import Reader, Writer
from weir.workers.run.steps import ENDS_THE_PROCESS, Prediction, PreparedBatch, ValuesOrErrors, has_failed, takes
from weir.workers.run.streaming import StreamingRun


def warmup_batches(model: type[Model], max_batch_size: int) -> Iterator[Batch]:
    """Yield a batch of each warm-up size, filled with the model's examples in turn; none if there are no examples.

    An entry of a tensor model has as many rows as its example, so such a batch may have fewer entries than its size says.
    """
    items = [example.item if isinstance(example, Example) else example for example in model.examples]
    if not items:
        return
    for size in warmup_sizes(model, max_batch_size):
        yield Batch(0, list(_filled(model, items, size)), OBJECT, OBJECT)


def warmup_sizes(model: type[Model], max_batch_size: int) -> list[int]:
    """Return the batch sizes to warm up at, in rising order."""
    if model.warmup_sizes is not None:
        return sorted({min(size, max_batch_size) for size in model.warmup_sizes})
    return sorted({1, math.isqrt(max_batch_size), max_batch_size})


def _filled(model: type[Model], items: list[Any], size: int) -> Iterator[Any]:
    if not is_tensor_model(model):
        return itertools.islice(itertools.cycle(items), size)
    from weir.workers.run.tensors import repeated

    return iter(repeated(model, items[0], size))  # one example, for all rows of a batch have the same shape


logger = logging.getLogger("weir")


def load_shared(model_class: type[Model], params: dict[str, Any], max_batch_size: int) -> Model:
    """Return a model that has loaded what its workers share. Raises whatever the constructor and `load_shared` raise."""
    model = model_class(**params)
    model.max_batch_size = max_batch_size  # type: ignore[misc]  # what holds here, not the class's default
    model.load_shared()
    return model


class Runner:
    """Owns one instance of a model and runs batches through it, from any thread, one at a time.

    `fatal` are the exceptions that are passed on, because they end the process or thread; any other that the model raises is the error of
    entries. `label` is what the model is served as (Service.label). `open_place` returns shared memory of so many bytes for a result, or None
    if there is no room. `shared` is the model, if it has been made already and has loaded what its workers share.
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
        """Construct the model, `load` it and warm it up. Raises whatever the model raises, and the error that an example got in the warm-up."""
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
        """Whether the model may read arrays in shared memory: it neither writes to them nor keeps them."""
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
        """Predict, postprocess, validate and encode. Return the batch's final events, one for each entry.

        Entries in `cancelled` are left out of `predict`. `restarted` is called before `predict` is called again for a part of the batch: a limit
        on its time starts anew.
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
        """Do what `compute` does for a streaming model: yield events as `predict` yields answers, the final ones last.

        `cancelled` may grow meanwhile: the model is told. `restarted` is called when `predict` yields nothing that a caller gets, or is called
        again.
        """
        return self._streaming.run(prepared, cancelled, restarted or _nothing)

    def run(
        self, prepared: PreparedBatch, cancelled: Container[int] = (), restarted: Callable[[], None] | None = None
    ) -> Generator[Events, None, None]:
        """Yield the events of a batch of any model, the final ones last. See `compute` and `stream`."""
        if self.streaming:
            yield from self.stream(prepared, cancelled, restarted)
        else:
            yield self.compute(prepared, cancelled, restarted)

    def stop(self) -> None:
        """Unload the model. Raises whatever it raises."""
        if takes(self._model.unload, "error", 0):
            self._model.unload(None)  # type: ignore[call-arg]  # as it has declared
        else:
            self._model.unload()

    def end(self, error: BaseException) -> None:
        """Unload a model whose `unload` takes the `error` that ended its worker; do nothing to another model. What it raises is logged."""
        if takes(self._model.unload, "error", 0):
            try:
                self._model.unload(error)  # type: ignore[call-arg]  # as it has declared
            except Exception:
                logger.exception("worker %d of %r: unload raised", self._worker_index, self._label)

    def _warm_up(self, batch: Batch) -> None:
        size = len(batch.payloads)
        prepared = self.prepare(batch)
        for events in list(self.run(prepared)):
            indices = range(size) if events.indices is None else events.indices
            for index, output in zip(indices, events.outputs, strict=True):
                if isinstance(output, WeirError):
                    output.message = f"warm-up, example {index} of {size} at once: {output.message}"
                    output.args = (output.message,)
                    raise output


def _without(column: ValuesOrErrors, cancelled: Container[int]) -> ValuesOrErrors:
    return [
        Cancelled("nobody waits for it any more") if index in cancelled else value for index, value in enumerate(column)
    ]


def _nothing() -> None:
    pass


def _kinds(outputs: ValuesOrErrors) -> list[EventKind]:
    return [EventKind.ERROR if isinstance(output, WeirError) else EventKind.DONE for output in outputs]
