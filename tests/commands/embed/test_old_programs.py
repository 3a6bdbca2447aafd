"""What the example programs of bert-as-service do, with its own client, against a server that is started with its flags.

As they are published, the first ends with a TypeError of its own (the length of a comparison) and the second reads a field that the client 1.10.0
calls `embedding`.
"""

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import zmq
from bert_serving.client import BertClient
from tests.served import Served
from tests.text_models import tiny

from weir.bench.vectors import reserve_ports

LINES = [f"first do it, then do it right, the {number}th time, and let it go at once\n" for number in range(512)]


class Started(NamedTuple):
    """A server, and its ports."""

    served: Served
    port: int
    port_out: int
    said: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("models") / "model", layers=2)


@pytest.fixture(scope="module")
def started(model: Path) -> Iterator[Started]:
    with reserve_ports(2) as (port, port_out):
        flags = ("-num_worker=1", "-cpu", "-port", port, "-port_out", port_out, "-max_seq_len", "NONE")
        ours = ("-show_tokens_to_client", "--no-calibrate", "--cache", model / "cache")
        with Served(f"-model_dir={model}", *flags, *ours, command="embed serve") as served:
            said = served.until_logged("flags of bert-serving-start.*")[0]
            served.until_printed("also at")
            yield Started(served, port, port_out, said)


def connected(started: Started, **said: Any) -> BertClient:
    return BertClient(port=started.port, port_out=started.port_out, check_length=False, **said)


def test_the_log_says_how_other_machines_reach_it(started: Started) -> None:
    assert f"zmq_port={started.port} zmq_port_out={started.port_out}" in started.said
    assert "only for this machine; --host 0.0.0.0 opens them to others" in started.said


def test_requests_that_grow_by_and_by(started: Started) -> None:
    """As its first example, but for six of its ten requests, of which the largest has a quarter of a million texts there."""
    with connected(started, show_server_config=True) as client:
        expected = client.encode(LINES)
        for power in (0, 1, 4, 6):
            vectors, tokens = client.encode(LINES * 2**power, show_tokens=True)
            assert vectors.shape == (512 * 2**power, tiny.HIDDEN) and len(tokens) == len(vectors)
            assert tokens[0][0] == tokens[-1][0] == "[CLS]"
            assert numpy.allclose(vectors[-512:], expected, atol=1e-5)


def test_requests_without_waiting_and_an_endless_stream(started: Started) -> None:
    """As its second example."""
    with connected(started) as client:
        expected = client.encode(LINES)
        for _ in range(8):
            client.encode(LINES, blocking=False)
        assert client.fetch_all(concat=True).shape == (8 * 512, tiny.HIDDEN)
        for _ in range(8):
            client.encode(LINES, blocking=False)
        fetched = [(each.id, each.embedding.shape) for each in client.fetch()]
        assert len({number for number, _ in fetched}) == 8
        assert {shape for _, shape in fetched} == {(512, tiny.HIDDEN)}

        def endless() -> Iterator[list[str]]:
            while True:
                yield LINES

        streamed = list(client.encode_async(endless(), max_num_batch=8))
        assert len(streamed) == 8 and all(numpy.allclose(each.embedding, expected, atol=1e-5) for each in streamed)


def test_clients_of_one_identity(started: Started) -> None:
    """As its third example: two more clients listen under the identity of the one that asks, and hear its answers too."""
    with connected(started) as client:
        clones = [connected(started, identity=client.identity) for _ in range(2)]
        for _ in range(3):
            assert client.encode(LINES).shape == (512, tiny.HIDDEN)
        for clone in clones:
            clone.receiver.setsockopt(zmq.RCVTIMEO, 60_000)
            heard: list[int] = []
            while len(heard) < 3:
                frames = clone.receiver.recv_multipart()
                heard += [len(frames[2])] if len(frames) == 4 else []  # the others tell of the server
            clone.close()
            assert heard == [4 * 512 * tiny.HIDDEN] * 3


def test_its_quick_start(model: Path) -> None:
    for port in (5555, 5556):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            pytest.skip(f"port {port} is taken on this machine")
    with Served(
        "-model_dir", model, "-num_worker=1", "--no-calibrate", "--cache", model / "cache", command="embed serve"
    ) as served:
        found = served.until_printed("also at.*")
        assert re.search(r"tcp://127.0.0.1:5555\b", found[0])
        with BertClient(check_length=False) as client:
            assert client.encode(["First do it", "then do it right", "then do it better"]).shape == (3, tiny.HIDDEN)
