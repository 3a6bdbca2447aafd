"""What a hostile client sends: worst and mutated inputs of every wire format, made of a random number generator each.

An attack connects, sends, reads or does not, and returns in a word how it was answered. Nothing of it needs a key.
"""

import gzip
import re
import socket
import ssl
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import grpc
from benchmarks.parsers import Ports, cases, message
from tests.fuzz.bodies import grpc_body, head, json_body, json_value, msgpack_body

from weir.protocols.response import compress
from weir.text_server.bert_as_service.frames import COMMAND, GREETING, LONG, MORE, frame, ready

CORPUS = Path(__file__).parent / "corpus"
PATIENCE = 90.0  # seconds for an answer to what has come whole
HASTE = 0.3  # seconds for an answer to what may have none
SILENT = "HANGS"  # no answer to what must have one
OPEN = "no answer yet"  # nor need there be
_LONGEST = 200_000  # bytes of most bodies
_EXTREMES = (b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(8), b"\x80" + bytes(7), b"\xff\xff", b"\0\1", b"\x7f")
_NUMBERS = (
    b"0", b"-1", b"1e308", b"-0.0", b"9" * 400, b"18446744073709551616", b"4294967295", b"2147483648", b"1e-400", b"NaN", b'""', b"[]",
    b"{}", b"null", b"true", b'"\\ud800"',
)  # fmt: skip


class Room(NamedTuple):
    """What an attack has: where the server is, connections that it leaves open, chance, and the directory of the server's jobs."""

    ports: Ports
    left_open: list[socket.socket]
    chance: Random
    jobs: Path


Attack = Callable[[Room], str]


# What is sent.


