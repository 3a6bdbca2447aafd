"""A server of sentence vectors in a process of its own, for as long as it is measured."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, NamedTuple

from weir.client import EmbeddingClient, Unreachable
from weir.errors import SettingsError

ANSWER_SECONDS = 600.0  # thousands of texts in one request take their time on a CPU


class Running(NamedTuple):
    """A server that runs: where HTTP is, where clients are to ask, and over ZeroMQ on which port the answers come. A call connects a client."""

    http: str
    url: str
    port_out: int | None = None

    def __call__(self) -> EmbeddingClient:
        return EmbeddingClient(self.url, timeout=ANSWER_SECONDS, port_out=self.port_out, ignore_all_checks=True)


@contextmanager
def text_server(flags: Sequence[str], *, zmq: bool = False, timeout: float = 300.0) -> Iterator[Running]:
    """Run `weir embed serve` with `flags` until the end of the block, which begins when it is ready; clients ask it
    over ZeroMQ if `zmq`. Raises SettingsError with its own words if it does not start, or is not ready after `timeout` seconds.
    """
    port, *others = _free_ports(3 if zmq else 1)
    doors = ["--port", str(port), "--host", "127.0.0.1"]
    if zmq:
        doors += ["--zmq-port", str(others[0]), "--zmq-port-out", str(others[1])]
    command = [sys.executable, "-m", "weir", "embed", "serve", *flags, *doors, "--log-level", "warning"]
    with tempfile.TemporaryFile() as words:
        server = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=words, stdin=subprocess.DEVNULL, env=_without_key()
        )
        http = f"http://127.0.0.1:{port}"
        try:
            _wait(server, http, timeout, words)
            yield Running(http, f"tcp://127.0.0.1:{others[0]}", others[1]) if zmq else Running(http, http)
        finally:
            _end(server)


def _without_key() -> dict[str, str]:
    """Return the environment: the key of the user's other servers is none of this one, which its clients do not know."""
    return {name: value for name, value in os.environ.items() if name not in ("WEIR_API_KEY", "WEIR_API_KEY_FILE")}


def _free_ports(count: int) -> list[int]:
    """Return ports that are free at this moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait(server: "subprocess.Popen[bytes]", url: str, timeout: float, words: IO[bytes]) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if server.poll() is not None:
            words.seek(0)
            said = words.read().decode(errors="replace").strip()
            raise SettingsError(f"the server did not start: {said[-2000:]}")
        try:
            with EmbeddingClient(url, timeout=10.0, ignore_all_checks=True) as client:
                client.encode(["ready"])
                return
        except Unreachable:
            time.sleep(0.1)
    raise SettingsError(f"the server was not ready after {timeout:g} s (wait_till_ready)")


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
