"""The request that the batcher knows."""

import asyncio

from tests.frontends.http.fast.kit import site

from weir.batching.request_state import RequestBase
from weir.frontends.http.fast.connection import Connection
from weir.frontends.http.fast.native import HttpRequest
from weir.frontends.http.fast.plan import HeadReader, make_plan
from weir.protocols.access import Access
from weir.protocols.entries import Schedule, item_entry
from weir.protocols.exchange import Exchange, QueuedRequest

HEAD = b"POST /infer/square HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\nX-Request-Priority: 4\r\nX-Batch-Key: k\r\nAccept: application/msgpack"


def test_its_constructor_sets_what_that_of_a_queued_request_sets() -> None:
    async def test() -> None:
        async with site() as here:
            plan = make_plan(HeadReader().read(HEAD), here.shared.route_handlers, here.shared.settings, Access())
            head = plan.head
            request = HttpRequest(Connection(here.shared), plan, b"3")
            exchange = Exchange(here.service, frontend="http")
            queued = QueuedRequest(item_entry(head, b"3"), exchange, Schedule(4, head.timeout), lambda request: None)
            for name in RequestBase.__slots__:
                assert getattr(request, name) == getattr(queued, name), name

    asyncio.run(test())
