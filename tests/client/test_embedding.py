"""EmbeddingClient on a real server of encoders without a model."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_server.hashing import HashingEncoder, vector_of
from tests.text_server.served_texts import Served, served

from weir.client.calls import NEVER, Retry, Unreachable
from weir.client.embedding import ConcurrentEmbeddingClient, EmbeddingClient
from weir.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    SettingsError,
    Unsupported,
    WeirError,
)
from weir.text_server.bert_as_service.http import Status
from weir.text_server.texts import TextOptions, TextQuery

TEXTS = ["first do it", "then do it right"]
EXPECTED = np.stack([vector_of(text) for text in TEXTS])


class Running:
    """A server in a thread. `encoder` is its model, `stuck` one that answers when `gate` is opened."""

    def __init__(self, **http: Any) -> None:
        self._http = http
        self.encoder = HashingEncoder()
        self.stuck = HashingEncoder("stuck")
        self.started = threading.Event()
        self.server: Served
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self.stuck.gate = asyncio.Event()
        self.stuck.entered = asyncio.Event()
        async with served(self.encoder, self.stuck, **self._http) as self.server:
            self.started.set()
            await self._end.wait()

    def on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def __enter__(self) -> "Running":
        self._thread.start()
        self.started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running() as started:
        yield started


@pytest.fixture
def client(running: Running) -> Iterator[EmbeddingClient]:
    running.encoder.error = None
    with EmbeddingClient(running.server.url, identity="me", ignore_all_checks=True, retry=NEVER) as made:
        yield made


def test_vectors_come_as_arrays(running: Running, client: EmbeddingClient) -> None:
    vectors = client.encode(TEXTS)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, EXPECTED)
    vectors += 1  # they are the caller's own
    assert running.encoder.heard[-1].query.client == "me"


def test_wishes_travel_along(running: Running, client: EmbeddingClient) -> None:
    vectors, tokens = client.encode(TEXTS, show_tokens=True, dimensions=3, priority=2, timeout=7, prompt="query")
    np.testing.assert_array_equal(vectors, EXPECTED[:, :3])
    assert tokens == [text.split() for text in TEXTS]
    query = running.encoder.heard[-1].query
    assert query.options == TextOptions(dimensions=3, prompt="query", want_tokens=True)
    assert (query.priority, query.timeout) == (2, 7.0)


@pytest.mark.parametrize("texts", [[("a b", "c")], [[5, 6], [7]]])
def test_pairs_and_token_ids_arrive_as_they_are(running: Running, client: EmbeddingClient, texts: Any) -> None:
    client.encode(texts)
    assert running.encoder.heard[-1].texts == texts


def test_words_arrive_as_words(running: Running, client: EmbeddingClient) -> None:
    np.testing.assert_array_equal(client.encode([text.split() for text in TEXTS], is_tokenized=True), EXPECTED)


def test_answers_can_be_fetched_later(client: EmbeddingClient) -> None:
    for text in TEXTS:
        client.encode([text], blocking=False)
    np.testing.assert_array_equal(client.fetch_all(concat=True), EXPECTED)
    found = {each.id: each.embedding for each in client.encode_async([[text] for text in TEXTS])}
    np.testing.assert_array_equal(np.concatenate([found[number] for number in sorted(found)]), EXPECTED)


def test_a_cut_text_is_warned_of(running: Running) -> None:
    with (
        EmbeddingClient(running.server.url, check_version=False) as client,
        pytest.warns(UserWarning, match="1 texts are longer than the model reads and were cut: 1 "),
    ):
        client.encode(["short", "one two three four five six seven"])


def test_token_ids_of_another_model_are_warned_of(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = running.encoder.encode

    async def marked(texts: Any, query: TextQuery) -> Any:
        return (await encode(texts, query))._replace(foreign=2)

    monkeypatch.setattr(running.encoder, "encode", marked)
    with EmbeddingClient(running.server.url) as client:
        with pytest.warns(UserWarning, match=r"2 texts came as token ids.*those of another model give wrong vectors"):
            client.encode([[5, 6], [7]])
        client.encode([[5, 6], [7]], blocking=False)
        with pytest.warns(UserWarning, match="2 texts came as token ids"):
            client.fetch_all()
    with EmbeddingClient(running.server.url, ignore_all_checks=True) as client:
        client.encode([[5, 6], [7]])  # warnings are errors


def test_errors_are_those_of_a_caller_in_process(running: Running, client: EmbeddingClient) -> None:
    with pytest.raises(ModelNotFound, match="available: hashing, stuck"):
        client.encode(TEXTS, model="other")
    with pytest.raises(InvalidRequest, match=r"texts\[1\]: must not be empty"):
        client.encode(["a", ""])
    with pytest.raises(InvalidRequest, match="all of a request are pairs or none"):
        client.encode([("a", "b"), "c"])
    with pytest.raises(InvalidRequest, match=r"texts\[1\]: is not valid Unicode: character 2 is half of a surrogate"):
        client.encode(["a", "ab\ud800"])
    with pytest.raises(InvalidRequest, match=r"texts\[0\]: is not valid Unicode: character 0"):
        client.encode([["a", "\ud800"]], is_tokenized=True)
    with pytest.raises(InvalidRequest, match="model, prompt: must be valid Unicode"):
        client.encode(["a"], model="\ud800")
    running.encoder.error = Overloaded("full", retry_after=2.0)
    with pytest.raises(Overloaded) as caught:
        client.encode(TEXTS, timeout=1.0)  # too little to be sent again
    assert caught.value.retry_after == 2.0


def test_silence_ends_in_time(client: EmbeddingClient) -> None:
    with pytest.raises(DeadlineExceeded):
        client.encode(TEXTS, model="stuck", timeout=0.05)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(running: Running, client: EmbeddingClient, timeout: float) -> None:
    rule = f"timeout={timeout!r}: must be a finite number of seconds greater than 0"
    heard = len(running.encoder.heard)
    for ask in (client.encode, client.encode_async):
        with pytest.raises(InvalidRequest, match=rule):
            ask(TEXTS, timeout=timeout)
    with pytest.raises(InvalidRequest, match=rule):
        client.encode(TEXTS, blocking=False, timeout=timeout)
    assert len(running.encoder.heard) == heard
    with pytest.raises(SettingsError, match=rule):
        EmbeddingClient(running.server.url, timeout=timeout)


def test_closing_ends_what_is_under_way(running: Running) -> None:
    client = EmbeddingClient(running.server.url, model="stuck", ignore_all_checks=True)
    future = client._transport.start(_asked(), 20.0)
    running.on_loop(_entered(running))
    client.close()
    client.close()
    with pytest.raises((Cancelled, CancelledError)):
        future.result()
    with pytest.raises(Cancelled):
        client.encode(TEXTS, blocking=False)


def _asked() -> Any:
    from weir.client.embedding import EncodeCall

    return EncodeCall(TEXTS, "stuck")


async def _entered(running: Running) -> None:
    assert running.stuck.entered is not None
    await running.stuck.entered.wait()


def test_what_http_has_not_is_refused(running: Running, client: EmbeddingClient) -> None:
    with pytest.raises(Unsupported, match="ZeroMQ"):
        list(client.listen())
    with pytest.raises(SettingsError, match="port_out"):
        EmbeddingClient(running.server.url, port_out=5556)
    with pytest.raises(
        SettingsError, match="speaks HTTP: give the server's HTTP address, such as http://localhost:8000"
    ):
        EmbeddingClient("tcp://localhost:5555", port_out=5556)
    with pytest.raises(SettingsError, match="must begin with one of http://, https://, unix:"):
        EmbeddingClient("ftp://localhost")
    with pytest.raises(SettingsError, match="ndarray or list"):
        EmbeddingClient(running.server.url, output="tensor")
    with pytest.raises(Unreachable):
        EmbeddingClient("http://127.0.0.1:9", ignore_all_checks=True, retry=NEVER).encode(TEXTS)


def test_the_server_reports_its_state_and_ends_on_request(running: Running, client: EmbeddingClient) -> None:
    assert client.server_config["max_seq_len"] == 6
    assert client.server_status["statistic"]["num_sys_request"] > 0
    client.terminate()
    running.on_loop(running.server.ended.wait())


def test_a_server_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "weir.sock"
    with Running(uds=str(path)):
        for url in (f"unix:{path}", f"unix://{path}"):
            with EmbeddingClient(url) as client:
                np.testing.assert_array_equal(client.encode(TEXTS), EXPECTED)
                assert client.server_config["weir_version"]
        with ConcurrentEmbeddingClient(f"unix:{path}", max_concurrency=2) as several:
            np.testing.assert_array_equal(several.encode(TEXTS), EXPECTED)
    with pytest.raises(Unreachable, match=r"unix:.*weir\.sock: no connection"):
        EmbeddingClient(f"unix:{path}")
    with pytest.raises(SettingsError, match="url='unix:': must be http://HOST:PORT, https://HOST:PORT or unix:PATH"):
        EmbeddingClient("unix:")


# What it has of bert-as-service's client.


def test_lists_come_where_they_are_requested(running: Running) -> None:
    with EmbeddingClient(running.server.url, output="list", check_version=False) as client:
        assert client.encode(TEXTS) == EXPECTED.tolist()
        for text in TEXTS:
            client.encode([text], blocking=False)
        assert client.fetch_all(concat=True) == EXPECTED.tolist()
        assert next(client.encode_async([TEXTS])).embedding == EXPECTED.tolist()


def test_what_is_fetched_later_has_its_number(client: EmbeddingClient) -> None:
    assert [client.encode([text], blocking=False) for text in TEXTS] == [1, 2]
    assert client.status["num_pending_request"] == 2
    assert client.status["pending_request"] == {1, 2}
    # In the order of the requests.
    assert [answer.tolist() for answer in client.fetch_all()] == EXPECTED[:, None].tolist()
    assert client.fetch_all() == []
    assert client.fetch_all(concat=True).size == 0
    numbers = {client.encode([text], blocking=False, show_tokens=True) for text in TEXTS}
    assert {answer.id for answer in client.fetch()} == numbers == {3, 4}
    assert client.status["num_request"] == 4


def test_batches_of_an_endless_generator_are_encoded(client: EmbeddingClient) -> None:
    def endless() -> Iterator[list[str]]:
        while True:
            yield TEXTS

    answers = list(client.encode_async(endless(), max_num_batch=20, ahead=3))
    assert sorted(answer.id for answer in answers) == list(range(1, 21))
    stopped = client.encode_async(endless(), ahead=3)
    np.testing.assert_array_equal(next(stopped).embedding, EXPECTED)
    stopped.close()
    assert client.status["num_pending_request"] == 0


def test_many_threads_share_a_client(client: EmbeddingClient) -> None:
    texts = [[f"text {number} {place}" for place in range(1 + number % 5)] for number in range(100)]
    with ThreadPoolExecutor(16) as threads:
        for mine, vectors in zip(texts, threads.map(client.encode, texts), strict=True):
            np.testing.assert_array_equal(vectors, np.stack([vector_of(text) for text in mine]))


def test_answers_that_are_under_way_together_do_not_mix(client: EmbeddingClient) -> None:
    batches = [[f"text {number} {place}" for place in range(50)] for number in range(40)]
    for answer in client.encode_async(batches, ahead=8):
        np.testing.assert_array_equal(answer.embedding, np.stack([vector_of(text) for text in batches[answer.id - 1]]))


def test_a_concurrent_client_has_so_many_places(running: Running) -> None:
    with ConcurrentEmbeddingClient(running.server.url, max_concurrency=1, ignore_all_checks=True) as client:
        running.on_loop(_forget_entered(running))
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(client.encode, TEXTS, model="stuck", timeout=20.0)
            running.on_loop(_entered(running))
            with pytest.raises(Overloaded, match="max_concurrency=1"):
                client.encode(TEXTS)
            running.on_loop(_open(running))
            np.testing.assert_array_equal(waiting.result(), EXPECTED)
        np.testing.assert_array_equal(client.encode(TEXTS), EXPECTED)
        with pytest.raises(Unsupported, match="blocking=False"):
            client.encode(TEXTS, blocking=False)
        with pytest.raises(Unsupported, match="encode_async"):
            client.encode_async([TEXTS])
    running.on_loop(_close(running))


async def _forget_entered(running: Running) -> None:
    assert running.stuck.entered is not None
    running.stuck.entered.clear()


async def _open(running: Running) -> None:
    assert running.stuck.gate is not None
    running.stuck.gate.set()


async def _close(running: Running) -> None:
    assert running.stuck.gate is not None
    running.stuck.gate.clear()


def test_what_is_no_text_is_refused_before_it_is_sent(running: Running, client: EmbeddingClient) -> None:
    heard = len(running.encoder.heard)
    wrong: list[tuple[Any, str]] = [
        ("one", "list of texts, not str"), ([], "must not be empty"), (["a", 3], r"texts\[1\]: must be a text, not int"),
        ([["a"]], r"texts\[0\]"), ([("a", 1)], r"texts\[0\]"),
    ]  # fmt: skip
    for texts, text in wrong:
        with pytest.raises(InvalidRequest, match=text):
            client.encode(texts)
    with pytest.raises(InvalidRequest, match=r"texts\[1\]: must be a list of words"):
        client.encode([["a"], "b"], is_tokenized=True)
    assert len(running.encoder.heard) == heard


def test_cut_texts_are_refused_or_passed_over(running: Running, client: EmbeddingClient) -> None:
    long = "one two three four five six seven"
    with pytest.raises(InvalidRequest, match=r"texts\[1\]"):
        client.encode(["a", long], truncate=False)
    with EmbeddingClient(running.server.url, check_length=False) as other:
        assert other.encode([long]).shape == (1, 8)  # warnings are errors


def test_what_is_fetched_later_fails_in_time(client: EmbeddingClient) -> None:
    client.encode(TEXTS, model="stuck", blocking=False, timeout=0.2)
    client.encode(["a"], blocking=False)
    assert next(client.fetch()).id == 2
    with pytest.raises(DeadlineExceeded):
        client.fetch_all()


def test_an_overloaded_server_is_tried_again(running: Running) -> None:
    refusals: list[Exception] = [Overloaded("full", retry_after=0.02), Draining("for a moment")]
    encode = running.encoder.encode

    async def refusing(texts: Any, query: TextQuery) -> Any:
        if refusals:
            raise refusals.pop(0)
        return await encode(texts, query)

    with (
        pytest.MonkeyPatch.context() as patch,
        EmbeddingClient(running.server.url, retry=Retry(first_wait=0.01)) as client,
    ):
        patch.setattr(running.encoder, "encode", refusing)
        np.testing.assert_array_equal(client.encode(TEXTS), EXPECTED)
    assert not refusals


@pytest.mark.parametrize(
    ("facts", "error"), [({"weir_version": "77.0"}, Conflict), ({"server_version": "1.10.0"}, Unsupported)]
)
def test_a_server_of_another_kind_is_refused(
    running: Running, monkeypatch: pytest.MonkeyPatch, facts: dict[str, str], error: type[WeirError]
) -> None:
    monkeypatch.setattr(Status, "server_status", lambda self, client: facts)
    with pytest.raises(error, match="check_version"):
        EmbeddingClient(running.server.url)
    with EmbeddingClient(running.server.url, check_version=False) as client:
        assert client.server_config == facts
