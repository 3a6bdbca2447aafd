from typing import Any

import numpy
import pytest

from weir.model import Example, Model, Tensor
from weir.workers.run.runner import warmup_batches, warmup_sizes


class Plain(Model):
    examples = (1, Example(2, 4), (3, 4))


class Arrays(Model):
    inputs = (Tensor("x", "FP32", [-1, 2]),)
    outputs = (Tensor("y", "FP32", [-1]),)
    examples = ({"x": [[1, 2], [3, 4]]},)


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (2, [1, 2]), (64, [1, 8, 64]), (100, [1, 10, 100])])
def test_sizes(largest: int, sizes: list[int]) -> None:
    assert warmup_sizes(Plain, largest) == sizes


def test_own_sizes_are_kept_within_the_largest() -> None:
    class Own(Plain):
        warmup_sizes = (32, 4, 128)

    class NoWarmup(Plain):
        warmup_sizes = ()

    assert warmup_sizes(Own, 64) == [4, 32, 64]
    assert list(warmup_batches(NoWarmup, 64)) == []


def test_batches_are_filled_with_the_examples_in_turn() -> None:
    batches = [batch.payloads for batch in warmup_batches(Plain, 4)]
    assert batches == [[1], [1, 2], [1, 2, (3, 4), 1]]
    assert list(warmup_batches(Model, 4)) == []


def test_tensors_are_repeated_up_to_the_rows() -> None:
    rows: list[Any] = [[len(entry["x"]) for entry in batch.payloads] for batch in warmup_batches(Arrays, 9)]
    assert rows == [[2], [2], [2, 2, 2, 2]]
    assert next(warmup_batches(Arrays, 9)).payloads[0]["x"].dtype == numpy.float32
