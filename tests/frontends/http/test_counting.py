"""What requests of the ASGI application are charged with."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.fakes import RecordingObserver
from tests.frontends.http.models import Echo
from tests.protocols.kserve.models import Vector
from tests.rings import subcases
from tests.waiting import until

from weir import InvalidRequest, Model, Service
from weir.catalog.registry import Registry
from weir.errors import DeadlineExceeded, Overloaded, TooLarge
from weir.frontends.http.application import make_app
from weir.frontends.http.asgi import Body, discard_body, unpacked
from weir.protocols import HttpSettings
from weir.protocols.account import CLAIM, Account, Counted, charge_response, release
from weir.protocols.kserve import KserveContext
from weir.protocols.offloading import LONG_BODY
from weir.protocols.response import CODINGS, compress
from weir.testing import FakeExecutor


@asynccontextmanager
async def asked(
    model: type[Model], executor: FakeExecutor, observer: RecordingObserver | None = None, **settings: Any
) -> AsyncIterator[tuple[Account, httpx.AsyncClient]]:
    """Give the account of an application whose model answers on command, and a client of it; at the end nothing is held."""
    observers, size = [observer or RecordingObserver()], 1 if model is Echo else 8
    service = Service(model, name="m", executor=executor, max_batch_size=size, observers=observers)
    context = KserveContext(Registry([service]), HttpSettings(**settings))
    transport, headers = httpx.ASGITransport(make_app(context)), {"accept-encoding": "identity"}
    async with service, httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        yield context.account, client
    assert context.account.held_bytes == 0


async def test_a_body_is_charged_as_what_it_is_decompressed_until_its_answer() -> None:
    executor = FakeExecutor(workers=2)
    async with asked(Echo, executor, max_waiting_bytes=3_000_000, max_body_size=1_000_000) as (account, client):

        async def post() -> httpx.Response:
            packed = gzip.compress(json.dumps("x" * 900_000).encode())
            return await client.post("/infer/m", content=packed, headers={"content-encoding": "gzip"})

        calls = [asyncio.ensure_future(post()) for _ in range(2)]
        await until(lambda: len(executor.pending) == 2)
        assert 1_800_000 < account.held_bytes < 1_900_000
        account.take(500_000)
        refused = await post()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "max_waiting_bytes" in refused.json()["error"]["message"]
        account.give(500_000)
        for _ in calls:
            executor.respond_next(lambda batch: [b"done"] * len(batch))
        assert [each.status_code for each in await asyncio.gather(*calls)] == [200, 200]


async def test_tensors_are_charged_as_the_arrays_that_they_become() -> None:
    executor = FakeExecutor()
    async with asked(Vector, executor, max_waiting_bytes=90_000) as (account, client):
        tensor = {"name": "x", "datatype": "FP32", "shape": [8, 1000], "data": [0] * 8000}
        document = {"inputs": [tensor]}
        call = asyncio.ensure_future(client.post("/v2/models/m/infer", json=document))
        await until(lambda: bool(executor.pending))
        assert account.held_bytes > 32_000 + 16_000
        refused = await client.post("/v2/models/m/infer", json=document)
        assert (refused.status_code, "max_waiting_bytes" in refused.json()["error"]) == (429, True)
        executor.respond_next(lambda batch: [{} for _ in batch])
        assert (await call).status_code == 500


async def test_an_answer_that_could_not_wait_is_refused() -> None:
    executor, observer = FakeExecutor(lambda batch: ["x" * 50_000 for _ in batch]), RecordingObserver()
    async with asked(Echo, executor, observer, max_waiting_bytes=40_000) as (_, client):
        for path, body in (("/infer/m", 1), ("/infer/m/batch", [1]), ("/v1/models/m:predict", {"instances": [1]})):
            answer = await client.post(path, json=body)
            assert answer.status_code == 413
            assert "max_waiting_bytes" in answer.text
    assert observer.kinds == {"": 3}  # counted when the model had responded


def crumbs(count: int) -> Any:
    """Return a `receive` of a body in pieces of one byte."""
    left = [count]

    async def receive() -> Any:
        left[0] -= 1
        return {"type": "http.request", "body": b"x", "more_body": left[0] > 0}

    return receive


async def nowhere(message: Any) -> None:
    """Send it to nobody."""


async def test_a_body_in_crumbs_arrives_whole_and_is_charged_as_it_comes() -> None:
    account = Account(HttpSettings(max_waiting_bytes=2000))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = Body(receive)
        if scope["path"] == "/short":
            assert await body.read(10_000, 10.0) == b"x" * 1500
            assert account.held_bytes == 1500
            return
        with pytest.raises(Overloaded):
            await body.read(10_000, 10.0)
        assert account.held_bytes == 2000

    await Counted(app, account)({"type": "http", "path": "/short"}, crumbs(1500), nowhere)
    await Counted(app, account)({"type": "http", "path": "/long"}, crumbs(2500), nowhere)
    assert account.held_bytes == 0


async def test_every_body_and_answer_is_charged_whoever_reads_and_makes_them() -> None:
    account, held = Account(HttpSettings(max_waiting_bytes=2000)), list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(3):
            await receive()
        held.append(account.held_bytes)
        release(2)
        held.append(account.held_bytes)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        # Beyond the limit: it exists.
        await send({"type": "http.response.body", "body": b"x" * 5000, "more_body": True})
        await send({"type": "http.response.body", "body": b"x" * 10, "more_body": True})
        charge_response(100)
        await send({"type": "http.response.body", "body": b"x" * 100})

    async def send(message: Any) -> None:
        held.append(account.held_bytes)

    await Counted(app, account)({"type": "http"}, crumbs(3), send)
    assert held == [3, 1, 1, 5001, 11, 101]
    assert account.held_bytes == 0


async def test_what_is_discarded_holds_nothing_even_beyond_all_memory() -> None:
    account, held = Account(HttpSettings(max_waiting_bytes=2000)), list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await discard_body(receive, 10.0)
        held.append(account.held_bytes)

    async def endless() -> Any:
        return {"type": "http.request", "body": b"x" * 2001, "more_body": True}

    for receive in (crumbs(10_000), endless):
        await Counted(app, account)({"type": "http"}, receive, nowhere)
    assert held == [0, 0]


LONG = b"x" * (LONG_BODY + 1)


async def unpacked_by(account: Account, packed: bytes, within: float = 10.0, limit: int = 4 * LONG_BODY) -> bytes:
    """Return what `packed` is when it is decompressed for a request of `account`."""
    with account.claim() as claim:
        CLAIM.set(claim)
        return await unpacked(packed, "gzip", limit, within)


async def test_long_bodies_are_decompressed_a_few_at_a_time() -> None:
    account, packed = Account(HttpSettings(max_waiting_bytes=10 * LONG_BODY)), gzip.compress(LONG)
    assert await asyncio.gather(*[unpacked_by(account, packed) for _ in range(20)]) == [LONG] * 20
    for _ in range(2):
        await account.unpacking.acquire()
    with pytest.raises(DeadlineExceeded, match=r"could not be decompressed within 0\.01 s"):
        await unpacked_by(account, packed, 0.01)
    for _ in range(2):
        account.unpacking.release()
    account.take(7 * LONG_BODY)
    with pytest.raises(Overloaded):
        await unpacked_by(account, packed)
    assert account.held_bytes == 7 * LONG_BODY


@subcases("coding", CODINGS)
async def test_short_bodies_wait_for_nobody_who_decompresses(coding: str) -> None:
    account = Account(HttpSettings())
    for _ in range(2):  # two bodies that become large are decompressed
        await account.unpacking.acquire()
    with account.claim() as claim:
        CLAIM.set(claim)
        assert await unpacked(compress(b"short", coding), coding, 400, 0.01) == b"short"
        assert account.held_bytes == 5
        with pytest.raises(InvalidRequest):
            await unpacked(b"junk", coding, 400, 0.01)
        assert account.held_bytes == 5  # what is not decompressed is not charged


async def test_a_body_above_the_limit_is_refused_however_short_the_limit() -> None:
    with pytest.raises(TooLarge, match="at most 400 bytes"):
        await unpacked_by(Account(HttpSettings()), gzip.compress(b"x" * 401), limit=400)


async def test_a_claim_ends_with_its_request_whatever_happens() -> None:
    account = Account(HttpSettings())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        claim = CLAIM.get()
        assert claim is not None
        claim.take(100)
        raise RuntimeError("it fails")

    with pytest.raises(RuntimeError, match="it fails"):
        await Counted(app, account)({"type": "http"}, crumbs(1), nowhere)
    assert (account.held_bytes, CLAIM.get()) == (0, None)
