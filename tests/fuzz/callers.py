"""What an ordinary caller sends to end a server: each request is valid, or nearly, and dear. See hostile.py for what needs no key."""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from random import Random
from typing import Any

import grpc
import httpx
from tests.fuzz.hostile import PATIENCE, SILENT, Attack, Room

from weir.text_server.bert_as_service.frames import GREETING, MORE, frame, ready

_MB = 1 << 20


def _connected(room: Room) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", room.ports["http"]), timeout=10)
    client.settimeout(PATIENCE)
    return client


def _asked(room: Room, method: str, path: str, content: bytes | None = None, **headers: str) -> str:
    """Return the status of a whole request."""
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{room.ports['http']}", timeout=PATIENCE) as client:
            return str(client.request(method, path, content=content, headers=headers).status_code)
    except httpx.TimeoutException:
        return SILENT
    except httpx.HTTPError:
        return "closed"


def _posted(room: Room, path: str, content: bytes) -> str:
    return _asked(room, "POST", path, content, **{"content-type": "application/json"})


def _left(room: Room, client: socket.socket) -> str:
    room.left_open.append(client)
    return "left open"


def long_heads(room: Room) -> str:
    """Ask with a path or a header of 60 KB, read the answer, and leave the connection open; or do not end the request."""
    chance = room.chance
    path, header = chance.choice(
        ((b"/" + b"a" * 60_000, b""), (b"/infer/length", b"X-Long: " + b"a" * 60_000 + b"\r\n"))
    )
    method, length = chance.choice(
        ((b"GET", b""), (b"POST", b"Content-Length: 2\r\n"), (b"POST", b"Content-Length: 9\r\n"))
    )
    client = _connected(room)
    client.sendall(b"%b %b HTTP/1.1\r\nHost: t\r\n%b%b\r\n11" % (method, path, length, header))
    if b"9" not in length and not client.recv(12):
        return "closed"
    return _left(room, client)


