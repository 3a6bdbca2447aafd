"""What the example programs 1, 2, 3 and 8 of bert-as-service do, with its client from PyPI, at a server of a model.

As they are published, 1 ends with a TypeError of its own (the length of a comparison) and 2 reads a field that the client 1.10.0 calls `embedding`.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import repeat
from typing import Any

import numpy
import pytest
from bert_serving.client import BertClient
from tests.embedding import tiny
from tests.embedding.zeromq.opened import Connect

import weir.embedding

LINES = [f"line {number} of a file, do it right" for number in range(120)]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    folder = tmp_path_factory.mktemp("models")
    with weir.embedding.serve(
        tiny.model(folder / "model"), port=0, zmq_port=0, zmq_show_tokens=True, executor="thread", threads=1, device_map=["cpu"],
        calibrate=False, cache=str(folder / "cache"),
    ) as server:  # fmt: skip
        assert server.zmq_ports is not None
        yield server.zmq_ports


@pytest.fixture
def connect(ports: tuple[int, int]) -> Iterator[Connect]:
    with ExitStack() as stack:

        def made(**said: Any) -> Any:
            return stack.enter_context(
                BertClient(ip="127.0.0.1", port=ports[0], port_out=ports[1], timeout=60_000, **said)
            )

        yield made


def near(some: Any, others: Any) -> bool:
    """Tell whether these are the same vectors, whatever batches they were in."""
    return bool(numpy.allclose(some, others, atol=1e-5))


def test_ever_larger_requests_one_after_the_other(connect: Connect) -> None:
    client = connect(show_server_config=True)
    once = client.encode(LINES)
    assert once.shape == (len(LINES), tiny.HIDDEN)
    for power in range(6):
        count = 2**power
        vectors, tokens = client.encode(LINES * count, show_tokens=True)
        assert near(vectors, numpy.tile(once, (count, 1)))
        assert len(tokens) == len(LINES) * count and tokens[0][0] == "[CLS]"


def test_many_are_sent_and_fetched_later(connect: Connect) -> None:
    client = connect()
    once = client.encode(LINES)
    for _ in range(20):
        client.encode(LINES, blocking=False)
    assert near(client.fetch_all(concat=True), numpy.tile(once, (20, 1)))
    for _ in range(20):
        client.encode(LINES, blocking=False)
    found = list(client.fetch())
    assert len({answer.id for answer in found}) == 20
    assert all(near(answer.embedding, once) for answer in found)
    streamed = list(client.encode_async(repeat(LINES), max_num_batch=20))
    assert len(streamed) == 20 and all(near(answer.embedding, once) for answer in streamed)


def test_clones_of_a_client_that_have_asked_for_nothing_end_at_once(connect: Connect) -> None:
    client = connect()
    clones = [connect(identity=client.identity) for _ in range(2)]
    heard: list[Any] = []
    threads = [threading.Thread(target=lambda clone=clone: heard.extend(clone.fetch())) for clone in clones]
    for thread in threads:
        thread.start()
    vectors = [client.encode(LINES) for _ in range(3)]
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert heard == [] and all(each.shape == (len(LINES), tiny.HIDDEN) for each in vectors)


def test_a_question_is_nearest_to_itself(connect: Connect) -> None:
    questions = ["Why are there two ports?", "How fast is it?", "May a text be longer than that?", "First do it"]
    client = connect()
    known = client.encode(questions)
    known = known / numpy.linalg.norm(known, axis=1, keepdims=True)
    for place, question in enumerate(questions):
        scores = (client.encode([question])[0] * known).sum(axis=1)
        assert scores.argmax() == place
