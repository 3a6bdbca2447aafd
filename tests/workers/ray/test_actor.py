"""A detached actor outlives its servers: what it does between two of them, without a Ray."""

import socket
from contextlib import closing

from weir.messages import OBJECT, Batch, Events
from weir.wire.frames import FrameParser, Stop, encode_batch
from weir.workers.ray.actor import ServerConnection


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
