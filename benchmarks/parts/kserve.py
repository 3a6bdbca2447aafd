"""The Open Inference Protocol over HTTP and gRPC, beside Triton and MLServer, which have the same two models.

Over HTTP wrk sends small JSON tensors and large binary ones. Over gRPC h2load (of nghttp2) sends small tensors, one call at a time on each
connection, also to a grpc.aio server that does nothing: a client of grpcio costs several times as much for each call as the faster servers do.
"""

import json
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy

from benchmarks.harness.result import Result
from benchmarks.harness.rounds import (
    LATENCIES,
    Column,
    Measurements,
    Rounds,
    folder,
    loops,
    micro,
    spreads,
    start_all,
    times,
    with_usage,
)
from benchmarks.harness.servers import (
    PEERS,
    Load,
    Server,
    free_port,
    load,
    python_of,
    script,
    serving,
    serving_anything,
    weir_command,
)
from benchmarks.harness.settings import FAST, described, ways

WEIR, TRITON, MLSERVER, NOTHING = "Weir", "Triton", "MLServer", "an empty grpc.aio server"
CONTENDERS = (WEIR, *ways(TRITON), *ways(MLSERVER))
SIMPLE, MEAN = "/v2/models/simple/infer", "/v2/models/mean/infer"
IMAGE_SHAPE = [1, 3, 224, 224]
SMALL, LARGE = "small JSON, 64 connections", "602 KB binary, 16 connections"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
GRPC_CONNECTIONS = (1, 16)


def simple_body() -> bytes:
    """Return two rows of 16 numbers, as JSON."""
    names = ("INPUT0", "INPUT1")
    inputs = [{"name": name, "datatype": "INT32", "shape": [1, 16], "data": list(range(16))} for name in names]
    return json.dumps({"inputs": inputs}).encode()


def binary_body() -> tuple[bytes, dict[str, str]]:
    """Return one image of 602 KB as a binary tensor, and the headers that belong to it."""
    image = numpy.zeros(IMAGE_SHAPE, numpy.float32).tobytes()
    parameters = {"binary_data_size": len(image)}
    tensor = {"name": "IMAGE", "datatype": "FP32", "shape": IMAGE_SHAPE, "parameters": parameters}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + image, {"Inference-Header-Content-Length": str(len(head))}


def servers(names: Sequence[str], ports: dict[str, int]) -> Iterator[AbstractContextManager[Server]]:
    """Yield the servers of these names, to be entered. The gRPC port of each is put into `ports`."""
    for name in names:
        port = ports[name] = free_port()
        yield serving(name, command(name, str(port)), path=SIMPLE, body=simple_body(), expected=None)


def command(name: str, grpc_port: str) -> list[str]:
    """Return the command that starts the server of this name."""
    if name in FAST:
        return [*FAST[name].environment(), *command(FAST[name].peer, grpc_port)]
    if name == WEIR:
        flags = ("--grpc-port", grpc_port, "--max-batch-size", "64")
        return weir_command("benchmarks.models:Simple", "benchmarks.models:Mean", *flags)
    if name == TRITON:
        return [python_of("triton"), script("triton.py"), "--http", "{port}", "--grpc", grpc_port]
    models, program = script("mlserver_models"), Path(python_of("mlserver")).with_name("mlserver")
    variables = [f"PYTHONPATH={models}", "MLSERVER_HTTP_PORT={port}", f"MLSERVER_GRPC_PORT={grpc_port}"]
    return ["env", "-C", models, *variables, str(program), "start", "."]


def _start_http(stack: ExitStack) -> Mapping[str, Any]:
    bodies = folder(stack)
    (bodies / SMALL).write_bytes(simple_body())
    body, headers = binary_body()
    (bodies / LARGE).write_bytes(body)
    large = {"content_type": "application/octet-stream", "body": bodies / LARGE, "headers": headers}
    loads: dict[str, dict[str, Any]] = {
        SMALL: {"connections": 64, "body": bodies / SMALL},
        LARGE: {"connections": 16, **large},
    }
    started = start_all(stack, servers(CONTENDERS, {}))
    return {name: (server, loads) for name, server in started.items()}


def _http(contender: Any, case: str, seconds: float) -> dict[str, float]:
    server, loads = contender
    url = server.url.removesuffix(SIMPLE) + {SMALL: SIMPLE, LARGE: MEAN}[case]
    return with_usage(server, lambda: load(url, seconds=seconds, **loads[case]), refused=server.name != WEIR)


def _conclude_http(result: Result, measured: Measurements) -> None:
    result.values |= measured.values()
    for case, peer, wished in ((SMALL, TRITON, 2.0), (SMALL, MLSERVER, 15.0), (LARGE, TRITON, 4.0)):
        result.at_least(f"{case}: at least {wished:g} times {peer}", measured.times(WEIR, peer, case), wished)
    result.notes += [
        "Each server has one worker process per model and batches of up to 64. CPU is user and system time of all its processes per request.",
        f"Triton is the server binary in nvidia-pytriton 0.7.0, with its Python backend and DLPack tensors; tritonserver 2.73.0 on PyPI is a binding without the server. MLServer 1.7.1 refuses binary tensors over HTTP (422). {described(CONTENDERS)}",
    ]


