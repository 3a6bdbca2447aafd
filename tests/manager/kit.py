"""A service with a fake executor and a clock that stands still, for the tests of this part."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from weir import Model, Service
from weir.testing import Answer, FakeClock, FakeExecutor, RecordingObserver


class Square(Model):
    examples = (3,)

    def predict(self, batch: list[Any]) -> list[Any]:
        return squares(batch)


def squares(batch: list[Any]) -> list[Any]:
    return [x * x for x in batch]


class Rig(NamedTuple):
    service: Service
    executor: FakeExecutor
    clock: FakeClock
    heard: RecordingObserver


@asynccontextmanager
async def serving(
    answer: Answer | None = squares, *, kind: type[Service] = Service, model: type[Model] = Square, workers: int = 1,
    places: int = 1, **settings: Any,
) -> AsyncIterator[Rig]:  # fmt: skip
    """Without `answer`, batches stay pending until the test answers them."""
    clock, executor, heard = FakeClock(), FakeExecutor(answer, workers=workers, places=places), RecordingObserver()
    service = kind(model, executor=executor, clock=clock, observers=[heard], **settings)
    await service.start()
    try:
        yield Rig(service, executor, clock, heard)
    finally:
        await service.stop(0.0)


async def turns(count: int = 3) -> None:
    """Let the loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)