@cache
def corpus(name: str) -> list[bytes]:
    """Return what the fuzzer kept of one of its targets."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


@cache
def _worst(path: str) -> list[Callable[[int], Any]]:
    return [case.body for case in cases() if path in case.path]


def worst(chance: Random, path: str) -> bytes:
    """Return one of the worst bodies known of a path of benchmarks.parsers."""
    made = chance.choice(_worst(path))(size(chance))
    return made if isinstance(made, bytes) else b""


def mutated(chance: Random, data: bytes, times: int = 3) -> bytes:
    """Return `data` with some things wrong, missing, too often, or too large."""
    for _ in range(chance.randrange(times + 1)):
        place = chance.randrange(len(data) + 1)
        part = data[place : place + chance.choice((1, 2, 8, 64))]
        kind = chance.randrange(8)
        if kind == 0:
            data = data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
        elif kind == 1:
            data = data[:place] + data[place + len(part) :]
        elif kind == 2:
            data = data[:place] + part * chance.choice((2, 100, 5000)) + data[place:]
        elif kind == 3:
            extreme = chance.choice(_EXTREMES)
            data = data[:place] + extreme + data[place + len(extreme) :]
        elif kind == 4:
            data = data[:place]
        elif kind == 5 and (numbers := list(re.finditer(rb"-?\d+", data[:100_000]))):
            start, end = chance.choice(numbers).span()
            data = data[:start] + chance.choice(_NUMBERS) + data[end:]
        elif kind == 6:
            depth = chance.choice((2, 30, 500, 5000))
            begin, end_of = chance.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"\x91", b""), (b"\x81\xa1a", b"")))
            data = data[:place] + begin * depth + part + end_of * depth + data[place + len(part) :]
        else:
            data += data[: chance.randrange(len(data) + 1)]
        data = data[: 4 * _LONGEST]
    return data


def size(chance: Random) -> int:
    """Return a size of a body: mostly small."""
    return chance.choice((10, 200, 3_000, 30_000, 40_000, _LONGEST)) if chance.random() < 0.97 else 2_000_000


def json_like(chance: Random) -> bytes:
    """Return JSON, or what was."""
    if chance.random() < 0.5:
        return mutated(chance, chance.choice(corpus(chance.choice(("json", "worker", "generate", "websocket")))))
    return mutated(chance, json_body(chance, size(chance)), 1)


def body(chance: Random, coding: str) -> bytes:
    """Return `data` compressed, perhaps badly."""
    plain = json_like(chance) if chance.random() < 0.7 else bytes(chance.choice((1000, 1 << 20)))
    makes: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress, "deflate": zlib.compress, "zstd": partial(compress, coding="zstd"), "br": bytes,
    }  # fmt: skip
    make = makes[coding]
    packed = make(plain)
    kind = chance.randrange(5)
    if kind == 0:
        return mutated(chance, packed)
    if kind == 1:
        return make(b"") * chance.choice((2, 1000)) + packed
    if kind == 2:
        return make(packed)
    if kind == 3:
        return gzip.compress(plain[:100_000], 0) * chance.choice((1, 20))
    return packed


# HTTP.

_POSTS = (
    "/infer/length", "/infer/grid", "/infer/words", "/infer/length/batch", "/infer/grid/batch", "/infer/words/batch", "/v2/models/grid/infer",
    "/v2/models/grid/generate", "/v2/models/grid/generate_stream", "/v2/models/length/infer", "/encode", "/v1/embeddings", "/v2/repository/index",
    "/v2/repository/models/grid/load", "/v2/repository/models/grid/unload", "/v2/systemsharedmemory/region/a/register",
    "/models/grid/policy", "/v2/models/grid/versions/1/infer", "/embed", "/rerank", "/inference", "/nothing",
)  # fmt: skip
_GETS = (
    "/", "/health", "/health/live", "/health/ready", "/health/deep", "/models", "/models/grid", "/models/grid/policy", "/openapi.json", "/docs", "/metrics",
    "/v2", "/v2/", "/v2/health/ready", "/v2/models/grid", "/v2/models/grid/config", "/v2/models/grid/stats", "/v2/models/stats", "/status/server",
    "/v2/systemsharedmemory/status", "/infer/length", "/dashboard", "/v2/ws", "/v1/models",
)  # fmt: skip
_TYPES = (
    "application/json", "application/json", "application/msgpack", "application/x-msgpack", "application/octet-stream",
    "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", "", "a/b;" + "c=d;" * 200,
)  # fmt: skip


def http_body(room: Room) -> str:
    """POST one body whose length is true; it must be answered."""
    chance = room.chance
    path, kind, coding = chance.choice(_POSTS), chance.choice(_TYPES), ""
    data = json_like(chance)
    if "msgpack" in kind:
        data = mutated(chance, msgpack_body(chance, size(chance)), 1)
    elif kind.startswith("application/x-www"):
        fields = (b"texts=a", b"id=1", b"a", b"=", b"%41=%", b"texts=" + data[:99])
        data = b"&".join(chance.choices(fields, k=chance.choice((1, 9, 3000))))
    elif kind.startswith("multipart"):
        part = b'Content-Disposition: form-data; name="a"\r\n\r\nb\r\n--x\r\n'
        data = b"--x\r\n" + mutated(chance, part * chance.choice((1, 900)))
    elif chance.random() < 0.1:
        data = worst(chance, chance.choice(("native", "KServe", "texts"))) or data
    headers = [f"Content-Type: {kind}", *chance.sample(_HEADERS, chance.randrange(4))]
    if chance.random() < 0.15:
        coding = chance.choice(("gzip", "deflate", "zstd", "br"))
        data = body(chance, coding)
        headers.append(f"Content-Encoding: {coding}")
    if chance.random() < 0.15:
        headers.append(f"Inference-Header-Content-Length: {chance.choice((0, 1, len(data), len(data) // 2, 1 << 62))}")
        data = mutated(chance, chance.choice(corpus("binary")))[2:] if chance.random() < 0.5 else data
    return _posted(room, path, headers, data)


_HEADERS = (
    "X-Request-Timeout: 0.001", "X-Request-Timeout: 1e400", "X-Request-Timeout: 5", "X-Request-Timeout: x", "X-Priority: 99999999999999", "X-Priority: -1",
    "Accept: application/msgpack", "Accept: " + ",".join(["a/b;q=0.1"] * 500), "Accept-Encoding: gzip, zstd;q=0", "traceparent: 00-" + "0" * 50,
    "X-Explain: 1", "Expect: 100-continue", "Expect: nothing", "Origin: http://elsewhere", "Connection: close", "Cookie: " + "a=b;" * 900,
    "Range: bytes=0-1", "If-None-Match: *", "Upgrade: h2c", "X-Forwarded-For: 1.2.3.4", "Accept-Encoding: br;q=1e999",
)  # fmt: skip


def _posted(room: Room, path: str, headers: list[str], data: bytes) -> str:
    chance, length = room.chance, f"Content-Length: {len(data)}"
    if chance.random() < 0.2:
        length, data = "Transfer-Encoding: chunked", _chunked(chance, data)
    start = "\r\n".join([f"POST {path} HTTP/1.1", "Host: t", length, *headers, "", ""]).encode("latin-1")
    return _asked(room, start + data)


def _asked(room: Room, data: bytes, patience: float = PATIENCE, silence: str = SILENT) -> str:
    with connected(room.ports["http"], patience) as client:
        _send(client, data, room.chance)
        return status_of(client, silence)


def _chunked(chance: Random, data: bytes) -> bytes:
    step = chance.choice((1, 7, 1000, 65536)) if len(data) < 20_000 else 65536
    more = chance.choice((b"", b"", b";a=b", b";" + b"x" * 300))
    pieces = [data[at : at + step] for at in range(0, len(data), step)]
    end = chance.choice((b"0\r\n\r\n", b"0\r\na: b\r\n\r\n"))
    return b"".join([b"%x%b\r\n%b\r\n" % (len(each), more, each) for each in pieces]) + end


def http_head(room: Room) -> str:
    """Send a head that is none, is too long, or says what cannot be; it needs no answer."""
    chance = room.chance
    made = head(chance, size(chance)) if chance.random() < 0.5 else chance.choice(corpus("head"))
    data = mutated(chance, made) + (b"\r\n\r\n" if chance.random() < 0.8 else b"")
    return _asked(room, data, HASTE, OPEN)


_AFTER_PATHS = ("", "?", "?" + "a=b&" * 2000, "/", "/..%2f..", "%00", "//", "?format=x", "/" + "x" * 5000)


def http_pages(room: Room) -> str:
    """Ask for a page, perhaps by a method or with a query that it does not know."""
    chance = room.chance
    method = chance.choice(("GET", "GET", "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "X" * 90))
    path = chance.choice((*_GETS, *_POSTS)) + chance.choice(_AFTER_PATHS)
    headers = "Host: t", "Connection: close", *chance.sample(_HEADERS[:15], 2)
    return _asked(room, "\r\n".join([f"{method} {path} HTTP/1.1", *headers, "", ""]).encode("latin-1"))


def http_pipelined(room: Room) -> str:
    """Send many requests at once, and read little or nothing of their answers."""
    chance = room.chance
    one = f"GET {chance.choice(_GETS[:12])} HTTP/1.1\r\nHost: t\r\n\r\n"
    if chance.random() < 0.1:
        data = chance.choice(('"abc"', "[1,2]", '{"x":[[1,2]]}', '{"texts":["a"]}'))
        lines = f"Host: t\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        one = f"POST {chance.choice(_POSTS[:8])} HTTP/1.1\r\n{lines}\r\n\r\n{data}"
    client = connected(room.ports["http"], 1.0)
    sent = _flood(client, one.encode() * 200, chance.choice((20_000, 2_000_000)))
    return left_open(room, client, f"pipelined, {'all' if sent else 'none'} sent")


_UNFINISHED = (
    "Content-Length: 16000000\r\n\r\n[", "Transfer-Encoding: chunked\r\n\r\nfffff\r\n[", "X: ", "Content-Length: 5\r\n\r\n[",
)  # fmt: skip


def http_unfinished(room: Room) -> str:
    """Announce a body, or a head, and send only a part of it."""
    chance = room.chance
    start = f"POST {chance.choice(_POSTS)} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
    client = connected(room.ports["http"], 1.0)
    _send(client, (start + chance.choice(_UNFINISHED)).encode(), chance)
    if chance.random() < 0.3:
        _flood(client, b"1," * 4000, chance.choice((9000, 3_000_000)))
    return left_open(room, client, "unfinished")


# WebSockets.

_UPGRADE = (
    b"GET /v2/ws HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def ws_frame(data: bytes, opcode: int, *, fin: bool = True, masked: bool = True, says: int | None = None) -> bytes:
    """Return one frame, masked with zeros; `says` is the length that it announces, if that is not its own."""
    length = len(data) if says is None else says
    mask = 0x80 if masked else 0
    first = bytes([(0x80 if fin else 0) | opcode])
    if length < 126 and says is None:
        head = bytes([mask | length])
    elif length < 1 << 16:
        head = bytes([mask | 126]) + struct.pack(">H", length)
    else:
        head = bytes([mask | 127]) + struct.pack(">Q", length & (1 << 64) - 1)
    return first + head + (bytes(4) if masked else b"") + data


def _ws_message(chance: Random) -> bytes:
    if chance.random() < 0.3:
        return mutated(chance, chance.choice(corpus("websocket")))[1:]
    return mutated(chance, worst(chance, "WebSocket") or b"{}", 1)


def _framed_message(chance: Random) -> bytes:
    content, opcode = _ws_message(chance), chance.choice((1, 1, 2))
    kind = chance.randrange(6)
    if kind == 0:  # in pieces
        step = max(1, len(content) // chance.choice((2, 50)))
        pieces = [content[at : at + step] for at in range(0, len(content), step)] or [b""]
        last = len(pieces) - 1
        return b"".join([ws_frame(each, 0 if at else opcode, fin=at == last) for at, each in enumerate(pieces)])
    if kind == 1:  # empty pieces
        empty = ws_frame(b"", 0, fin=False) * chance.choice((9, 5000))
        return ws_frame(b"", opcode, fin=False) + empty + ws_frame(content, 0)
    if kind == 2:
        return ws_frame(content[:125], chance.choice((9, 10, 8))) * chance.choice((1, 300))
    if kind == 3:
        fin, masked = chance.random() < 0.5, chance.random() < 0.8
        return mutated(chance, ws_frame(content, chance.randrange(16), fin=fin, masked=masked))
    if kind == 4:
        return ws_frame(content[:10], opcode, says=chance.choice((5, 70_000, 1 << 31, 1 << 63, (1 << 64) - 1)))
    return ws_frame(content, opcode)


def websocket(room: Room) -> str:
    """Send messages in pieces, pings, frames that cannot be; read the first answer."""
    chance = room.chance
    data = b"".join(_framed_message(chance) for _ in range(chance.choice((1, 1, 3, 20))))
    client = connected(room.ports["http"], 1.0)
    _send(client, _UPGRADE, chance)
    if not status_of(client).startswith("101"):
        client.close()
        return "not opened"
    if chance.random() < 0.3:
        _flood(client, data, 3 * len(data))
        return left_open(room, client, "unread")
    _flood(client, data, len(data))
    with client:
        client.settimeout(HASTE)
        return _framed(client)


def _framed(client: socket.socket) -> str:
    """Return what the first frame says that is not of the upgrade's answer."""
    with suppress(OSError):
        data = client.recv(1 << 16).rpartition(b"\r\n\r\n")[2] or client.recv(1 << 16)
        if data[:1] == b"\x88":
            return f"closed {int.from_bytes(data[2:4], 'big')}"
        found = re.search(rb'"status": ?(\d+)', data)
        return f"answer {found[1].decode()}" if found else ("answer" if data else "closed")
    return OPEN


