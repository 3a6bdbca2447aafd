"""Runs batches inside a worker: bytes come in, bytes go out, and one bad item fails alone.

payloads ─ read ─ preprocess ─┤ prepare         (decode, validate)
                    predict ─┐
   postprocess ─ write ──────┤ compute          (validate, encode)

The `predict` of a streaming model is a generator: `StreamingRun` runs it, and sends what it yields at once.

A worker may have several models: `HostedRunner` has a Runner for each, and the id of a batch says for which it is.
"""

import copy
import itertools
import logging
import math
from collections.abc import Callable, Container, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index as as_index
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

from weir.errors import Cancelled, ModelError, WeirError, kind_of
from weir.messages import OBJECT, Batch, EventKind, Events, Timing
from weir.metrics import MetricReport, ModelMetrics
from weir.model import Example, Last, Model, is_tensor_model
from weir.workers.run.steps import (
    ENDS_THE_PROCESS,
    Fatal,
    Prediction,
    PreparedBatch,
    Reader,
    ValuesOrErrors,
    Writer,
    copies,
    each,
    fault_of,
    hint_for_one,
    model_error,
    raised_by_a_list,
    takes,
)

logger = logging.getLogger("weir")

STREAMED_FOR_ONE = hint_for_one("predict", "yield {index: result, ...} for all items")
Yielded = dict[int, Any]  # what `predict` yields: responses by index in the list that it got


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


def load_shared(model_class: type[Model], params: dict[str, Any], max_batch_size: int) -> Model:
    """Return a model that has loaded what its workers share. Raises whatever the constructor and `load_shared` raise."""
    model = model_class(**params)
    model.max_batch_size = max_batch_size  # type: ignore[misc]  # what holds here, not the class's default
    model.load_shared()
    return model


class RunnableModel(NamedTuple):
    """A model as a Runner runs it: its class, the arguments of its constructor, the size of its batches in rows, whether a batch that fails runs again
    in halves, and the `label` that it is served as (Service.label)."""

    kind: type[Model]
    params: dict[str, Any]
    max_batch_size: int
    retry_in_halves: bool = True
    label: str = ""


