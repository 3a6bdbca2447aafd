"""Workers of two kinds, with real processes."""

import asyncio
import os
import signal
from typing import Any

import pytest
from tests.serving.kit import Watch
from tests.serving.models import Paced, Square

from weir import Conflict, Service, SettingsError
from weir.workers.process.shared import SharedPool

pytestmark = pytest.mark.usefixtures("nothing_is_left")

TWO: dict[str, Any] = {
    "workers": 2,
    "worker_kinds": ["small", "large"],
    "env": [{"KIND": "small", "SECONDS": "0.4"}, {"KIND": "large", "SECONDS": "0.02"}],
    "max_batch_size": 1,
}


def of_kind(service: Service, kind: str) -> Any:
    """Return the state of the worker of `kind`."""
    (found,) = (worker for worker in service.state()["workers"] if worker["kind"] == kind)
    return found


async def test_the_fastest_idle_worker_serves_under_any_rule() -> None:
    async with Service(Paced, **TWO) as service:
        assert {await service.infer(0) for _ in range(6)} == {"small", "large"}  # both are tried
        assert {await service.infer(0) for _ in range(10)} == {"large"}
        assert set(await asyncio.gather(*map(service.infer, range(4)))) == {"small", "large"}


@pytest.mark.parametrize("kind", ["small", "large"])
async def test_a_worker_that_is_killed_comes_back_as_its_own_kind(kind: str) -> None:
    heard = Watch()
    async with Service(Paced, **TWO, observers=[heard]) as service:
        before = of_kind(service, kind)["pid"]
        os.kill(before, signal.SIGKILL)
        await heard.until(lambda: of_kind(service, kind)["pid"] not in (before, None))
        await heard.until(lambda: of_kind(service, kind)["state"] == "ready")
        for _ in range(2):
            assert set(await asyncio.gather(*map(service.infer, range(2)))) == {"small", "large"}


async def test_each_kind_keeps_a_worker() -> None:
    async with Service(Paced, **TWO) as service:
        with pytest.raises(Conflict, match=r"workers=1: no worker is of the kind 'large'"):
            await service.remove_worker()
        await service.add_worker()
        assert [worker["kind"] for worker in service.state()["workers"]] == ["small", "large", "small"]
        await service.remove_worker()


def test_shared_workers_are_of_one_kind() -> None:
    with pytest.raises(SettingsError, match=r"worker_kinds=.*: models that share workers have workers of one kind"):
        Service(Square, executor=SharedPool().member, workers=2, worker_kinds=["a", "b"])
