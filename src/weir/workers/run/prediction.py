"""The model's own steps: preprocess, predict and postprocess, of items or of tensors. What is not overridden is skipped."""

from collections.abc import Callable
from typing import Any

from weir.errors import ModelError
from weir.model import Model, is_tensor_model, overrides
from weir.workers.faults import fault_of
from weir.workers.run.steps import Fatal, Sizes, Together, ValuesOrErrors, each, filling, takes_second


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
        ) -> Together:
            return Together(name, call, judge, halves=retry_in_halves, fatal=fatal)

        def batch_form(name: str) -> Together | None:
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
