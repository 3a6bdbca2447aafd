"""Servers under test: started on a free port, waited for, watched, ended."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(__file__).with_name("peers")
START_SECONDS = 60.0


class Usage(NamedTuple):
    """CPU seconds used so far, and resident bytes (shared pages counted once)."""

    front_seconds: float
    worker_seconds: float
    memory_bytes: int


class Server:
    """A running server. `front` is its first process; the workers are all below it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int, path: str, words: IO[bytes]) -> None:
        self.name = name
        self.process = process
        self.words = words  # what it has written to stderr
        self.port = port
        self.url = f"http://127.0.0.1:{port}{path}"
        self.front = psutil.Process(process.pid)

    def ask(self, body: bytes, content_type: str = "application/json") -> bytes:
        """Send one request; return the body of the answer."""
        request = urllib.request.Request(self.url, data=body, headers={"Content-Type": content_type})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bytes(answer.read())

    def usage(self) -> Usage:
        """Return what the server has used until now."""
        workers = self.front.children(recursive=True)
        everyone = [self.front, *workers]
        times = [_cpu_seconds(process) for process in everyone]
        return Usage(times[0], sum(times[1:]), sum(process.memory_full_info().pss for process in everyone))


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def environment() -> dict[str, str]:
    """Return the environment of what is measured: this tree's own source first."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def free_port() -> int:
    """Return a port that is free at this moment (the peers cannot choose one themselves and say which)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(name: str, command: Sequence[str], *, path: str, body: bytes, expected: bytes | None,
            content_type: str = "application/json", start_seconds: float = START_SECONDS) -> Iterator[Server]:  # fmt: skip
    """Run `command` ("{port}" stands for the port) until the end of the block, from its first right answer on (None: any)."""
    port = free_port()
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [word.format(port=port) for word in command],
            cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=words, start_new_session=True,
        )  # fmt: skip
        server = Server(name, process, port, path, words)
        try:
            _wait_until_right(server, body, expected, content_type, start_seconds)
            yield server
        finally:
            _end(process)


@contextmanager
def serving_anything(name: str, command: Sequence[str], port: int) -> Iterator[Server]:
    """Run `command` until the end of the block, from the moment something listens on `port`."""
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=words, start_new_session=True
        )
        server = Server(name, process, port, "/", words)
        try:
            _wait_until_listening(server)
            yield server
        finally:
            _end(process)


def _wait_until_listening(server: Server) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise RuntimeError(f"{server.name} ended at its start: {_last_words(server)}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", server.port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{server.name} does not listen after {START_SECONDS:.0f} s")


def _wait_until_right(server: Server, body: bytes, expected: bytes | None, content_type: str, within: float) -> None:
    end = time.monotonic() + within
    answer: object = None
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise RuntimeError(f"{server.name} ended at its start: {_last_words(server)}")
        try:
            answer = server.ask(body, content_type)
            if expected is None or answer == expected:
                return
        except (OSError, urllib.error.URLError) as error:
            answer = error
        time.sleep(0.1)
    raise RuntimeError(f"{server.name} gave no right answer within {within:.0f} s, last: {answer!r}")


def _last_words(server: Server) -> str:
    server.words.seek(0)
    return server.words.read().decode(errors="replace")[-2000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def weir_command(target: str, *flags: str) -> list[str]:
    """Return the command that serves `target` as a user would."""
    return [sys.executable, "-m", "weir", "serve", target, "--port", "{port}", "--host", "127.0.0.1",
            "--log-level", "warning", *flags]  # fmt: skip
