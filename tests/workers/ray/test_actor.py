"""A detached actor outlives its servers: what it does between two of them, without a Ray."""

import socket
import threading
from contextlib import closing

import pytest

from weir.messages import OBJECT, Batch, Events
from weir.wire.frames import FrameParser, Stop, encode_batch
from weir.workers.ray import actor
from weir.workers.ray.actor import NotOwned, ServerConnection, WorkerActor


def test_a_worker_that_outlives_its_server_finishes_its_batches_for_nobody() -> None:
    server, end = socket.socketpair()
    with server, closing(ServerConnection(end, FrameParser(), None)) as channel:
        for batch_id in (1, 2):
            server.sendall(encode_batch(Batch(batch_id, [b"a", b"b"], OBJECT, OBJECT), None))
        first = channel.receive()
        assert isinstance(first, Batch) and 1 not in channel.cancelled(1)
        server.close()
        channel.report(Events(1, [b"a"], indices=[0], final=False))  # which nobody reads
        channel.report(Events(1, [b"b"], indices=[1], final=False))
        assert 0 in channel.cancelled(1) and 1 in channel.cancelled(1)
        channel.report(Events(1, [], indices=[]))
        assert isinstance(channel.receive(), Batch) and 1 in channel.cancelled(2)
        channel.report(Events(2, [b"a", b"b"]))
        assert isinstance(channel.receive(), Stop) and channel.kept


def test_it_has_one_server_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "RENEWAL", 0.01)
    worker, left = WorkerActor("v", b""), threading.Event()
    assert not worker.is_owned()
    assert worker.adopt("other", b"") == ("version", 0)
    assert worker.adopt("v", b"") == ("", 1)

    def serve() -> None:
        while not left.is_set():
            assert worker.listen(1)

    server = threading.Thread(target=serve)
    server.start()
    assert worker.is_owned() and worker.adopt("v", b"") == ("serves", 0)
    left.set()
    server.join()
    assert not worker.is_owned()
    assert worker.adopt("v", b"") == ("", 2)
    with pytest.raises(NotOwned, match="another server has taken this actor over"):
        worker.listen(1)
    assert worker.listen(2)
