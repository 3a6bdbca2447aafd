"""HTTP compared with mosec, LitServe, BentoML, Ray Serve and an application that does nothing: square as JSON; and binary bodies of 600 KB through shared memory."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from benchmarks.harness.result import Result, mebibytes
from benchmarks.harness.rounds import (
    LATENCIES,
    Column,
    Measurements,
    Rounds,
    folder,
    loops,
    medians,
    micro,
    of_load,
    spreads,
    start_all,
    times,
    with_usage,
)
from benchmarks.harness.servers import Server, load, python_of, script, serving, wait_until_right, weir_command
from benchmarks.harness.settings import FAST, described, ways

WEIR, MOSEC, NOTHING = "Weir", "mosec", "an empty app on uvicorn"
LITSERVE, BENTOML, RAY = "LitServe", "BentoML", "Ray Serve"
# The idle processes of these poll, which halves what other servers answer beside them: they run only while they are measured.
POLLING = tuple(name for peer in (LITSERVE, BENTOML, RAY) for name in ways(peer))
SINGLE = "mosec, batches of 1"
CONNECTIONS = (1, 64, 256)
WISHED = {64: 3.0, 256: 2.5}
BODY_BYTES = 224 * 224 * 3 * 4
BODY_CONNECTIONS = 16
QUIET = ("--no-access-log", "--log-level", "error")
OCTETS = "application/octet-stream"


def _mosec(model: str) -> list[str]:
    told = ["--address", "127.0.0.1", "--port", "{port}", "--log-level", "error"]
    return [python_of("mosec"), script("mosec_server.py"), model, *told]


def command_of(name: str) -> tuple[list[str], str]:
    """Return how a server is started, and the path of its model: with one worker, but for fast modes of peers."""
    if name in FAST:
        command, path = command_of(FAST[name].peer)
        return [*FAST[name].environment(), *command], path
    if name == WEIR:
        return weir_command("benchmarks.models:Square", "--max-batch-size", "64"), "/infer/square"
    if name in (MOSEC, SINGLE):
        return _mosec("single" if name == SINGLE else "square"), "/inference"
    if name == LITSERVE:
        return [python_of("litserve"), script("litserve_server.py"), "--port", "{port}"], "/predict"
    if name == RAY:
        return [python_of("ray-serve"), script("ray_square.py"), "--port", "{port}"], "/infer"
    if name == BENTOML:
        serve = [python_of("bentoml"), "-m", "bentoml", "serve", f"{script('bentoml_server.py')}:Square"]
        return [*serve, "--host", "127.0.0.1", "--port", "{port}", "--quiet"], "/square"
    uvicorn = [sys.executable, "-m", "uvicorn", "--app-dir", script("")]
    return [*uvicorn, "nothing:app", "--port", "{port}", *QUIET], "/"


def started(stack: ExitStack, names: Iterable[str]) -> dict[str, Server]:
    """Start these servers until the end of `stack`."""
    return start_all(stack, map(_square_server, names))


def _square_server(name: str) -> AbstractContextManager[Server]:
    command, path = command_of(name)
    body, expected = (b'{"numbers": [3]}', b"[9]") if name in ways(BENTOML) else (b"3", b"9")
    return serving(name, command, path=path, body=body, expected=expected)


def _start_square(stack: ExitStack) -> Mapping[str, Server]:
    servers: dict[str, Server] = {}
    for name in CONTENDERS:
        servers |= started(stack, [name])
        if name in POLLING:
            servers[name].pause()
    return servers


def _takes_part(name: str, connections: int) -> bool:
    return connections == 64 or name not in POLLING


def _square(server: Server, connections: int, seconds: float) -> dict[str, float]:
    if server.name not in POLLING:
        return with_usage(server, lambda: load(server.url, connections, seconds, body=server.body))
    server.resume()
    try:
        wait_until_right(server, server.body, None, "application/json", 60.0)  # Ray starts its HAProxy anew
        load(server.url, connections, 1.0, body=server.body)  # what it puts off while it is stopped
        return with_usage(server, lambda: load(server.url, connections, seconds, body=server.body))
    finally:
        server.pause()


PEERS = (MOSEC, LITSERVE, BENTOML, RAY)
CONTENDERS = (WEIR, *(name for peer in PEERS for name in ways(peer)), NOTHING)
SETTINGS = (
    "LitServe and BentoML run without access logs; BentoML takes a list of one number and computes in the process that listens; Ray Serve waits up to 10 ms for a batch. "
    f"Rows with a peer's name alone have its defaults. {described(CONTENDERS)}"
)


def _conclude_square(result: Result, measured: Measurements) -> None:
    result.values |= measured.values()
    for connections, wished in WISHED.items():
        better = result.values[f"times mosec {connections}"] = measured.times(WEIR, MOSEC, connections)
        result.at_least(f"{connections} connections: at least {wished:g} times mosec", better, wished)
    mosec, nothing = measured.times(MOSEC, WEIR, 1, "p50"), measured.times(WEIR, NOTHING, 1, "p50")
    result.values["p50 1"] = measured.middle(WEIR, 1, "p50")
    result.values["p50 1 mosec"] = measured.middle(MOSEC, 1, "p50")
    result.at_least("1 connection: p50 at most 1/30 of mosec's", mosec, 30, "1/{:.1f}")
    result.at_most("1 connection: p50 at most twice that of an empty app on uvicorn", nothing, 2)
    result.notes.append(SETTINGS)


SQUARE = Rounds(
    "square",
    "Square over HTTP",
    "One worker process, JSON, batches of up to 64 (mosec waits up to 5 ms for a full batch), and wrk with one thread on the same machine.",
    start=_start_square,
    one=_square,
    contenders=CONTENDERS,
    takes_part=_takes_part,
    cases=CONNECTIONS,
    heads=("connections", "server"),
    columns=(
        spreads("requests/s"),
        times("times mosec", MOSEC),
        *LATENCIES,
        micro("CPU µs front", "front"),
        micro("CPU µs workers", "workers"),
        loops("front, in loops"),
    ),
    conclude=_conclude_square,
)


MOSEC_WAYS = {name: FAST[name].environment() if name in FAST else [] for name in ways(MOSEC)}


def _start_bodies(stack: ExitStack) -> Mapping[str, Any]:
    weir = weir_command("benchmarks.models:Length", "--max-batch-size", "64")
    body = folder(stack) / "body"
    body.write_bytes(bytes(BODY_BYTES))
    expected: dict[str, Any] = {"body": b"12345", "expected": b"5", "content_type": OCTETS}
    weir_server = serving(WEIR, weir, path="/infer/length", **expected)
    mosec = [
        serving(name, [*words, *_mosec("length")], path="/inference", **expected) for name, words in MOSEC_WAYS.items()
    ]
    servers = start_all(stack, (weir_server, *mosec))
    return {name: (server, body) for name, server in servers.items()}


def _bodies(contender: Any, case: str, seconds: float) -> dict[str, float]:
    server, body = contender
    done = load(server.url, BODY_CONNECTIONS, seconds, body=body, content_type=OCTETS)
    return of_load(done, server) | {"memory": server.usage().memory_bytes}


def _memory(measured: Measurements, name: str) -> list[float]:
    """Return the memory after the round that warms up, and after each other."""
    return [measured.before(name, figure="memory"), *measured.of(name, figure="memory")]


def _conclude_bodies(result: Result, measured: Measurements) -> None:
    result.values |= measured.values() | {"times mosec": measured.times(WEIR, MOSEC)}
    memory = _memory(measured, WEIR)
    result.at_least("at least 4,000 requests/s", result.values[WEIR], 4000, "{:,.0f}")
    result.at_most("flat memory: after at most 1.1 times before", memory[-1] / memory[0], 1.1, "{:.3f}")
    result.notes.append(f"Memory is that of all processes together; shared pages count once. {described(ways(MOSEC))}")


BODIES = Rounds(
    "large-bodies",
    "Large binary bodies",
    f"{BODY_BYTES:,} bytes of application/octet-stream to a worker process that returns their length, {BODY_CONNECTIONS} connections.",
    start=_start_bodies,
    one=_bodies,
    contenders=(WEIR, *MOSEC_WAYS),
    heads=("server",),
    columns=(
        spreads("requests/s"),
        times("times mosec", MOSEC),
        medians("GB/s", "rate", lambda rate: f"{rate * BODY_BYTES / 1e9:.2f}"),
        *LATENCIES,
        Column("MiB before", lambda measured, name, case: mebibytes(_memory(measured, name)[0])),
        Column("MiB after", lambda measured, name, case: mebibytes(_memory(measured, name)[-1])),
        Column("MiB most", lambda measured, name, case: mebibytes(max(_memory(measured, name)))),
    ),
    conclude=_conclude_bodies,
    warm_ups=1,
)
