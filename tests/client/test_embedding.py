"""EmbeddingClient on a real server of encoders without a model."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from tests.rings import subcases
from tests.text_server.hashing import HashingEncoder, vector_of
from tests.text_server.served_texts import Served, served

from weir import errors
from weir.client.calls import NEVER, Retry, Unreachable
from weir.client.embedding import ConcurrentEmbeddingClient, EmbeddingClient, EncodeCall
from weir.text_server.bert_as_service.http import Status
from weir.text_server.texts import TextOptions, TextQuery

TEXTS = ["first do it", "then do it right"]
EXPECTED = np.stack([vector_of(text) for text in TEXTS])
LONG = "one two three four five six seven"


class Running(NamedTuple):
    """A server in a thread. `encoder` is its model, `stuck` one that answers when its gate is opened."""

    server: Served
    encoder: HashingEncoder
    stuck: Any
    portal: BlockingPortal

    def wait_for(self, event: asyncio.Event) -> None:
        self.portal.call(event.wait)


@contextmanager
def serving(**http: Any) -> Iterator[Running]:
    encoder, stuck = HashingEncoder(), HashingEncoder("stuck")
    stuck.gate, stuck.entered = asyncio.Event(), asyncio.Event()
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(served(encoder, stuck, **http)) as server,
    ):
        yield Running(server, encoder, stuck, portal)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as started:
        yield started


@pytest.fixture
def client(running: Running) -> Iterator[EmbeddingClient]:
    running.encoder.error = None
    with EmbeddingClient(running.server.url, identity="me", ignore_all_checks=True, retry=NEVER) as made:
        yield made


def test_vectors_come_as_arrays_and_options_travel_along(running: Running, client: EmbeddingClient) -> None:
    vectors = client.encode(TEXTS)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, EXPECTED)
    vectors += 1  # they are the caller's own
    vectors, tokens = client.encode(TEXTS, show_tokens=True, dimensions=3, priority=2, timeout=7, prompt="query")
    np.testing.assert_array_equal(vectors, EXPECTED[:, :3])
    assert tokens == [text.split() for text in TEXTS]
    query = running.encoder.heard[-1].query
    assert query.options == TextOptions(dimensions=3, prompt="query", want_tokens=True)
    assert (query.priority, query.timeout, query.client) == (2, 7.0, "me")


@subcases(("texts", "said"), [
    ([("a b", "c")], {}), ([[5, 6], [7]], {}), ([text.split() for text in TEXTS], {"is_tokenized": True}),
])  # fmt: skip
def test_pairs_token_ids_and_words_arrive_as_they_are(
    running: Running, client: EmbeddingClient, texts: Any, said: Any
) -> None:
    client.encode(texts, **said)
    assert running.encoder.heard[-1].texts == texts


@subcases(
    ("image", "rule"),
    [
        ("/nowhere.png", r"must be a path, bytes, .* \(.*No such file"),
        (7, "must be a path, bytes, an image of Pillow, or an array of uint8"),
        (np.zeros((2, 2, 5), np.uint8), "must be a path, bytes, an image of Pillow, or an array of uint8"),
    ],
)
def test_what_is_no_image_is_refused_before_it_is_sent(client: EmbeddingClient, image: Any, rule: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=rf"images\[1\]: {rule}"):
        client.encode(images=[b"", image])


def test_a_request_has_texts_or_images(client: EmbeddingClient) -> None:
    with pytest.raises(errors.InvalidRequest, match="texts: must not be empty"):
        client.encode()
    with pytest.raises(errors.InvalidRequest, match="either all of a request are pairs or none is"):
        client.encode([("a", "b")], images=[b"file"])


def test_a_cut_text_is_warned_of_unless_it_is_refused(running: Running, client: EmbeddingClient) -> None:
    with (
        EmbeddingClient(running.server.url, check_version=False) as warned,
        pytest.warns(UserWarning, match="1 texts are longer than the model reads and were cut: 1 "),
    ):
        warned.encode(["short", LONG])
    with pytest.raises(errors.InvalidRequest, match=r"texts\[1\]"):
        client.encode(["a", LONG], truncate=False)
    with EmbeddingClient(running.server.url, check_length=False) as other:
        assert other.encode([LONG]).shape == (1, 8)  # warnings are errors


def test_token_ids_of_another_model_are_warned_of(
    running: Running, client: EmbeddingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = running.encoder.encode

    async def marked(texts: Any, query: TextQuery) -> Any:
        return (await encode(texts, query))._replace(foreign=2)

    monkeypatch.setattr(running.encoder, "encode", marked)
    with EmbeddingClient(running.server.url) as warned:
        with pytest.warns(UserWarning, match=r"2 texts came as token ids.*those of another model give wrong vectors"):
            warned.encode([[5, 6], [7]])
        warned.encode([[5, 6], [7]], blocking=False)
        with pytest.warns(UserWarning, match="2 texts came as token ids"):
            warned.fetch_all()
    client.encode([[5, 6], [7]])  # warnings are errors


def test_errors_are_those_of_a_caller_in_process(running: Running, client: EmbeddingClient) -> None:
    running.encoder.error = errors.Overloaded("full", retry_after=2.0)
    with pytest.raises(errors.Overloaded) as caught:
        client.encode(TEXTS, timeout=1.0)  # too little to be sent again
    assert caught.value.retry_after == 2.0
    running.encoder.error = None
    with pytest.raises(errors.ModelNotFound, match="available: hashing, stuck"):
        client.encode(TEXTS, model="other")
    with pytest.raises(errors.InvalidRequest, match=r"texts\[1\]: must not be empty"):
        client.encode(["a", ""])


@subcases(("texts", "said", "rule"), [
    ([("a", "b"), "c"], {}, "all of a request are pairs or none"),
    (["a", "ab\ud800"], {}, r"texts\[1\]: is not valid Unicode: character 2 is half of a surrogate"),
    ([["a", "\ud800"]], {"is_tokenized": True}, r"texts\[0\]: is not valid Unicode: character 0"),
    (["a"], {"model": "\ud800"}, "model, prompt: must be valid Unicode"),
    ("one", {}, "list of texts, not str"), ([], {}, "must not be empty"), (["a", 3], {}, r"texts\[1\]: must be a text, not int"),
    ([["a"]], {}, r"texts\[0\]"), ([("a", 1)], {}, r"texts\[0\]"),
    ([["a"], "b"], {"is_tokenized": True}, r"texts\[1\]: must be a list of words"),
    (TEXTS, {"timeout": float("nan")}, "timeout=nan: must be a finite number of seconds greater than 0"),
    (TEXTS, {"timeout": 0, "blocking": False}, "timeout=0: must be a finite number of seconds greater than 0"),
])  # fmt: skip
def test_what_is_wrong_is_refused_before_it_is_sent(
    running: Running, client: EmbeddingClient, texts: Any, said: dict[str, Any], rule: str
) -> None:
    heard = len(running.encoder.heard)
    with pytest.raises(errors.InvalidRequest, match=rule):
        client.encode(texts, **said)
    assert len(running.encoder.heard) == heard


@subcases(("url", "said", "kind", "rule"), [
    ("", {"timeout": -1}, errors.SettingsError, "timeout=-1: must be a finite number of seconds greater than 0"),
    ("", {"port_out": 5556}, errors.SettingsError, "port_out"),
    ("", {"output": "tensor"}, errors.SettingsError, "ndarray or list"),
    ("tcp://localhost:5555", {"port_out": 5556}, errors.SettingsError, "speaks HTTP: give the server's HTTP address, such as http://localhost:8000"),
    ("ftp://localhost", {}, errors.SettingsError, "must begin with one of http://, https://, unix:"),
    ("unix:", {}, errors.SettingsError, "url='unix:': must be http://HOST:PORT, https://HOST:PORT or unix:PATH"),
    ("http://127.0.0.1:9", {}, Unreachable, "http://127.0.0.1:9"),
])  # fmt: skip
def test_what_makes_no_client(running: Running, url: str, said: Any, kind: type[errors.WeirError], rule: str) -> None:
    with pytest.raises(kind, match=rule):
        EmbeddingClient(url or running.server.url, **said)


def test_what_http_has_not_is_refused(client: EmbeddingClient) -> None:
    with pytest.raises(errors.Unsupported, match="ZeroMQ"):
        list(client.listen())
    with pytest.raises(errors.InvalidRequest, match="timeout=0:"):
        client.encode_async([TEXTS], timeout=0)
    with pytest.raises(Unreachable):
        EmbeddingClient("http://127.0.0.1:9", ignore_all_checks=True, retry=NEVER).encode(TEXTS)


def test_closing_ends_what_is_under_way(running: Running) -> None:
    client = EmbeddingClient(running.server.url, model="stuck", ignore_all_checks=True)
    future = client._transport.start(EncodeCall(TEXTS, "stuck"), 20.0)
    running.wait_for(running.stuck.entered)
    client.close()
    client.close()
    with pytest.raises((errors.Cancelled, CancelledError)):
        future.result()
    with pytest.raises(errors.Cancelled):
        client.encode(TEXTS, blocking=False)


def test_the_server_reports_its_state_and_ends_on_request(running: Running, client: EmbeddingClient) -> None:
    assert client.server_config["max_seq_len"] == 6
    assert client.server_status["statistic"]["num_sys_request"] > 0
    client.terminate()
    running.wait_for(running.server.ended)


def test_a_server_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "weir.sock"
    with serving(uds=str(path)):
        for url in (f"unix:{path}", f"unix://{path}"):
            with EmbeddingClient(url) as client:
                np.testing.assert_array_equal(client.encode(TEXTS), EXPECTED)
                assert client.server_config["weir_version"]
        with ConcurrentEmbeddingClient(f"unix:{path}", max_concurrency=2) as several:
            np.testing.assert_array_equal(several.encode(TEXTS), EXPECTED)
    with pytest.raises(Unreachable, match=r"unix:.*weir\.sock: no connection"):
        EmbeddingClient(f"unix:{path}")


# What it has of bert-as-service's client.


def test_lists_come_where_they_are_requested(running: Running) -> None:
    with EmbeddingClient(running.server.url, output="list", check_version=False) as client:
        assert client.encode(TEXTS) == EXPECTED.tolist()
        for text in TEXTS:
            client.encode([text], blocking=False)
        assert client.fetch_all(concat=True) == EXPECTED.tolist()
        assert next(client.encode_async([TEXTS])).embedding == EXPECTED.tolist()


def test_what_is_fetched_later_has_its_number_and_its_deadline(client: EmbeddingClient) -> None:
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
    client.encode(TEXTS, model="stuck", blocking=False, timeout=0.2)
    client.encode(["a"], blocking=False)
    assert next(client.fetch()).id == 6
    with pytest.raises(errors.DeadlineExceeded):
        client.fetch_all()
    with pytest.raises(errors.DeadlineExceeded):
        client.encode(TEXTS, model="stuck", timeout=0.05)


def test_batches_of_an_endless_generator_are_encoded_and_do_not_mix(client: EmbeddingClient) -> None:
    def endless() -> Iterator[list[str]]:
        for number in count(1):
            yield [f"text {number} {place}" for place in range(50)]

    answers = {each.id: each.embedding for each in client.encode_async(endless(), max_num_batch=40, ahead=8)}
    assert sorted(answers) == list(range(1, 41))
    for number, batch in zip(range(1, 41), endless(), strict=False):
        np.testing.assert_array_equal(answers[number], np.stack([vector_of(text) for text in batch]))
    stopped = client.encode_async(endless(), ahead=3)
    assert next(stopped).embedding.shape == (50, 8)
    stopped.close()
    assert client.status["num_pending_request"] == 0


def test_many_threads_share_a_client(client: EmbeddingClient) -> None:
    texts = [[f"text {number} {place}" for place in range(1 + number % 5)] for number in range(100)]
    with ThreadPoolExecutor(16) as threads:
        for mine, vectors in zip(texts, threads.map(client.encode, texts), strict=True):
            np.testing.assert_array_equal(vectors, np.stack([vector_of(text) for text in mine]))


def test_a_concurrent_client_has_so_many_places(running: Running) -> None:
    with ConcurrentEmbeddingClient(running.server.url, max_concurrency=1, ignore_all_checks=True) as client:
        running.stuck.entered.clear()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(client.encode, TEXTS, model="stuck", timeout=20.0)
            running.wait_for(running.stuck.entered)
            with pytest.raises(errors.Overloaded, match="max_concurrency=1"):
                client.encode(TEXTS)
            running.portal.call(running.stuck.gate.set)
            np.testing.assert_array_equal(waiting.result(), EXPECTED)
        running.portal.call(running.stuck.gate.clear)
        np.testing.assert_array_equal(client.encode(TEXTS), EXPECTED)
        with pytest.raises(errors.Unsupported, match="blocking=False"):
            client.encode(TEXTS, blocking=False)
        with pytest.raises(errors.Unsupported, match="encode_async"):
            client.encode_async([TEXTS])


def test_an_overloaded_server_is_tried_again(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[Exception] = [errors.Overloaded("full", retry_after=0.02)]
    encode = running.encoder.encode

    async def refusing(texts: Any, query: TextQuery) -> Any:
        if refusals:
            raise refusals.pop(0)
        return await encode(texts, query)

    monkeypatch.setattr(running.encoder, "encode", refusing)
    with EmbeddingClient(running.server.url, retry=Retry(first_wait=0.01)) as client:
        np.testing.assert_array_equal(client.encode(TEXTS), EXPECTED)
    assert not refusals


@pytest.mark.parametrize(
    ("facts", "error"),
    [({"weir_version": "77.0"}, errors.Conflict), ({"server_version": "1.10.0"}, errors.Unsupported)],
)
def test_a_server_of_another_kind_is_refused(
    running: Running, monkeypatch: pytest.MonkeyPatch, facts: dict[str, str], error: type[errors.WeirError]
) -> None:
    monkeypatch.setattr(Status, "server_status", lambda self, client: facts)
    with pytest.raises(error, match="check_version"):
        EmbeddingClient(running.server.url)
    with EmbeddingClient(running.server.url, check_version=False) as client:
        assert client.server_config == facts
