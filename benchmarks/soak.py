"""Hours of everything at once: load, killed workers, killers, bad clients; nothing may be lost, nothing may grow."""

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from rich.console import Console

from benchmarks.harness.result import mebibytes
from benchmarks.harness.servers import Server, serving, weir_command
from benchmarks.parts.overload import offer

PATH = "/infer/square"
ROUND_SECONDS = 20.0
RATE = 2000
CODES = {"200", "429", "503", "unsent"}  # what a sound request may get while workers are killed


def run(console: Console, minutes: float) -> None:
    """Run for `minutes`; end with an error when a request got no answer, a wrong one, or memory grew by 10 %."""
    command = weir_command("benchmarks.models:Square", "--workers", "2", "--max-queue-size", "4096")
    with serving("Weir", command, path=PATH, body=b"3", expected=b"9") as server:
        _round(server, random.Random(0))
        before, end, number = server.usage().memory_bytes, time.monotonic() + 60 * minutes, 0
        while time.monotonic() < end:
            number += 1
            seen, pestered = _round(server, random.Random(number))
            memory = server.usage().memory_bytes
            console.print(
                f"{number:5} {seen['codes']} p99 {1e3 * seen['p99']:.1f} ms, {dict(pestered)}, {mebibytes(memory)} MiB",
                soft_wrap=True,
            )
            _judge(seen, memory, before)
        if server.ask(b"7") != b"49":
            raise SystemExit("wrong answer after the soak")
    console.print(f"[green]{number} rounds; every request had its answer; memory stayed within 10 %")


def _round(server: Server, chance: random.Random) -> tuple[dict[str, Any], Counter[str]]:
    done, pestered = threading.Event(), Counter[str]()
    pest = threading.Thread(target=_pester, args=(server, chance, done, pestered))
    pest.start()
    try:
        return offer(server.port, PATH, RATE, ROUND_SECONDS, 64), pestered
    finally:
        done.set()
        pest.join()


def _judge(seen: dict[str, Any], memory: float, before: float) -> None:
    if seen["unanswered"] or set(seen["codes"]) - CODES:
        raise SystemExit(f"answers that must not be, or none: {seen}")
    if memory > 1.1 * before:
        raise SystemExit(f"memory grew from {mebibytes(before)} to {mebibytes(memory)} MiB")


def _pester(server: Server, chance: random.Random, done: threading.Event, count: Counter[str]) -> None:
    """Do something unkind every 0.1 s or so."""
    unkind: list[Callable[[Server, random.Random], None]] = [_half_request, _garbage, _leave, _wrong_item]
    while not done.wait(chance.uniform(0.02, 0.2)):
        what = _kill if chance.random() < 0.02 else chance.choice(unkind)
        try:
            what(server, chance)
        except (OSError, ProcessLookupError):
            continue  # turned away, or it was gone already
        count[what.__name__.strip("_")] += 1


def _kill(server: Server, chance: random.Random) -> None:
    """End a worker; the launcher's own children only, never what anybody else started."""
    workers = server.front.children()
    if workers:
        os.kill(chance.choice(workers).pid, signal.SIGKILL)


def _say(server: Server, what: bytes, *, read: bool) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(what)
        if read:
            connection.recv(1 << 16)


def _request(body: bytes) -> bytes:
    return f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _half_request(server: Server, chance: random.Random) -> None:
    whole = _request(b"1" * 100)
    _say(server, whole[: chance.randrange(1, len(whole))], read=False)


def _garbage(server: Server, chance: random.Random) -> None:
    _say(server, chance.randbytes(chance.randrange(1, 2000)) + b"\r\n\r\n", read=False)


def _leave(server: Server, chance: random.Random) -> None:
    """Send a sound request and go away before its answer."""
    _say(server, _request(b"3"), read=False)


def _wrong_item(server: Server, chance: random.Random) -> None:
    """Send an item that predict raises for; its neighbours must not notice."""
    _say(server, _request(chance.choice([b"{}", b"nonsense", b'"text"', b"[1]"])), read=True)
