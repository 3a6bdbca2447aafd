from typing import Any

import pytest
from tests.workers.runs import run

from weir.errors import InvalidRequest, ModelError
from weir.model import Model
from weir.workers.run.steps import Sizes


class Compiled(Model):
    allowed_batch_sizes = (8, 2)

    def predict(self, batch: list[Any]) -> list[Any]:
        assert len(batch) in (2, 8)
        return [(item, len(batch)) for item in batch]


class Short(Compiled):
    def predict(self, batch: list[Any]) -> list[Any]:
        return batch[:1]


def test_filled() -> None:
    sizes = Sizes(Compiled)
    assert [sizes.filled(rows) for rows in range(1, 9)] == [2, 2, 8, 8, 8, 8, 8, 8]
    with pytest.raises(InvalidRequest, match="a batch of 9 rows: the model takes 8 at most"):
        sizes.filled(9)
    assert Sizes(Model).filled(9) == 9


def test_items_are_filled_up_with_the_last_one() -> None:
    assert run(Compiled, ["a"]) == [("a", 2)]
    assert run(Compiled, ["a", "b"]) == [("a", 2), ("b", 2)]
    assert run(Compiled, list("abc")) == [("a", 8), ("b", 8), ("c", 8)]


def test_the_model_must_answer_what_it_got() -> None:
    (answer,) = run(Short, ["a"])
    assert isinstance(answer, ModelError)
    assert answer.message == "predict returned 1 answers for 2 items"