def long_lengths(room: Room) -> str:
    """State a length with thousands of zeros."""
    path = room.chance.choice(
        (b"/infer/length", b"/v1/files", b"/encode", b"/v2/models/grid/infer", b"/v1/batches", b"/nothing")
    )
    with _connected(room) as client:
        client.sendall(b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %b2\r\n\r\n{}" % (path, b"0" * 5000))
        return client.recv(12)[9:12].decode() or SILENT


def many_tokens(room: Room) -> str:
    """Send a text of very many token ids, words, or words of almost a thousand letters."""
    chance = room.chance
    count = chance.choice((1_000, 100_000, 1_000_000))
    text = chance.choice(
        (
            [chance.randrange(10, 100)] * count,
            ["abab"] * (count // 4),
            ("a" * 999 + " ") * (count // 500),
            "a ||| " * (count // 4),
        )
    )
    path, fields = chance.choice(
        (
            ("/v1/embeddings", {"input": [text] if isinstance(text, list) else text}),
            ("/embed", {"inputs": [text]}),
            ("/encode", {"id": 1, "texts": [text]}),
            ("/tokenize", {"inputs": text}),
            ("/decode", {"ids": text}),
        )
    )
    return _posted(room, path, json.dumps({"model": "tokens", **fields}).encode())


def pages(room: Room) -> str:
    """Ask for a page that is dear to make, many times at once."""
    path = room.chance.choice(("/openapi.json", "/models", "/v1/models", "/info", "/v2/models/stats"))
    with _connected(room) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: t\r\n\r\n".encode() * 50)
        return client.recv(12)[9:12].decode() or SILENT


def stalled_upload(room: Room) -> str:
    """Begin to upload a file, and leave it at that."""
    client = _connected(room)
    announced, sent = room.chance.choice((1000, 100 * _MB)), room.chance.choice((1, 1000, 500_000))
    client.sendall(
        b"POST /v1/files HTTP/1.1\r\nHost: t\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n"
        % announced
    )
    begin = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    client.sendall((begin + b"x" * sent)[: announced - 1])
    return _left(room, client)


def _lines(chance: Random) -> bytes:
    """Return an input file: blank lines, long lines, very many, or lines that fail."""
    kind = chance.randrange(4)
    if kind == 0:
        return chance.choice((b"\n", b" \n", b"\r\n")) * (4 * _MB)
    size, count = ((4 * _MB, 4), (10, 5000), (300_000, 30))[kind - 1]
    line = '{"custom_id": "%d", "method": "POST", "url": "/infer/length", "body": "%s"}\n'
    return "".join([line % (number, "x" * size) for number in range(count)]).encode()


def batch_job(room: Room) -> str:
    """Upload a file and start a job with it; perhaps cancel it, read its output slowly, or delete what it reads."""
    chance, url = room.chance, f"http://127.0.0.1:{room.ports['http']}"
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            made = client.post("/v1/files", files={"file": ("f", _lines(chance))}, data={"purpose": "batch"})
            if made.status_code != 200:
                return str(made.status_code)
            file = made.json()["id"]
            job = client.post(
                "/v1/batches", json={"input_file_id": file, "endpoint": "/infer/length", "completion_window": "1h"}
            )
            if job.status_code == 200 and chance.random() < 0.3:
                client.post(f"/v1/batches/{job.json()['id']}/cancel")
            reader = _connected(room)
            reader.sendall(f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: t\r\n\r\n".encode())
            room.left_open.append(reader)
            _tidied(client)
            return str(job.status_code)
    except httpx.TimeoutException:
        return SILENT
    except httpx.HTTPError:
        return "closed"


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
    kinds = {"content-type": f"multipart/form-data; boundary={boundary}"}
    return _asked(room, "POST", "/v1/files", part.encode(), **kinds)


def withdrawn(room: Room) -> str:
    """Send tens of thousands of requests for one topic, or for many, over ZeroMQ, and leave before they are answered."""
    chance = room.chance
    count, topics = chance.choice((1_000, 10_000, 52_000)), chance.choice((1, 200))
    names = [b"w%d.%d" % (chance.randrange(10**9), place) for place in range(topics)]
    with _zmtp(room, "zmq_out", "SUB") as reader, _zmtp(room, "zmq", "PUSH") as sender, suppress(OSError):
        reader.sendall(b"".join([frame(b"\1" + name) for name in names]))
        reader.recv(64)
        asked = [
            frame(names[place % topics], MORE)
            + frame(b'["a%d"]' % place, MORE)
            + frame(b"%d" % place, MORE)
            + frame(b"1")
            for place in range(count)
        ]
        sender.sendall(b"".join(asked))
    return "withdrawn"


def _zmtp(room: Room, port: str, kind: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", room.ports[port]), timeout=10)
    client.settimeout(10.0)
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
    line = '{"custom_id": "%d", "method": "POST", "url": "/infer/length", "body": "%s"}\n'
    content = "".join([line % (number, "x" * 100_000) for number in range(30)]).encode()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{room.ports['http']}", timeout=PATIENCE) as client:
            made = client.post("/v1/files", files={"file": ("f", content)}, data={"purpose": "batch"})
            if made.status_code != 200:
                return str(made.status_code)
            file = made.json()["id"]
            job = client.post(
                "/v1/batches", json={"input_file_id": file, "endpoint": "/infer/length", "completion_window": "1h"}
            )
            with suppress(FileNotFoundError):  # another attack may have deleted it
                os.truncate(room.jobs / "files" / file, room.chance.randrange(len(content)))
            if job.status_code == 200:
                CUT_JOBS.append(job.json()["id"])
            return str(job.status_code)
    except httpx.TimeoutException:
        return SILENT
    except httpx.HTTPError:
        return "closed"


def _tidied(client: httpx.Client) -> None:
    """Delete the oldest files, so that there is room for more jobs."""
    for file in client.get("/v1/files?order=asc&limit=20").json().get("data", [])[:10]:
        client.delete(f"/v1/files/{file['id']}")


ATTACKS_OF_CALLERS: dict[str, tuple[Attack, int]] = {  # by name, and how often
    "long heads": (long_heads, 6), "long lengths": (long_lengths, 2), "many tokens": (many_tokens, 8), "dear pages": (pages, 4),
    "stalled uploads": (stalled_upload, 6), "batch jobs": (batch_job, 4), "odd jobs": (odd_job, 4), "ZMTP withdrawn": (withdrawn, 2),
    "many gRPC calls": (many_calls, 2), "quick deaths": (quick_deaths, 2), "forged lines": (forged_lines, 4), "cut files": (cut_file, 2),
}  # fmt: skip
