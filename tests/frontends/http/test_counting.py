"""What requests of the ASGI application are charged with."""

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest

from weir import InvalidRequest, Model, Service, Tensor
from weir.catalog.registry import Registry
from weir.errors import DeadlineExceeded, Overloaded, TooLarge
from weir.frontends.http.application import make_app
from weir.frontends.http.asgi import Body, discard_body, unpacked
from weir.messages import Batch
from weir.protocols import HttpSettings
from weir.protocols.account import CLAIM, Account, Counted, charge_answer, release
from weir.protocols.kserve import KserveContext
from weir.protocols.offloading import LONG_BODY
from weir.protocols.response import CODINGS, compress
from weir.testing import FakeExecutor


class Echo(Model):
    """Answers with what it gets."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Double(Model):
    """Doubles rows."""

    inputs = (Tensor("x", "FP64", [-1, -1]),)
    outputs = (Tensor("y", "FP64", [-1, -1]),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"] * 2}


class Here:
    """The application with one model that answers on command, and a client of it."""

    def __init__(self, model: type[Model], executor: FakeExecutor, **settings: Any) -> None:
        self.executor = executor
        self.service = Service(model, name="m", executor=executor)
        registry, http = Registry([self.service]), HttpSettings(**settings)
        context = KserveContext(registry, http)
        self.account = context.account
        transport = httpx.ASGITransport(make_app(context))
        self.client = httpx.AsyncClient(
            transport=transport, base_url="http://test", headers={"accept-encoding": "identity"}
        )

    async def __aenter__(self) -> "Here":
        await self.service.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        await self.service.stop(0.0)
        assert self.account.held_bytes == 0


class Telling(FakeExecutor):
    """An executor that can be waited for."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers=workers)
        self._begun = asyncio.Semaphore(0)

    def run(self, worker: int, batch: Batch) -> None:
        super().run(worker, batch)
        self._begun.release()

    async def next_begun(self) -> None:
        """Return when one batch more is with a worker."""
        async with asyncio.timeout(60):
            await self._begun.acquire()


async def test_a_body_is_charged_as_what_it_is_decompressed_until_its_answer() -> None:
    executor = Telling(workers=2)
    Alone = type("Alone", (Echo,), {"max_batch_size": 1})
    async with Here(Alone, executor, max_waiting_bytes=3_000_000, max_body_size=1_000_000) as here:
        packed = gzip.compress(json.dumps("x" * 900_000).encode())
        headers = {"content-encoding": "gzip"}
        first, second = [
            asyncio.ensure_future(here.client.post("/infer/m", content=packed, headers=headers)) for _ in range(2)
        ]
        for _ in range(2):
            await executor.next_begun()
        assert 1_800_000 < here.account.held_bytes < 1_900_000
        here.account.take(500_000)
        refused = await here.client.post("/infer/m", content=packed, headers=headers)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "max_waiting_bytes" in refused.json()["error"]["message"]
        here.account.give(500_000)
        for _ in range(2):
            executor.answer_next(lambda batch: [b"done"] * len(batch))
        assert [each.status_code for each in await asyncio.gather(first, second)] == [200, 200]


async def test_tensors_are_charged_as_the_arrays_that_they_become() -> None:
    executor = Telling(workers=1)
    async with Here(Double, executor, max_waiting_bytes=100_000) as here:
        tensor = {"name": "x", "datatype": "FP64", "shape": [10, 500], "data": [0] * 5000}
        document = {"inputs": [tensor]}
        calls = asyncio.ensure_future(here.client.post("/v2/models/m/infer", json=document))
        await executor.next_begun()
        assert here.account.held_bytes > 40_000 + 10_000
        refused = await here.client.post("/v2/models/m/infer", json=document)
        assert (refused.status_code, "max_waiting_bytes" in refused.json()["error"]) == (429, True)
        calls.cancel()


async def test_an_answer_that_could_not_wait_is_refused() -> None:
    executor = FakeExecutor(lambda batch: ["x" * 50_000 for _ in batch])
    async with Here(Echo, executor, max_waiting_bytes=40_000) as here:
        answer = await here.client.post("/infer/m", json=1)
        assert answer.status_code == 413
        assert "max_waiting_bytes" in answer.json()["error"]["message"]


