"""The steps of a model (preprocess, predict, postprocess) for a whole batch, such that one entry that fails fails alone.

A *column* is a list with one value per entry, or a WeirError where the entry has failed. Steps leave those as they are. A step that the model does not
override is skipped.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from weir.errors import InvalidRequest, ModelError, WeirError
from weir.model import Model, is_tensor_model, overrides
from weir.workers.faults import ENDS_THE_PROCESS, Fault, copies, fault_of, model_error

ValuesOrErrors = list[Any]
Fatal = tuple[type[BaseException], ...]


def has_failed(column: ValuesOrErrors) -> bool:
    """Tell whether an entry of `column` has failed."""
    return any(issubclass(kind, WeirError) for kind in set(map(type, column)))


def each(
    function: Callable[..., Any],
    column: ValuesOrErrors,
    fault: Fault,
    *more: ValuesOrErrors,
    fatal: Fatal = ENDS_THE_PROCESS,
) -> ValuesOrErrors:
    """Return `function` of each value (and of those in `more` beside it); what it raises becomes `fault`'s error in that
    place. Each value is passed exactly once. Exceptions of the types in `fatal` are passed on."""
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
    """A step that takes all entries at once: predict, and the batch forms of the others.

    `call` gets a list of values; `judge` gets what came back, and the values, and returns one result per value or raises
    a WeirError, which all of them get. If `call` itself raises, it is called again for each half (`halves`), so
    that only the values that make it raise get the error.
    """

    def __init__(
        self, name: str, call: Callable[[list[Any]], Any], judge: Callable[[Any, list[Any]], ValuesOrErrors], *,
        halves: bool, fatal: Fatal,
    ) -> None:  # fmt: skip
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
                returned = list(returned)
        except BaseException as error:
            if isinstance(error, self._fatal):
                raise
            if len(values) == 1 or not self._halves:
                return self._failed(error, len(values))
        else:
            try:
                return self._judge(returned, values)
            except WeirError as error:
                return copies(error, len(values))
        # Out here the exception is gone, and with it the frames that hold what `call` had allocated.
        middle = len(values) // 2
        results: ValuesOrErrors = []
        for half in (values[:middle], values[middle:]):
            if restarted is not None:
                restarted()
            results += self._run(half, restarted)
        return results

    def _failed(self, error: BaseException, count: int) -> ValuesOrErrors:
        if count == 1 and isinstance(error, WeirError):
            return [error]
        return list(copies(model_error(self._name, error), count))


# How many arguments a user's method wants, where the contract leaves it the choice.


def takes_first(method: Callable[..., Any], name: str) -> bool:
    """Tell whether the bound `method` wants an argument: it has a positional parameter that must be given or is called `name`,
    or any number of them."""
    return _takes(method, name, 0)


def takes_second(method: Callable[..., Any], name: str) -> bool:
    """Tell whether the bound `method` wants a second argument too; see `takes_first`."""
    return _takes(method, name, 1)


def _takes(method: Callable[..., Any], name: str, place: int) -> bool:
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return False  # written in C, without a signature
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(positional) <= place:
        return any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return positional[place].default is inspect.Parameter.empty or positional[place].name == name


# The batch sizes that a compiled model allows (Model.allowed_batch_sizes).


class Sizes:
    """Which sizes a model's batches have; without a list of them, every size."""

    def __init__(self, model: type[Model]) -> None:
        self._allowed = sorted(model.allowed_batch_sizes or ())

    def __bool__(self) -> bool:
        return bool(self._allowed)

    def filled(self, rows: int) -> int:
        """Return how many rows `predict` gets for a batch of `rows`. InvalidRequest for more than it can get."""
        if not self._allowed:
            return rows
        for size in self._allowed:
            if size >= rows:
                return size
        raise InvalidRequest(f"a batch of {rows} rows: the model takes {self._allowed[-1]} at most")


def filling(
    sizes: Sizes, call: Callable[[list[Any]], Any], judge: Callable[[Any, list[Any]], list[Any]]
) -> tuple[Callable[[list[Any]], Any], Callable[[Any, list[Any]], list[Any]]]:
    """Return `call` and `judge` (see steps.TogetherStep) such that lists of items are filled up with copies of the last one,
    and their answers dropped."""

    def filled(items: list[Any]) -> list[Any]:
        return items + items[-1:] * (sizes.filled(len(items)) - len(items))

    return lambda items: call(filled(items)), lambda returned, items: judge(returned, filled(items))[: len(items)]


class Prediction:
    """Runs the columns of a batch through one model instance, which has been loaded."""

    def __init__(self, model: Model, *, retry_in_halves: bool, fatal: Fatal, max_batch_size: int = 1) -> None:
        kind = type(model)
        self._model = model
        self._fatal = fatal
        self._preprocess = model.preprocess if overrides(kind, "preprocess") else None
        self._postprocess = model.postprocess if overrides(kind, "postprocess") else None
        self._takes_preprocessed = self._postprocess is not None and takes_second(self._postprocess, "preprocessed")

        def together(
            name: str, call: Callable[[list[Any]], Any], judge: Callable[[Any, list[Any]], ValuesOrErrors]
        ) -> TogetherStep:
            return TogetherStep(name, call, judge, halves=retry_in_halves, fatal=fatal)

        def batch_form(name: str) -> TogetherStep | None:
            return together(name, getattr(model, name), judge_of(name)) if overrides(kind, name) else None

        self._preprocess_batch = batch_form("preprocess_batch")
        self._postprocess_batch = batch_form("postprocess_batch")
        if is_tensor_model(kind):
            from weir.workers.run.tensors import Splitter, Stacker, input_buffers

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
        """Return the model's answers. `restarted` is called each time that `predict` is about to be called again."""
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
    """Return the function that makes a column of what the model's method `name` returned: a sequence, or something like
    it, of one value per item. It raises ModelError for anything else."""

    def judge(returned: Any, items: list[Any]) -> ValuesOrErrors:
        if type(returned) is not list:
            if isinstance(returned, (str, bytes, dict, set, frozenset)) or not hasattr(returned, "__iter__"):
                raise ModelError(
                    f"{name} returned a {type(returned).__name__} for {len(items)} items, must be a list of {len(items)}"
                )
            try:
                returned = list(returned)
            except Exception as error:  # a generator has the model's own code in it; an array of no dimensions
                raise ModelError(f"{name} returned a {type(returned).__name__} that is no list ({error})") from error
        if len(returned) != len(items):
            raise ModelError(f"{name} returned {len(returned)} answers for {len(items)} items")
        return returned  # type: ignore[no-any-return]  # narrowed by `type(...) is`, which mypy does not follow

    return judge
