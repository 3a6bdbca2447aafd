"""What an ordinary caller sends to end a server: each request is valid, or nearly, and dear. See hostile.py for what needs no key."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import grpc
import httpx
from tests.fuzz.hostile import PATIENCE, SILENT, Attack, Room, connected, left_open, status_of

from weir.text_server.bert_as_service.frames import GREETING, MORE, frame, ready

_MB = 1 << 20


def _answered(room: Room, ask: Callable[[httpx.Client], str]) -> str:
    """Return what `ask` returns, or how its client was not answered."""
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{room.ports['http']}", timeout=PATIENCE) as client:
            return ask(client)
    except httpx.TimeoutException:
        return SILENT
    except httpx.HTTPError:
        return "closed"


def _posted(room: Room, path: str, content: bytes, kind: str = "application/json") -> str:
    """Return the status of a whole request."""
    headers = {"content-type": kind}
    return _answered(room, lambda client: str(client.post(path, content=content, headers=headers).status_code))


_LONG = ((b"/" + b"a" * 60_000, b""), (b"/infer/length", b"X-Long: " + b"a" * 60_000 + b"\r\n"))
_BEGINNINGS = ((b"GET", b""), (b"POST", b"Content-Length: 2\r\n"), (b"POST", b"Content-Length: 9\r\n"))


def long_heads(room: Room) -> str:
    """Ask with a path or a header of 60 KB, read the answer, and leave the connection open; or do not end the request."""
    chance = room.chance
    path, header = chance.choice(_LONG)
    method, length = chance.choice(_BEGINNINGS)
    client = connected(room.ports["http"], PATIENCE)
    client.sendall(b"%b %b HTTP/1.1\r\nHost: t\r\n%b%b\r\n11" % (method, path, length, header))
    if b"9" not in length and not client.recv(12):
        return "closed"
    return left_open(room, client, "left open")


def long_lengths(room: Room) -> str:
    """State a length with thousands of zeros."""
    paths = (b"/infer/length", b"/v1/files", b"/encode", b"/v2/models/grid/infer", b"/v1/batches", b"/nothing")
    with connected(room.ports["http"], PATIENCE) as client:
        head = b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %b2\r\n\r\n{}"
        client.sendall(head % (room.chance.choice(paths), b"0" * 5000))
        return status_of(client)


def many_tokens(room: Room) -> str:
    """Send a text of very many token ids, words, or words of almost a thousand letters."""
    chance = room.chance
    count = chance.choice((1_000, 100_000, 1_000_000))
    ids, words = [chance.randrange(10, 100)] * count, ("a" * 999 + " ") * (count // 500)
    text: list[Any] | str = chance.choice((ids, ["abab"] * (count // 4), words, "a ||| " * (count // 4)))
    asks: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": [text] if isinstance(text, list) else text},
        "/embed": {"inputs": [text]},
        "/encode": {"id": 1, "texts": [text]},
        "/tokenize": {"inputs": text},
        "/decode": {"ids": text},
    }
    path = chance.choice(list(asks))
    return _posted(room, path, json.dumps({"model": "tokens", **asks[path]}).encode())


def pages(room: Room) -> str:
    """Ask for a page that is dear to make, many times at once."""
    path = room.chance.choice(("/openapi.json", "/models", "/v1/models", "/info", "/v2/models/stats"))
    with connected(room.ports["http"], PATIENCE) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: t\r\n\r\n".encode() * 50)
        return status_of(client)


def stalled_upload(room: Room) -> str:
    """Begin to upload a file, and leave it at that."""
    client = connected(room.ports["http"], PATIENCE)
    announced, sent = room.chance.choice((1000, 100 * _MB)), room.chance.choice((1, 1000, 500_000))
    kind = "Content-Type: multipart/form-data; boundary=b"
    client.sendall(f"POST /v1/files HTTP/1.1\r\nHost: t\r\n{kind}\r\nContent-Length: {announced}\r\n\r\n".encode())
    begin = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    client.sendall((begin + b"x" * sent)[: announced - 1])
    return left_open(room, client, "left open")


def _lines(chance: Random) -> bytes:
    """Return an input file: blank lines, long lines, very many, or lines that fail."""
    kind = chance.randrange(4)
    if kind == 0:
        return chance.choice((b"\n", b" \n", b"\r\n")) * (4 * _MB)
    return _input(*((4 * _MB, 4), (10, 5000), (300_000, 30))[kind - 1])


def _input(size: int, count: int) -> bytes:
    line = '{"custom_id": "%d", "method": "POST", "url": "/infer/length", "body": "%s"}\n'
    return "".join([line % (number, "x" * size) for number in range(count)]).encode()


def _job(room: Room, content: bytes, then: Callable[[httpx.Client, str, str], None]) -> str:
    """Upload a file and start a job with it; `then` gets the file and the job, "" if there is none."""

    def ask(client: httpx.Client) -> str:
        made = client.post("/v1/files", files={"file": ("f", content)}, data={"purpose": "batch"})
        if made.status_code != 200:
            return str(made.status_code)
        file = made.json()["id"]
        asked = {"input_file_id": file, "endpoint": "/infer/length", "completion_window": "1h"}
        job = client.post("/v1/batches", json=asked)
        then(client, file, job.json()["id"] if job.status_code == 200 else "")
        return str(job.status_code)

    return _answered(room, ask)


def batch_job(room: Room) -> str:
    """Upload a file and start a job with it; perhaps cancel it, read its output slowly, or delete what it reads."""
    cancels = room.chance.random() < 0.3

    def then(client: httpx.Client, file: str, job: str) -> None:
        if job and cancels:
            client.post(f"/v1/batches/{job}/cancel")
        reader = connected(room.ports["http"], PATIENCE)
        reader.sendall(f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: t\r\n\r\n".encode())
        room.left_open.append(reader)
        for oldest in client.get("/v1/files?order=asc&limit=20").json().get("data", [])[:10]:
            client.delete(f"/v1/files/{oldest['id']}")  # so that there is room for more jobs

    return _job(room, _lines(room.chance), then)


def odd_job(room: Room) -> str:
    """Ask for a job with a window that is none, or upload with a boundary of thousands of characters, or a form that ends early."""
    chance = room.chance
    kind = chance.randrange(3)
    if kind == 0:
        window = chance.choice(("\u0661h", "1h\n", "9999d", "0m", "-1h", "1" * 5000 + "h"))
        body = {"input_file_id": "file-x", "endpoint": "/infer/length", "completion_window": window}
        return _posted(room, "/v1/batches", json.dumps(body).encode())
    boundary = "b" * chance.choice((1, 257, 5000))
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{{"custom_id": '
    return _posted(room, "/v1/files", part.encode(), f"multipart/form-data; boundary={boundary}")


def withdrawn(room: Room) -> str:
    """Send tens of thousands of requests for one topic, or for many, over ZeroMQ, and leave before they are answered."""
    chance = room.chance
    count, topics = chance.choice((1_000, 10_000, 52_000)), chance.choice((1, 200))
    names = [b"w%d.%d" % (chance.randrange(10**9), place) for place in range(topics)]

    def ask(place: int) -> bytes:
        parts = names[place % topics], b'["a%d"]' % place, b"%d" % place
        return b"".join([frame(each, MORE) for each in parts]) + frame(b"1")

    with _zmtp(room, "zmq_out", "SUB") as reader, _zmtp(room, "zmq", "PUSH") as sender, suppress(OSError):
        reader.sendall(b"".join([frame(b"\1" + name) for name in names]))
        reader.recv(64)
        sender.sendall(b"".join(map(ask, range(count))))
    return "withdrawn"


def _zmtp(room: Room, port: str, kind: str) -> socket.socket:
    client = connected(room.ports[port], 10.0)
    client.sendall(GREETING + ready(kind))
    return client


def many_calls(room: Room) -> str:
    """Begin thousands of gRPC calls on one connection, and leave or wait for them."""
    count = room.chance.choice((100, 2000))
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{room.ports['grpc']}", options) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive", None, None)
        begun: list[Any] = [call.future(b"", timeout=PATIENCE) for _ in range(count)]
        if room.chance.random() < 0.3:
            return "left"
        codes = {each.code().name for each in begun}
    return "OK" if codes <= {"OK", "RESOURCE_EXHAUSTED"} else sorted(codes - {"OK"})[0]


_DYING = threading.Lock()  # one thread ends workers at a time, so that it knows how often they have died
_HEALTHY = 20.0  # seconds in which a worker that has served before must serve again


def quick_deaths(room: Room) -> str:
    """End the worker of a model nine times, let it serve, and end it once more: it must soon serve again."""
    if not _DYING.acquire(blocking=False):
        return "another does"
    try:
        for deaths in (9, 1):
            for _ in range(deaths):
                _posted(room, "/infer/frail", b'"die"')
            until = time.monotonic() + (PATIENCE if deaths > 1 else _HEALTHY)
            while (status := _posted(room, "/infer/frail", b"1")) != "200":
                if time.monotonic() > until:
                    return f"{SILENT}: not served again, {status}"
                time.sleep(0.1)
        return "served again"
    finally:
        _DYING.release()


FORGED = "forged-line"


def forged_lines(room: Room) -> str:
    """Let a model fail with a text that looks like lines of the log, and steers a terminal. The storm reads the log."""
    ends = "\n", "\r", "\r\n", "\x0b", "\x0c", "\x1b[2J", "\x85", "\x9b2K", "\u2028", "\u2029", "\x00", "\x08"
    text = "".join(f"no{room.chance.choice(ends)}{FORGED} [info] served" for _ in range(5)) + "\x1b[31m"
    status = _posted(room, "/infer/frail", json.dumps(text).encode())
    return "the model fails" if status == "500" else status


CUT_JOBS: list[str] = []  # by their names


def cut_file(room: Room) -> str:
    """Cut the file that a job reads, as a full disk would. The storm sees whether such jobs end."""
    content = _input(100_000, 30)

    def then(_: httpx.Client, file: str, job: str) -> None:
        with suppress(FileNotFoundError):  # another attack may have deleted it
            os.truncate(room.jobs / "files" / file, room.chance.randrange(len(content)))
        if job:
            CUT_JOBS.append(job)

    return _job(room, content, then)


ATTACKS_OF_CALLERS: dict[str, tuple[Attack, int]] = {  # by name, and how often
    "long heads": (long_heads, 6), "long lengths": (long_lengths, 2), "many tokens": (many_tokens, 8), "dear pages": (pages, 4),
    "stalled uploads": (stalled_upload, 6), "batch jobs": (batch_job, 4), "odd jobs": (odd_job, 4), "ZMTP withdrawn": (withdrawn, 2),
    "many gRPC calls": (many_calls, 2), "quick deaths": (quick_deaths, 2), "forged lines": (forged_lines, 4), "cut files": (cut_file, 2),
}  # fmt: skip
