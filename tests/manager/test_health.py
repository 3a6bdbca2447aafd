"""The deep health check: a real model, its examples, what must be equal and what need not."""

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy
import pydantic
import pytest

from weir.manager.health import same
from weir.manager.service import Service
from weir.model import Example, Model


class Answer(pydantic.BaseModel):
    """As a user would declare it."""

    y: int


class Point(msgspec.Struct):
    """As a user would declare it."""

    y: float


@dataclass
class Place:
    """As a user would declare it."""

    at: Point


class Doubling(Model):
    """Its second example is wrong, its third claims nothing."""

    Output = Answer
    examples = (Example(2, {"y": 4}), Example(3, {"y": 7}), 5)

    def predict(self, batch: Any) -> Any:
        """Return doubles."""
        return [Answer(y=item * 2) for item in batch]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(y=4), {"y": 4}),
        (Point(0.1 + 0.2), {"y": 0.3}),
        (Place(Point(1.0)), {"at": {"y": 1.0}}),
        (numpy.array([1.0, 2.0]), [1.0, 2.00000001]),
        ([Answer(y=1)], [Answer(y=1)]),
        (math.nan, math.nan),
        (b"a", b"a"),
        (None, None),
    ],
)
def test_same(answer: Any, expected: Any) -> None:
    assert same(answer, expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(y=4), {"y": 5}),
        (Answer(y=4), {"y": 4, "z": 1}),
        ([1], [1, 2]),
        (1.001, 1.0),
        ("1", 1),
        (math.nan, 1.0),
        ({}, None),
    ],
)
def test_not_the_same(answer: Any, expected: Any) -> None:
    assert not same(answer, expected)


def test_says_what_came_of_each_example() -> None:
    async def main() -> dict[str, Any]:
        async with Service(Doubling, executor="inline") as service:
            return await service.deep_health()

    health = asyncio.run(main())
    assert not health["healthy"]
    assert [example["ok"] for example in health["examples"]] == [True, False, True]
    assert health["examples"][1]["error"] == "expected {'y': 7}, got Answer(y=6)"
