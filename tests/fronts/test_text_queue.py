"""The dispatcher's side of texts of fronts: turns, outputs in one message, and what ends a front."""

import time
from typing import Any

import numpy
from tests.fronts.test_dispatcher import connected
from tests.rings import subcases
from tests.waiting import until

from weir.errors import Overloaded
from weir.fronts.dispatcher import sent_output
from weir.fronts.messages import (
    CallerLeft,
    FailedRequest,
    MustHandOver,
    Outputs,
    Reported,
    RequestForm,
    SentArray,
    SentText,
    Submit,
)
from weir.messages import JSON, Form
from weir.testing import FakeExecutor

FORM = RequestForm(0, 1, Form(1e6, frontend="openai"))


class Texts:
    """A product whose models take texts: it notes their turns, and what was reported."""

    def __init__(self) -> None:
        self.under_way: list[tuple[float, bool]] = []
        self.heard: list[bytes] = []

    def turns(self, handle: Any) -> "Texts":
        return self

    def enter(self, ahead: float, cost: float) -> tuple[float, bool]:
        self.under_way.append((ahead + cost, True))
        return self.under_way[-1]

    def leave(self, turn: tuple[float, bool]) -> None:
        self.under_way.remove(turn)

    def reported(self, data: bytes) -> None:
        if data == b"wrong":
            raise ValueError("wrong")
        self.heard.append(data)


def vectors(batch: list[Any]) -> list[Any]:
    return [numpy.array([len(ids)], numpy.float32) for ids in batch]


def texts(first: int, *payloads: bytes, costs: list[int] | None = None, ahead: float = 0.0) -> Submit:
    now, count = time.monotonic(), len(payloads)
    sent = [SentText(ids, cost, ahead, True, 0, ()) for ids, cost in zip(payloads, costs or [1] * count, strict=True)]
    return Submit(first, 0, [now] * count, [*sent])


async def test_texts_of_a_batch_come_back_in_one_message() -> None:
    async with connected(FakeExecutor(vectors)) as (front, _, _):
        product = front.catalogue.product = Texts()
        await front.send(FORM, texts(3, b"abcd", b"abcdefgh", costs=[1, 2], ahead=7.0))
        found = await front.next()
        assert isinstance(found, Outputs) and found.batch is not None and found.batch.rows == 2
        expected = {number: [SentArray((1,), numpy.float32(size).tobytes())] for number, size in ((3, 4), (4, 8))}
        assert dict(zip(found.numbers, found.outputs, strict=True)) == expected
        assert product.under_way == [] and front.side.open == {}


async def test_every_end_of_a_text_ends_its_turn() -> None:
    executor = FakeExecutor()
    async with connected(executor, max_batch_size=1, max_queue_size=1) as (front, _, _):
        product = front.catalogue.product = Texts()
        await front.send(FORM, texts(0, b"abcd"))
        await until(lambda: bool(executor.pending))
        await front.send(texts(1, b"abcd"), texts(2, b"abcd"))
        refused = await front.next()
        assert isinstance(refused, FailedRequest) and refused.error.kind == Overloaded.__name__
        assert len(product.under_way) == 2
        await front.send(CallerLeft(1), Reported(b"counts"), texts(3, b"abcd"), texts(4, b"abcd"))
        assert (await front.next()).number == 4
        assert len(product.under_way) == 2 and product.heard == [b"counts"]
        front.side.close()
        assert product.under_way == []


async def test_more_texts_than_a_front_can_have_connections_hinder_no_requests() -> None:
    plain = RequestForm(1, 1, Form(1e6, content_type=JSON, accept=JSON, frontend="http"))

    executor = FakeExecutor()
    async with connected(executor, max_batch_size=1, max_queue_size=8) as (front, _, account):
        front.catalogue.product = Texts()
        front.catalogue.table()
        await front.send(FORM, plain, texts(0, *[b"abcd"] * 2 * account.max_connections))
        await until(lambda: len(front.side.open) == 2 * account.max_connections)
        front.catalogue.product = None  # the model of these texts has gone, and they still wait
        front.side.put(front.catalogue.table())
        now = time.monotonic()
        await front.send(Submit(6, 1, [now, now], [b"3", b"4"]))
        await until(lambda: len(front.side.open) == 8)
        assert front.ended == []
        await front.send(Submit(8, 1, [now] * 7, [b"3"] * 7))
        assert "more than it can have" in await front.until_ended()
        front.side.close()


async def test_texts_for_a_model_that_takes_none_are_handed_over() -> None:
    async with connected() as (front, _, _):
        await front.send(FORM, texts(0, b"abcd"))
        assert await front.next() == MustHandOver(0)


@subcases(
    "message",
    [
        Reported(b"wrong"),
        Submit(0, 0, [0.0], [SentText(b"abcd", 0, 0.0, True, 0, ())]),
        Submit(0, 0, [0.0], [SentText(b"abcd", 1, -1.0, True, 0, ())]),
        Submit(0, 9, [0.0], [SentText(b"abcd", 1, 0.0, True, 0, ())]),
    ],
)
async def test_a_front_that_sends_what_is_none_ends(message: Any) -> None:
    async with connected() as (front, _, _):
        front.catalogue.product = Texts()
        await front.send(FORM, message)
        assert "it sent" in await front.until_ended()


def test_outputs_are_sent_as_they_are() -> None:
    vector = numpy.array([1, 2], numpy.float32)
    assert sent_output(b"[1,2]") == b"[1,2]"
    assert sent_output(vector) == [SentArray((2,), vector.tobytes())]
    several = [SentArray(shape, vector.tobytes()) for shape in ((2,), (1, 2))]
    assert sent_output((vector, vector.reshape(1, 2))) == several
