"""The batch sizes that a compiled model allows (Model.allowed_batch_sizes)."""

from collections.abc import Callable
from typing import Any

from weir.errors import InvalidRequest
from weir.model import Model


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
    """Return `call` and `judge` (see steps.Together) such that lists of items are filled up with copies of the last one,
    and their answers dropped."""

    def filled(items: list[Any]) -> list[Any]:
        return items + items[-1:] * (sizes.filled(len(items)) - len(items))

    return lambda items: call(filled(items)), lambda returned, items: judge(returned, filled(items))[: len(items)]
