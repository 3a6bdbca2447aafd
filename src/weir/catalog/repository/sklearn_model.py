"""The model that runs an estimator of scikit-learn (the extra `sklearn`). Run as a program, this module prints a description of
the file as JSON."""

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from weir.errors import InvalidRequest, brief
from weir.model import Model

SKOPS = ".skops"
METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function", "score_samples", "transform")
_NUMBERS = (int, float, bool, type(None))  # None is a missing value


class SklearnModel(Model):
    """Runs the estimator in the file `path`: an item is one row of features, and its response one row of the result.

    An item is a list of as many numbers as the estimator has `features`; where it knows its `columns` by name, also an object of
    values by name. An estimator that knows neither, such as a pipeline that begins with texts, gets the items as they are.

    `method` is the estimator's method to call: predict, predict_proba, transform and so on.
    """

    path: ClassVar[str] = ""
    trusted: ClassVar[tuple[str, ...]] = ()
    features: ClassVar[int | None] = None
    columns: ClassVar[tuple[str, ...]] = ()

    def __init__(self, method: str = "predict") -> None:
        self._method = method

    def load(self) -> None:
        """Load the estimator from its file."""
        self._call = getattr(open_estimator(self.path, self.trusted), self._method)

    def preprocess(self, item: Any) -> Any:
        """Return the row of an item. Raises InvalidRequest if it has not the features of the estimator."""
        if self.features is None:
            return item
        if isinstance(item, Mapping) and self.columns:
            return _in_order(item, self.columns)
        row = item.tolist() if hasattr(item, "tolist") else item
        if not isinstance(row, (list, tuple)) or len(row) != self.features:
            has = f"{len(row)} values" if isinstance(row, (list, tuple)) else f"{brief(row, 60)}"
            kind = "a list of values" if self.columns else "a list of numbers"
            raise InvalidRequest(f"an item must be {kind}, {self.features} of them: it has {has}")
        if not self.columns:
            for index, value in enumerate(row):
                if not isinstance(value, _NUMBERS):
                    raise InvalidRequest(f"item[{index}]={brief(value, 60)}: must be a number")
        return row

    def predict(self, batch: list[Any]) -> list[Any]:
        """Return a row of the result for each row."""
        return rows_of(self._call(table_of(batch, self.features, self.columns)), len(batch))


def open_estimator(path: str, trusted: Sequence[str] = ()) -> Any:
    """Return the estimator in a file. Only a file that does not end with .skops may run code while it is loaded: see Trust."""
    if path.endswith(SKOPS):
        from skops.io import load

        return load(path, trusted=list(trusted))
    import joblib  # it comes with scikit-learn

    return joblib.load(path)


def table_of(rows: list[Any], features: int | None, columns: Sequence[str]) -> Any:
    """Return rows as the estimator takes them: a table with columns where it knows their names, else an array."""
    if features is None:
        return rows
    if columns:
        pandas = _pandas()
        return rows if pandas is None else pandas.DataFrame(rows, columns=list(columns))
    import numpy

    return numpy.asarray(rows, dtype=float)


@cache
def _pandas() -> Any:
    """Return the module, or None where it is not installed: the columns are in order, so scikit-learn's warning about names is dropped."""
    try:
        import pandas
    except ImportError:
        warnings.filterwarnings("ignore", message="X does not have valid feature names", category=UserWarning)
        return None
    return pandas


def rows_of(result: Any, count: int) -> list[Any]:
    """Return the `count` rows of a method's result, as values that JSON can have."""
    if hasattr(result, "toarray"):  # a sparse matrix
        result = result.toarray()
    if hasattr(result, "to_numpy"):  # a table
        result = result.to_numpy()
    if isinstance(result, list) and result and hasattr(result[0], "shape"):  # an array for each of several targets
        return [list(row) for row in zip(*[rows_of(each, count) for each in result], strict=True)]
    rows = result.tolist() if hasattr(result, "tolist") else list(result)
    if not isinstance(rows, list) or len(rows) != count:
        raise ValueError(f"the estimator has answered {brief(rows, 60)} to {count} rows")
    return rows


def _in_order(item: Mapping[str, Any], columns: Sequence[str]) -> list[Any]:
    missing = [name for name in columns if name not in item]
    unknown = [name for name in item if name not in columns]
    if missing or unknown:
        wrong = f"lacks {', '.join(map(repr, missing))}" if missing else f"has {brief(unknown[0], 60)}"
        raise InvalidRequest(f"an item must have the keys {', '.join(columns)}: it {wrong}")
    return [item[name] for name in columns]


def describe(path: str, trusted: Sequence[str]) -> dict[str, Any]:
    """Return facts about the estimator in a file: its type, methods, features and columns, and an example that it answers; or only
    the types in it that are neither known to be safe nor `trusted`."""
    if path.endswith(SKOPS):
        from skops.io import get_untrusted_types

        untrusted = [name for name in get_untrusted_types(file=path) if name not in trusted]
        if untrusted:
            return {"untrusted": untrusted}
    estimator = open_estimator(path, trusted)
    features = getattr(estimator, "n_features_in_", None)
    columns = list(map(str, getattr(estimator, "feature_names_in_", ())))
    described = {
        "type": type(estimator).__name__,
        "methods": [name for name in METHODS if hasattr(estimator, name)],
        "features": None if features is None else int(features),
        "columns": columns,
    }
    return {**described, "examples": _examples(estimator, described)}


def _examples(estimator: Any, described: Mapping[str, Any]) -> list[Any]:
    """Return an item that the estimator answers, if one can be guessed."""
    features, columns = described["features"], described["columns"]
    item = "text" if features is None else [0.0] * features
    try:
        rows_of(getattr(estimator, described["methods"][0])(table_of([item], features, columns)), 1)
    except Exception:  # its features are of other kinds
        return []
    return [dict(zip(columns, item, strict=True)) if columns else item]


if __name__ == "__main__":
    try:
        print(json.dumps(describe(sys.argv[1], sys.argv[2:])))  # noqa: T201 - the server reads it
    except BaseException as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
