"""What fronts cost: the CPU time of reading, queueing and writing one request, with one front (the server itself) and with more; what that lets so many cores
serve; and that the queue stays one: batch sizes, and the cost of a solved policy. Large bodies and gRPC calls are measured too."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, NamedTuple
from urllib.request import urlopen

import psutil

from benchmarks.harness.result import Result, Table, count
from benchmarks.harness.rounds import (
    LATENCIES,
    Column,
    Measurements,
    Rounds,
    folder,
    medians,
    micro,
    of_load,
    spreads,
    start_all,
)
from benchmarks.harness.servers import Load, Server, free_port, load, serving, weir_command
from benchmarks.harness.texts import model_directory, weir_texts
from benchmarks.models import TEN_TIMES
from benchmarks.parts.kserve import MEAN, METHOD, SIMPLE, binary_body, grpc_load, request_body, simple_body
from weir.policy.cost.objective import Prices
from weir.policy.solve.bank import solve_bank

FRONTS = (1, 2, 4)
SQUARE, KSERVE, TEXTS, SOLVED = "square", "KServe JSON", "texts", "solved policy"
CLOSED = {f"{SQUARE}, {connections}": (SQUARE, connections) for connections in (1, 64, 256)} | {
    f"{KSERVE}, 256": (KSERVE, 256)
}
TEXTS_64 = f"{TEXTS}, 64"
CLOSED[TEXTS_64] = TEXTS, 64
ONE_TEXT = json.dumps({"input": "First do it, then do it right, then do it better."}).encode()
ONE_THREAD = (
    "--device-map", "cpu", "--workers", "1", "--threads", "1", "--bulk-workers", "0", "--max-batch-size", "32", "--max-batch-cost", "512", "--layers", "-6",
)  # fmt: skip
OPEN = f"{SOLVED}, Poisson"
LARGE, GRPC = "602 KB, 16", "gRPC, 64"
SHOWN = (f"{SQUARE}, 256", f"{KSERVE}, 256", TEXTS_64, LARGE, GRPC)  # on the page on fronts
IMAGES, PORT = "images and calls", "gRPC port"  # the server of these two cases
LOAD = 0.7  # of what the model of the solved policy can serve
PRICES = Prices(latency_weight=1.0, energy_weight=10.0)
MOST_TIMES = 1.25  # CPU time of fronts and dispatcher, as a multiple of that of one front
MOST_MORE = 60e-6  # seconds by which p50 over one connection may grow
DISPATCHER = 5e-6  # seconds of CPU per request
CALL = 6e-6  # the same for a gRPC call, and for a text
SAME_BYTES = 0.9  # of the bytes of large bodies per CPU second with one front
SAME_BATCHES = 0.10  # share by which the mean batch of several fronts may be smaller
SAME_COST = 0.05  # share by which a solved policy may cost more
CORES = (2, 4, 8, 16)
SIZES = medians("rows a batch", "batch", "{:.1f}".format)


class Served(NamedTuple):
    """What statistics of a model have counted: batches by size, requests, and the seconds that all of them took."""

    batches: Mapping[int, int]
    requests: int
    seconds: float


def _name(fronts: int) -> str:
    return f"--fronts {fronts}"


def _start(stack: ExitStack) -> Mapping[str, Mapping[str, Any]]:
    bank = folder(stack) / "bank.npz"
    bank.write_bytes(solve_bank(TEN_TIMES, PRICES, rates=[LOAD * TEN_TIMES.max_rate]).to_bytes())
    body, headers = binary_body()
    image = folder(stack) / "image"
    image.write_bytes(body)
    sent = {"body": image, "headers": headers, "content_type": "application/octet-stream"}
    found: dict[str, dict[str, Any]] = {_name(fronts): {PORT: free_port(), LARGE: sent} for fronts in FRONTS}
    both, most = ("benchmarks.models:Simple", "benchmarks.models:Mean"), ("--max-batch-size", "64")
    for what, targets, path, body, flags in (
        (SQUARE, ("benchmarks.models:Square",), "/infer/square", b"3", most),
        (KSERVE, both[:1], SIMPLE, simple_body(), most),
        (SOLVED, ("benchmarks.models:Exactly",), "/infer/exactly", b"3", ("--policy", str(bank))),
        (IMAGES, both, SIMPLE, simple_body(), most),
    ):
        commands = {
            _name(each): weir_command(
                *targets, *flags, "--fronts", str(each),
                *(("--grpc-port", str(found[_name(each)][PORT])) if what == IMAGES else ()),
            )
            for each in FRONTS
        }  # fmt: skip
        servers = (serving(name, command, path=path, body=body, expected=None) for name, command in commands.items())
        for name, server in start_all(stack, servers).items():
            found[name][what] = server
    for name, server in start_all(stack, map(_serving_texts, FRONTS)).items():
        found[name][TEXTS] = server
    return found


def _serving_texts(fronts: int) -> AbstractContextManager[Server]:
    command = weir_texts(model_directory(), *ONE_THREAD, "--fronts", str(fronts))
    return serving(_name(fronts), command, path="/v1/embeddings", body=ONE_TEXT, expected=None)


def cpu_seconds(server: Server) -> dict[str, float]:
    """Return the CPU time used so far, of the dispatcher, its fronts and its workers."""
    spent = {"dispatcher": _cpu(server.front), "fronts": 0.0, "workers": 0.0}
    for process in server.front.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            spent["fronts" if "weir.fronts.entry" in process.cmdline() else "workers"] += _cpu(process)
    return spent


def _cpu(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def _served(server: Server) -> Served:
    host = server.url.partition("://")[2].partition("/")[0]
    with urlopen(f"http://{host}/v2/models/stats") as answer:
        (model,) = json.load(answer)["model_stats"]
    ended = model["inference_stats"]["success"]
    batches = {each["batch_size"]: each["compute_infer"]["count"] for each in model["batch_stats"]}
    return Served(batches, ended["count"], ended["ns"] / 1e9)


def _figures_of(before: Served, after: Served, seconds: float) -> dict[str, float]:
    """Return the mean size of the batches between the two, and what they cost by PRICES."""
    batches = {size: number - before.batches.get(size, 0) for size, number in after.batches.items()}
    requests = after.requests - before.requests
    found = {"batch": sum(size * number for size, number in batches.items()) / sum(batches.values())}
    response_ms = 1000.0 * (after.seconds - before.seconds) / requests
    energies = TEN_TIMES.energy_mj
    power = sum(energies[min(size, len(energies)) - 1] * number for size, number in batches.items()) / 1000.0 / seconds
    return found | {"cost": PRICES.latency_weight_at(requests / seconds) * response_ms + PRICES.energy_weight * power}


def _one(servers: Mapping[str, Any], case: str, seconds: float) -> dict[str, float]:
    if case == OPEN:
        return _one_open(servers[SOLVED], seconds)
    if case in (LARGE, GRPC):
        return _one_of_images(servers, case, seconds)
    what, connections = CLOSED[case]
    server = servers[what]
    served = _served(server)
    figures = _with_cpu(server, lambda: load(server.url, connections, seconds, body=server.body))
    return figures | {"batch": _figures_of(served, _served(server), seconds)["batch"]}


def _one_of_images(servers: Mapping[str, Any], case: str, seconds: float) -> dict[str, float]:
    server = servers[IMAGES]
    if case == LARGE:
        url = server.url.removesuffix(SIMPLE) + MEAN
        return _with_cpu(server, lambda: load(url, 16, seconds, **servers[LARGE]))
    return _with_cpu(server, lambda: grpc_load(servers[PORT], METHOD, request_body(), 64, seconds))


def _with_cpu(server: Server, run: Callable[[], Load]) -> dict[str, float]:
    """Return what `run` has measured, and the CPU time of each request."""
    before = cpu_seconds(server)
    done = run()
    after = cpu_seconds(server)
    spent = {name: (after[name] - before[name]) / done.requests for name in before}
    return of_load(done, server) | spent | {"edge": spent["dispatcher"] + spent["fronts"]}


def _times(measured: Measurements, name: str, case: str) -> float:
    """Return the CPU time of fronts and dispatcher as a multiple of that of one front: of the two medians that the table shows.

    The median of the ratios of single rounds is another figure, and of few rounds may lie far from it.
    """
    return measured.middle(name, case, "edge") / measured.middle(_name(1), case, "edge")


def _times_and_rounds(measured: Measurements, name: str, case: str) -> str:
    """Show `_times`, and the smallest and largest of the ratios of single rounds."""
    ours, alone = measured.of(name, case, "edge"), measured.of(_name(1), case, "edge")
    if not ours:
        return ""
    rounds = sorted(mine / other for mine, other in zip(ours, alone, strict=True))
    return f"{_times(measured, name, case):.2f} ({rounds[0]:.2f} to {rounds[-1]:.2f})"


def _one_open(server: Server, seconds: float) -> dict[str, float]:
    """The same arrivals for every contender: what differs is what the fronts do to the batches."""
    served = _served(server)
    options = {
        "--rate": f"{LOAD * TEN_TIMES.max_rate:g}",
        "--duration": f"{seconds:g}",
        "--data": "3",
        "--warm-up": "0",
    }
    flags = [text for pair in (options | {"--max-lag-ms": "1000"}).items() for text in pair]
    subprocess.run([sys.executable, "-m", "weir", "bench", server.url, *flags], check=True, capture_output=True)
    figures = _figures_of(served, after := _served(server), seconds)
    return figures | {"rate": (after.requests - served.requests) / seconds}


def _conclude(result: Result, measured: Measurements) -> None:
    alone, two = _name(1), _name(2)
    for case in (*CLOSED, LARGE, GRPC):
        result.values[f"times {case}"] = _times(measured, two, case)
    dearer = result.values[f"times {TEXTS_64}"]
    result.at_most(f"{TEXTS}, 64 connections: at most {MOST_TIMES} times the CPU of one front", dearer, MOST_TIMES)
    spent = measured.middle(two, TEXTS_64, "dispatcher")
    result.at_most("dispatcher: at most 6 µs of CPU per text", spent * 1e6, CALL * 1e6, "{:.1f}")
    for what in (SQUARE, KSERVE):
        dearer = result.values[f"times {what}, 256"]
        result.at_most(f"{what}, 256 connections: at most {MOST_TIMES} times the CPU of one front", dearer, MOST_TIMES)
    spent = measured.middle(two, f"{SQUARE}, 256", "dispatcher")
    result.at_most("dispatcher: at most 5 µs of CPU per request", spent * 1e6, DISPATCHER * 1e6, "{:.1f}")
    more = measured.middle(two, f"{SQUARE}, 1", "p50") - measured.middle(alone, f"{SQUARE}, 1", "p50")
    result.at_most("1 connection: p50 at most 60 µs more", more * 1e6, MOST_MORE * 1e6, "{:.0f}")
    for name in map(_name, FRONTS[1:]):
        batch = measured.times(name, alone, OPEN, "batch")
        result.at_least(f"{name}, {SOLVED}: batches as large as with one front", batch, 1.0 - SAME_BATCHES)
        cost = measured.times(name, alone, OPEN, "cost")
        result.at_most(f"{name}, {SOLVED}: costs what it costs with one front", cost, 1.0 + SAME_COST)
    share = 1.0 / _times(measured, two, LARGE)
    result.at_least(f"{LARGE} connections: {SAME_BYTES} of the bytes per CPU second", share, SAME_BYTES)
    dearer = result.values[f"times {GRPC}"]
    result.at_most(f"{GRPC} connections: at most {MOST_TIMES} times the CPU of one front", dearer, MOST_TIMES)
    spent = measured.middle(two, GRPC, "dispatcher")
    result.at_most("dispatcher: at most 6 µs of CPU per gRPC call", spent * 1e6, CALL * 1e6, "{:.1f}")
    result.tables.append(_predicted(measured))


def _predicted(measured: Measurements) -> Table:
    """Return what so many cores serve, if a request costs there what it costs here: a model that costs nothing is bound by fronts, dispatcher or cores."""
    rows = []
    for what in (SQUARE, KSERVE):
        case = f"{what}, 256"
        own, worker, front, dispatcher = (
            measured.middle(name, case, figure)
            for name, figure in ((_name(1), "edge"), (_name(1), "workers"), (_name(2), "fronts"), (_name(2), "dispatcher"))
        )  # fmt: skip
        for cores in CORES:
            one = min(1 / own, cores / (own + worker))
            rates = {each: min(each / front, 1 / dispatcher, cores / (front + dispatcher + worker)) for each in range(2, cores + 1)}  # fmt: skip
            best = max(rates, key=lambda each: (round(rates[each]), -each))
            better = rates[best] > one
            rate = max(rates[best], one)
            rows.append([what, str(cores), str(best if better else 1), count(rate), f"{rate / one:.1f}"])
    columns = ["requests", "cores", "best `--fronts`", "requests/s", "times one front"]
    return Table("Predicted from these costs", columns, rows)


PART = Rounds(
    "fronts",
    "Several fronts",
    "One worker process, batches of up to 64, for texts (16 tokens, the first layer of all-MiniLM-L6-v2) of up to 32; wrk with one thread runs on the same cores. The CPU time of fronts and dispatcher counts, not the rate: two cores"
    " run the load and all processes. The solved policy gets Poisson arrivals at 0.7 of what its model can serve.",
    start=_start,
    one=_one,
    contenders=tuple(map(_name, FRONTS)),
    cases=(*CLOSED, LARGE, GRPC, OPEN),
    heads=("requests, connections", "server"),
    columns=(
        micro("CPU µs dispatcher", "dispatcher"),
        micro("CPU µs fronts", "fronts"),
        micro("CPU µs both", "edge"),
        Column("times one front", _times_and_rounds),
        micro("CPU µs workers", "workers"),
        SIZES,
        medians("cost", "cost", "{:.0f}".format),
        spreads("requests/s"),
        *LATENCIES,
    ),
    conclude=_conclude,
)  # fmt: skip
