"""A worker drives an external program; when that dies, both are replaced."""

import psutil
import pytest
from examples.filter import Shout

import weir


def programs() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if each.name() == "perl"]


async def test_the_program_is_killed_and_replaced() -> None:
    async with weir.Service(Shout, workers=2) as service:
        assert (await service.deep_health())["healthy"]
        before = programs()
        assert len(before) == 2
        for each in before:
            each.kill()
        texts = [f"line {number}" for number in range(40)]
        assert await service.infer_many(texts) == [text.upper() for text in texts]
        with pytest.raises(weir.InvalidRequest, match="must be one line"):
            await service.infer("two\nlines")
        assert not {each.pid for each in before} & {each.pid for each in programs()}
    assert not programs()
