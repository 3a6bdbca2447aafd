"""The connection to an actor goes to those who have its token, and to nobody else."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.workers.ray.certificates import certificate

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


# Between nodes the connection to an actor is encrypted where Ray encrypts its own.


HOST = "127.0.0.1"


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use(certificate(tmp_path / "ours"), monkeypatch)
    return tmp_path


def use(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def encrypted(certificates: Path) -> Iterator[ConnectionOffer]:
    with closing(ConnectionOffer(TOKEN, HOST)) as encrypted:
        yield encrypted


def pass_on(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
    with suppress(OSError):  # the target has ended first
        while data := source.recv(1 << 16):
            seen += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def received(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := source.recv(1 << 20)):
        data += more
    return data


def test_nobody_between_the_nodes_can_read_what_is_sent(encrypted: ConnectionOffer) -> None:
    seen = bytearray()
    with socket.create_server((HOST, 0)) as between:
        threads = []
        between_ends: list[socket.socket] = []

        def watch() -> None:
            near, far = between.accept()[0], socket.create_connection((HOST, int(encrypted.address[1])))
            between_ends.extend((near, far))
            for ends in ((near, far), (far, near)):
                threads.append(threading.Thread(target=pass_on, args=(*ends, seen)))
                threads[-1].start()

        watching = threading.Thread(target=watch)
        watching.start()
        with connect((HOST, between.getsockname()[1]), TOKEN) as server:
            actor, _ = encrypted.take()
            server.sendall(b"a secret batch")
            assert received(actor, 14) == b"a secret batch"
            actor.sendall(b"a secret response")
            assert received(server, 17) == b"a secret response"
        assert actor.recv(100) == b""  # the server has left
        for thread in [watching, *threads]:
            thread.join(60)
        for end in between_ends:
            end.close()
    assert len(seen) > 1000 and b"secret" not in seen


def test_long_messages_cross_each_other(encrypted: ConnectionOffer) -> None:
    size = 24 << 20
    with connect(encrypted.address, TOKEN) as server:
        actor, _ = encrypted.take()
        sending = [
            threading.Thread(target=end.sendall, args=(content * size,))
            for end, content in ((server, b"b"), (actor, b"r"))
        ]
        for thread in sending:
            thread.start()
        came: list[bytes] = []
        reading = threading.Thread(target=lambda: came.append(received(actor, size)))
        reading.start()
        assert received(server, size) == b"r" * size
        for thread in [*sending, reading]:
            thread.join(60)
        assert came == [b"b" * size]
        server.sendall(b"last")
    assert received(actor, 5) == b"last"  # all of it, and then the end


def test_the_server_learns_that_the_actor_has_gone(encrypted: ConnectionOffer) -> None:
    with connect(encrypted.address, TOKEN) as server:
        actor, _ = encrypted.take()
        actor.sendall(b"last")
        actor.close()
        assert received(server, 5) == b"last"


def test_strangers_are_turned_away_from_an_encrypted_one(
    encrypted: ConnectionOffer, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_connection((HOST, int(encrypted.address[1]))) as plain:
        plain.sendall(b"no TLS at all" * 10)
        assert b"secret" not in plain.recv(100)
    use(certificate(certificates / "theirs"), monkeypatch)  # of another authority
    with pytest.raises(OSError, match=r"(?i)certificate|disconnected|reset"):
        connect(encrypted.address, TOKEN)


def test_the_certificate_must_be_for_the_address(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(certificate(certificates / "elsewhere", ["192.0.2.1"]), monkeypatch)
    with (
        closing(ConnectionOffer(TOKEN, HOST)) as encrypted,
        pytest.raises(OSError, match=r"IP address mismatch.*'127\.0\.0\.1'"),
    ):
        connect(encrypted.address, TOKEN)


def test_a_file_that_is_missing_is_named(encrypted: ConnectionOffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TLS_CA_CERT", "/nowhere")
    with pytest.raises(OSError, match=r"^RAY_USE_TLS is set, so RAY_TLS_CA_CERT must name a file; it is '/nowhere'$"):
        connect(encrypted.address, TOKEN)


def test_processes_of_one_node_need_no_certificates(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TLS_CA_CERT", "/nowhere")
    with closing(ConnectionOffer(TOKEN)) as encrypted, connect(encrypted.address, TOKEN) as server:
        server.sendall(b"batch")
        assert encrypted.take()[0].recv(100) == b"batch"
