"""The connection to an actor goes to those who have its token, and to nobody else."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from weir.workers.ray import connection
from weir.workers.ray.connection import Address, ConnectionOffer, connect

TOKEN = b"t" * connection.TOKEN_BYTES
HOSTS = ("", "127.0.0.1")


@pytest.fixture(params=HOSTS, ids=["this node", "another node"])
def offer(request: pytest.FixtureRequest) -> Iterator[ConnectionOffer]:
    offer = ConnectionOffer(TOKEN, request.param)
    yield offer
    offer.close()


def plain(address: Address) -> socket.socket:
    """Connect without a word."""
    if not isinstance(address, str):
        return socket.create_connection(address)
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect("\0" + address)
    except OSError:
        end.close()
        raise
    return end


def exchange(offer: ConnectionOffer) -> None:
    """Have the server connect, and bytes go both ways."""
    with connect(offer.address, TOKEN) as server:
        actor, descriptors = offer.take()
        assert descriptors == []
        assert server.gettimeout() is actor.gettimeout() is None
        server.sendall(b"batch")
        assert actor.recv(100) == b"batch"
        actor.sendall(b"answer")
        assert server.recv(100) == b"answer"


def test_who_has_the_token_is_connected(offer: ConnectionOffer) -> None:
    exchange(offer)
    with pytest.raises(OSError, match="refused"):
        plain(offer.address)  # one connection is all


def test_who_says_nothing_keeps_nobody_out(offer: ConnectionOffer) -> None:
    strangers = [plain(offer.address) for _ in range(8)]
    exchange(offer)
    for each in strangers:
        each.close()


def test_descriptors_come_along_on_one_node() -> None:
    reading, writing = os.pipe()
    offer = ConnectionOffer(TOKEN)
    with closing(offer), connect(offer.address, TOKEN, [reading, writing]):
        os.write(writing, b"shared")
        os.close(reading)
        os.close(writing)
        came = offer.take()[1]
        assert os.read(came[0], 100) == b"shared"


def test_strangers_are_turned_away(offer: ConnectionOffer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=r"disconnected|reset"):
        connect(offer.address, b"another token")
    with plain(offer.address) as stranger:  # sends back what it got
        stranger.sendall(stranger.recv(100) * 2)
        assert stranger.recv(100) == b""
    plain(offer.address).close()
    monkeypatch.setattr(connection, "PATIENCE", 0.05)
    with plain(offer.address) as silent:
        assert len(silent.recv(100)) == 32
        assert silent.recv(100) == b""
    monkeypatch.setattr(connection, "PATIENCE", 5.0)
    exchange(offer)


def test_nothing_is_sent_to_who_does_not_prove_that_it_is_the_actor() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            with listening.accept()[0] as end:
                end.sendall(b"n" * 32)
                end.sendall(end.recv(100)[32:])  # the proof of the server is none of the actor

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(PermissionError, match="is not the actor"):
            connect(("127.0.0.1", listening.getsockname()[1]), TOKEN)
        pretending.join()


def test_an_offer_that_nobody_takes_is_closed() -> None:
    for host in HOSTS:
        offer = ConnectionOffer(TOKEN, host)
        offer.close()
        with pytest.raises(OSError, match="refused"):
            connect(offer.address, TOKEN)
