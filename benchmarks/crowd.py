"""Callers of texts beside each other, over HTTP and over ZeroMQ. `python -m benchmarks.crowd [--seconds S] [--protocol http|zmq|both]`.

One client sends 10,000 sentences every 10 ms, or as fast as the server takes them; others send one sentence a second each. The small
clients' p99 should be at most three times what a batch takes. Then two large clients at once: their throughputs should
differ by less than 10 %.

The child `client URL ZMQ_PORT ZMQ_PORT_OUT flood SECONDS | drip SECONDS CLIENTS | steady SECONDS BEGIN` is such clients and prints what
came of it; with ports of 0 they ask the URL over HTTP.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.harness.result import Part, Result, Run
from benchmarks.harness.servers import ask_own
from benchmarks.harness.texts import model_directory
from weir.bench.vectors import WORDS, RunningServer, text_server
from weir.client import EmbeddingClient
from weir.client.calls import NEVER
from weir.errors import WeirError
from weir.text_server.bert_as_service.client import BertTransport

SMALL = 4  # clients of one sentence a second
LEAST_SECONDS = 3.0  # of a case, so that each of them has answers
BATCHES = 3.0  # times, wished at most
APART = 0.1  # of the larger throughput, wished at most
PROTOCOLS = ("http", "zmq")


class Case(NamedTuple):
    """One case over one protocol, measured."""

    protocol: str
    what: str
    seen: str
    wished: str
    value: float
    met: bool


def main() -> int:
    """Measure; return 1 if a wish was not met."""
    asked = _arguments()
    console, good = Console(), True
    table = Table("protocol", "case", "measured", "wished", "met")
    for case in cases(PROTOCOLS if asked.protocol == "both" else (asked.protocol,), asked.seconds):
        good &= case.met
        table.add_row(case.protocol, case.what, case.seen, case.wished, "yes" if case.met else "NO")
        console.print(f"[dim]{case.protocol}:[/] {case.what}: {case.seen}")
    console.print(table)
    return 0 if good else 1


def cases(protocols: Sequence[str], seconds: float) -> Iterator[Case]:
    """Yield each case over each protocol when it is measured; the server measures its batches before that."""
    flags = [str(model_directory()), "--device-map", "cpu", "--timeout", "3600"]
    for protocol in protocols:
        with tempfile.TemporaryDirectory() as cache:
            with text_server([*flags, "--cache", cache], zmq=protocol == "zmq") as server:
                yield _overtaking(server, seconds, protocol)
            with text_server([*flags, "--cache", cache], zmq=protocol == "zmq") as server:
                yield _sharing(server, seconds, protocol)


def _overtaking(server: RunningServer, seconds: float, protocol: str) -> Case:
    with ThreadPoolExecutor(2) as pool:
        crowd = pool.submit(_client, server, "flood", seconds + 6)
        time.sleep(5)  # until the first ten thousand have been read, and what follows them waits
        before = _batches(server)
        small = _client(server, "drip", seconds, SMALL)
        after = _batches(server)
        crowd.result()
    batch = (after[0] - before[0]) / (after[1] - before[1])
    p50, p99 = _quantile(small["seconds"], 0.5), _quantile(small["seconds"], 0.99)
    times = p99 / batch
    said = f"p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms of {len(small['seconds'])} sentences: {times:.1f} batches of {1e3 * batch:.1f} ms"
    return Case(
        protocol, "one large client, small ones", said, f"p99 at most {BATCHES:g} batches", times, times <= BATCHES
    )


def _sharing(server: RunningServer, seconds: float, protocol: str) -> Case:
    with ThreadPoolExecutor(2) as pool:
        begin = time.time() + 4
        both = [pool.submit(_client, server, "steady", seconds, begin) for _ in range(2)]
        rates = [each.result()["rate"] for each in both]
    apart = 1 - min(rates) / max(rates)
    said = " and ".join(f"{rate:.1f}" for rate in rates) + f" sentences/s: {100 * apart:.1f} % apart"
    return Case(protocol, "two large clients", said, f"less than {100 * APART:.0f} % apart", apart, apart < APART)


def _client(server: RunningServer, *told: object) -> Any:
    return ask_own("crowd", "client", server.http, *(server.zmq_ports or (0, 0)), *told)


def _batches(server: RunningServer) -> tuple[float, float]:
    """Return the seconds that batches have taken in their worker, and how many there were."""
    seconds = count = 0.0
    with urllib.request.urlopen(f"{server.http}/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(
                (
                    "weir_preprocess_time_seconds_sum",
                    "weir_predict_time_seconds_sum",
                    "weir_postprocess_time_seconds_sum",
                )
            ):
                seconds += float(value)
            elif name.startswith("weir_batch_size_count"):
                count += float(value)
    return seconds, count


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.crowd", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each case")
    parser.add_argument("--protocol", choices=[*PROTOCOLS, "both"], default="both")
    return parser.parse_args()


def measure(run: Run) -> Result:
    """Measure every case once, for as long as all rounds would take."""
    result = Result(["protocol", "case", "measured"])
    for case in cases(PROTOCOLS, max(LEAST_SECONDS, run.rounds * run.seconds)):
        result.rows.append([case.protocol, case.what, case.seen])
        result.goal(f"{case.protocol}, {case.what}: {case.wished}", f"{case.value:.2f}", case.met)
        result.values[f"{case.protocol} {case.what}"] = case.value
        run.step(f"{case.protocol}, {case.what}: {case.seen}")
    result.notes.append(
        "One client sends 10,000 sentences every 10 ms, or as fast as the server accepts them; "
        f"{SMALL} others send one sentence a second each. Then two clients keep 256 sentences under way each. all-MiniLM-L6-v2 on all cores."
    )
    return result


MANY, EVERY = 10_000, 0.01
UNDER_WAY, TOGETHER = 4, 64
WORDS_EACH = 12


def sentences(count: int, seed: int) -> list[str]:
    """Return so many, all of one length."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=WORDS_EACH)) for _ in range(count)]


