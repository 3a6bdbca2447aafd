"""The load and the tables of a server of sentence vectors, against a client that counts."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest

from weir.bench.vector_tables import Plan, Table, Tables
from weir.bench.vectors import Clients, Connect, Patience, measure, texts_of
from weir.client import EmbeddingClient
from weir.errors import InvalidRequest

ONCE = Patience(1, 10.0)


class Counting:
    """A server that counts what it is asked, and its clients."""

    def __init__(self, wrong: str = "") -> None:
        self.requests: Counter[int] = Counter()  # by their number of texts
        self.opened = 0
        self.flags: list[list[str]] = []
        self._wrong = wrong
        self._lock = threading.Lock()

    def connect(self) -> EmbeddingClient:
        with self._lock:
            self.opened += 1
        return cast(EmbeddingClient, self)

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *said: object) -> None:
        return None

    def encode(self, texts: list[str]) -> None:
        if self._wrong:
            raise InvalidRequest(self._wrong)
        with self._lock:
            self.requests[len(texts)] += 1

    @contextmanager
    def serve(self, flags: Sequence[str]) -> Iterator[Connect]:
        self.flags.append(list(flags))
        yield self.connect


def test_clients_ask_as_often_as_they_are_told_and_once_before_that() -> None:
    server = Counting()
    rates = measure(server.connect, Clients(3, 5, 2), Patience(4, 60.0))
    assert len(rates) == 3 and all(rate > 0 for rate in rates)
    assert server.requests == {5: 3 * (1 + 4)} and server.opened == 3


def test_a_client_without_time_asks_once_all_the_same() -> None:
    server = Counting()
    measure(server.connect, Clients(1, 2, 2), Patience(100, 0.0))
    assert server.requests == {2: 2}


def test_an_error_of_a_call_is_that_of_the_measurement() -> None:
    with pytest.raises(InvalidRequest, match="no"):
        measure(Counting("no").connect, Clients(4, 1, 1), ONCE)


def test_texts_have_the_words_that_were_asked_for_and_are_always_the_same() -> None:
    texts = texts_of(Clients(2, 3, 7), ["a", "b"])
    assert [len(each) for each in texts] == [3, 3]
    assert all(len(text.split()) == 7 for each in texts for text in each)
    assert texts == texts_of(Clients(2, 3, 7), ["a", "b"])


def test_every_table_is_written_and_every_step_told() -> None:
    server, told = Counting(), list[str]()
    plan = Plan([20, 40], [1, 8], [1, 2], [32], [-1, -2], batch=4, patience=ONCE, small_and_large=False)
    tables = list(Tables(plan, server.serve, told.append).measure())
    assert [table.title for table in tables] == [
        "Length of texts", "Texts in a batch of the server", "Pooled layer", "Texts in a request of one client", "Clients",
    ]  # fmt: skip
    assert [len(table.rows) for table in tables] == [2, 1, 2, 2, 2]
    assert len(told) == plan.steps == 9
    short = ["--max-length", "40"]
    assert server.flags == [
        ["--max-length", "20"], short, [*short, "--max-batch-size", "32", "--max-batch-cost", "1280", "--run-tokens", "1280"],
        [*short, "--layers", "-1"], [*short, "--layers", "-2"], short,
    ]  # fmt: skip


def test_small_requests_are_compared_with_large_ones() -> None:
    server, told = Counting(), list[str]()
    plan = Plan([], [], [], [], [], batch=4, patience=Patience(1, 0.0))
    (table,) = Tables(plan, server.serve, told.append).measure()
    assert [row[:2] for row in table.rows] == [["32", "1"], ["1", "16"]]
    assert "of the throughput of large ones (wished: 0.9 or more)" in table.remark and len(told) == plan.steps


def test_an_empty_plan_starts_nothing() -> None:
    server = Counting()
    assert list(Tables(Plan([], [], [], [], small_and_large=False), server.serve, _nobody).measure()) == []
    assert server.flags == []


def _nobody(said: Any) -> None:
    raise AssertionError(said)


def test_a_table_is_markdown() -> None:
    table = Table("Clients", ["clients", "texts/s"], [["1", "75"]], "Alone.")
    assert table.markdown() == "### Clients\n\n| clients | texts/s |\n| ---: | ---: |\n| 1 | 75 |\n\nAlone.\n"