class Runner:
    """Owns one instance of a model and runs batches through it, from any thread, one at a time; a `twin` runs others meanwhile.

    `fatal` are the exceptions that are passed on, because they end the process or thread; any other that the model raises is the error of
    entries. `open_place` returns shared memory of a size in bytes for a result, or None
    if there is no room. `shared` is the model, if it has been made already and has loaded what its workers share.
    """

    def __init__(
        self,
        runs: RunnableModel,
        worker_index: int,
        *,
        fatal: tuple[type[BaseException], ...] = ENDS_THE_PROCESS,
        open_place: Callable[[int], memoryview | None] | None = None,
        shared: Model | None = None,
    ) -> None:
        self._class, self._params, self._max_batch_size, self._retry_in_halves, self._label = runs
        self._worker_index = worker_index
        self._fatal = fatal
        self._open_place = open_place
        self._shared = shared
        self._model: Model
        self._reader: Reader
        self._prediction: Prediction
        self._writer: Writer
        self._streaming: StreamingRun
        self.streaming = self._class.streaming

    def start(self) -> None:
        """Construct the model, `load` it and warm it up. Raises whatever the model raises, and the error that an example got in the warm-up."""
        for _ in self.starting():
            pass

    def starting(self) -> Iterator[bool]:
        """Do what `start` does; yield True before each batch of the warm-up and False after it."""
        model = self._class(**self._params) if self._shared is None else self._shared
        model.worker_index = self._worker_index
        model.max_batch_size = self._max_batch_size  # type: ignore[misc]  # what holds here, not the class's default
        if self._open_place is not None and is_tensor_model(self._class):
            from weir.workers.run.tensors import allocator

            model._allocate = allocator(self._open_place)
        if self._shared is None:
            model.load_shared()
        model.load()
        self._use(model)
        metrics = self._metrics()
        if metrics is not None:
            metrics.muted = True
        try:
            for batch in warmup_batches(self._class, self._max_batch_size):
                yield True
                self._warm_up(batch)
                yield False
        except BaseException as error:
            self.end(error)
            raise
        if metrics is not None:
            metrics.muted = False

    def twin(self) -> "Runner":
        """Return a runner of the same instance of the model, which has been started, for batches that run at the same time in another thread."""
        twin = copy.copy(self)
        twin._use(self._model)
        return twin

    def _use(self, model: Model) -> None:
        self._model = model
        self._reader = Reader(model, self._fatal)
        self._prediction = Prediction(
            model, retry_in_halves=self._retry_in_halves, fatal=self._fatal, max_batch_size=self._max_batch_size
        )
        self._writer = Writer(model, self._fatal, self._label)
        self._streaming = StreamingRun(
            model, self._prediction, self._writer, retry_in_halves=self._retry_in_halves, fatal=self._fatal
        )

    def measured(self) -> list[MetricReport] | None:
        """Return what the model's own metrics have become since the last call, or since it was constructed; None for nothing."""
        if "metrics" not in vars(self._model):
            return None
        metrics = self._metrics()
        return None if metrics is None or metrics.muted else metrics.take()

    def _metrics(self) -> ModelMetrics | None:
        """Return the model's own metrics, if it uses any; what else it may call `metrics` is its own."""
        metrics = vars(self._model).get("metrics")
        return metrics if isinstance(metrics, ModelMetrics) else None

    @property
    def borrows(self) -> bool:
        """Whether the model may read arrays in shared memory: it neither writes to them nor keeps them."""
        if not is_tensor_model(self._class):
            return False
        return not (self._class.streaming and self._class.owns_inputs)  # otherwise the arrays are copied when joined

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Decode, validate and preprocess. May run in another thread while `compute` runs for the batch before."""
        began = perf_counter()
        reader = self._reader
        items = reader.read(batch.payloads, batch.content_types)
        heads = reader.heads(items, batch.content_types) if reader.has_heads else None
        column = self._prediction.preprocess(items)
        return PreparedBatch(batch.batch_id, batch.accepts, column, heads, perf_counter() - began, batch.share)

    def compute(
        self, prepared: PreparedBatch, cancelled: Container[int] = (), restarted: Callable[[], None] | None = None
    ) -> Events:
        """Predict, postprocess, validate and encode. Return the batch's final events, one for each entry.

        Entries in `cancelled` are left out of `predict`. `restarted` is called before `predict` is called again for a part of the batch: a limit
        on its time starts again.
        """
        column = _without(prepared.column, cancelled) if cancelled else prepared.column
        began = perf_counter()
        responses = self._prediction.predict(column, restarted)
        predicted = perf_counter()
        responses = self._prediction.postprocess(responses, column)
        outputs = self._writer.write(responses, prepared.accepts, prepared.heads)
        timing = Timing(prepared.seconds, predicted - began, perf_counter() - predicted)
        return Events(prepared.batch_id, outputs, timing=timing, measured=self.measured())

    def stream(
        self, prepared: PreparedBatch, cancelled: Container[int] = (), restarted: Callable[[], None] | None = None
    ) -> Generator[Events, None, None]:
        """Do what `compute` does for a streaming model: yield events as `predict` yields responses, the final ones last.

        `cancelled` may grow meanwhile, and the model gets the indices. `restarted` is called when `predict` yields nothing that a caller gets, or is called
        again.
        """
        for events in self._streaming.run(prepared, cancelled, restarted or _nothing):
            events.measured = self.measured()
            yield events

    def run(
        self, prepared: PreparedBatch, cancelled: Container[int] = (), restarted: Callable[[], None] | None = None
    ) -> Generator[Events, None, None]:
        """Yield the events of a batch of any model, the final ones last. See `compute` and `stream`."""
        self._model._share = prepared.share
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
                    output.message = (
                        f"warm-up of {self._label!r}, example {index} in a batch of {size}: {output.message}"
                    )
                    output.args = (output.message,)
                    raise output


def _without(column: ValuesOrErrors, cancelled: Container[int]) -> ValuesOrErrors:
    return [
        Cancelled("no caller is waiting for it any more") if index in cancelled else value
        for index, value in enumerate(column)
    ]


def _nothing() -> None:
    pass


MOST_HOSTED = 1024  # models in one worker


def hosted_id(batch_id: int, index: int) -> int:
    """Return the id that a batch of the hosted model at `index` has in its worker.

    It is one number because each model numbers its own batches: the frames, and all that keeps a batch by its id, need no second number.
    """
    return batch_id * MOST_HOSTED + index


def split_id(batch_id: int) -> tuple[int, int]:
    """Return what `hosted_id` took: the id of a batch, and the index of its model."""
    return divmod(batch_id, MOST_HOSTED)


class Hosted(NamedTuple):
    """One of the models of a worker: its class and parameters (see source.py), its label, and the settings of its Runner."""

    source: bytes
    label: str
    max_batch_size: int
    retry_in_halves: bool


class HostedModels(Model):
    """The models of a worker that has several. A HostedRunner runs them."""

    def __init__(self, hosted: list[Hosted]) -> None:
        from weir.workers.source import unpack_source  # which loads pickles; other workers have used it by now

        self.hosted = hosted
        self.models: list[Model] = []
        for one in hosted:
            kind, params = unpack_source(one.source)
            with _naming(one.label):
                self.models.append(kind(**params))

    def load_shared(self) -> None:
        """Load what is shared by the workers of each model."""
        for one, model in zip(self.hosted, self.models, strict=True):
            with _naming(one.label):
                model.max_batch_size = one.max_batch_size  # type: ignore[misc]  # see Runner.start
                model.load_shared()

    def predict(self, batch: list[Any]) -> list[Any]:
        """Do not call this: each of the models has its own."""
        raise NotImplementedError  # HostedRunner calls those of the models, but a model must have one


@contextmanager
def _naming(label: str) -> Iterator[None]:
    """Have the message of what is raised in the block begin with `label`."""
    try:
        yield
    except WeirError as error:
        error.message = f"{label}: {error.message}"
        error.args = (error.message,)
        raise
    except Exception as error:
        raise model_error(f"{label}: it", error) from error


class HostedRunner:
    """A Runner for each of several models, which share one worker. The methods are those of Runner. All models are loaded, or none."""

    borrows = False

    def __init__(self, params: dict[str, Any], *, worker_index: int, shared: Model | None) -> None:
        models = load_shared(HostedModels, params, 1) if shared is None else shared
        assert isinstance(models, HostedModels)
        self._runners = [
            Runner(
                RunnableModel(type(model), {}, one.max_batch_size, one.retry_in_halves, one.label),
                worker_index,
                shared=model,
            )
            for one, model in zip(models.hosted, models.models, strict=True)
        ]
        self._labels = [one.label for one in models.hosted]

    def starting(self) -> Iterator[bool]:
        """Load all models and warm them up, in order; see Runner.starting."""
        for label, runner in zip(self._labels, self._runners, strict=True):
            with _naming(label):
                yield from runner.starting()

    def twin(self) -> "HostedRunner":
        """Return a runner of the same models for another thread."""
        twin = copy.copy(self)
        twin._runners = [runner.twin() for runner in self._runners]
        return twin

    def measured(self) -> None:
        """Return None: what their own metrics are after the start comes with the first batch of each."""

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Prepare a batch of the model that its id says."""
        return self._runners[split_id(batch.batch_id)[1]].prepare(batch)

    def run(
        self, prepared: PreparedBatch, cancelled: Container[int] = (), restarted: Callable[[], None] | None = None
    ) -> Generator[Events, None, None]:
        """Yield the events of a batch."""
        return self._runners[split_id(prepared.batch_id)[1]].run(prepared, cancelled, restarted)

    def stop(self) -> None:
        """Unload all models."""
        for runner in self._runners:
            runner.stop()

    def end(self, error: BaseException) -> None:
        """Unload those models that take the error which ended their worker."""
        for runner in self._runners:
            runner.end(error)


