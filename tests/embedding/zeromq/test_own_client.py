"""Weir's own client over ZeroMQ: it does what the stock one does, and every failure is an answer."""

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
from bert_serving.client import BertClient
from tests.embedding.zeromq.hashing import DIMENSIONS, MAX_LENGTH, vector_of
from tests.embedding.zeromq.opened import Connect, Opened

from weir.client import NEVER, ConcurrentEmbeddingClient, EmbeddingClient, Unreachable
from weir.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    Overloaded,
    SettingsError,
    TooLarge,
    Unsupported,
    WeirError,
)

TEXTS = ["First do it", "then do it right", "then do it better"]
LONG = " ".join("abcdefgh")


def expected(texts: list[Any]) -> Any:
    return numpy.stack([vector_of(text) for text in texts])


def refuse(opened: Opened, *errors: WeirError) -> None:
    opened.call(lambda: opened.encoder.refusals.extend(errors))


# What it does.


def test_texts_become_vectors(connect: Connect) -> None:
    vectors = connect().encode(TEXTS)
    assert vectors.dtype == numpy.float32
    assert (vectors == expected(TEXTS)).all()
    assert connect(output="list").encode(TEXTS) == expected(TEXTS).tolist()


def test_a_text_may_be_words_token_ids_or_a_pair(connect: Connect, opened: Opened) -> None:
    client = connect()
    for texts in ([["a", "b"], ["c"]], [[101, 7], [8]], [("a", "b"), "a ||| b"]):
        vectors = client.encode(texts, is_tokenized=isinstance(texts[0][0], str) and isinstance(texts[0], list))
        assert (vectors == expected(texts)).all()
        assert opened.encoder.asked[-1]["texts"] == texts


def test_token_ids_of_another_model_are_named_in_the_log_and_warned_of(
    connect: Connect, opened: Opened, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = opened.encoder.encode

    async def marked(texts: Any, **said: Any) -> Any:
        return (await encode(texts, **said))._replace(foreign=2)

    monkeypatch.setattr(opened.encoder, "encode", marked)
    with caplog.at_level("WARNING", "weir"):
        client = connect(identity="with ids")
        for _ in range(2):
            with pytest.warns(
                UserWarning, match=r"2 texts came as token ids.*those of another model give wrong vectors"
            ):
                client.encode([[1, 2], [3]])
        connect(ignore_all_checks=True).encode([[1, 2], [3]])  # warnings are errors
    said = [record.getMessage() for record in caplog.records if "'with ids'" in record.getMessage()]
    assert len(said) == 1 and "sent 2 texts as token ids" in said[0]


def test_tokens_come_on_request(connect: Connect) -> None:
    vectors, tokens = connect().encode(TEXTS, show_tokens=True)
    assert tokens == [text.split() for text in TEXTS]
    assert (vectors == expected(TEXTS)).all()


def test_what_is_wished_for_reaches_the_model(connect: Connect, opened: Opened) -> None:
    assert connect().encode(TEXTS, dimensions=2, priority=7, timeout=9.0, prompt="query").shape == (3, 2)
    asked = opened.encoder.asked[-1]
    assert (asked["priority"], asked["prompt"], asked["whole_words"]) == (7, "query", False)
    assert 8.0 < asked["timeout"] <= 9.0
    assert connect(model="other").encode(TEXTS).shape == (3, DIMENSIONS)


def test_a_request_has_so_many_texts(connect: Connect) -> None:
    with pytest.raises(TooLarge, match="100001; one request may have 100000"):
        connect().encode(["a"] * 100_001)


def test_answers_are_fetched_later(connect: Connect) -> None:
    client = connect()
    assert [client.encode([text], blocking=False) for text in TEXTS] == [1, 2, 3]
    assert client.status["num_pending_request"] == 3
    assert (client.fetch_all(concat=True) == expected(TEXTS)).all()
    assert client.fetch_all() == []
    assert client.fetch_all(concat=True).size == 0
    numbers = {client.encode([text], blocking=False, show_tokens=True) for text in TEXTS}
    assert {(answer.id, len(answer.tokens)) for answer in client.fetch()} == set(zip(numbers, (1, 1, 1), strict=True))


def test_lists_are_put_together(connect: Connect) -> None:
    client = connect(output="list")
    for text in TEXTS:
        client.encode([text], blocking=False)
    assert client.fetch_all(concat=True) == expected(TEXTS).tolist()


def test_batches_of_an_endless_generator_are_encoded(connect: Connect) -> None:
    client = connect()

    def endless() -> Iterator[list[str]]:
        while True:
            yield TEXTS

    answers = list(client.encode_async(endless(), max_num_batch=20, ahead=3))
    assert sorted(answer.id for answer in answers) == list(range(1, 21))
    stopped = client.encode_async(endless(), ahead=3)
    assert (next(stopped).embedding == expected(TEXTS)).all()
    stopped.close()
    assert client.status["num_pending_request"] == 0


def test_the_server_tells_about_itself(connect: Connect) -> None:
    client = connect(identity="me")
    client.encode(TEXTS)
    assert client.server_config["max_seq_len"] == MAX_LENGTH
    assert client.server_status["statistic"]["num_data_request"] > 0
    assert client.status["identity"] == "me"


def test_cut_texts_are_named(connect: Connect) -> None:
    with pytest.warns(UserWarning, match=r"2 texts are longer.*: 0, 2 "):
        connect().encode([LONG, "a", LONG])
    with warnings.catch_warnings():
        connect(check_length=False).encode([LONG])
    with pytest.raises(InvalidRequest, match=r"texts\[1\]"):
        connect().encode(["a", LONG], truncate=False)


def test_many_threads_share_a_client(connect: Connect) -> None:
    client = connect()
    texts = [[f"text {number} {place}" for place in range(1 + number % 5)] for number in range(200)]
    with ThreadPoolExecutor(16) as threads:
        for mine, vectors in zip(texts, threads.map(client.encode, texts), strict=True):
            assert (vectors == expected(mine)).all()


def test_a_concurrent_client_has_so_many_places(connect: Connect, opened: Opened) -> None:
    client = connect(kind=ConcurrentEmbeddingClient, max_concurrency=1)
    assert (client.encode(TEXTS) == expected(TEXTS)).all()
    opened.call(opened.encoder.released.clear)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.encode, ["!wait x"])
        assert first.result().shape == (1, DIMENSIONS)
        waiting = threads.submit(client.encode, ["!wait"])
        opened.until(lambda: opened.encoder.asked[-1]["texts"] == ["!wait"])
        with pytest.raises(Overloaded, match="max_concurrency=1"):
            client.encode(TEXTS)
        opened.call(opened.encoder.released.set)
        waiting.result()
    opened.call(opened.encoder.released.clear)
    with pytest.raises(Unsupported, match="blocking=False"):
        client.encode(TEXTS, blocking=False)
    with pytest.raises(Unsupported, match="encode_async"):
        client.encode_async([TEXTS])


