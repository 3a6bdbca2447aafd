"""What fronts cost: the CPU time of reading, queueing and writing one request, with one front (the server itself) and with more; what that lets so many cores
serve; and that the queue stays one: batch sizes, and the cost of a solved policy. Large bodies, large responses and gRPC calls are measured too, and several
whole servers, as gunicorn starts them, which divide the queue."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy
import psutil
from prometheus_client.parser import text_string_to_metric_families

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
from weir.policy.cost import Prices
from weir.policy.solve.bank import solve_bank
from weir.simulation.banks import make_bank

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
LARGE, ANSWER, GRPC = "602 KB, 16", "602 KB response, 16", "gRPC, 64"
SHOWN = (f"{SQUARE}, 256", f"{KSERVE}, 256", TEXTS_64, LARGE, ANSWER, GRPC)  # on the page
IMAGES, PORT = "images and calls", "gRPC port"  # the server of these cases
FRONT_COMMANDS = {"weir.fronts.entry", "gunicorn"}  # by which a process that reads requests is known
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
# So many workers behind one queue, and behind as many queues: each server of gunicorn has one worker.
DIVIDED = {f"{SOLVED}, {workers} workers, Poisson": workers for workers in (2, 4)}
ABOUT_DIVIDED = (
    "Several whole servers, such as gunicorn starts, divide the queue, and with it the batches. The same Poisson arrivals and number of workers, behind one queue"
    " and behind several, each with a policy solved for what it gets:"
)
_FIXED_MJ, _EACH_MJ = (float(each) for each in numpy.polyfit(TEN_TIMES.sizes, TEN_TIMES.energy_mj, 1)[::-1])
DRAWN = "/v2/models/drawn/infer"
DRAW = json.dumps({
    "inputs": [{"name": "SEED", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}], "parameters": {"binary_data_output": True},
}).encode()  # fmt: skip


class Served(NamedTuple):
    """What all processes of a server have counted: batches, their rows, requests, and the seconds that all of them took."""

    batches: float
    rows: float
    requests: float
    seconds: float


def _name(fronts: int) -> str:
    return f"--fronts {fronts}"


def _several(servers: int) -> str:
    return f"gunicorn, {servers} servers"


def _start(stack: ExitStack) -> Mapping[str, Mapping[str, Any]]:
    bank = folder(stack) / "bank.npz"
    bank.write_bytes(solve_bank(TEN_TIMES, PRICES, rates=[LOAD * TEN_TIMES.max_rate]).to_bytes())
    body, headers = binary_body()
    image = folder(stack) / "image"
    image.write_bytes(body)
    sent = {"body": image, "headers": headers, "content_type": "application/octet-stream"}
    found: dict[str, dict[str, Any]] = {_name(fronts): {PORT: free_port(), LARGE: sent} for fronts in FRONTS}
    most = ("--max-batch-size", "64")
    for what, targets, path, body, flags in (
        (SQUARE, ("benchmarks.models:Square",), "/infer/square", b"3", most),
        (KSERVE, ("benchmarks.models:Simple",), SIMPLE, simple_body(), most),
        (SOLVED, ("benchmarks.models:Exactly",), "/infer/exactly", b"3", ("--policy", str(bank))),
        (
            IMAGES,
            tuple(f"benchmarks.models:{each}" for each in ("Simple", "Mean", "Drawn")),
            SIMPLE,
            simple_body(),
            most,
        ),
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
    for case, workers in DIVIDED.items():
        found[_name(workers)][case] = _serving_one_queue(stack, workers)
        found[_several(workers)] = {
            SQUARE: _serving_several(stack, "square()", workers, "/infer/square"),
            case: _serving_several(stack, f"exactly({str(bank)!r})", workers, "/infer/exactly"),
        }
    return found


def _serving_one_queue(stack: ExitStack, workers: int) -> Server:
    """Serve with as many fronts as workers, and a policy solved for all of them."""
    bank = folder(stack) / "bank.npz"
    bank.write_bytes(make_bank(TEN_TIMES, PRICES, workers=workers).to_bytes())
    flags = ("--policy", str(bank), "--workers", str(workers), "--fronts", str(workers))
    command = weir_command("benchmarks.models:Exactly", *flags)
    return stack.enter_context(serving(_name(workers), command, path="/infer/exactly", body=b"3", expected=None))


def _serving_several(stack: ExitStack, app: str, servers: int, path: str) -> Server:
    """Serve with several whole servers, which write their metrics into one folder."""
    command = [
        "env", f"PROMETHEUS_MULTIPROC_DIR={folder(stack)}", sys.executable, "-m", "gunicorn", f"benchmarks.hosted:{app}",
        "--worker-class", "uvicorn_worker.UvicornWorker", "--workers", str(servers), "--bind", "127.0.0.1:{port}", "--log-level", "warning",
    ]  # fmt: skip
    return stack.enter_context(serving(_several(servers), command, path=path, body=b"3", expected=None))


def _serving_texts(fronts: int) -> AbstractContextManager[Server]:
    command = weir_texts(model_directory(), *ONE_THREAD, "--fronts", str(fronts))
    return serving(_name(fronts), command, path="/v1/embeddings", body=ONE_TEXT, expected=None)


def cpu_seconds(server: Server) -> dict[str, float]:
    """Return the CPU time used so far, of the dispatcher, its fronts and its workers."""
    spent = {"dispatcher": _cpu(server.front), "fronts": 0.0, "workers": 0.0}
    for process in server.front.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            spent["workers" if FRONT_COMMANDS.isdisjoint(process.cmdline()) else "fronts"] += _cpu(process)
    return spent


def _cpu(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def _served(server: Server) -> Served:
    host = server.url.partition("://")[2].partition("/")[0]
    names = (
        "weir_batch_size_count",
        "weir_batch_size_sum",
        "weir_total_time_seconds_count",
        "weir_total_time_seconds_sum",
    )
    sums = dict.fromkeys(names, 0.0)
    with urlopen(f"http://{host}/metrics") as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                if sample.name in sums:
                    sums[sample.name] += sample.value
    return Served(*sums.values())


def _figures_of(before: Served, after: Served, seconds: float) -> dict[str, float]:
    """Return the mean size of the batches between the two, and what they cost by PRICES."""
    batches, rows, requests, waited = (then - now for then, now in zip(after, before, strict=True))
    power = (_FIXED_MJ * batches + _EACH_MJ * rows) / 1000.0 / seconds
    cost = PRICES.latency_weight_at(requests / seconds) * 1000.0 * waited / requests + PRICES.energy_weight * power
    return {"batch": rows / batches, "cost": cost}


def _one(servers: Mapping[str, Any], case: str, seconds: float) -> dict[str, float]:
    if case == OPEN:
        return _one_open(servers[SOLVED], seconds)
    if case in DIVIDED:
        return _one_open(servers[case], seconds, DIVIDED[case])
    if case in (LARGE, ANSWER, GRPC):
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
    if case == ANSWER:
        url = server.url.removesuffix(SIMPLE) + DRAWN
        return _with_cpu(server, lambda: load(url, 16, seconds, body=DRAW))
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


def _one_open(server: Server, seconds: float, workers: int = 1) -> dict[str, float]:
    """The same arrivals for every contender: what differs is what the fronts do to the batches."""
    served = _served(server)
    options = {
        "--rate": f"{LOAD * workers * TEN_TIMES.max_rate:g}",
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
    for case in (*CLOSED, LARGE, ANSWER, GRPC):
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
    for case, workers in DIVIDED.items():
        divided = measured.times(_several(workers), _name(workers), case, "cost")
        result.values[f"times the cost, {_several(workers)}"] = divided
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


def _takes_part(name: str, case: str) -> bool:
    if case in DIVIDED:
        return name in (_name(DIVIDED[case]), _several(DIVIDED[case]))
    return name in map(_name, FRONTS) or case == f"{SQUARE}, 256"


PART = Rounds(
    "fronts",
    "Several fronts",
    "One worker process, batches of up to 64, for texts (16 tokens, the first layer of all-MiniLM-L6-v2) of up to 32; wrk with one thread runs on the same cores. The CPU time of fronts and dispatcher counts, not the rate: two cores"
    " run the load and all processes. The solved policy gets Poisson arrivals at 0.7 of what its workers can serve. Each server of gunicorn is a whole Weir with"
    " one worker, and with a policy solved for its part of the arrivals.",
    start=_start,
    one=_one,
    contenders=(*map(_name, FRONTS), *map(_several, DIVIDED.values())),
    cases=(*CLOSED, LARGE, ANSWER, GRPC, OPEN, *DIVIDED),
    takes_part=_takes_part,
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
