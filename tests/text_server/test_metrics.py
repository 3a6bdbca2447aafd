import pytest
from tests.batching.mill import Asked
from tests.rings import subcases

from weir.messages import Dispatch, Reason, Request, Timing, Wakeup
from weir.testing import FakeClock
from weir.text_models.texts import EncodedImage, Tokens
from weir.text_server.metrics import PaddingMetrics, RunShapes, TextClients


def test_what_the_stock_statistic_has_is_counted() -> None:
    assert set(TextClients().statistics().values()) == {0}
    clock = FakeClock()
    clients = TextClients(clock)
    for client, texts, after in (("a", 3, 0.0), ("b", 1, 0.5), ("a", 1, 0.25)):
        clock.advance(after)
        clients.received(client, texts, frontend="zeromq")
    clients.received_command("c", frontend="http")
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


def test_clients_are_active_for_three_minutes() -> None:
    clock = FakeClock()
    clients = TextClients(clock)
    clients.received("a", 1, frontend="zeromq")
    clock.advance(179.0)
    clients.received("b", 2, frontend="http")
    assert clients.active == 2
    clock.advance(2.0)
    assert clients.active == 1
    assert clients.table() == [
        {"identity": "b", "frontend": "http", "num_request": 1, "num_total_seq": 2, "last": 2.0, "active": True},
        {"identity": "a", "frontend": "zeromq", "num_request": 1, "num_total_seq": 1, "last": 181.0, "active": False},
    ]


def test_the_clients_heard_of_last_are_remembered() -> None:
    clients = TextClients(max_remembered=3)
    for name in ("a", "b", "c", "a", "d"):
        clients.received(name, 1, frontend="zeromq")
    assert [row["identity"] for row in clients.table()] == ["d", "a", "c"]
    for number in range(10_000):
        clients.received(f"client {number}", number, frontend="zeromq")
    assert clients.statistics()["num_total_client"] == 3
    assert len(clients._sizes) == len(clients._intervals) == 3


def test_a_client_that_sends_ids_of_another_model_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clients = TextClients()
    clients.warn_of_ids("stranger", "mini", 1)  # nobody knows it
    clients.received("chain", 2, frontend="openai")
    with caplog.at_level("WARNING", "weir"):
        for _ in range(3):
            clients.warn_of_ids("chain", "mini", 2)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("client 'chain' sent 2 texts as token ids that the tokenizer of 'mini' would not produce")
    assert "check_embedding_ctx_length=False" in line


TIMING = Timing(0.0, 0.0, 0.0)


def cut(*lengths: int) -> Dispatch:
    """Return a batch of texts."""
    requests: list[Request] = [Asked(Tokens(bytes(4 * length))) for length in lengths]
    return Dispatch(1, 0, requests, None, len(requests), 0.0, Reason.IDLE, 0, 0.0, None, Wakeup.ARRIVAL, 0.0)


@subcases(("shapes", "lengths", "padding"), [
    (RunShapes(), (10, 4, 7), 9),  # up to the longest
    (RunShapes(lambda lengths: [[1, 2], [0]]), (10, 4, 7), 3),  # in runs
    (RunShapes(fixed_length=16), (20, 4), 16),  # or further
    (RunShapes(padding_cost=0.25), (10, 4, 8), 2.0),  # in tokens' time
])  # fmt: skip
def test_a_batch_is_filled_up(shapes: RunShapes, lengths: tuple[int, ...], padding: float) -> None:
    waste = PaddingMetrics()
    waste.models["m"] = shapes
    for model in ("m", "other"):
        waste.computed(model, cut(*lengths), TIMING, 0.0)
    found = [(each.name, each.labels, each.value) for family in waste.collect() for each in family.samples]
    tokens = ("weir_tokens_total", {"model": "m"}, sum(lengths))
    assert found == [tokens, ("weir_padding_tokens_total", {"model": "m"}, padding)]


def test_a_text_that_only_the_worker_reads_has_what_it_was_thought_to_have() -> None:
    waste = PaddingMetrics()
    waste.models["m"] = RunShapes()
    dispatch = cut(8)
    dispatch.requests.append(Asked("a text", cost=5.0))
    waste.computed("m", dispatch, TIMING, 0.0)
    assert (waste.tokens["m"], waste.padding["m"]) == (13, 3)


def test_images_are_not_padded_however_long_they_are_decoded() -> None:
    waste = PaddingMetrics()
    waste.models["m/images"] = RunShapes(model="m")
    dispatch = cut(1)
    dispatch.requests[:] = [Asked(EncodedImage(b"", 50, decoding), cost=50 + decoding) for decoding in (12.0, 900.0)]
    waste.computed("m/images", dispatch, TIMING, 0.0)
    assert (waste.tokens["m"], waste.padding["m"]) == (100, 0)