def test_clients_of_one_identity_hear_each_other(connect: Connect, opened: Opened) -> None:
    asking, listening = connect(identity="one"), connect(identity="one")
    heard = listening.listen(timeout=20.0)
    asking.encode(TEXTS)
    assert (next(heard).embedding == expected(TEXTS)).all()
    assert (listening.encode(["mine"]) == expected(["mine"])).all()
    with BertClient("127.0.0.1", opened.port, opened.port_out, identity=b"one", timeout=20_000) as stock:
        opened.until(lambda: len(opened.door._publisher._peers.get(b"one", ())) == 2)
        stock.encode(["stock"])
        assert (next(heard).embedding == expected(["stock"])).all()
    listening.close()
    assert list(heard) == []


# What fails.


def test_every_failure_is_an_answer(connect: Connect, opened: Opened) -> None:
    client = connect(retry=NEVER)
    for texts, error, text in (
        (["a", "!fail"], InvalidRequest, r"texts\[1\]: '!fail'"),
        (["!raise"], ModelError, "RuntimeError"),
        (["!wait"], DeadlineExceeded, "no answer in time"),
    ):
        with pytest.raises(error, match=text):
            client.encode(texts, timeout=0.2 if texts == ["!wait"] else None)
    with pytest.raises(ModelNotFound, match="there are hashing, other"):
        client.encode(TEXTS, model="absent")
    refuse(opened, Overloaded("full", retry_after=3.5))
    with pytest.raises(Overloaded, match="full") as refused:
        client.encode(TEXTS)
    assert refused.value.retry_after == 3.5


