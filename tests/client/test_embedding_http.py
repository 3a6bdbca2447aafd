"""EmbeddingClient over HTTP, on a real server of encoders without a model."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.embedding.doors import Served, served
from tests.embedding.hashing import HashingEncoder, vector_of

from weir.client.embedding import ConcurrentEmbeddingClient, EmbeddingClient
from weir.client.failures import Unreachable
from weir.client.retrying import NEVER
from weir.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    SettingsError,
    Unsupported,
)  # fmt: skip

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
    assert running.encoder.heard[-1].said["client"] == "me"


def test_wishes_travel_along(running: Running, client: EmbeddingClient) -> None:
    vectors, tokens = client.encode(TEXTS, show_tokens=True, dimensions=3, priority=2, timeout=7, prompt="query")
    np.testing.assert_array_equal(vectors, EXPECTED[:, :3])
    assert tokens == [text.split() for text in TEXTS]
    said = running.encoder.heard[-1].said
    assert said["prompt"] == "query"
    assert (said["dimensions"], said["priority"], said["timeout"], said["want_tokens"]) == (3, 2, 7.0, True)


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

    async def marked(texts: Any, **said: Any) -> Any:
        return (await encode(texts, **said))._replace(foreign=2)

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
    with pytest.raises(ModelNotFound, match="there are hashing, stuck"):
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
    from weir.client.embedding_transport import EncodeCall

    return EncodeCall(TEXTS, "stuck")


async def _entered(running: Running) -> None:
    assert running.stuck.entered is not None
    await running.stuck.entered.wait()


def test_what_http_has_not_is_refused(running: Running, client: EmbeddingClient) -> None:
    with pytest.raises(Unsupported, match="ZeroMQ"):
        list(client.listen())
    with pytest.raises(SettingsError, match="port_out"):
        EmbeddingClient(running.server.url, port_out=5556)
    with pytest.raises(Unreachable):
        EmbeddingClient("http://127.0.0.1:9", ignore_all_checks=True, retry=NEVER).encode(TEXTS)


def test_the_server_tells_its_state_and_ends_when_asked(running: Running, client: EmbeddingClient) -> None:
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
