"""The models that stock clients' examples ask do what these expect, in real workers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weir
from weir.catalog.loading import load_target
from weir.model import check_model

REPOSITORY = Path(__file__).resolve().parents[2] / "examples" / "repository"
FIRST = np.arange(16, dtype=np.int32).reshape(1, 16)
SECOND = np.full((1, 16), 3, np.int32)


async def infer(target: str, **arrays: Any) -> Any:
    """Return the answer of a model of the example repository."""
    model = check_model(load_target(f"{REPOSITORY / target}"))
    async with weir.Service(model, name=target.partition("/")[0]) as service:
        return await service.infer(arrays)


def texts(numbers: Any) -> Any:
    """Return each number as its digits."""
    return np.array([[str(number).encode() for number in row] for row in numbers], dtype=object)


async def test_simple() -> None:
    answer = await infer("simple/1/model.py:Simple", INPUT0=FIRST, INPUT1=SECOND)
    np.testing.assert_array_equal(answer["OUTPUT0"], FIRST + SECOND)
    np.testing.assert_array_equal(answer["OUTPUT1"], FIRST - SECOND)


async def test_simple_string() -> None:
    answer = await infer("simple_string/1/model.py:SimpleString", INPUT0=texts(FIRST), INPUT1=texts(SECOND))
    assert answer["OUTPUT0"].tolist() == texts(FIRST + SECOND).tolist()
    assert answer["OUTPUT1"].tolist() == texts(FIRST - SECOND).tolist()
    with pytest.raises(weir.InvalidRequest, match="must be integers"):
        await infer("simple_string/1/model.py:SimpleString", INPUT0=texts([["x"] * 16]), INPUT1=texts(SECOND))


async def test_simple_identity() -> None:
    words = np.array([[b"", b"\xff\x00", "größer".encode()]], dtype=object)
    answer = await infer("simple_identity/1/model.py:SimpleIdentity", INPUT0=words)
    assert answer["OUTPUT0"].tolist() == words.tolist()
