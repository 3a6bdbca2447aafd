"""The small examples do what they say, in real workers."""

import asyncio

import numpy as np
import pytest
from examples.brightness import PGM, Brightness
from examples.hooks import UserScore
from examples.square import Square
from examples.tensors import Affine

import weir


async def test_square() -> None:
    async with weir.Service(Square) as service:
        assert await service.infer(3) == 9
        assert (await service.deep_health())["healthy"]


async def test_tensors_are_joined_and_divided() -> None:
    async with weir.Service(Affine, max_batch_size=4) as service:
        x = np.arange(30, dtype=np.float32).reshape(10, 3)
        whole = await service.infer({"x": x})
        rows = await asyncio.gather(*(service.infer({"x": x[row : row + 1]}) for row in range(10)))
    np.testing.assert_allclose(whole["y"], np.concatenate([row["y"] for row in rows]), rtol=1e-5)


def test_brightness_reads_pictures() -> None:
    model = Brightness()
    assert model.predict([model.decode(b"P5 2 1 255\n\xff\x01", PGM)]) == [pytest.approx(128 / 255)]


@pytest.mark.parametrize("body", [b"", b"P5", b"P6 2 1 255\n\xff\x01", b"P5 2 1 255\n\xff", b"P5 a b 255\n\xff\x01"])
def test_brightness_refuses_what_is_no_picture(body: bytes) -> None:
    with pytest.raises(weir.InvalidRequest, match="PGM picture"):
        Brightness().decode(body, PGM)


async def test_hooks_look_a_batch_up_at_once() -> None:
    async with UserScore(max_batch_size=8, policy="control-limit:3") as service:
        asked = service.store.asked
        results = await asyncio.gather(*map(service.infer, [1, 2, 3]), return_exceptions=True)
        assert service.store.asked == asked + 1
    assert results[:2] == [{"score": 3.0}, {"score": 7.0}]
    assert isinstance(results[2], weir.InvalidRequest)