def test_a_request_given_up_is_taken_back(connect: Connect, opened: Opened) -> None:
    def begun() -> int:
        return sum(each["texts"] == ["!wait"] for each in opened.encoder.asked)

    earlier, before = begun(), opened.encoder.cancelled
    client = connect()
    with pytest.raises(DeadlineExceeded):  # on a busy machine even before it has begun
        client.encode(["!wait"], timeout=0.1)
    assert client.server_config  # what was sent before has been read by now
    first = begun()
    client.encode(["!wait"], blocking=False)
    opened.until(lambda: begun() == first + 1)
    client.close()
    client.close()
    with pytest.raises(Cancelled):
        client.fetch_all()
    with pytest.raises(Cancelled):
        client.encode(TEXTS)
    opened.until(lambda: opened.encoder.cancelled - before == begun() - earlier)


def test_what_is_fetched_later_fails_in_time(connect: Connect) -> None:
    client = connect()
    client.encode(["!wait"], blocking=False, timeout=0.1)
    client.encode(["a"], blocking=False)
    assert next(client.fetch()).id == 2
    with pytest.raises(DeadlineExceeded):
        client.fetch_all()


def test_what_is_no_text_is_refused_before_it_is_sent(connect: Connect) -> None:
    client = connect()
    for texts, text in (
        ("one", "list of texts, not str"),
        ([], "must not be empty"),
        (["a", 3], r"texts\[1\]: must be a text, not int"),
        ([["a"]], r"texts\[0\]"),
        (["a", "\ud800"], r"texts\[1\]: has no form"),
        ([("a", 1)], r"texts\[0\]"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            client.encode(texts)
    with pytest.raises(InvalidRequest, match=r"texts\[1\]: must be a list of words"):
        client.encode([["a"], "b"], is_tokenized=True)


def test_an_overloaded_line_is_asked_again(connect: Connect, opened: Opened) -> None:
    client = connect()
    refuse(opened, Overloaded("full", retry_after=0.02), Draining("for a moment"))
    assert (client.encode(TEXTS) == expected(TEXTS)).all()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "1", False])
def test_a_timeout_that_is_none_is_refused_before_anything_is_sent(
    connect: Connect, opened: Opened, timeout: Any
) -> None:
    client, rule = connect(), f"timeout={timeout!r}: must be a finite number of seconds greater than 0"
    asked = len(opened.encoder.asked)
    for blocking in (True, False):
        with pytest.raises(InvalidRequest, match=rule):
            client.encode(TEXTS, blocking, timeout=timeout)
    with pytest.raises(InvalidRequest, match=rule):
        client.encode_async([TEXTS], timeout=timeout)
    assert client.fetch_all() == []
    assert len(opened.encoder.asked) == asked
    with pytest.raises(SettingsError, match=rule):
        EmbeddingClient(opened.url, port_out=opened.port_out, timeout=timeout)


def test_nobody_listens(opened: Opened) -> None:
    with pytest.raises(Unreachable, match="no answer in time, to anything"):
        EmbeddingClient(opened.url, port_out=1, timeout=0.2)
    with EmbeddingClient(f"{opened.url}/", port_out=1, timeout=0.2, ignore_all_checks=True) as client:
        client.encode(TEXTS, blocking=False)
        with pytest.raises(Unreachable):
            client.fetch_all()


@pytest.mark.parametrize(
    ("url", "said", "text"),
    [
        ("ftp://localhost", {}, "must begin with one of"),
        ("tcp://localhost:99999", {}, "url="),
        ("tcp://", {}, "must be tcp://HOST:PORT"),
        ("tcp://localhost", {"identity": "x" * 300}, "1 to 255 bytes"),
        ("tcp://localhost", {"output": "tensor"}, "ndarray or list"),
        ("tcp://localhost", {"timeout": 0}, "timeout=0"),
    ],
)
def test_what_cannot_be_is_refused(url: str, said: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        EmbeddingClient(url, **said)


@pytest.mark.parametrize(
    ("facts", "error"), [({"weir_version": "77.0"}, Conflict), ({"server_version": "1.10.0"}, Unsupported)]
)
def test_a_server_of_another_kind_is_refused(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, facts: dict[str, str], error: type[WeirError]
) -> None:
    monkeypatch.setattr(opened.door._answering._means.status, "config", lambda client: facts)
    with pytest.raises(error, match="check_version"):
        EmbeddingClient(opened.url, port_out=opened.port_out, timeout=20.0)
    with EmbeddingClient(opened.url, port_out=opened.port_out, timeout=20.0, check_version=False) as client:
        assert facts.items() <= client.server_config.items()
