"""As many workers as the load needs, with real processes and threads under load: up, down, to zero and back."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.serving.kit import Watch

from weir import Model, Service
from weir.policy import scaling

FEW_SECONDS = 60.0


class Slow(Model):
    def load(self) -> None:
        time.sleep(0.05)

    def predict(self, batch: list[int]) -> list[int]:
        time.sleep(0.01 * len(batch))
        return [item + 1 for item in batch]


class Load:
    """Keeps `width` requests under way, each followed by the next, and checks every answer."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.answered = 0

    async def until(self, condition: Callable[[], Any], width: int, pause: float = 0.0) -> None:
        """Go on until `condition` holds."""

        async def caller(number: int) -> None:
            while not condition():
                item = 1000 * self.answered + number
                assert await self.service.infer(item) == item + 1
                self.answered += 1
                await asyncio.sleep(pause)

        async with asyncio.timeout(FEW_SECONDS):
            await asyncio.gather(*map(caller, range(width)))


@pytest.mark.parametrize("executor", ["process", "thread"])
async def test_no_request_is_lost_when_workers_come_and_go(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "LEAST_HOLD", 0.3)
    monkeypatch.setattr(scaling, "LEAST_HORIZON", 0.2)
    monkeypatch.setattr(scaling.WorkerScaling, "INTERVAL", 0.02)
    watch = Watch()
    service = Service(
        Slow, executor=executor, workers="0..3", max_batch_size=2, scale_to_zero_after=0.5, target_load=0.5,
        observers=[watch], max_queue_delay=0.0,
    )  # fmt: skip
    async with service:
        load = Load(service)
        await load.until(lambda: service.ready_workers == service.explain_policy()["scaling"]["wanted"] == 3, width=24)
        await load.until(lambda: service.worker_count < 3, width=1, pause=0.05)
        await watch.until(lambda: service.ready_workers == 0)
        assert service.ready
        assert service.explain_policy()["scaling"]["reason"] == "idle"
        assert await service.infer(41) == 42, "the first request waits for the start"
        await load.until(lambda: service.ready_workers == 3, width=24)
        counts = service.statistics.to_dict()
    assert counts["inference_stats"]["fail"]["count"] == 0
    assert counts["inference_stats"]["success"]["count"] == load.answered + 1
