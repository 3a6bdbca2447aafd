from typing import Any

from weir.messages import JSON, MSGPACK, OBJECT
from weir.model import Model, Tensor
from weir.workers.run.tensors import readers, repeated, writers


class Doubled(Model):
    inputs = (Tensor("x", "INT64", [-1]),)
    outputs = (Tensor("y", "INT64", [-1]),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"] * 2}


def test_read_and_write() -> None:
    model = Doubled()
    assert readers(model)[JSON](b'{"x": [1]}')["x"].tolist() == [1]
    entry = readers(model)[OBJECT]({"x": [2, 3]})
    assert entry["x"].tolist() == [2, 3]
    assert writers(model, "doubled")[JSON](entry) == b'{"x":[2,3]}'
    assert writers(model, "doubled")[MSGPACK](entry) == b"\x81\xa1x\x92\x02\x03"


def test_an_example_is_repeated_at_least_once() -> None:
    assert [len(repeated(Doubled, {"x": [1, 2, 3]}, rows)) for rows in (1, 3, 7)] == [1, 1, 2]
