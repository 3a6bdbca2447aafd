"""Where nobody listens, where the server goes away or is no server of ours, and who may control it."""

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
from tests.client import kit
from tests.client.models import item
from tests.rings import subcases

from weir import errors
from weir.client import NEVER, ConnectionLost, EmbeddingClient, HttpClient, Unreachable

NOWHERE = kit.Running(None, "http://127.0.0.1:9", "127.0.0.1:9")  # type: ignore[arg-type]  # there is none


@pytest.mark.parametrize("name", kit.REMOTE)
def test_nobody_listens(name: str) -> None:
    with kit.asking(name, NOWHERE, retry=NEVER, timeout=5.0) as client:
        assert client.server_live() is False
        assert client.server_ready() is False
        for ask in (client.models, lambda: client.infer("a", item(1)), lambda: list(client.stream("a", item(1)))):
            with pytest.raises(Unreachable):
                ask()


@contextmanager
def answering(*parts: bytes) -> Iterator[kit.Running]:
    """Something that answers any request with `parts`, the last again and again until the client leaves."""

    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"".join(parts))
            connection.settimeout(0.01)
            while True:
                try:
                    if not connection.recv(1):
                        return
                except TimeoutError:
                    connection.sendall(parts[-1])
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        yield kit.Running(None, f"http://127.0.0.1:{listening.getsockname()[1]}", "")  # type: ignore[arg-type]  # it is no server
        thread.join()


def _page(body: bytes, head: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode("latin-1") + body


@pytest.mark.parametrize("name", ["http", "http-async"])
@subcases(
    ("head", "kind", "rule"),
    [
        ("503 Busy\r\nRetry-After: 1000000", errors.CapacityError, "HTTP status 503"),
        ("400 No\r\nRetry-After: \xb2", errors.InvalidRequest, "HTTP status 400"),
        ("200 OK\r\nInference-Header-Content-Length: 4 bytes", errors.WeirError, "a: the response has another form"),
    ],
)
def test_a_header_that_makes_no_sense_is_an_error_at_once(
    name: str, head: str, kind: type[Exception], rule: str
) -> None:
    ask = "stream" if "Retry" in head else "infer"
    with (
        answering(_page(b"", head)) as stranger,
        kit.asking(name, stranger, timeout=5.0) as client,
        pytest.raises(kind, match=rule),
    ):
        list(getattr(client, ask)("a", {"x": numpy.ones(1)}))


@subcases("body", [b"<html>", b"\xc0", b"\x82\xa6result\xc4\x04\0\0\0\0\xa5shape\x91\x02"])
def test_vectors_in_another_form_are_an_error_of_ours(body: bytes) -> None:
    for is_checked, where in ((False, "/encode"), (True, "/status/server")):
        with answering(_page(body)) as stranger, pytest.raises(errors.WeirError, match=f"^{where}: .* another form"):
            EmbeddingClient(stranger.url, check_version=is_checked).encode(["a"])


@pytest.mark.parametrize("name", ["http", "http-async"])
def test_a_body_that_does_not_end_or_is_no_json_is_an_error_of_ours(name: str) -> None:
    drips = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "
    bodies = b"<html>", b"null", b'"abc"', b"[]", b'{"models": 3}', b"[" * 100_000
    pages = [((_page(body),), 5.0, "the response has another form") for body in bodies]
    for parts, timeout, rule in ((drips, 0.2, "no response in time"), *pages):
        with (
            answering(*parts) as stranger,
            kit.asking(name, stranger, timeout=timeout, retry=NEVER) as client,
            pytest.raises(errors.DeadlineExceeded if parts is drips else errors.WeirError, match=rule),
        ):
            client.models()


def test_waiting_for_a_server_ends_in_time() -> None:
    with HttpClient(NOWHERE.url) as client, pytest.raises(errors.DeadlineExceeded, match="server ready"):
        client.wait_until_server_ready(0.05, interval=0.01)


def test_keys_and_tokens_are_sent_and_a_server_that_dies_is_noticed(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    ticking = f"{kit.STREAMING}:Ticking"
    said = ("--control-token-file", token, "--api-key", "key", "--load", "ticking", "--workers", "3")
    with kit.serving(*said, targets=(ticking,)) as server:
        for name in ("http", "grpc", "websocket-async"):
            with kit.asking(name, server) as stranger, pytest.raises(errors.Unauthorized):
                stranger.unload_model("simple")
            with kit.asking(name, server, token="secret") as owner:
                owner.unload_model("simple")
        with (
            kit.asking("http", server, token="key") as http,
            kit.asking("grpc-async", server, token="key") as grpc,
            kit.asking("websocket", server, token="key") as websocket,
        ):
            under_way = [client.stream("ticking", item(1)) for client in (http, grpc, websocket)]
            for answers in under_way:
                next(answers)
            children = server.served.children()
            server.served.signal(signal.SIGKILL)
            for answers in under_way:
                with pytest.raises(ConnectionLost):
                    for _ in answers:
                        pass
            for client in (http, grpc, websocket):
                with pytest.raises((Unreachable, ConnectionLost)):
                    client.infer("ticking", item(1), timeout=10.0)
            for child in children:
                child.wait(200)
