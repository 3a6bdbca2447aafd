"""fronts.py: what fronts count for the whole server; and the turns that an encoder gives to their texts."""

import asyncio
from typing import Any

import msgspec
import pytest
from tests.rings import subcases

from weir.text_server.fronts import Counting, FrontClients, FrontCounts, add_counted
from weir.text_server.metrics import TextClients, TextCounts
from weir.text_server.requests import CallerQueue


async def test_what_a_front_counts_is_counted_once() -> None:
    sent: list[bytes] = []

    counting = Counting(sent.append)
    counts, clients = FrontCounts(counting), FrontClients(counting)
    counting.report()  # nothing yet
    for texts in (1, 3):
        clients.received("me", texts, frontend="openai")
        counts.answered("small", "openai", texts, 1)
        counts.transferred("small", "openai", 10, 20)
    for client in ("you", "them"):
        clients.received(client, 1, frontend="tei")
    clients.passed_on("them", 1)  # the dispatcher receives it
    counts.refused("", "tei", 404)
    clients.warn_of_ids("me", "small", 2)
    counting.report()
    counting.report()
    (data,) = sent
    moved: list[Any] = []
    whole = TextClients(clock=lambda: 0.0)
    total = TextCounts(whole, lambda *sizes: moved.append(sizes))
    add_counted(data, total, whole)
    samples = {(each.name, *each.labels.values()): each.value for family in total.collect() for each in family.samples}
    assert samples["weir_text_calls_total", "small", "openai", "200"] == 2
    assert samples["weir_text_calls_total", "", "tei", "404"] == 1
    assert samples["weir_texts_total", "small", "openai"] == 4
    assert samples["weir_texts_truncated_total", "small", "openai"] == 2
    assert moved == [("small", "openai", 20, 40)]
    found = whole.statistics()
    assert (found["num_data_request"], found["num_total_seq"], found["num_total_client"]) == (3, 5, 3)
    assert {each["identity"]: each["num_request"] for each in whole.table()} == {"me": 2, "you": 1, "them": 0}
    assert found["max_size_per_request"] == 3 and found["min_last_two_interval"] >= 0


async def test_a_report_comes_by_itself() -> None:
    came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    FrontClients(Counting(came.set_result)).received("me", 1, frontend="tei")
    assert await asyncio.wait_for(came, 60)


@subcases(
    "data",
    [b"no", msgspec.msgpack.encode([[["collect", [], [1]]], []]), msgspec.msgpack.encode([[], [["me", "tei", [1], []]]])],
)  # fmt: skip
def test_counts_that_are_none(data: bytes) -> None:
    clients = TextClients()
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        add_counted(data, TextCounts(clients), clients)


def test_a_text_that_is_ahead_goes_after_those_that_are_not() -> None:
    queue: CallerQueue[Any] = CallerQueue()
    early, late = queue.hold(), queue.at(9.0)
    assert (early, late, queue.now) == (0.0, 9.0, 0.0)
    queue.release()
    assert queue.now == 9.0  # nobody with less is under way
    queue.ended(late)
    assert queue.at(1.0) == 10.0