def flood(connect: Callable[[], EmbeddingClient], seconds: float) -> dict[str, Any]:
    """Send without waiting for answers."""
    texts, sent = sentences(MANY, 1), 0
    client = connect()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        client.encode(texts, blocking=False)
        sent += 1
        # The client itself sends 32 calls at once at most, so that more than that wait here and cost memory only.
        time.sleep(EVERY if sent < 16 else max(0.0, end - time.monotonic()))
    return {"sent": sent, "texts": MANY}


def drip(connect: Callable[[], EmbeddingClient], seconds: float, clients: int) -> dict[str, Any]:
    """Send one sentence a second from each client; return how long the answers took."""

    def one(place: int) -> list[float]:
        took = []
        with connect() as client:
            begin = time.monotonic() + place / clients
            for turn, text in enumerate(sentences(int(seconds), 100 + place)):
                time.sleep(max(0.0, begin + turn - time.monotonic()))
                sent = time.perf_counter()
                client.encode([text])
                took.append(time.perf_counter() - sent)
        return took

    with ThreadPoolExecutor(clients) as pool:
        return {"seconds": [each for took in pool.map(one, range(clients)) for each in took]}


def steady(connect: Callable[[], EmbeddingClient], seconds: float, begin: float) -> dict[str, Any]:
    """Keep the same number of texts in flight all the time; return texts per second, from the first answer to the last."""
    texts = sentences(TOGETHER, 7)
    with connect() as client, ThreadPoolExecutor(UNDER_WAY) as pool:
        client.encode(["ready"])
        time.sleep(max(0.0, begin - time.time()))
        started = time.monotonic()

        def keep_asking(_: int) -> list[float]:
            answered = []
            while time.monotonic() - started < seconds:
                client.encode(texts)
                answered.append(time.monotonic())
            # Only what came in time counts, so that neither gains from running on alone.
            return [each for each in answered if each - started < seconds]

        answered = sorted(each for mine in pool.map(keep_asking, range(UNDER_WAY)) for each in mine)
    if len(answered) < 2:
        sys.exit(f"steady: {len(answered)} answers in {seconds:g} s, no rate can be told")
    return {"rate": TOGETHER * (len(answered) - 1) / (answered[-1] - answered[0])}


def run_client(url: str, port: str, port_out: str, what: str, *told: str) -> None:
    """Do what is asked."""

    def connect() -> EmbeddingClient:
        retry = NEVER if what == "flood" else None
        transport = BertTransport("127.0.0.1", int(port), int(port_out)) if int(port) else None
        return EmbeddingClient(url, timeout=600, ignore_all_checks=True, retry=retry, transport=transport)

    kinds: dict[str, Callable[..., dict[str, Any]]] = {"flood": flood, "drip": drip, "steady": steady}
    numbers = [int(each) if each.isdecimal() else float(each) for each in told]
    try:
        print(json.dumps(kinds[what](connect, *numbers)), flush=True)
    except WeirError as error:
        sys.exit(f"{what}: {error}")
    os._exit(0)  # what is still under way would be waited for


PART = Part(
    "crowd",
    "A crowd of callers",
    "How a large client affects small ones, and a second large one.",
    lambda rounds: 2 * len(PROTOCOLS),
    measure,
)


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        run_client(*sys.argv[2:])
    else:
        sys.exit(main())
