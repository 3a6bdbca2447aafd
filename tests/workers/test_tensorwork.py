from typing import Any

import pytest

from weir.errors import ModelError
from weir.messages import JSON, MSGPACK, OBJECT
from weir.model import Model, Tensor
from weir.workers.tensorwork import judge_of, predictor, readers, repeated, writers


class Doubled(Model):
    inputs = (Tensor("x", "INT64", [-1]),)
    outputs = (Tensor("y", "INT64", [-1]),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"] * 2}


def test_read_predict_divide_write() -> None:
    model = Doubled()
    entries = [readers(model)[JSON](b'{"x": [1]}'), readers(model)[OBJECT]({"x": [2, 3]})]
    first, second = judge_of(model)(predictor(model)(entries), entries)
    assert writers(model, "doubled")[JSON](first) == b'{"y":[2]}'
    assert writers(model, "doubled")[MSGPACK](second) == b"\x81\xa1y\x92\x04\x06"


def test_rows_must_be_those_of_the_batch() -> None:
    model = Doubled()
    entry = readers(model)[OBJECT]({"x": [2, 3]})
    with pytest.raises(ModelError, match="predict returned 1 rows for a batch of 4"):
        judge_of(model)({"y": [1]}, [entry, entry])


def test_an_example_is_repeated_at_least_once() -> None:
    assert [len(repeated(Doubled, {"x": [1, 2, 3]}, rows)) for rows in (1, 3, 7)] == [1, 1, 2]
