from typing import Any

import pytest

from weir.messages import Batch


def fields(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in Batch.__slots__}


def test_a_replaced_batch_differs_in_the_named_fields_alone() -> None:
    batch = Batch(1, ["a"], "t", "u", 2, 3, 4)
    whole = fields(batch)
    assert len(set(map(str, whole.values()))) == len(whole)  # so that none has the value of another
    for name in Batch.__slots__:
        assert fields(batch.replaced(**{name: "new"})) == {**whole, name: "new"}
    assert fields(batch) == whole


def test_a_field_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="a Batch has no payload"):
        Batch(1, [], "", "").replaced(payload=[])
