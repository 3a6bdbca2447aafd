"""Does any body hold the event loop? `python -m benchmarks.parsers [--sizes 1 16] [--bar 50] [--memory MB] [--only TEXT]`

Each parser that strangers reach gets the worst bodies that we know for it, of 1 and 16 MB, at a real server with every
protocol. The server notes the longest stretch in which its event loop did not come to its next turn: CPU time of the
loop's own thread, which is what is done on the loop, and CPU time of the whole process, for a thread that keeps the
interpreter holds the loop as well. CPU time, and without what the loop's thread waited for a processor, so that what else
the machine does is not counted (but that a processor is slower beside others). More than the bar, in milliseconds for each
megabyte of the body, or an answer of 5xx but 503 and 501, or none: the exit code is 1. Compressed bodies count as what
they become. Who is over the bar is measured once more, and the shorter stretches count: what a body does it does again.

The child `serve [BYTES [CERTIFICATE KEY [JOBS TOKENIZER]]]` is that server; its first line says its ports. Requests and answers may hold so many bytes (0: what
there is room for). With a certificate it serves HTTP over TLS too, on a port of its own. With a directory for them it runs batch jobs, and with the directory of a tokenizer it has a
second model of texts that reads them with it. Nobody may control it.
"""

import argparse
import asyncio
import dataclasses
import gc
import gzip
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import grpc
import numpy as np
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import weir
from benchmarks import models
from benchmarks.harness.servers import ROOT, environment
from benchmarks.models import Grid, Words
from weir.batching import BatchingSettings
from weir.catalog.registry import Registry
from weir.frontends.grpc import CORE_VARIABLES, GrpcSettings
from weir.frontends.grpc.core import Core
from weir.frontends.grpc.server import GrpcServer
from weir.frontends.http.application import InferencePaths, inference_protocols, make_app
from weir.frontends.http.server import HttpServer
from weir.frontends.websocket import WebSockets
from weir.jobs import JobSettings
from weir.jobs.routes import JobRoutes
from weir.jobs.running import JobContext, Reply, call
from weir.protocols import HttpSettings
from weir.protocols.access import Control, ControlSettings
from weir.protocols.account import Account
from weir.protocols.kserve import KserveContext
from weir.protocols.response import compress
from weir.telemetry import TelemetrySettings
from weir.telemetry.logs import LogObserver, get_logger, logging_to
from weir.text_models.texts import Text, TokenDetail
from weir.text_models.tokenizer import Tokenizer
from weir.text_server.bert_as_service.frames import COMMAND, GREETING, MORE, frame, ready
from weir.text_server.bert_as_service.http import Encode, Status
from weir.text_server.bert_as_service.zeromq import ZeroMqFrontend
from weir.text_server.encoder import Encoder, TextShape
from weir.text_server.exchange import EmbeddingContext
from weir.text_server.metrics import TextCounts
from weir.text_server.protocols.openai import OpenAI
from weir.text_server.protocols.tei import Tei
from weir.text_server.server import added_by
from weir.text_server.server_settings import ZeroMqSettings
from weir.text_server.texts import Encoded, Encodes, TextFacts, TextQuery
from weir.text_server.tokenizing import TokenizerThreads
from weir.wire.kserve_grpc import ModelInferRequest
from weir.wire.values import ANY_NAMES

BAR = 50.0  # milliseconds for each megabyte
JSON, MSGPACK = "application/json", "application/msgpack"
INFER = "/inference.GRPCInferenceService/ModelInfer"
PATIENCE = 120  # seconds for an answer
# The least that is held against a body: a turn of the loop takes as long for other reasons.
LEAST_MS = 25.0

Ports = dict[str, int]
Bodies = dict[str, Callable[..., Any]]  # by name: take a size and make what is sent
Send = Callable[[Ports, Any], str]  # returns how it was answered


class Case(NamedTuple):
    """One way to be slow: `body(size)` makes what `send` sends."""

    path: str
    name: str
    body: Callable[[int], Any]
    send: Send


# Bodies.