# gRPC and HTTP/2.

_SERVICE = "/inference.GRPCInferenceService/"
_METHODS = (
    "ModelInfer", "ModelInfer", "ModelInfer", "ModelStreamInfer", "ModelMetadata", "ModelReady", "ServerMetadata", "RepositoryIndex", "ModelLoad",
    "ModelStatistics", "SystemSharedMemoryRegister", "ModelConfig", "WorkerLoad", "HasHardware", "Nothing", "ServerLive",
)  # fmt: skip
_OTHERS = (
    "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)  # fmt: skip


def grpc_call(room: Room) -> str:
    """Call with a message that is none, or one of the worst."""
    chance = room.chance
    kind = chance.randrange(4)
    if kind == 0:
        data = mutated(chance, chance.choice(corpus("grpc")))
    elif kind == 1:
        data = mutated(chance, grpc_body(chance, size(chance)), 1)
    elif kind == 2:
        data = worst(chance, "gRPC")
    else:
        contents = {"fp32_contents": [1, 2]}
        data = message(inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 2], "contents": contents}])
        data = mutated(chance, data)
    path = _SERVICE + chance.choice(_METHODS) if chance.random() < 0.9 else chance.choice(_OTHERS)
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{room.ports['grpc']}", options) as channel:
        try:
            if path.endswith("Check") or (not path.endswith("Watch") and chance.random() < 0.7):
                channel.unary_unary(path, None, None)(data, timeout=chance.choice((0.01, PATIENCE, PATIENCE)))
            else:
                sent = iter([data] * chance.choice((1, 5, 200)))
                answers: Any = channel.stream_stream(path, None, None)(sent, timeout=HASTE)
                for _ in range(chance.choice((0, 1, 50))):
                    next(answers)
                answers.cancel()
        except StopIteration:
            return "OK"
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS_2 = b"".join(  # literal fields, none of them indexed
    b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
    for name, value in ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
        (b":authority", b"t"), (b"content-type", b"application/grpc"), (b"te", b"trailers"))
)  # fmt: skip


