"""The client of bert-as-service, as PyPI has it, against the frontend."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy
import pytest
import zmq
from bert_serving.client import BertClient, ConcurrentBertClient
from tests.text_server.bert_as_service.hashing import DIMENSIONS, MAX_LENGTH, expected
from tests.text_server.bert_as_service.opened import Connect, Opened

from weir.errors import ModelNotReady, Overloaded
from weir.messages import LONGEST_TIMEOUT
from weir.text_server.bert_as_service.port import Port

TEXTS = ["First do it", "then do it right", "then do it better"]


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    with Opened(zmq_show_tokens=True) as opened:
        yield opened


@pytest.fixture
def connect(opened: Opened) -> Iterator[Connect]:
    """Returns a stock client of the frontend; all are closed at the end."""
    with ExitStack() as stack:

        def made(to: Opened = opened, kind: Any = BertClient, **said: Any) -> Any:
            said = {"port": to.port, "port_out": to.port_out, "timeout": 20_000, **said}
            return stack.enter_context(kind(ip="127.0.0.1", **said))

        yield made


def test_texts_become_vectors(connect: Connect, opened: Opened) -> None:
    client, words = connect(), [text.split() for text in TEXTS]
    vectors, tokens = client.encode(TEXTS, show_tokens=True)
    assert (vectors.shape, vectors.dtype, tokens) == ((3, DIMENSIONS), numpy.float32, words)
    assert (vectors == expected(TEXTS)).all() and (client.encode(words, is_tokenized=True) == vectors).all()
    texts, query = opened.encoder.heard[-1]
    assert (texts, query.options.whole_words) == (words, True)
    assert query.timeout == LONGEST_TIMEOUT  # a stock client listens as long as it likes
    client.encode(["who ||| me", " ||| none"])
    assert opened.encoder.heard[-1].texts == [("who", "me"), " ||| none"]
    assert connect(output_fmt="list").encode(TEXTS) == expected(TEXTS).tolist()


def test_answers_are_fetched_later(connect: Connect) -> None:
    client = connect()
    for text in TEXTS:
        client.encode([text], blocking=False)
    assert (client.fetch_all(sort=True, concat=True) == expected(TEXTS)).all()
    for text in TEXTS:
        client.encode([text], blocking=False)
    assert {answer.id for answer in client.fetch()} == {5, 6, 7}  # number 1 asked for the configuration
    answers = list(connect().encode_async(([text] for text in TEXTS), max_num_batch=2))
    assert sorted(answer.id for answer in answers) == [2, 3]


def test_the_server_tells_about_itself(connect: Connect) -> None:
    client = connect(show_server_config=True, identity=b"asks#about@it")
    client.encode(TEXTS)
    assert client.server_config["max_seq_len"] == MAX_LENGTH
    assert client.server_config["client"] == "asks#about@it"
    statistic = client.server_status["statistic"]
    assert statistic["num_data_request"] >= 1
    assert statistic["num_total_seq"] >= 3
    assert client.status["num_request"] == 5


def test_silence_ends_with_the_timeout(connect: Connect) -> None:
    with pytest.raises(TimeoutError):
        connect(timeout=200).encode(["!wait"])
    assert (connect().encode(TEXTS) == expected(TEXTS)).all()


def test_what_is_refused_raises_and_is_logged_with_the_client(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with Opened() as opened, caplog.at_level("WARNING", "weir"):
        client = connect(opened, identity=b"the one", timeout=-1)  # it would wait for ever
        for texts, said, logged in (
            (["fine", "!fail"], r"InvalidRequest: texts\[1\]: '!fail' cannot be encoded", "InvalidRequest"),
            (["!raise"], "ModelError: RuntimeError in the server", "RuntimeError: nobody expects this"),
        ):
            with pytest.raises(TypeError, match=f"refused by the server: {said}"):
                client.encode(texts)
            assert (client.encode(TEXTS) == expected(TEXTS)).all()
            assert "'client': 'the one'" in caplog.text and logged in caplog.text
        for text in ("a", "!fail", "b"):
            client.encode([text], blocking=False)
        with pytest.raises(TypeError, match="cannot be encoded"):
            client.fetch_all()


def test_a_request_that_is_too_large_raises(connect: Connect) -> None:
    with Opened(zmq_max_message_size=100_000, zmq_max_response_size=32 * 1000) as opened:
        client = connect(opened, timeout=-1)
        with pytest.raises(TypeError, match=r"TooLarge: a request of 30\d{4} bytes \(zmq_max_message_size\)"):
            client.encode(["x" * 300_000])
        rule = "TooLarge: texts: 1001; their vectors have 32032 bytes; a response may have 32000"
        with pytest.raises(TypeError, match=rule):
            client.encode(["a"] * 1001)
        assert client.encode(["a"] * 1000).shape == (1000, 8)
        opened.call(opened.frontend.refuse)
        with pytest.raises(TypeError, match="Draining: the server is shutting down"):
            client.encode(["a"])


def test_what_is_no_character_is_left_out(connect: Connect, opened: Opened) -> None:
    vectors = connect(timeout=-1).encode(["First\0 do it", "then \ud83ddo it right", "then do it better"])
    assert (vectors == expected(TEXTS)).all()
    assert opened.encoder.heard[-1].texts == TEXTS


def test_an_identity_may_be_anything(connect: Connect) -> None:
    for identity in (b"a#b@c", b"#", b"@1#2@", "für".encode(), b"\xff\xfe", b"0"):
        assert (connect(identity=identity).encode(TEXTS) == expected(TEXTS)).all()


def test_many_clients_get_their_own_answers(connect: Connect) -> None:
    clients = [connect(ignore_all_checks=True) for _ in range(24)]
    texts = [[f"text {client} {place}" for place in range(1 + client % 5)] for client in range(24)]
    with ThreadPoolExecutor(24) as threads:
        for _ in range(5):
            found = threads.map(lambda one, mine: one.encode(mine), clients, texts)
            assert all((vectors == expected(mine)).all() for mine, vectors in zip(texts, found, strict=True))


def test_threads_share_a_concurrent_client(connect: Connect) -> None:
    client = connect(kind=ConcurrentBertClient, max_concurrency=4)
    with ThreadPoolExecutor(4) as threads:
        for vectors in threads.map(lambda _: client.encode(texts=TEXTS), range(40)):
            assert (vectors == expected(TEXTS)).all()


def test_clients_of_one_identity_all_hear_an_answer(connect: Connect) -> None:
    asking, hearing = connect(identity=b"one"), connect(identity=b"one")
    asking.encode(TEXTS)
    hearing.receiver.setsockopt(zmq.RCVTIMEO, 20_000)
    frames = hearing.receiver.recv_multipart()
    while len(frames) == 3:  # the configuration that the other one asked for
        frames = hearing.receiver.recv_multipart()
    assert numpy.frombuffer(frames[2], "float32").tolist() == expected(TEXTS).ravel().tolist()


def test_what_a_full_line_refuses_waits(connect: Connect, opened: Opened) -> None:
    client = connect()
    refusals = [Overloaded("full", retry_after=0.01), ModelNotReady("not yet")]
    opened.call(lambda: opened.encoder.refusals.extend(refusals))
    assert (client.encode(TEXTS) == expected(TEXTS)).all()


def test_a_question_about_the_server_holds_up_nobody(connect: Connect) -> None:
    client = connect()
    client._send(b"SHOW_CONFIG")
    number = client._send(b'["First do it"]', 1)
    assert client._recv().id == number  # the configuration waits for those who have just come


def test_a_client_outlives_the_server(connect: Connect) -> None:
    with Opened() as first:
        client = connect(first)
        assert (client.encode(TEXTS) == expected(TEXTS)).all()
    answer: list[Any] = []
    asking = threading.Thread(target=lambda: answer.append(client.encode(TEXTS)))  # while nobody is there
    asking.start()
    with Opened(port=first.port, port_out=first.port_out):
        asking.join(60)
        assert (answer[0] == expected(TEXTS)).all()
        assert (client.encode(TEXTS) == expected(TEXTS)).all()


def test_a_broken_connection_is_made_anew(connect: Connect) -> None:
    with Opened() as opened:
        client = connect(opened)
        opened.call(partial(_end_all, opened.frontend._out))
        assert (client.encode(TEXTS) == expected(TEXTS)).all()  # kept until the client is back
        opened.call(partial(_end_all, opened.frontend._in))
        opened.until(lambda: any(peer._parser.ready for peer in opened.frontend._in.peers))
        assert (client.encode(TEXTS) == expected(TEXTS)).all()


def _end_all(port: Port) -> None:
    for peer in list(port.peers):
        peer.transport.abort()