def filled(unit: bytes, size: int, before: bytes = b"[", after: bytes = b"]") -> bytes:
    """Return a list of so many units that it has about `size` bytes."""
    return before + b",".join([unit] * max(1, (size - len(before) - len(after)) // (len(unit) + 1))) + after


def numbered(unit: str, size: int, before: bytes, after: bytes) -> bytes:
    """Return the same of units with numbers in them."""
    return before + b",".join((unit % place).encode() for place in range(size // (len(unit) + 5))) + after


_ASCII = bytes(place % 128 for place in range(256))


def names_again(size: int) -> bytes:
    """Return an object of as many names as may be, and these again."""
    names = [b'"%x":1.5' % place for place in range(ANY_NAMES)]
    return b"{" + b",".join((names * (size // (12 * ANY_NAMES) + 1))[: size // 12]) + b"}"


def msgpack_names(size: int) -> bytes:
    """Return an object of as many names as there is room for, as msgpack."""
    count = min(size // 5, 1 << 21)
    parts = (bytes((0xA3, place >> 14, place >> 7 & 127, place & 127, 1)) for place in range(count))
    return b"\xdf" + count.to_bytes(4, "big") + b"".join(parts)


def tensor(data: bytes, shape: str, datatype: str = "FP32", beside: bytes = b"") -> bytes:
    """Return an inference request of the Open Inference Protocol."""
    inputs = b'{"model_name":"grid","inputs":[{"name":"x","datatype":"%b","shape":%b,"data":%b}]%b}'
    return inputs % (datatype.encode(), shape.encode(), data, beside)


WANTS_BINARY = b',"parameters":{"binary_data_output":true}'


def flat(size: int, unit: bytes = b"1", datatype: str = "FP32") -> bytes:
    """Return numbers of one row, of which an answer in binary is wanted: so the server decodes them, not a worker."""
    data = filled(unit, size)
    return tensor(data, f"[1,{data.count(b',') + 1}]", datatype, WANTS_BINARY)


def nested(size: int, depth: int) -> bytes:
    """Return rows of one number, so deep."""
    data = filled(b"[" * depth + b"1" + b"]" * depth, size)
    return tensor(data, str([data.count(b",") + 1, *[1] * depth]), "FP32", WANTS_BINARY)


def half(size: int, unit: bytes, before: bytes = b"[", after: bytes = b"]") -> bytes:
    """Return a list with half of a surrogate pair at its end."""
    return filled(unit, size, before, b',"\\ud800"' + after)


def elements(size: int) -> tuple[bytes, dict[str, str]]:
    """Return as many empty elements of BYTES as there is room for, as binary data."""
    count = size // 4
    said = {"name": "x", "datatype": "BYTES", "shape": [1, count], "parameters": {"binary_data_size": 4 * count}}
    header = json.dumps({"inputs": [said]}).encode()
    return header + bytes(4 * count), {"Inference-Header-Content-Length": str(len(header))}


def packed(size: int, coding: str, unit: bytes) -> tuple[bytes, dict[str, str]]:
    """Return a compressed list that has `size` bytes as it was."""
    plain = filled(unit, size)
    data = compress(plain, coding)
    return data, {"Content-Encoding": coding}


def members(size: int, coding: str) -> tuple[bytes, dict[str, str]]:
    """Return nothing, compressed again and again."""
    made = {"gzip": gzip.compress(b""), "deflate": zlib.compress(b""), "zstd": compress(b"", "zstd")}
    return made[coding] * (size // len(made[coding])), {"Content-Encoding": coding}


def message(**fields: Any) -> bytes:
    """Return a ModelInferRequest for the tensor model."""
    return bytes(ModelInferRequest(model_name="grid", **fields).SerializeToString())


def typed(size: int, datatype: str, field: str, values: list[Any]) -> bytes:
    """Return one tensor as a list of values."""
    given = {"name": "x", "datatype": datatype, "shape": [1, len(values)], "contents": {field: values}}
    return message(inputs=[given])


# Ways to send them.


def over_http(path: str, content_type: str, ports: Ports, body: Any) -> str:
    """POST a body, with headers if it is a pair of both; return the code."""
    data, headers = body if isinstance(body, tuple) else (body, {})
    client = http.client.HTTPConnection("127.0.0.1", ports["http"], timeout=PATIENCE)
    try:
        client.request("POST", path, data, {"Content-Type": content_type, **headers})
        answer = client.getresponse()
        answer.read()
        return str(answer.status)
    finally:
        client.close()


def over_websocket(ports: Ports, body: bytes, *, text: bool = True) -> str:
    """Send one message; return the status of its failure, 200, or the code that the connection is closed with."""
    with connect(f"ws://127.0.0.1:{ports['http']}/v2/ws", max_size=None, compression=None) as client:
        try:
            client.send(body.decode() if text else body)
            answer = client.recv(timeout=PATIENCE)
        except ConnectionClosed as closed:
            return str(closed.rcvd.code if closed.rcvd else "lost")
        return str(json.loads(answer).get("status", 200)) if isinstance(answer, str) else "200"


def over_grpc(ports: Ports, body: bytes) -> str:
    """Call ModelInfer; return the status."""
    with grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}", [("grpc.max_receive_message_length", -1)]) as channel:
        try:
            channel.unary_unary(INFER, None, None)(body, timeout=PATIENCE)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def over_zmtp(port: str, kind: str, ports: Ports, body: bytes) -> str:
    """Send frames on one connection, and a ping after them; return whether its pong came."""
    with socket.create_connection(("127.0.0.1", ports[port]), timeout=PATIENCE) as connection:
        connection.sendall(GREETING + ready(kind))
        received, end = b"", frame(b"\x04PING\0\0last", COMMAND)
        connection.settimeout(1.0)
        view = memoryview(body + end)
        try:
            while view:
                with suppress(TimeoutError):
                    view = view[connection.send(view[: 256 << 10]) :]
                    continue
                return "not read"
            connection.settimeout(PATIENCE)
            while not received.endswith(b"\x04PONGlast"):
                chunk = connection.recv(1 << 20)
                if not chunk:
                    return "closed"
                received = received[-16:] + chunk
        except ConnectionError:
            return "closed"
    return "pong"


def cases() -> list[Case]:
    """Return all of them."""
    made: list[Case] = []

    def add(path: str, send: Send, bodies: Bodies) -> None:
        made.extend(Case(path, name, body, send) for name, body in bodies.items())

    x = (b'{"x":[', b"]}")
    long_key = b'{"' + b"k" * 100_000 + b'":['
    anything: Bodies = {
        "integers": partial(filled, b"1"), "empty lists": partial(filled, b"[]"), "objects": partial(filled, b'{"a":{}}'),
        "deep lists": partial(filled, b"[[[[[[]]]]]]"), "half of a pair after lists": partial(half, unit=b"[[[]]]"),
        "half of a pair after objects": partial(half, unit=b'{"a":{}}'),
        "half of a pair below a long key": lambda size: half(size, b"1", long_key, b"]}"),
        "names": lambda size: numbered('"%x":1.5', size, b"{", b"}"), "names that come again": names_again,
        "floats": partial(filled, b"-1e308"), "escapes": lambda size: b'["' + b"\\n" * (size // 2) + b'"]', "no end": lambda size: b"[" * size,
    }  # fmt: skip
    tensors: Bodies = {
        "rows of one": lambda size: filled(b"[1]", size, *x), "one row": lambda size: filled(b"1", size, b'{"x":[[', b"]]}"),
        "a long text": lambda size: filled(b'"y"', size // 2, b'{"x":["' + b"x" * (size // 2) + b'",', b"]}"),
        "long integers": lambda size: filled(b"18446744073709551615", size, b'{"x":[[1,', b"]]}"),
        "unknown names": lambda size: numbered('"%x":1', size, b"{", b"}"), "objects in a tensor": partial(filled, b'{"a":{}}', before=x[0], after=x[1]),
    }  # fmt: skip
    add("native, one item", partial(over_http, "/infer/length", JSON), anything)
    add("native, measured", partial(over_http, "/infer/words", JSON), anything)
    add("native, a tensor", partial(over_http, "/infer/grid", JSON), anything | tensors)
    add("native, a list of items", partial(over_http, "/infer/length/batch", JSON), anything)
    add("native, a list of measured items", partial(over_http, "/infer/words/batch", JSON), anything)
    add("native, a list of tensors", partial(over_http, "/infer/grid/batch", JSON), {
        **anything, "tiny tensors": partial(filled, b'{"x":[[1]]}'),
        "a thousand tensors": lambda size: filled(filled(b"[1]", size // 1000, *x), size),
    })  # fmt: skip
    msgpack: Bodies = {
        "integers": lambda size: b"\xdd" + size.to_bytes(4, "big") + b"\x01" * size,
        "empty lists": lambda size: b"\xdd" + size.to_bytes(4, "big") + b"\x90" * size,
        "deep lists": lambda size: b"\xdd" + (size // 4).to_bytes(4, "big") + b"\x91\x91\x91\x90" * (size // 4),
        "no end": lambda size: b"\x91" * size, "names": msgpack_names,
        "small objects": lambda size: b"\xdd" + (size // 76).to_bytes(4, "big") + b"".join(
            b"\x8f" + b"".join(b"\xa3" + (place + part).to_bytes(3, "big").translate(_ASCII) + b"\x01" for part in range(15))
            for place in range(0, size // 76 * 15, 15)
        ),
    }  # fmt: skip
    for path in ("/infer/words", "/infer/grid", "/infer/length/batch", "/infer/words/batch"):
        add(f"native, msgpack, {path}", partial(over_http, path, MSGPACK), dict(msgpack))
    protocol: Bodies = {
        "numbers": flat, "texts": partial(flat, unit=b'""', datatype="BYTES"), "rows of one": partial(nested, depth=1),
        "rows of one, deep": partial(nested, depth=6), "NaN": lambda size: flat(size, b"NaN"),
        "floats": partial(flat, unit=b"-1e308", datatype="FP64"),
        "parameters of floats": lambda size: numbered(
            '"%x":-1e308', size, b'{"model_name":"grid","inputs":[],"parameters":{', b"}}"
        ),
        "undecoded": lambda size: tensor(filled(b"1", size), f"[1,{size // 2}]"),
        "a shape": lambda size: tensor(b"[]", filled(b"1", size).decode()),
        "outputs": lambda size: numbered('{"name":"%x"}', size, b'{"model_name":"grid","inputs":[],"outputs":[', b"]}"),
        "one output": lambda size: filled(b'{"name":"a"}', size, b'{"model_name":"grid","inputs":[],"outputs":[', b"]}"),
        "tensors": lambda size: numbered(
            '{"name":"%x","shape":[0],"datatype":"FP32","data":[]}', size, b'{"model_name":"grid","inputs":[', b"]}"
        ),
        "parameters": lambda size: numbered(
            '"%x":1', size, b'{"model_name":"grid","inputs":[],"parameters":{', b"}}"
        ),
        "half of a pair": lambda size: half(size, b"[[[]]]", b'{"model_name":"grid","inputs":[', b"]}"),
        "an id of lists": partial(filled, b"[]", before=b'{"model_name":"grid","id":[', after=b"]}"),
    }  # fmt: skip
    add("KServe JSON", partial(over_http, "/v2/models/grid/infer", JSON), dict(protocol))
    add("KServe binary", partial(over_http, "/v2/models/grid/infer", JSON), {"BYTES": elements})
    add("KServe generate", partial(over_http, "/v2/models/grid/generate", JSON), anything | tensors)
    add("WebSocket", over_websocket, dict(protocol))
    add("gRPC", over_grpc, {
        "int64": lambda size: typed(size, "INT64", "int64_contents", [1] * size),
        "fp32": lambda size: typed(size, "FP32", "fp32_contents", [1.0] * (size // 4)),
        "bytes": lambda size: typed(size, "BYTES", "bytes_contents", [b""] * (size // 2)),
        "empty raw tensors": lambda size: message(raw_input_contents=[b""] * (size // 2)),
        "raw BYTES": lambda size: message(
            inputs=[{"name": "x", "datatype": "BYTES", "shape": [1, size // 4]}], raw_input_contents=[bytes(size // 4 * 4)]
        ),
        "empty tensors": lambda size: b"\x2a\x00" * (size // 2), "a shape": lambda size: message(
            inputs=[{"name": "x", "datatype": "FP32", "shape": [1] * size}]
        ),
        "empty outputs": lambda size: b"\x32\x00" * (size // 2), "unknown fields": lambda size: b"\x78\x01" * (size // 2),
        "groups": lambda size: b"\x7b\x7c" * (size // 2),
        "parameters": lambda size: message(parameters={f"{place:x}": {"bool_param": True} for place in range(size // 16)}),
    })  # fmt: skip
    texts: Bodies = {
        "empty texts": lambda size: filled(b'""', size, b'{"texts":[', b"]}"), "texts": lambda size: filled(b'"a"', size, b'{"texts":[', b"]}"),
        "words": lambda size: filled(b'["a"]', size, b'{"texts":[', b"]}"), "ids": lambda size: filled(b"1", size, b'{"texts":[[', b"]]}"),
        "lists": lambda size: filled(b"[[]]", size, b'{"texts":[', b"]}"),
        "a wrong list": lambda size: filled(b"[]", size, b'{"texts":[[', b"]]}"),
        "fields": lambda size: numbered('"%x":1', size, b"{", b"}"),
        "half of a pair": lambda size: half(size, b"[[[]]]", b'{"texts":[', b"]}"),
    }  # fmt: skip
    add("texts, /encode", partial(over_http, "/encode", JSON), dict(texts))
    add("texts, a form", partial(over_http, "/encode", "application/x-www-form-urlencoded"), {
        "texts": lambda size: b"texts=a&" * (size // 8) + b"id=1", "percents": lambda size: b"texts=" + b"%41" * (size // 3),
        "fields": lambda size: b"a&" * (size // 2),
    })  # fmt: skip
    openai: Bodies = {
        name: (lambda size, body=body: body(size).replace(b'"texts"', b'"input"', 1)) for name, body in texts.items()
    }
    add("texts, OpenAI", partial(over_http, "/v1/embeddings", JSON), openai)
    for coding in ("gzip", "deflate", "zstd"):
        add(
            "compression",
            partial(over_http, "/infer/grid", JSON),
            {f"empty {coding} members": partial(members, coding=coding)},
        )
    for coding in ("gzip", "zstd"):
        add(
            "compression",
            partial(over_http, "/infer/grid", JSON),
            {f"lists in {coding}": partial(packed, coding=coding, unit=b"[]")},
        )
    add("compression", partial(over_http, "/v2/models/grid/infer", JSON), {
        "zlib without a header": lambda size: zlib.compress(flat(size)),
        "empty zlib members without a header": lambda size: members(size, "deflate")[0],
    })  # fmt: skip
    ask = frame(b"me", MORE)
    add("ZMTP", partial(over_zmtp, "zmq", "PUSH"), {
        "pings": lambda size: frame(b"\x04PING\0\0", COMMAND) * (size // 9),
        "empty messages": lambda size: b"\0\0" * (size // 2),
        "endless frames": lambda size: b"\1\0" * (size // 2),
        "small requests": lambda size: (ask + frame(b'["a"]', MORE) + frame(b"1", MORE) + frame(b"1")) * (size // 17),
        "many texts": lambda size: ask + frame(filled(b'"a"', size), MORE) + frame(b"1", MORE) + frame(b"%d" % (size // 4)),
        "lists": lambda size: ask + frame(filled(b"[[]]", size), MORE) + frame(b"1", MORE) + frame(b"%d" % (size // 5)),
    })  # fmt: skip
    add("ZMTP, answers", partial(over_zmtp, "zmq_out", "SUB"), {
        "subscriptions": lambda size: frame(b"\1a") * (size // 4),
        "subscriptions that differ": lambda size: b"".join(frame(b"\1%07d" % place) for place in range(size // 10)),
        "pings": lambda size: frame(b"\x04PING\0\0", COMMAND) * (size // 9),
    })  # fmt: skip
    return made


# The server, and what it says of itself.


class Probe:
    """Asks the server how long its loop was held."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._answers = self._connection.makefile("rb")

    def ask(self, question: bytes) -> list[float]:
        """Return the longest stretches, in milliseconds."""
        return [1000.0 * seconds for seconds in self._ask(question)]

    def held(self) -> tuple[int, int]:
        """Return the bytes and the connections in the server's account."""
        size, connections = self._ask(b"held")
        return size, connections

    def close(self) -> None:
        """Ask no more."""
        self._answers.close()
        self._connection.close()

    def _ask(self, question: bytes) -> Any:
        self._connection.sendall(question + b"\n")
        return json.loads(self._answers.readline())


@contextmanager
def serving(memory_mb: int, *arguments: str, log: IO[bytes] | None = None) -> Iterator[tuple[Ports, Probe]]:
    """Run the server in a process of its own, with its workers each, of so much memory (0: what there is); what its `arguments` are it says itself.
    Among its ports is its `pid`. It logs to `log`, or where this process does."""
    limited = ["prlimit", f"--as={memory_mb << 20}"] if memory_mb else []
    command = [*limited, sys.executable, "-m", "benchmarks.parsers", "serve", *arguments]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**CORE_VARIABLES, **environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
    ) as server:
        assert server.stdout is not None
        ports: Ports = json.loads(server.stdout.readline())
        probe = Probe(ports["probe"])
        try:
            yield {**ports, "pid": server.pid}, probe
        finally:
            probe.close()  # the server waits for this
            server.communicate(timeout=60)


class Measured(NamedTuple):
    """What one body did: `stretches` are in milliseconds, of the loop's thread and of the process."""

    case: Case
    size_mb: float
    answer: str
    stretches: list[float]

    def met(self, bar: float) -> bool:
        """Return whether it was answered, and held the loop no longer than it may."""
        failed = self.answer in ("lost", "INTERNAL", "UNKNOWN", "CANCELLED", "none") or (
            self.answer.startswith("5") and self.answer not in ("501", "503")
        )
        return not failed and max(self.stretches) <= max(LEAST_MS, bar * self.size_mb)


def measure(case: Case, size: int, ports: Ports, probe: Probe, bar: float) -> Measured:
    """Send one body; if it is over the bar, once more."""
    body = case.body(size)
    first = sent(case, size, body, ports, probe)
    if first.met(bar):
        return first
    again = sent(case, size, body, ports, probe)
    stretches = [min(pair) for pair in zip(first.stretches, again.stretches, strict=True)]
    return again._replace(stretches=stretches)


def sent(case: Case, size: int, body: Any, ports: Ports, probe: Probe) -> Measured:
    """Send a body once."""
    probe.ask(b"reset")
    try:
        answer = case.send(ports, body)
    except Exception as error:  # whatever a client raises, the server has not answered
        answer = f"none: {type(error).__name__}"[:24]
    time.sleep(0.05)
    return Measured(case, size / 1e6, answer, probe.ask(b"longest"))


def shown(measured: list[Measured], bar: float, sizes: list[float]) -> Table:
    """Return the table, a row for each case; those that are over the bar in red."""
    heads = [f"{size:g} MB: {what}" for size in sizes for what in ("answer", "loop, ms", "process, ms")]
    table = Table("path", "body", *heads)
    for case in dict.fromkeys(each.case for each in measured):
        mine = [each for each in measured if each.case is case]
        cells = [cell for each in mine for cell in (each.answer, *[f"{stretch:.0f}" for stretch in each.stretches])]
        table.add_row(case.path, case.name, *cells, style=None if all(each.met(bar) for each in mine) else "red")
    return table


def main() -> int:
    """Measure and print; 1 if a body held the loop for longer than the bar, or was not answered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.0, 16.0], help="of bodies, in MB")
    parser.add_argument("--bar", type=float, default=BAR, help="milliseconds for each MB")
    parser.add_argument("--memory", type=int, default=0, help="MB that each process of the server may map (0: any)")
    parser.add_argument("--only", default="", help="paths, or bodies, with this text in their names")
    asked = parser.parse_args()
    chosen = [case for case in cases() if asked.only in case.path or asked.only in case.name]
    measured: list[Measured] = []
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with serving(asked.memory) as (ports, probe), Progress(*columns, console=console) as progress:
        task = progress.add_task("bodies", total=len(chosen) * len(asked.sizes))
        for case in chosen:
            for size in asked.sizes:
                progress.update(task, description=f"{case.path}: {case.name}, {size:g} MB")
                measured.append(measure(case, int(1e6 * size), ports, probe, asked.bar))
                progress.advance(task)
    console.print(shown(measured, asked.bar, asked.sizes))
    over = sum(not each.met(asked.bar) for each in measured)
    console.print(f"{len(measured)} bodies, {over} over {asked.bar:g} ms/MB or not answered")
    return 1 if over else 0


BEAT = 0.001  # seconds


class Length(models.Length):
    """Says how long an item is that has a length."""

    def predict(self, batch: list[Any]) -> list[int]:
        return [len(item) if hasattr(item, "__len__") else 0 for item in batch]


class Frail(weir.Model):
    """Ends its process for "die", and fails with any other text."""

    def predict(self, batch: list[Any]) -> list[Any]:
        if "die" in batch:
            os.kill(os.getpid(), signal.SIGKILL)
        for item in batch:
            if isinstance(item, str):
                raise ValueError(item)
        return batch


class Lengths:
    """Encodes every text as its length and a zero: what is measured is what comes before."""

    name, dimensions, max_length, facts, batching = "lengths", 2, 512, TextFacts(), BatchingSettings()

    async def encode(self, texts: Sequence[Text], query: TextQuery) -> Encoded:
        """Return a vector for each text."""
        count = len(texts)
        vectors = np.zeros((count, 2), np.float32)
        vectors[:, 0] = list(map(len, texts))
        return Encoded(vectors, [1] * count, [False] * count)

    def encode_one(self, text: Text, query: TextQuery, done: Any) -> None:
        """Leave it to `encode`."""

    async def tokenize(self, texts: Sequence[str], **said: Any) -> list[list[TokenDetail]]:
        """Nobody asks."""
        return []

    async def decode(self, ids: Sequence[Sequence[int]], **said: Any) -> list[str]:
        """Nobody asks."""
        return []


class LoopProbe:
    """Notes the longest stretches in which the loop did not come to its next turn; made in the loop's own thread."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._scheduling = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._loop = asyncio.get_running_loop()
        self.asked_out = asyncio.Event()  # set once the one who asked has gone
        self.reset()
        self._beat()

    def reset(self) -> None:
        """Forget."""
        self.on_loop = self.in_process = 0.0
        self._times = self._now()

    def _now(self) -> tuple[float, float, float]:
        """Return the seconds that the thread has computed, that the process has, and that the thread neither has nor could have: because it
        waited for something else than a processor, or has computed."""
        waited = int(os.pread(self._scheduling, 100, 0).split()[1]) / 1e9
        return time.thread_time(), time.process_time(), time.monotonic() - waited

    def _beat(self) -> None:
        before, self._times = self._times, self._now()
        on_loop, in_process, passed = (after - then for after, then in zip(self._times, before, strict=True))
        self.on_loop = max(self.on_loop, on_loop)
        self.in_process = max(self.in_process, min(in_process, passed))
        self._loop.call_later(BEAT, self._beat)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer questions on one connection."""
        while question := await reader.readline():
            if question == b"reset\n":
                self.reset()
            longest = [self.on_loop, self.in_process]
            held = [self._account.held_bytes, self._account.connections]
            writer.write(json.dumps(held if question == b"held\n" else longest).encode() + b"\n")
        writer.close()
        self.asked_out.set()


def nobody() -> Control:
    """Return who may control the server: nobody, for the token is known to none."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(secrets.token_hex().encode())
        file.flush()
        return Control(ControlSettings(control_token_file=file.name))


class Tokens(weir.Model):
    """Says how many tokens a text has."""

    padded = True

    def predict(self, batch: list[Any]) -> list[Any]:
        ids = [item if isinstance(item, bytes) else item[0] for item in batch]
        return [np.array([len(each) // 4, 0], np.float32) for each in ids]

    @classmethod
    def measure(cls, item: Any) -> weir.Measure:
        return weir.Measure(cost=len(item.ids) / 4)


def of_tokens(directory: str) -> tuple[weir.Service, Encoder]:
    """Return a service of token counts and its encoder, with the tokenizer in `directory`."""
    service = weir.Service(Tokens, name="tokens", workers=1)
    return service, Encoder(service, TokenizerThreads(Tokenizer(Path(directory))), TextShape(2, 64))


async def serve(
    waiting_bytes: str = "0", certificate: str = "", key: str = "", jobs: str = "", tokenizer: str = ""
) -> None:
    """Serve until the standard input ends; over TLS too if there is a certificate with its key."""
    services = [weir.Service(model, workers=1) for model in (Length, Grid, Words)]
    services.append(weir.Service(Frail, workers=1, observers=[LogObserver(get_logger("weir"))]))
    http = HttpSettings(port=0, max_waiting_bytes=int(waiting_bytes) or None, body_timeout=20.0)
    encoders: dict[str, Encodes] = {"lengths": Lengths()}
    if tokenizer:
        service, encoders["tokens"] = of_tokens(tokenizer)
        services.append(service)
    registry, control = Registry(services), nobody()
    context = KserveContext(registry, http, control)
    texts = EmbeddingContext(encoders, http, 100_000, TextCounts())
    status = Status(texts.encoders, texts.clients)
    apis = [Tei(texts), OpenAI(texts), Encode(texts, status, control=control, end=lambda: None)]
    added = added_by(apis)

    async def ask(path: str, body: bytes) -> Reply:
        return await call(app, path, body)

    batches = None
    if jobs:
        options = JobSettings(batch_dir=jobs, batch_max_bytes=1 << 30)
        of_jobs = JobContext(options, ask, http.max_body_size, context.account, get_logger("weir").log)
        batches = JobRoutes(of_jobs, http, InferencePaths(inference_protocols(context), added.endpoints))
        batches.begin()
        added = added._replace(endpoints=[*batches.endpoints(), *added.endpoints])
    sockets = WebSockets(registry, http, context.account)
    app = make_app(context, websockets=sockets, added=added)
    servers: list[Any] = [
        registry,
        HttpServer(context, app, websockets=sockets),
        GrpcServer(context, GrpcSettings(grpc_port=0), http, Core),
        ZeroMqFrontend(
            texts,
            ZeroMqSettings(zmq_port=0),
            control=control,
            status=status,
            terminate=lambda: None,
            account=context.account,
        ),
    ]
    if certificate:
        certified = dataclasses.replace(http, tls_certfile=certificate, tls_keyfile=key)
        safe = KserveContext(registry, certified, control, account=context.account)
        servers.append(HttpServer(safe, app, websockets=sockets))
    async with AsyncExitStack() as stack:
        stack.enter_context(logging_to(TelemetrySettings()))
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        if batches is not None:
            batches.start()
            stack.push_async_callback(batches.stop)
        gc.collect()
        gc.freeze()  # as `weir serve` does
        looks = LoopProbe(context.account)
        probe = await asyncio.start_server(looks.answer, "127.0.0.1", 0)
        ports = {
            "http": servers[1].port, "grpc": servers[2].port, "zmq": servers[3].port,
            "zmq_out": servers[3].port_out, "probe": probe.sockets[0].getsockname()[1], "tls": servers[-1].port,
        }  # fmt: skip
        print(json.dumps(ports), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await looks.asked_out.wait()
        probe.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(*sys.argv[2:]))
    else:
        raise SystemExit(main())
