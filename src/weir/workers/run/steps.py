"""The steps of a model (preprocess, predict, postprocess) for a whole batch, such that an entry that fails fails alone.

A *column* is a list with one value per entry, or a WeirError in the place of an entry that has failed. Steps leave errors as they are. A step
that the model does not override is skipped. What a model raises becomes the error that callers get: see `model_error`.
"""

import copy
import inspect
import re
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple

from weir.errors import ModelError, WeirError, counted, kind_of
from weir.messages import has_failed
from weir.model import Model, Sizes, is_tensor_model, overrides

# In a worker process these exceptions end it, which the server notices. Any other, a Rust panic or a CancelledError too, is an error of the
# item or the batch.
ENDS_THE_PROCESS: tuple[type[BaseException], ...] = (SystemExit, KeyboardInterrupt)

# The text of an exception may be a whole array; of it, and of the traceback, only so many characters are kept.
MAX_TEXT = 2_000
MAX_TRACEBACK = 50_000

Fault = Callable[[BaseException, Any], WeirError]


def model_error(what: str, error: BaseException, hint: str = "") -> ModelError:
    """Return the ModelError for an exception that `what` (predict, postprocess, ...) raised; the cause is `error`. `hint` ends its message."""
    failure = ModelError(
        f"{what} raised {type(error).__name__}: {_text(error)}{hint}",
        original_type=_qualified_name(type(error)),
        remote_traceback=_traceback(error),
    )
    failure.__cause__ = error
    return failure


def fault_of(what: str) -> Fault:
    """Return the function that makes an item's error of an exception that `what` raised for it: a WeirError stays as it is."""

    def fault(error: BaseException, _item: Any) -> WeirError:
        return error if isinstance(error, WeirError) else model_error(what, error)

    return fault


def copies(error: WeirError, count: int) -> list[WeirError]:
    """Return `count` copies of `error`, one for each caller: they raise them independently of each other."""
    made = [error]
    for _ in range(count - 1):
        another = copy.copy(error)
        another.__cause__ = error.__cause__
        made.append(another)
    return made[:count]


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a __str__ that raises costs its text, and nothing else
        return "(its text cannot be had)"
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."


def _qualified_name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _traceback(error: BaseException) -> str:
    """Return the traceback from the model's first line on, without Weir's lines above it."""
    try:
        lines = traceback.format_exception(type(error), error, _of_the_model(error.__traceback__))
        return "".join(lines)[:MAX_TRACEBACK]
    except Exception:  # as for _text
        return ""


def _of_the_model(frames: TracebackType | None) -> TracebackType | None:
    below = frames
    while below is not None and below.tb_frame.f_globals.get("__name__", "").startswith("weir."):
        below = below.tb_next
    return below or frames


ValuesOrErrors = list[Any]
Fatal = tuple[type[BaseException], ...]


class PreparedBatch(NamedTuple):
    """A batch that has been decoded, validated and preprocessed. `column` is what `predict` takes, `heads` what the Writer must know of each
    entry besides its answer, `seconds` how long it took, and `share` that of its Batch."""

    batch_id: int
    accepts: str | list[str]
    column: ValuesOrErrors
    heads: ValuesOrErrors | None
    seconds: float
    share: int = 1


def each(
    function: Callable[..., Any],
    column: ValuesOrErrors,
    fault: Fault,
    *more: ValuesOrErrors,
    fatal: Fatal = ENDS_THE_PROCESS,
) -> ValuesOrErrors:
    """Return the results of `function` for each value of `column`, with the values of `more` in the same place as further arguments.

    Each value is passed exactly once. If `function` raises, the result is the error that `fault` makes of the exception and the value.
    Exceptions of the types in `fatal` are passed on.
    """
    if has_failed(column):
        function = _sparing_failed(function)
    results: ValuesOrErrors = []
    iterators = [iter(values) for values in (column, *more)]
    while len(results) < len(column):
        try:
            results.extend(map(function, *iterators))  # goes on after the value that raised
            if len(results) < len(column):
                raise RuntimeError("StopIteration")  # which ends `map` silently
        except BaseException as error:
            if isinstance(error, fatal):
                raise
            results.append(fault(error, column[len(results)]))
    return results


def _sparing_failed(function: Callable[..., Any]) -> Callable[..., Any]:
    def spare(value: Any, *more: Any) -> Any:
        return value if isinstance(value, WeirError) else function(value, *more)

    return spare


