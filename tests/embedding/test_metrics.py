from typing import Any

import pytest

from weir.embedding.bert_as_service.status import Status
from weir.embedding.metrics import TextClients


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_the_stock_statistic_has_is_counted() -> None:
    clock = Clock()
    clients = TextClients(clock)
    for client, texts, after in (("a", 3, 0.0), ("b", 1, 0.5), ("a", 1, 0.25)):
        clock.now += after
        clients.asked(client, texts, door="zeromq")
    clients.asked_about("c", door="http")
    assert clients.statistics() == {
        "num_data_request": 3, "num_total_seq": 5, "num_sys_request": 1, "num_total_request": 4, "num_total_client": 3,
        "num_active_client": 3, "avg_request_per_client": 1.0, "min_request_per_client": 0, "max_request_per_client": 2,
        "num_min_request_per_client": 1, "num_max_request_per_client": 1, "avg_size_per_request": 5 / 3,
        "min_size_per_request": 1, "max_size_per_request": 3, "num_min_size_per_request": 2,
        "num_max_size_per_request": 1, "avg_last_two_interval": 0.375, "min_last_two_interval": 0.25,
        "max_last_two_interval": 0.5, "num_min_last_two_interval": 1, "num_max_last_two_interval": 1,
        "avg_request_per_second": 3.0, "min_request_per_second": 2.0, "max_request_per_second": 4.0,
        "num_min_request_per_second": 1, "num_max_request_per_second": 1,
    }  # fmt: skip


def test_nobody_has_asked() -> None:
    assert TextClients().statistics() == {
        "num_data_request": 0, "num_total_seq": 0, "num_sys_request": 0, "num_total_request": 0, "num_total_client": 0,
        "num_active_client": 0,
    }  # fmt: skip


def test_clients_are_active_for_three_minutes() -> None:
    clock = Clock()
    clients = TextClients(clock)
    clients.asked("a", 1, door="zeromq")
    clock.now += 179.0
    clients.asked("b", 2, door="http")
    assert clients.active == 2
    clock.now += 2.0
    assert clients.active == 1
    assert clients.table() == [
        {"identity": "b", "door": "http", "num_request": 1, "num_total_seq": 2, "last": 2.0, "active": True},
        {"identity": "a", "door": "zeromq", "num_request": 1, "num_total_seq": 1, "last": 181.0, "active": False},
    ]


def test_the_clients_heard_of_last_are_remembered() -> None:
    clients = TextClients(most=3)
    for name in ("a", "b", "c", "a", "d"):
        clients.asked(name, 1, door="zeromq")
    assert [row["identity"] for row in clients.table()] == ["d", "a", "c"]
    for number in range(10_000):
        clients.asked(f"client {number}", number, door="zeromq")
    assert clients.statistics()["num_total_client"] == 3
    assert len(clients._sizes) == len(clients._intervals) == 3


class Encoder:
    dimensions, max_length = 8, 6


def test_the_status_says_what_stock_clients_look_for() -> None:
    clients = TextClients()
    served: Any = {"one": Encoder(), "two": Encoder()}
    status = Status(served, clients, lambda: {"pooling_layer": [-2]})
    config = status.config("me")
    assert (config["server_version"], config["max_seq_len"], config["client"]) == ("1.10.0", 6, "me")
    assert config["show_tokens_to_client"] is False
    assert config["pooling_layer"] == [-2]
    assert config["models"]["two"] == {"dimensions": 8, "max_seq_len": 6}
    clients.asked("me", 4, door="zeromq")
    assert status.server_status()["statistic"]["num_total_seq"] == 4
    assert status.client_status()["clients"][0]["identity"] == "me"


def test_a_client_whose_token_ids_are_of_another_model_is_named_in_the_log_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clients = TextClients()
    clients.warn_of_ids("stranger", 1, "mini")  # nobody knows it
    clients.asked("chain", 2, door="openai")
    with caplog.at_level("WARNING", "weir"):
        for _ in range(3):
            clients.warn_of_ids("chain", 2, "mini")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "client 'chain' sent 2 texts as token ids that the tokenizer of 'mini' would not make of them"
    )
    assert "check_embedding_ctx_length=False" in line
