"""The request that the batcher knows."""

import asyncio

from tests.frontends.http.fast.kit import site

from weir.batching.request_state import RequestBase
from weir.frontends.http.fast.connection import Connection
from weir.frontends.http.fast.native import HttpRequest
from weir.frontends.http.fast.plan import HeadReader, make_plan
from weir.protocols.access import Access

HEAD = b"POST /infer/square HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\nX-Request-Priority: 4\r\nX-Batch-Key: k\r\nAccept: application/msgpack"


def test_its_constructor_sets_what_the_base_sets() -> None:
    async def test() -> None:
        async with site() as here:
            plan = make_plan(HeadReader().read(HEAD), here.shared.route_handlers, here.shared.settings, Access())
            head = plan.head
            request = HttpRequest(Connection(here.shared), plan, b"3")
            base = RequestBase(
                b"3",
                here.clock(),
                head.timeout,
                content_type=head.content_type,
                accept=head.accept,
                key=head.key,
                priority=4,
                door="http",
            )
            for name in RequestBase.__slots__:
                assert getattr(request, name) == getattr(base, name), name

    asyncio.run(test())
