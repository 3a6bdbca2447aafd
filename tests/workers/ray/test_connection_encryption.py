"""Between nodes the connection to an actor is encrypted where Ray encrypts its own."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.workers.ray.certificates import certificate

from weir.workers.ray import connection
from weir.workers.ray.connection import ConnectionOffer, connect

TOKEN = b"t" * connection.TOKEN_BYTES
HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use(certificate(tmp_path / "ours"), monkeypatch)
    return tmp_path


def use(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def offer(certificates: Path) -> Iterator[ConnectionOffer]:
    with closing(ConnectionOffer(TOKEN, HOST)) as offer:
        yield offer


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


def test_nobody_between_the_nodes_can_read_what_is_sent(offer: ConnectionOffer) -> None:
    seen = bytearray()
    with socket.create_server((HOST, 0)) as between:
        threads = []
        between_ends: list[socket.socket] = []

        def watch() -> None:
            near, far = between.accept()[0], socket.create_connection((HOST, int(offer.address[1])))
            between_ends.extend((near, far))
            for ends in ((near, far), (far, near)):
                threads.append(threading.Thread(target=pass_on, args=(*ends, seen)))
                threads[-1].start()

        watching = threading.Thread(target=watch)
        watching.start()
        with connect((HOST, between.getsockname()[1]), TOKEN) as server:
            actor, _ = offer.take()
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


def test_long_messages_cross_each_other(offer: ConnectionOffer) -> None:
    size = 24 << 20
    with connect(offer.address, TOKEN) as server:
        actor, _ = offer.take()
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


def test_the_server_learns_that_the_actor_has_gone(offer: ConnectionOffer) -> None:
    with connect(offer.address, TOKEN) as server:
        actor, _ = offer.take()
        actor.sendall(b"last")
        actor.close()
        assert received(server, 5) == b"last"


def test_strangers_are_turned_away(offer: ConnectionOffer, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_connection((HOST, int(offer.address[1]))) as plain:
        plain.sendall(b"no TLS at all" * 10)
        assert b"secret" not in plain.recv(100)
    use(certificate(certificates / "theirs"), monkeypatch)  # of another authority
    with pytest.raises(OSError, match=r"(?i)certificate|disconnected|reset"):
        connect(offer.address, TOKEN)


def test_the_certificate_must_be_for_the_address(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(certificate(certificates / "elsewhere", ["192.0.2.1"]), monkeypatch)
    with (
        closing(ConnectionOffer(TOKEN, HOST)) as offer,
        pytest.raises(OSError, match=r"IP address mismatch.*'127\.0\.0\.1'"),
    ):
        connect(offer.address, TOKEN)


def test_a_file_that_is_missing_is_named(offer: ConnectionOffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TLS_CA_CERT", "/nowhere")
    with pytest.raises(OSError, match=r"^RAY_USE_TLS is set, so RAY_TLS_CA_CERT must name a file; it is '/nowhere'$"):
        connect(offer.address, TOKEN)


def test_processes_of_one_node_need_no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TLS_CA_CERT", "/nowhere")
    with closing(ConnectionOffer(TOKEN)) as offer, connect(offer.address, TOKEN) as server:
        server.sendall(b"batch")
        assert offer.take()[0].recv(100) == b"batch"