def h2_frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    """Return one frame of HTTP/2."""
    return struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data


def opened(stream: int, flags: int = 4) -> bytes:
    """Return the frame that opens a stream; with `flags` 0 its headers go on."""
    return h2_frame(1, flags, stream, _HEADERS_2)


def http2(room: Room) -> str:
    """Send frames of HTTP/2 to the port of gRPC: streams opened and reset, settings, pings, headers without end, anything."""
    chance = room.chance
    settings = [
        (chance.randrange(8), chance.choice((0, 1, 1 << 16, (1 << 32) - 1))) for _ in range(chance.randrange(9))
    ]
    data = _PREFACE + h2_frame(4, 0, 0, b"".join(struct.pack(">HI", *each) for each in settings))
    many, kind = chance.choice((1, 50, 1500)), chance.randrange(8)
    streams = range(1, 2 * many, 2)
    if kind == 0:
        data += b"".join(opened(at) + h2_frame(3, 0, at, bytes(4)) for at in streams)
    elif kind == 1:
        data += h2_frame(chance.choice((4, 6)), 0, 0, bytes(8) if chance.random() < 0.5 else b"") * many
    elif kind == 2:
        data += opened(1, 0) + h2_frame(9, 0, 1, b"\0\1a\1b" * 2000) * min(many, 100)
    elif kind == 3:
        announced = b"\0" + struct.pack(">I", 16 << 20) + b"x"
        data += b"".join(opened(at) + h2_frame(0, 0, at, announced) for at in streams[:200])
    elif kind == 4:
        more = struct.pack(">I", chance.choice((0, 1, (1 << 31) - 1)))
        data += opened(1) + h2_frame(8, 0, chance.choice((0, 1)), more) * many
    elif kind == 5:
        data += opened(1) + h2_frame(0, 0, 1) * many
    elif kind == 6:
        data += h2_frame(2, 0, 1, bytes(5)) * many + h2_frame(5, 4, 1, bytes(9))
    else:
        for _ in range(min(many, 60)):
            kinds = chance.randrange(12), chance.randrange(256), chance.randrange(8)
            data += h2_frame(*kinds, mutated(chance, _HEADERS_2)[:9000])
    client = connected(room.ports["grpc"], 1.0)
    _flood(client, mutated(chance, data, 1), len(data))
    if chance.random() < 0.3:
        return left_open(room, client, "unread")
    with client, suppress(OSError):
        client.settimeout(HASTE)
        while came := client.recv(1 << 16):
            if b"\7" in came[3:4]:
                return "GOAWAY"
        return "closed"
    return OPEN


