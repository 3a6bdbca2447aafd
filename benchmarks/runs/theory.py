"""One policy under Poisson load, live: prints response time, power and cost. Arguments: POLICY RATE SECONDS SEED.

A thread hands each request to the event loop at its intended instant, and response times count from that instant.
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

import weir
from benchmarks.models import TEN_TIMES, Exactly
from weir.batching.settings import BatchingSettings
from weir.errors import WeirError
from weir.messages import Dispatch, Request, Timing
from weir.simulation.arrivals import parse_arrivals
from weir.simulation.simulator import run as simulate
from weir.simulation.statistics import STRETCHES, Estimate, estimate
from weir.telemetry.silent import SilentObserver

WARM_UP = 0.1  # share of the arrivals that does not count
PATIENCE = 3600.0  # seconds: nothing expires, and no wait but the policy's own ends
ENERGY_WEIGHT = 10.0
START_STRETCHES = 12  # of the first quarter of the time


class Ledger(SilentObserver):
    """When each request was answered (by its number, which is its item), and each batch."""

    def __init__(self, count: int) -> None:
        self.ends: NDArray[np.float64] = np.full(count, np.nan)
        self.batches: list[tuple[float, int]] = []
        self.excess_ms: list[float] = []  # by how much longer a batch took, seen from here, than it should
        self.left = count

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """Note a batch."""
        self.batches.append((dispatch.at, dispatch.rows))

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Note how long the batch took."""
        self.excess_ms.append(1000.0 * (now - dispatch.at) - float(TEN_TIMES.service_time_ms[dispatch.rows - 1]))

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Note the answers."""
        if error is not None:
            return  # too late to be answered: the measurement is over
        for request in requests:
            self.ends[request.payload] = now
        self.left -= len(requests)


def feed(loop: asyncio.AbstractEventLoop, service: weir.Service, instants: NDArray[np.float64]) -> None:
    """Hand over one request at each instant; it never waits for an answer."""
    for number, instant in enumerate(instants.tolist()):
        ahead = instant - time.monotonic()
        if ahead > 0.0:
            time.sleep(ahead)
        loop.call_soon_threadsafe(service.infer, number)


async def measure(policy: str, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """Return what came of `seconds` of load at `rate` requests/s."""
    count = int(rate * seconds)
    instants = parse_arrivals(f"poisson:rate={rate}").times(np.random.default_rng(seed), count)
    ledger = Ledger(count)
    patient: dict[str, Any] = {
        "max_queue_delay": PATIENCE,
        "timeout": PATIENCE,
        "max_queue_size": count,
        "drain_timeout": 0.0,
    }
    async with weir.Service(Exactly, policy=policy, observers=[ledger], **patient) as service:
        start = time.monotonic() + 0.1
        intended = start + instants
        thread = threading.Thread(target=feed, args=(asyncio.get_running_loop(), service, intended))
        thread.start()
        await asyncio.sleep(0.1 + seconds)
        waiting = service.state()["waiting"]
        thread.join()
    return (
        account(ledger, intended, waiting)
        | {"start_costs": start_costs(ledger, intended)}
        | {"simulated_ms": simulated(policy, instants)}
    )


def account(ledger: Ledger, intended: NDArray[np.float64], waiting: int) -> dict[str, Any]:
    """Return the figures of the requests after the warm-up, and of the batches that began in that time."""
    first, last = intended[int(WARM_UP * len(intended))], intended[-1]
    counted = (intended >= first) & np.isfinite(ledger.ends)
    response_ms = 1000.0 * (ledger.ends - intended)[counted]
    energies = np.array([[at, TEN_TIMES.energy_mj[rows - 1]] for at, rows in ledger.batches if first <= at <= last])
    power_w = float(energies[:, 1].sum()) / (1000.0 * float(last - first))
    mean = mean_of(response_ms)
    return {
        "response_ms": mean.value, "low_ms": mean.low, "high_ms": mean.high, "power_w": power_w,
        "cost": mean.value + ENERGY_WEIGHT * power_w, "waiting": waiting, "answered": len(response_ms),
        "excess_ms": float(np.median(ledger.excess_ms)), "batch_size": float(np.mean([rows for _, rows in ledger.batches])),
    }  # fmt: skip


def start_costs(ledger: Ledger, intended: NDArray[np.float64]) -> list[float]:
    """Return what each stretch of the first quarter of the time has cost, from the cold start on."""
    edges = intended[0] + (intended[-1] - intended[0]) / 4.0 * np.linspace(0.0, 1.0, START_STRETCHES + 1)
    began = np.array([at for at, _ in ledger.batches])
    energy_mj = np.array([TEN_TIMES.energy_mj[rows - 1] for _, rows in ledger.batches])
    costs = []
    for low, high in pairwise(edges.tolist()):
        asked = (intended >= low) & (intended < high) & np.isfinite(ledger.ends)
        power_w = float(energy_mj[(began >= low) & (began < high)].sum()) / (1000.0 * (high - low))
        costs.append(1000.0 * float((ledger.ends - intended)[asked].mean()) + ENERGY_WEIGHT * power_w)
    return costs


def simulated(policy: str, instants: NDArray[np.float64]) -> float:
    """Return the mean response time for these very arrivals: the same batcher and policy, in virtual time (`auto`, which
    only a server can solve, would be greedy)."""
    settings = BatchingSettings(
        max_batch_size=TEN_TIMES.max_batch_size, max_queue_delay=PATIENCE, max_queue_size=len(instants)
    )
    run = simulate(TEN_TIMES, policy, instants, settings=settings)
    counted = (instants >= instants[int(WARM_UP * len(instants))]) & (run.end < instants[-1])
    return float(np.mean(1000.0 * (run.end - run.arrival)[counted]))


def mean_of(values: NDArray[np.float64]) -> Estimate:
    """Return the mean of values that follow each other, and its interval."""
    return estimate(np.array([part.mean() for part in np.array_split(values, STRETCHES)]), float(values.mean()))


if __name__ == "__main__":
    policy, rate, seconds, seed = sys.argv[1:]
    print(json.dumps(uvloop.run(measure(policy, float(rate), float(seconds), int(seed)))))
