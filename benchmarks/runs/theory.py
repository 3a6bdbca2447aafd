"""One policy under Poisson load, live: prints response time, power and cost. Arguments: POLICY RATE SECONDS SEED STRETCHES.

The generator of `weir bench` hands each request to the service at its intended instant, and response times count from that
instant. The loop of the service stays alert (LOOP_SPIN), as any user may have it.
"""

import asyncio
import gc
import json
import sys
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
from weir.bench.rounds import Alarm, OpenLoop
from weir.bench.target import Ledger as Books
from weir.errors import WeirError
from weir.messages import Dispatch, Request, Timing
from weir.simulation.arrivals import parse_arrivals
from weir.simulation.simulator import run as simulate
from weir.simulation.statistics import STRETCHES, Estimate, estimate
from weir.telemetry.recorder import SilentObserver

LOOP_SPIN = 0.001
COUNTED = (0.1, 0.97)  # shares of the arrivals between which they count: warm by then, and followed by others
AFTER = 0.3  # seconds that the last ones get
PATIENCE = 3600.0  # seconds: nothing expires, and no wait but the policy's own ends
ENERGY_WEIGHT = 10.0
Floats = NDArray[np.float64]


class Ledger(SilentObserver):
    """When each request was answered (by its number, which is its item), and each batch."""

    def __init__(self, count: int) -> None:
        self.ends: Floats = np.full(count, np.nan)
        self.batches: list[tuple[float, int]] = []
        self.excess_ms: list[float] = []  # by how much longer a batch took, seen from here, than it should

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


async def feed(service: weir.Service, intended: Floats) -> list[float]:
    """Hand over one request at each instant, without waiting for answers; return how late each was, in ms."""
    loop = asyncio.get_running_loop()
    finished, late_ms = loop.create_future(), []

    def send(number: int) -> None:
        late_ms.append(1000.0 * (time.monotonic() - books.intended[number]))
        service.infer(number)

    books = Books(intended.tolist())
    with Alarm() as alarm:
        OpenLoop(
            books,
            send,
            clock=time.monotonic,
            waker=alarm,
            soon=loop.call_soon,
            finished=lambda: finished.set_result(None),
        ).tick()
        await finished
    return late_ms


async def measure(policy: str, rate: float, seconds: float, seed: int, stretches: int) -> dict[str, Any]:
    """Return what came of `seconds` of load at `rate` requests/s."""
    instants = trace(rate, seconds, seed)
    ledger = Ledger(len(instants))
    patient: dict[str, Any] = {
        "max_queue_delay": PATIENCE, "timeout": PATIENCE, "max_queue_size": len(instants), "drain_timeout": 0.0,
        "loop_spin": LOOP_SPIN,
    }  # fmt: skip
    async with weir.Service(Exactly, policy=policy, observers=[ledger], **patient) as service:
        gc.collect()
        gc.freeze()  # as `weir serve` does
        intended = time.monotonic() + 0.1 + instants
        late_ms = await feed(service, intended)
        await asyncio.sleep(AFTER)
    costs = stretch_costs(ledger, intended, stretches)
    return account(ledger, intended, policy, instants) | {"stretch_costs": costs, "late_ms": float(np.mean(late_ms))}


def trace(rate: float, seconds: float, seed: int) -> Floats:
    """Return the instants of the arrivals, in seconds."""
    return parse_arrivals(f"poisson:rate={rate}").times(np.random.default_rng(seed), int(rate * seconds))


def counted(count: int) -> slice:
    """Return which of so many arrivals count."""
    low, high = (int(share * count) for share in COUNTED)
    return slice(low, high)


def account(ledger: Ledger, intended: Floats, policy: str, instants: Floats) -> dict[str, Any]:
    """Return the figures of the requests that count, and of the batches that began in that time; `excess_ms` is the mean
    without the hundredth part of the batches that took longest: those that something else on the machine held up."""
    counts = counted(len(intended))
    response_ms = 1000.0 * (ledger.ends - intended)
    mean = mean_of(response_ms[counts])
    first, last = intended[counts][0], intended[counts][-1]
    energies = np.array([[at, TEN_TIMES.energy_mj[rows - 1]] for at, rows in ledger.batches if first <= at <= last])
    power_w = float(energies[:, 1].sum()) / (1000.0 * float(last - first))
    expected_ms = simulated_ms(policy, instants)
    beyond = mean_of((response_ms - expected_ms)[counts])
    usual = np.sort(ledger.excess_ms)[: max(1, int(0.99 * len(ledger.excess_ms)))]
    return {
        "response_ms": mean.value, "low_ms": mean.low, "high_ms": mean.high, "power_w": power_w,
        "cost": mean.value + ENERGY_WEIGHT * power_w, "waiting": int(np.count_nonzero(~(ledger.ends <= intended[-1]))),
        "simulated_ms": float(np.mean(expected_ms[counts])), "beyond_ms": list(beyond),
        "excess_ms": float(np.mean(usual)), "batch_size": float(np.mean([rows for _, rows in ledger.batches])),
    }  # fmt: skip


def stretch_costs(ledger: Ledger, intended: Floats, stretches: int) -> list[float]:
    """Return what each of so many stretches of the time has cost, from the cold start on."""
    edges = np.linspace(intended[0], intended[-1], stretches + 1)
    began = np.array([at for at, _ in ledger.batches])
    energy_mj = np.array([TEN_TIMES.energy_mj[rows - 1] for _, rows in ledger.batches])
    costs = []
    for low, high in pairwise(edges.tolist()):
        asked = (intended >= low) & (intended < high) & np.isfinite(ledger.ends)
        power_w = float(energy_mj[(began >= low) & (began < high)].sum()) / (1000.0 * (high - low))
        costs.append(1000.0 * float((ledger.ends - intended)[asked].mean()) + ENERGY_WEIGHT * power_w)
    return costs


def simulated_ms(policy: str, instants: Floats) -> Floats:
    """Return the response times of these very arrivals: the same batcher and policy, in virtual time (`auto`, which only a
    server can solve, would be greedy)."""
    settings = BatchingSettings(
        max_batch_size=TEN_TIMES.max_batch_size, max_queue_delay=PATIENCE, max_queue_size=len(instants)
    )
    run = simulate(TEN_TIMES, policy, instants, settings=settings)
    return 1000.0 * (run.end - run.arrival)


def mean_of(values: Floats) -> Estimate:
    """Return the mean of values that follow each other, and its interval; of those that are known."""
    known = values[np.isfinite(values)]
    return estimate(np.array([part.mean() for part in np.array_split(known, STRETCHES)]), float(known.mean()))


if __name__ == "__main__":
    policy, *numbers = sys.argv[1:]
    rate, seconds = map(float, numbers[:2])
    print(json.dumps(uvloop.run(measure(policy, rate, seconds, *map(int, numbers[2:])))))