# ZMTP.


def zmtp(room: Room) -> str:
    """Send frames of ZMTP to one of the two ports, as one of the two sockets or as none."""
    chance = room.chance
    port, kind = chance.choice((("zmq", "PUSH"), ("zmq_out", "SUB")))
    data = GREETING + ready(kind)
    parts = chance.randrange(5)
    if parts == 0:
        data = mutated(chance, chance.choice(corpus("zmtp"))[1:])
    elif parts == 1:
        data += mutated(chance, worst(chance, "ZMTP, answers" if kind == "SUB" else "ZMTP"), 1)
    elif parts == 2:
        kinds = chance.choices((0, MORE, LONG, COMMAND, 0xFF), k=99)
        data += b"".join(frame(mutated(chance, b"x" * 9), each) for each in kinds)
    elif parts == 3:
        length = chance.choice(_EXTREMES)[:8].ljust(8, b"\0")
        data += bytes([chance.choice((LONG, LONG | MORE, LONG | COMMAND))]) + length + b"x" * 999
    else:
        who = b"%d" % chance.randrange(5)
        data += b"".join(_zmq_ask(chance, who) for _ in range(chance.choice((1, 20, 400))))
    if chance.random() < 0.3:
        data = mutated(chance, data, 2)
    client = connected(room.ports[port], 1.0)
    sent = _flood(client, data, len(data))
    if chance.random() < 0.4:
        return left_open(room, client, "left open")
    with client, suppress(OSError):
        client.settimeout(HASTE)
        while client.recv(1 << 16):
            pass
        return "closed"
    return OPEN if sent else "not read"


