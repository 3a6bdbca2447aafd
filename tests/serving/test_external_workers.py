"""A service whose workers attach from outside: what becomes of batches whose workers are lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.rings import subcases
from tests.waiting import until
from tests.workers.outsiders import Outsider

import weir
from weir.catalog.loading import ServiceMaker
from weir.catalog.sources import ModelToServe


@asynccontextmanager
async def serving(tmp_path: Path, **more: Any) -> AsyncIterator[tuple[weir.Service, str, Outsider]]:
    """A started service, its address, and the first worker."""
    address = f"unix:{tmp_path}/w.sock"
    service = weir.Service(weir.External, worker_socket=address, **more)
    starting = asyncio.ensure_future(service.start())
    await asyncio.sleep(0)
    first = await Outsider.connect(address)
    await starting
    try:
        yield service, address, first
    finally:
        await service.stop(0.0)
        await first.leave()


def workers_of(service: weir.Service) -> list[str]:
    return [line["state"] for line in service.state()["workers"]]


async def test_what_a_lost_worker_had_runs_again_when_another_attaches(tmp_path: Path) -> None:
    async with serving(tmp_path, max_batch_size=4) as (service, address, first):
        calls = [service.infer(text) for text in ("a", "b")]
        assert list((await first.jobs()).values()) == [b'"a"', b'"b"']
        await first.leave()
        second = await Outsider.connect(address)
        at_work = asyncio.ensure_future(second.upper())
        assert await asyncio.gather(*calls) == ["A", "B"]
        at_work.cancel()
        await second.leave()


async def test_without_a_worker_requests_wait_for_as_long_as_they_may(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _, first):
        await first.leave()
        await until(lambda: workers_of(service) == ["lost"])
        with pytest.raises(weir.DeadlineExceeded):
            await service.infer("x", timeout=0.05)
        assert workers_of(service) == ["lost"]
        assert service.ready


@subcases("address", ["tcp:0.0.0.0:0", "tcp:[::]:0", "tcp:10.1.2.3:9"])
def test_a_server_takes_workers_of_other_machines_only_if_allowed(address: str) -> None:
    model = ModelToServe("weir:External", "m", {}, [], {"worker_socket": address})
    with pytest.raises(weir.SettingsError, match="--allow-control"):
        ServiceMaker([])(model)
    assert ServiceMaker([], allow_remote_workers=True)(model).workers.worker_socket == address


def test_with_a_control_token_only_the_owner_of_the_server_attaches() -> None:
    model = ModelToServe("weir:External", "m", {}, [], {"worker_socket": "tcp:127.0.0.1:0"})
    with pytest.raises(weir.SettingsError, match="control token"):
        ServiceMaker([], allow_tcp_workers=False)(model)
    ServiceMaker([], allow_tcp_workers=False)(model._replace(settings={"worker_socket": "unix:w"}))
