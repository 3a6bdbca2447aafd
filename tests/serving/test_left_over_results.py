"""Large results that nobody reads any more give their shared memory back."""

from typing import Any

import pytest
from tests.serving.kit import Watch

from weir import Model, Service, WeirError
from weir.batching.request_state import RequestBase
from weir.messages import JSON, Dispatch, Form, Kind

pytestmark = pytest.mark.usefixtures("nothing_is_left")


class Large(Model):
    """Answers with a large text."""

    max_batch_size = 2

    def predict(self, batch: list[Any]) -> list[str]:
        return ["x" * 100_000 for _ in batch]


class Nobody(RequestBase):
    """A request of somebody who has left."""

    __slots__ = ()

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        raise AssertionError("it was cancelled")

    def fail(self, error: WeirError) -> None:
        raise AssertionError("it was cancelled")


@pytest.mark.parametrize("count", [0, 2, 4])
async def test_of_those_who_left(count: int) -> None:
    watch = Watch()
    async with Service(Large, observers=[watch]) as service:
        kind, payload = (Kind.ITEMS, [b"1"] * count) if count else (Kind.ITEM, b"1")
        request = Nobody(Form(30.0, kind, JSON, JSON, max(count, 1)), payload, service.now())
        service.submit(request)
        await watch.until(lambda: len(watch.timings) == (1 if count > 2 else 0) and watch.dispatches)
        service.cancel(request)
        await watch.until(lambda: len(watch.timings) == len(watch.dispatches))
        assert service.executor.gauges()["results_held_bytes"] == 0