_ZMQ_TEXTS = (b'["a"]', b"[]", b"SHOW_CONFIG", b"SHOW_STATUS", b"CANCEL", b"PENDING", b"TERMINATION", b"[[1,2]]")
_ZMQ_OPTIONS = (b"{}", b'{"timeout":0.01}', b'{"priority":99999999999}', b'{"ids":[' + b"1," * 899 + b"1]}")


def _zmq_ask(chance: Random, who: bytes) -> bytes:
    texts = chance.choice((*_ZMQ_TEXTS, json_value(chance, 300)))
    frames = [who, texts, b"%d" % chance.randrange(99), chance.choice((b"1", b"0", b"-1", b"99999999", b"x"))]
    if chance.random() < 0.5:
        frames.append(chance.choice((*_ZMQ_OPTIONS, json_value(chance, 200))))
    return b"".join(frame(each, MORE if at + 1 < len(frames) else 0) for at, each in enumerate(frames))


# TLS.


def tls(room: Room) -> str:
    """Begin a handshake and do not end it, or send what is none."""
    chance = room.chance
    client = connected(room.ports["tls"], 1.0)
    kind = chance.randrange(4)
    if kind == 0:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with suppress(OSError), context.wrap_socket(client) as wrapped:
            wrapped.settimeout(PATIENCE)
            _send(wrapped, b"GET /health/live HTTP/1.1\r\nHost: t\r\n\r\n", chance)
            return status_of(wrapped)
        return "closed"
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(505)
    data = b"" if kind == 1 else mutated(chance, hello if kind == 2 else b"\x16\x03\x01\x40\x00" + bytes(16384))
    _flood(client, data, len(data))
    return left_open(room, client, "unfinished")


# How it is sent.


def connected(port: int, timeout: float) -> socket.socket:
    """Return a connection to a port of the server."""
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.settimeout(timeout)
    return client


def _send(client: socket.socket, data: bytes, chance: Random) -> None:
    """Send all, sometimes in small pieces; who closes early has answered already."""
    with suppress(ConnectionError):
        if chance.random() < 0.1:
            for at in range(0, min(len(data), 200), 7):
                client.sendall(data[at : min(at + 7, 200)])
            data = data[200:]
        client.sendall(data)


def _flood(client: socket.socket, data: bytes, most: int) -> int:
    """Send `data` again and again until `most` bytes are sent or nothing more is read; return how many were sent."""
    sent, view = 0, memoryview(data)
    with suppress(OSError):
        while data and sent < most:
            sent += client.send(view[sent % len(data) :][: most - sent])
    return sent


def left_open(room: Room, client: socket.socket, word: str) -> str:
    """Leave the connection open, and return `word`."""
    room.left_open.append(client)
    return word


def status_of(client: socket.socket, silence: str = SILENT) -> str:
    """Return the status of an answer, which is read to its end or for a while; `silence` if none comes."""
    data = b""
    try:
        while len(data) < 12 or data.startswith(b"HTTP/1.1 100"):
            if data.startswith(b"HTTP/1.1 100") and b"\r\n\r\n" in data:
                data = data.partition(b"\r\n\r\n")[2]
                continue
            if not (came := client.recv(1 << 16)):
                break
            data += came
    except TimeoutError:
        return silence
    except OSError:
        return "closed"
    return data[9:12].decode("latin-1") if data[:5] == b"HTTP/" else "closed"


ATTACKS: dict[str, tuple[Attack, int]] = {  # by name, and how often
    "HTTP bodies": (http_body, 30), "HTTP heads": (http_head, 8), "HTTP pages": (http_pages, 8), "HTTP pipelined, unread": (http_pipelined, 2),
    "HTTP unfinished": (http_unfinished, 4), "WebSocket": (websocket, 14), "gRPC": (grpc_call, 14), "HTTP/2": (http2, 8), "ZMTP": (zmtp, 14), "TLS": (tls, 3),
}  # fmt: skip
