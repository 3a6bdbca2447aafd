"""A service with a fake executor and a clock that stands still, for the tests of this part."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from tests.fakes import FakeRequest, RecordingObserver
from tests.serving.models import Square as Square

from weir import Model, Service
from weir.testing import FakeClock, FakeExecutor, Predict


def squares(batch: list[Any]) -> list[Any]:
    return [x * x for x in batch]


class Rig(NamedTuple):
    service: Service
    executor: FakeExecutor
    clock: FakeClock
    heard: RecordingObserver

    async def answer_all(self) -> None:
        """Predict one batch after the other until none runs."""
        while self.executor.pending:
            self.executor.respond_next(squares)
            await turns()


@asynccontextmanager
async def serving(
    answer: Predict | None = squares, *, kind: type[Service] = Service, model: type[Model] = Square, workers: int = 1,
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


async def until(condition: Callable[[], Any]) -> None:
    """Return once `condition` holds, for what a test sees from outside and has no event of."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  (see above)
            await asyncio.sleep(0.001)


def request(rig_service: Service, payload: Any, **options: Any) -> FakeRequest:
    made = FakeRequest(payload, arrival=rig_service.now(), **options)
    rig_service.submit(made)
    return made