class TogetherStep:
    """A step that takes all entries at once: predict, and the batch forms of the other steps.

    `call` gets a list of values. `judge` gets what `call` returned, and the values, and returns one result per value; if it raises a WeirError,
    all of them get it. If `call` itself raises and `halves` is true, it is called again for each half of the values, so that only the values
    that make it raise get the error.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[list[Any]], Any],
        judge: Callable[[Any, list[Any]], ValuesOrErrors],
        *,
        halves: bool,
        fatal: Fatal,
    ) -> None:
        self._name = name
        self._call = call
        self._judge = judge
        self._halves = halves
        self._fatal = fatal

    def run(self, column: ValuesOrErrors, restarted: Callable[[], None] | None = None) -> ValuesOrErrors:
        """Return the column of results. `restarted` is called before each call but the first."""
        if not has_failed(column):
            return self._run(column, restarted)
        results = iter(self._run([value for value in column if not isinstance(value, WeirError)], restarted))
        return [value if isinstance(value, WeirError) else next(results) for value in column]

    def _run(self, values: list[Any], restarted: Callable[[], None] | None) -> ValuesOrErrors:
        if not values:
            return []
        try:
            returned = self._call(values[:])  # a copy: a model may do what it likes with its list
            if isinstance(returned, Iterator):  # a generator runs the model's own code only now
                returned = listed(returned, len(values))
        except BaseException as error:
            if isinstance(error, self._fatal):
                raise
            if len(values) == 1 or not self._halves:
                return self._failed(error, values)
        else:
            try:
                return self._judge(returned, values)
            except WeirError as error:
                return copies(error, len(values))
        # Here the exception is gone, and with it the frames that hold what `call` had allocated.
        middle = len(values) // 2
        results: ValuesOrErrors = []
        for half in (values[:middle], values[middle:]):
            if restarted is not None:
                restarted()
            results += self._run(half, restarted)
        return results

    def _failed(self, error: BaseException, values: list[Any]) -> ValuesOrErrors:
        if len(values) == 1 and isinstance(error, WeirError):
            return [error]
        hint = hint_for_one(self._name) if raised_by_a_list(error, values) else ""
        return list(copies(model_error(self._name, error, hint), len(values)))


def takes(method: Callable[..., Any], name: str, place: int) -> bool:
    """Return whether the bound `method` takes an optional argument of the contract: its positional parameter at `place` (from 0) is required or
    is called `name`, or it takes any number of arguments."""
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return False  # written in C, without a signature
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(positional) <= place:
        return any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return positional[place].default is inspect.Parameter.empty or positional[place].name == name


def filling(
    sizes: Sizes, call: Callable[[list[Any]], Any], judge: Callable[[Any, list[Any]], list[Any]]
) -> tuple[Callable[[list[Any]], Any], Callable[[Any, list[Any]], list[Any]]]:
    """Return `call` and `judge` (see TogetherStep) such that lists of items are filled up to an allowed size with copies of the last item, and
    the answers to those are dropped."""

    def filled(items: list[Any]) -> list[Any]:
        return items + items[-1:] * (sizes.filled(len(items)) - len(items))

    def called(items: list[Any]) -> Any:
        more = filled(items)
        returned = call(more)
        return listed(returned, len(more)) if isinstance(returned, Iterator) else returned

    return called, lambda returned, items: judge(returned, filled(items))[: len(items)]


class Prediction:
    """Runs the columns of a batch through one model instance, which has been loaded."""

    def __init__(self, model: Model, *, retry_in_halves: bool, fatal: Fatal, max_batch_size: int = 1) -> None:
        kind = type(model)
        self._model = model
        self._fatal = fatal
        self._preprocess = model.preprocess if overrides(kind, "preprocess") else None
        self._postprocess = model.postprocess if overrides(kind, "postprocess") else None
        self._takes_preprocessed = self._postprocess is not None and takes(self._postprocess, "preprocessed", 1)

        def together(
            name: str, call: Callable[[list[Any]], Any], judge: Callable[[Any, list[Any]], ValuesOrErrors]
        ) -> TogetherStep:
            return TogetherStep(name, call, judge, halves=retry_in_halves, fatal=fatal)

        def batch_form(name: str) -> TogetherStep | None:
            return together(name, getattr(model, name), judge_of(name)) if overrides(kind, name) else None

        self._preprocess_batch = batch_form("preprocess_batch")
        self._postprocess_batch = batch_form("postprocess_batch")
        if is_tensor_model(kind):
            from weir.workers.run.tensors import Splitter, Stacker, input_buffers, separated

            if kind.separate:
                self._predict = together("predict", *separated(model, judge_of("predict")))
            else:
                join = Stacker(kind, input_buffers(model, max_batch_size))
                self._predict = together("predict", lambda entries: model.predict(join(entries)), Splitter(kind))
        else:
            call, judge = model.predict, judge_of("predict")
            sizes = Sizes(kind)
            self._predict = together("predict", *(filling(sizes, call, judge) if sizes else (call, judge)))

    def preprocess(self, items: ValuesOrErrors) -> ValuesOrErrors:
        """Return what `predict` takes."""
        if self._preprocess_batch is not None:
            return self._preprocess_batch.run(items)
        if self._preprocess is None:
            return items
        return each(self._preprocess, items, fault_of("preprocess"), fatal=self._fatal)

    def predict(self, preprocessed: ValuesOrErrors, restarted: Callable[[], None] | None) -> ValuesOrErrors:
        """Return the model's answers. `restarted` is called each time before `predict` is called again."""
        return self._predict.run(preprocessed, restarted)

    def postprocess(self, answers: ValuesOrErrors, preprocessed: ValuesOrErrors) -> ValuesOrErrors:
        """Return what the callers get."""
        if self._postprocess_batch is not None:
            return self._postprocess_batch.run(answers)
        if self._postprocess is None:
            return answers
        more = (preprocessed,) if self._takes_preprocessed else ()
        return each(self._postprocess, answers, fault_of("postprocess"), *more, fatal=self._fatal)