async def crumbs(count: int) -> Any:
    """Return a `receive` of a body in pieces of one byte."""
    left = [count]

    async def receive() -> Any:
        left[0] -= 1
        return {"type": "http.request", "body": b"x", "more_body": left[0] > 0}

    return receive


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

    await Counted(app, account)({"type": "http", "path": "/short"}, await crumbs(1500), nowhere)
    await Counted(app, account)({"type": "http", "path": "/long"}, await crumbs(2500), nowhere)
    assert account.held_bytes == 0


async def nowhere(message: Any) -> None:
    """Send it to nobody."""


def test_every_body_and_answer_is_charged_whoever_reads_and_makes_them() -> None:
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
        charge_answer(100)
        await send({"type": "http.response.body", "body": b"x" * 100})

    async def send(message: Any) -> None:
        held.append(account.held_bytes)

    async def main() -> None:
        await Counted(app, account)({"type": "http"}, await crumbs(3), send)

    asyncio.run(main())
    assert held == [3, 1, 1, 5001, 11, 101]
    assert account.held_bytes == 0


def test_what_is_discarded_holds_nothing() -> None:
    account, held = Account(HttpSettings(max_waiting_bytes=2000)), list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await discard_body(receive, 10.0)
        held.append(account.held_bytes)

    async def main() -> None:
        await Counted(app, account)({"type": "http"}, await crumbs(10_000), nowhere)

    asyncio.run(main())
    assert held == [0]


def test_a_piece_beyond_all_memory_ends_what_is_discarded() -> None:
    account, sent = Account(HttpSettings(max_waiting_bytes=2000)), list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await discard_body(receive, 10.0)
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * 2001, "more_body": True}

    async def send(message: Any) -> None:
        sent.append((message["type"], account.held_bytes))

    asyncio.run(Counted(app, account)({"type": "http"}, receive, send))
    assert sent == [("http.response.body", 0)]


LONG = b"x" * (LONG_BODY + 1)


async def unpacked_by(account: Account, plain: bytes, within: float = 10.0, max_size: int = 4 * LONG_BODY) -> bytes:
    """Return `plain` after it was compressed, and decompressed for a request of `account`."""
    with account.claim() as claim:
        CLAIM.set(claim)
        return await unpacked(gzip.compress(plain), "gzip", max_size, within)


async def test_long_bodies_are_decompressed_a_few_at_a_time() -> None:
    account = Account(HttpSettings(max_waiting_bytes=10 * LONG_BODY))
    assert await asyncio.gather(*[unpacked_by(account, LONG) for _ in range(20)]) == [LONG] * 20
    for _ in range(2):
        await account.unpacking.acquire()
    with pytest.raises(DeadlineExceeded, match=r"could not be decompressed within 0\.01 s"):
        await unpacked_by(account, LONG, 0.01)
    for _ in range(2):
        account.unpacking.release()
    account.take(7 * LONG_BODY)
    with pytest.raises(Overloaded):
        await unpacked_by(account, LONG)
    assert account.held_bytes == 7 * LONG_BODY


@pytest.mark.parametrize("coding", CODINGS)
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


async def test_a_body_above_the_limit_is_refused_however_short_the_limit() -> None:
    with pytest.raises(TooLarge, match="at most 400 bytes"):
        await unpacked_by(Account(HttpSettings()), b"x" * 401, max_size=400)


async def test_what_is_not_decompressed_is_not_charged() -> None:
    account = Account(HttpSettings(max_waiting_bytes=1000))
    with account.claim() as claim:
        CLAIM.set(claim)
        with pytest.raises(InvalidRequest):
            await unpacked(b"junk", "gzip", 500, 10.0)
        assert account.held_bytes == 0


async def test_a_claim_ends_with_its_request_whatever_happens() -> None:
    account = Account(HttpSettings())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        claim = CLAIM.get()
        assert claim is not None
        claim.take(100)
        raise RuntimeError("it fails")

    unused: Any = None
    with pytest.raises(RuntimeError, match="it fails"):
        await Counted(app, account)({"type": "http"}, unused, unused)
    assert (account.held_bytes, CLAIM.get()) == (0, None)
