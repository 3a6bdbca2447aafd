"""Callers beside each other: the case of bert-as-service, live. `python -m benchmarks.crowd [--seconds S] [--door http|zmq|both]`.

One client sends 10,000 sentences every 10 ms, or as fast as the server takes them; others send one sentence a second each. The small
clients' p99 is wished to be at most three times what a batch takes. Then two large clients at once: their throughputs are wished to differ by less than 10 %.
"""

import argparse
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.children import ask_own
from benchmarks.text_load import model_directory
from weir.bench.vectors import RunningServer, text_server

SMALL = 4  # clients of one sentence a second
BATCHES = 3.0  # times, wished at most
APART = 0.1  # of the larger throughput, wished at most
DOORS = ("http", "zmq")


class Case(NamedTuple):
    """One case at one door, measured."""

    door: str
    what: str
    seen: str
    wished: str
    value: float
    met: bool


def main() -> int:
    """Measure; return 1 if a wish was not met."""
    asked = _arguments()
    console, good = Console(), True
    table = Table("door", "case", "measured", "wished", "met")
    for case in cases(DOORS if asked.door == "both" else (asked.door,), asked.seconds):
        good &= case.met
        table.add_row(case.door, case.what, case.seen, case.wished, "yes" if case.met else "NO")
        console.print(f"[dim]{case.door}:[/] {case.what}: {case.seen}")
    console.print(table)
    return 0 if good else 1


def cases(doors: Sequence[str], seconds: float) -> Iterator[Case]:
    """Yield each case at each door when it is measured; the server measures its batches before that."""
    flags = [str(model_directory()), "--device-map", "cpu", "--timeout", "3600"]
    for door in doors:
        with tempfile.TemporaryDirectory() as cache:
            with text_server([*flags, "--cache", cache], zmq=door == "zmq") as server:
                yield _overtaking(server, seconds, door)
            with text_server([*flags, "--cache", cache], zmq=door == "zmq") as server:
                yield _sharing(server, seconds, door)


def _overtaking(server: RunningServer, seconds: float, door: str) -> Case:
    with ThreadPoolExecutor(2) as pool:
        crowd = pool.submit(_client, server, "flood", seconds + 6)
        time.sleep(5)  # until the first ten thousand have been read, and what follows them waits
        before = _batches(server)
        small = _client(server, "drip", seconds, SMALL)
        after = _batches(server)
        sent = crowd.result()
    batch = (after[0] - before[0]) / (after[1] - before[1])
    p50, p99 = _quantile(small["seconds"], 0.5), _quantile(small["seconds"], 0.99)
    times = p99 / batch
    said = (
        f"p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms of {len(small['seconds'])} sentences: {times:.1f} batches of {1e3 * batch:.1f} ms; "
        f"meanwhile {sent['sent']} requests of {sent['texts']:,} sentences were sent"
    )
    return Case(door, "one large client, small ones", said, f"p99 at most {BATCHES:g} batches", times, times <= BATCHES)


def _sharing(server: RunningServer, seconds: float, door: str) -> Case:
    with ThreadPoolExecutor(2) as pool:
        begin = time.time() + 4
        both = [pool.submit(_client, server, "steady", seconds, begin) for _ in range(2)]
        rates = [each.result()["rate"] for each in both]
    apart = 1 - min(rates) / max(rates)
    said = " and ".join(f"{rate:.1f}" for rate in rates) + f" sentences/s: {100 * apart:.1f} % apart"
    return Case(door, "two large clients", said, f"less than {100 * APART:.0f} % apart", apart, apart < APART)


def _client(server: RunningServer, *told: object) -> Any:
    return ask_own("text_clients", server.http, *(server.zmq_ports or (0, 0)), *told)


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
    parser.add_argument("--door", choices=[*DOORS, "both"], default="both")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