def judge_of(name: str) -> Callable[[Any, list[Any]], ValuesOrErrors]:
    """Return the function that makes a column of what the model's method `name` returned. See `answers_of`."""
    return lambda returned, items: answers_of(returned, len(items), name)


def answers_of(returned: Any, count: int, name: str) -> list[Any]:
    """Return the answers in what `name` returned for `count` items: a list, a tuple, an array or tensor, or an iterator, of so many.

    Raises ModelError for anything else. Other types that have as many elements are refused too: a mapping, a table, a text or a named tuple
    is one object about the whole batch, and its parts would go to the wrong callers.
    """
    if type(returned) is list and len(returned) == count:
        return returned
    kind: Any = type(returned)
    what, of = kind_of(returned), counted(count, "item")
    if not (isinstance(returned, (list, Iterator)) or kind is tuple or _is_array(kind)):
        raise ModelError(
            f"{name} returned {what} for {of}, must be a list of {count} (or a tuple, an array or a generator){hint_for_one(name)}"
        )
    try:
        answers = listed(returned, count)
    except Exception as error:  # a generator has the model's own code in it; an array of no dimensions
        raise ModelError(f"{name} returned {what} that is no list ({error})") from error
    if len(answers) != count:
        found = f"more than {count}" if isinstance(answers, Beginning) else len(answers)
        noun = "result" if found == 1 else "results"
        raise ModelError(f"{name} returned {found} {noun} for {of}, must be one for each{hint_for_one(name)}")
    return answers


def hint_for_one(name: str, instead: str = "return [f(item) for item in batch]") -> str:
    """Return what an error of the method `name` ends with where its author may have written it for one item."""
    if name != "predict":
        return ""
    return f"; predict gets a list of items, so you may have written it for one: {instead}"


def raised_by_a_list(error: BaseException, items: list[Any]) -> bool:
    """Return whether `error` complains of a list (or a sequence) though none of `items` is one: then it probably complains of the batch."""
    if not isinstance(error, (TypeError, AttributeError)):
        return False
    words = re.findall(r"\w+", _text(error))
    return any(
        word in words and not any(isinstance(item, kind) for item in items)
        for word, kind in (("list", list), ("sequence", Sequence))
    )


class Beginning(list[Any]):
    """The beginning of an iterator that has more elements than it should; perhaps it has no end."""


def listed(returned: Any, count: int) -> list[Any]:
    """Return what `returned` iterates over as a list; of an iterator that has more elements than `count`, its Beginning."""
    if not isinstance(returned, Iterator):
        return returned if isinstance(returned, list) else list(returned)
    answers = list(islice(returned, count + 1))
    return answers if len(answers) <= count else Beginning(answers)


@lru_cache(maxsize=256)
def _is_array(kind: Hashable) -> bool:
    """Return whether `kind` is an array of numpy or jax, or a tensor of torch or TensorFlow: what other libraries may read as one."""
    return hasattr(kind, "__dlpack__") or (kind.__module__.partition(".")[0] == "tensorflow" and hasattr(kind, "numpy"))