HTTP = Rounds(
    "kserve",
    "Open Inference Protocol over HTTP",
    "Sum and difference of two INT32 [1,16] tensors as JSON, and one binary FP32 [1,3,224,224] tensor, with the same two models everywhere; wrk with one thread.",
    start=_start_http,
    one=_http,
    contenders=CONTENDERS,
    cases=(SMALL, LARGE),
    takes_part=lambda name, case: case == SMALL or name not in ways(MLSERVER),
    heads=("requests", "server"),
    columns=(
        spreads("good responses/s"),
        times("times Triton", TRITON),
        *LATENCIES,
        micro("CPU µs", "all"),
        Column("not 200", lambda measured, name, case: f"{max(measured.of(name, case, 'refused')):.1%}"),
    ),
    conclude=_conclude_http,
)


def _start_grpc(stack: ExitStack) -> Mapping[str, Any]:
    ports = {NOTHING: free_port()}
    nothing = [sys.executable, str(PEERS / "nothing.py"), str(ports[NOTHING])]
    started = start_all(stack, servers(CONTENDERS, ports))
    started |= start_all(stack, [serving_anything(NOTHING, nothing, ports[NOTHING])])
    body = request_body()
    return {name: (server, ports[name], body) for name, server in started.items()}


def request_body() -> bytes:
    """Return two rows of 16 numbers, raw, as stock clients write them."""
    from weir.wire.inference import InferenceRequest, TensorValue
    from weir.wire.kserve_grpc import write_request

    row = numpy.arange(16, dtype=numpy.int32).reshape(1, 16)
    inputs = [TensorValue(name, "INT32", row) for name in ("INPUT0", "INPUT1")]
    return write_request(InferenceRequest("simple", inputs=inputs))


def _grpc(contender: Any, connections: int, seconds: float) -> dict[str, float]:
    server, port, body = contender
    return with_usage(server, lambda: grpc_load(port, METHOD, body, connections, seconds))


def require_h2load() -> str:
    """Return h2load's path, or end with how to install it."""
    path = shutil.which("h2load")
    if path is None:
        raise SystemExit("h2load is missing. Debian, Ubuntu: apt install nghttp2-client; macOS: brew install nghttp2")
    return path


_HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")
_PREFIX = 5  # bytes before a message: whether it is compressed, and how long it is


def grpc_load(port: int, method: str, message: bytes, connections: int, seconds: float, threads: int = 1) -> Load:
    """Call `method` with `message` over `connections` for `seconds`, rounded, at least one.

    All answers must be as long as one that a client of grpcio gets before: h2load does not read statuses, and an answer that is
    an error has no message. Raises RuntimeError otherwise.
    """
    answer = _ask(port, method, message)
    whole = max(1, round(seconds))  # h2load takes whole seconds only
    with tempfile.TemporaryDirectory() as place:
        body, log = Path(place) / "body", Path(place) / "log"
        body.write_bytes(struct.pack(">?I", False, len(message)) + message)
        flags = [
            "-D",
            str(whole),
            "-c",
            str(connections),
            "-m",
            "1",
            f"-t{threads}",
            "-d",
            str(body),
            f"--log-file={log}",
        ]
        command = [require_h2load(), *flags, *_HEADERS, f"http://127.0.0.1:{port}{method}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
        took = numpy.loadtxt(log, usecols=2, ndmin=1) * 1e-6 if log.exists() and log.stat().st_size else numpy.empty(0)
    received = next((_received(line) for line in done.stdout.splitlines() if line.startswith("traffic:")), 0)
    if done.returncode or not len(took) or received < len(took) * (_PREFIX + len(answer)):
        raise RuntimeError(f"not every call at port {port} was answered well: {done.stdout}{done.stderr}")
    p50, p99 = numpy.percentile(took, [50, 99])
    return Load(len(took), whole, float(p50), float(p99), 0, 0)


def _received(traffic: str) -> int:
    """Return the bytes of data in h2load's line "traffic: 1.2MB (1234) total, 3KB (5) headers (...), 1.1MB (1200) data"."""
    return int(traffic.rpartition("(")[2].partition(")")[0])


def _ask(port: int, method: str, message: bytes) -> bytes:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(method, request_serializer=None, response_deserializer=None)
        answer: bytes = call(message, timeout=10)
    return answer


def _conclude_grpc(result: Result, measured: Measurements) -> None:
    result.values |= measured.values()
    one, most = GRPC_CONNECTIONS
    result.at_least(f"{most} connections: at least 2 times MLServer", measured.times(WEIR, MLSERVER, most), 2)
    for connections, wished in ((one, 1.3), (most, 1.0)):
        beside = measured.times(WEIR, TRITON, connections)
        result.at_least(f"{connections} connections: at least {wished:g} times Triton", beside, wished)
    result.notes.append(
        f"The load comes from h2load with one thread. CPU is user and system time of all processes per call. {described(CONTENDERS)}"
    )


GRPC = Rounds(
    "grpc",
    "Open Inference Protocol over gRPC",
    "ModelInfer with two INT32 [1,16] tensors, raw contents, one call at a time on each connection.",
    start=_start_grpc,
    one=_grpc,
    contenders=(*CONTENDERS, NOTHING),
    cases=GRPC_CONNECTIONS,
    heads=("connections", "server"),
    columns=(
        spreads("calls/s"),
        times("times MLServer", MLSERVER),
        *LATENCIES,
        micro("CPU µs front", "front"),
        micro("CPU µs all", "all"),
        loops("front, in loops"),
    ),
    conclude=_conclude_grpc,
    progress=("rate", "{:,.0f} calls/s".format),
)
