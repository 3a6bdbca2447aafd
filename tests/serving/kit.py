"""A service with a fake executor and a clock that stands still, for the tests of this part."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from tests.fakes import FakeRequest, RecordingObserver
from tests.serving.models import Square as Square
from tests.waiting import turns

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


def request(rig_service: Service, payload: Any, **options: Any) -> FakeRequest:
    made = FakeRequest(payload, arrival=rig_service.now(), **options)
    rig_service.submit(made)
    return made
