"""The load and the tables of a server of sentence vectors, against a client that counts."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weir.bench import vectors
from weir.client import EmbeddingClient
from weir.errors import InvalidRequest, ModelNotReady

ONCE = vectors.Patience(1, 10.0)


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
    def serve(self, flags: Sequence[str]) -> Iterator[vectors.Connect]:
        self.flags.append(list(flags))
        yield self.connect


def test_a_server_that_still_loads_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading(Counting):
        def encode(self, texts: list[str]) -> None:
            super().encode(texts)
            if self.requests[1] < 3:
                raise ModelNotReady("loading")

    server = Loading()
    process: Any = SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(vectors, "EmbeddingClient", lambda *_, **__: server)
    vectors._wait(process, "http://localhost", 60.0, BytesIO())
    assert server.requests == {1: 3}


def test_clients_send_as_many_requests_as_configured_after_one_first() -> None:
    server = Counting()
    (rate,) = vectors.measure(server.connect, vectors.Clients(1, 5, 2), vectors.Patience(4, 60.0))
    assert rate > 0 and server.requests == {5: 1 + 4} and server.opened == 1
    assert len(vectors.measure(server.connect, vectors.Clients(3, 5, 2), vectors.Patience(4, 60.0))) == 3
    # Each goes on until the last one has been counted.
    assert server.requests[5] >= 5 + 3 * (1 + 4) and server.opened == 4


def test_an_error_of_a_call_is_that_of_the_measurement() -> None:
    with pytest.raises(InvalidRequest, match="no"):
        vectors.measure(Counting("no").connect, vectors.Clients(4, 1, 1), ONCE)


def test_every_table_is_written_and_every_step_reported() -> None:
    server, told = Counting(), list[str]()
    plan = vectors.TablesPlan([20, 40], [1, 8], [1, 2], [32], [-1, -2], batch=4, patience=vectors.Patience(1, 0.0))
    tables = list(vectors.Tables(plan, server.serve, told.append).measure())
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


# The tables of sentence vectors in files.


TABLES = [
    vectors.Table(
        "Clients", ["clients", "texts/s each", "texts/s in all"], [(1, 75.0, 75.0), (2, 50.5, 101.0)], "Each waits."
    ),
    vectors.Table("Small requests and large ones", ["clients", "requests in flight each", "texts/s"], [(8, 32, 9.5)]),
]
MACHINE = {"machine": "two CPUs", "versions": {"weir": "0.1.0"}}


def test_markdown_says_at_its_end_what_was_measured_on() -> None:
    text = vectors.as_markdown(TABLES, MACHINE)
    assert "| 2 | 50.5 | 101 |" in text and text.endswith("<sub>machine two CPUs, versions weir 0.1.0.</sub>\n")


def test_texts_have_the_words_that_were_requested_and_are_always_the_same() -> None:
    texts = vectors.texts_of(vectors.Clients(2, 3, 7), ["a", "b"])
    assert [[len(text.split()) for text in each] for each in texts] == [[7] * 3] * 2
    assert texts == vectors.texts_of(vectors.Clients(2, 3, 7), ["a", "b"])
