"""The frontends before real worker processes."""

import asyncio

import httpx
import pytest
from tests.frontends.http.models import Deadly, Echo
from tests.frontends.http.servers import Serve

from weir.serving.service import Service

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def call_at_once(url: str, path: str, items: list[object]) -> list[httpx.Response]:
    async def call() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            return await asyncio.gather(*(client.post(path, json=item) for item in items))

    return asyncio.run(call())


def test_large_items_of_a_list(serve: Serve) -> None:
    server = serve(Service(Echo))
    items = ["x" * size for size in (10, 100_000, 50_000, 1)]
    assert server.client.post("/infer/echo/batch", json=items).json() == [{"output": item} for item in items]


def test_the_request_that_kills_its_worker_fails_alone(serve: Serve) -> None:
    server = serve(Service(Deadly, max_batch_size=16, policy="size-or-delay:size=16,delay=50ms", timeout=120.0))
    answers = call_at_once(server.url, "/infer/deadly", [*range(7), "die", *range(8, 16)])
    codes = [answer.status_code for answer in answers]
    assert codes == [200] * 7 + [500] + [200] * 8
    assert answers[7].json()["error"]["type"] == "ModelCrashed"
    assert [answer.json() for answer in answers if answer.status_code == 200] == [*range(7), *range(8, 16)]


def test_requests_that_come_together_share_batches(serve: Serve) -> None:
    service = Service(Echo, max_batch_size=64, policy="full:60", max_queue_delay=60.0)
    server = serve(service)
    answers = call_at_once(server.url, "/infer/echo", list(range(60)))
    assert [answer.json() for answer in answers] == list(range(60))
    assert sum(server.call(service.state)["batches"].values()) == 1