class Ends(NamedTuple):
    """The end of entries: an error each, or (None) an end without a further response."""

    entries: list[int]
    error: WeirError | None


class StreamProgress:
    """One run of `predict`: which entries it is for, and which of them have ended.

    `predict` numbers the items that it gets from 0; `entries` are their indices in the batch. `cancelled` grows when callers leave.
    """

    def __init__(self, entries: list[int], cancelled: Container[int]) -> None:
        self.entries = entries
        self.has_yielded = False
        self._cancelled = cancelled
        self._ended: set[int] = set()

    @property
    def left(self) -> frozenset[int]:
        """The items, as `predict` numbers them, that have ended or that no caller waits for."""
        return frozenset(
            index for index, entry in enumerate(self.entries) if index in self._ended or entry in self._cancelled
        )

    @property
    def over(self) -> bool:
        """Whether that is so of all items."""
        return len(self.left) == len(self.entries)

    def open_entries(self) -> list[int]:
        """Return the entries, by their indices in the batch, that go on."""
        left = self.left
        return [entry for index, entry in enumerate(self.entries) if index not in left]

    def ended(self, places: list[int]) -> None:
        """Note that these items, as `predict` numbers them, have ended."""
        self._ended.update(places)


class StreamingRun:
    """Runs batches through the generator `predict` of one model instance, one batch at a time."""

    def __init__(
        self, model: Model, prediction: Prediction, writer: Writer, *, retry_in_halves: bool, fatal: Fatal
    ) -> None:
        self._model = model
        self._prediction = prediction
        self._writer = writer
        self._halves = retry_in_halves
        self._fatal = fatal
        self._check = _tensor_check(model) if is_tensor_model(type(model)) else None

    def run(
        self, prepared: PreparedBatch, cancelled: Container[int], restarted: Callable[[], None]
    ) -> Generator[Events, None, None]:
        """Yield the events of the batch as soon as there are any, the final ones last. Close the generator to give up.

        `restarted` is called when a limit on the time of `predict` starts again without events.
        """
        batch_id, column = prepared.batch_id, prepared.column
        refused = [entry for entry, value in enumerate(column) if isinstance(value, WeirError)]
        if refused:
            yield Events(batch_id, [column[entry] for entry in refused], indices=refused, final=False)
        entries = [entry for entry, value in enumerate(column) if not isinstance(value, WeirError)]
        batch = _StreamedBatch(prepared, cancelled, restarted)
        ends = yield from self._run(batch, entries)
        timing = Timing(prepared.seconds, batch.predict_seconds, batch.postprocess_seconds)
        yield _ends_of(batch_id, ends, final=True, timing=timing)

    def _run(self, batch: "_StreamedBatch", entries: list[int]) -> Generator[Events, None, Ends]:
        """Yield the events of `entries`; return the end of those that have not ended by then."""
        course = StreamProgress(entries, batch.cancelled)
        failure: WeirError | None = None
        if not course.over:
            try:
                yield from self._drive(batch, course)
            except WeirError as error:
                failure = error
        left = course.open_entries()
        if failure is not None and not course.has_yielded and len(left) > 1 and self._halves:
            middle = len(left) // 2
            batch.restarted()
            yield _ends_of(batch.prepared.batch_id, (yield from self._run(batch, left[:middle])), final=False)
            batch.restarted()
            return (yield from self._run(batch, left[middle:]))
        try:
            return Ends(left, failure)
        finally:
            del failure  # a local of its own traceback

    def _drive(self, batch: "_StreamedBatch", course: StreamProgress) -> Generator[Events, None, None]:
        """Run the generator until it returns, or no caller is left. Raises a WeirError for what it raised."""
        items = [batch.prepared.column[entry] for entry in course.entries]
        steps = self._started(items)
        left: frozenset[int] | None = None
        try:
            while True:
                given = self._next(steps, left, items, batch)
                if given is None:
                    return
                course.has_yielded = True
                events = self._events(batch, course, given)
                if events is None:
                    batch.restarted()
                else:
                    yield events
                left = course.left
                if len(left) == len(course.entries):
                    return
        finally:
            self._close(steps)

    def _started(self, items: list[Any]) -> Generator[Any, Any, Any]:
        try:
            steps = self._model.predict(items)
        except BaseException as error:
            self._fail(error, items)
        if not isinstance(steps, Generator):
            raise ModelError(f"predict returned {kind_of(steps)}, must be a generator as the model is streaming")
        return steps

    def _next(
        self, steps: Generator[Any, Any, Any], left: frozenset[int] | None, items: list[Any], batch: "_StreamedBatch"
    ) -> Yielded | None:
        began = perf_counter()
        try:
            given = steps.send(left)
        except StopIteration:
            return None
        except BaseException as error:
            self._fail(error, items)
        finally:
            batch.predict_seconds += perf_counter() - began
        if not isinstance(given, dict):
            raise ModelError(f"predict yielded {kind_of(given)}, must be a dict of results by index")
        return given

    def _fail(self, error: BaseException, items: list[Any]) -> NoReturn:
        try:
            if isinstance(error, (WeirError, *self._fatal)):
                raise error
            raise model_error("predict", error, STREAMED_FOR_ONE if raised_by_a_list(error, items) else "")
        finally:
            del error  # a local of its own traceback

    def _events(self, batch: "_StreamedBatch", course: StreamProgress, given: Yielded) -> Events | None:
        """Return the events of what `predict` has just yielded; None if no caller gets any of it."""
        began = perf_counter()
        left, count = course.left, len(course.entries)
        responses = {_checked_index(index, count): result for index, result in given.items()}
        live = [index for index in responses if index not in left]
        if not live:
            return None
        entries = [course.entries[index] for index in live]
        chosen = [responses[index] for index in live]
        last = [isinstance(each, Last) for each in chosen]
        outputs = self._written(batch, entries, [each.result if isinstance(each, Last) else each for each in chosen])
        kinds = [EventKind.DONE if final else EventKind.PART for final in last]
        events = Events(batch.prepared.batch_id, outputs, indices=entries, kinds=kinds, final=False)
        course.ended([index for index, kind in zip(live, events.kinds or (), strict=True) if kind != EventKind.PART])
        batch.postprocess_seconds += perf_counter() - began
        return events

    def _written(self, batch: "_StreamedBatch", entries: list[int], values: ValuesOrErrors) -> ValuesOrErrors:
        if self._check is not None:
            values = each(self._check, values, fault_of("predict"), fatal=self._fatal)
        _, accepts, column, heads, *_ = batch.prepared
        responses = self._prediction.postprocess(values, [column[entry] for entry in entries])
        return self._writer.write(
            responses,
            accepts if isinstance(accepts, str) else [accepts[entry] for entry in entries],
            None if heads is None else [heads[entry] for entry in entries],
        )

    def _close(self, steps: Generator[Any, Any, Any]) -> None:
        """End the generator. What it raises then is logged, for no caller is left."""
        try:
            steps.close()
        except BaseException as error:
            if isinstance(error, self._fatal):
                raise
            logger.exception("predict raised when its generator was closed")


@dataclass
class _StreamedBatch:
    """The batch that runs, its cancelled entries, the callback for a new start of the time limit, and how many seconds were spent in the model's
    generator and with what it yielded."""

    prepared: PreparedBatch
    cancelled: Container[int]
    restarted: Callable[[], None]
    predict_seconds: float = 0.0
    postprocess_seconds: float = 0.0


def _ends_of(batch_id: int, ends: Ends, *, final: bool, timing: Timing | None = None) -> Events:
    count = len(ends.entries)
    outputs: list[Any] = [b""] * count if ends.error is None else [*copies(ends.error, count)]
    return Events(batch_id, outputs, indices=ends.entries, kinds=[EventKind.END] * count, final=final, timing=timing)


def _checked_index(index: Any, count: int) -> int:
    """Return the index that `predict` yielded as an int. Raises ModelError if it is not the index of one of `count` items."""
    try:
        found = as_index(index)
    except TypeError:
        found = -1
    if not 0 <= found < count:
        raise ModelError(f"predict yielded a result for item {index!r:.100} of a batch of {count}")
    return found


def _tensor_check(model: Model) -> Callable[[Any], Any]:
    from weir.workers.run import tensors

    return tensors.part_of(model)
