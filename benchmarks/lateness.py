"""Is the event loop late while tables are solved anew? `python -m benchmarks.lateness [--seconds S] [--rounds N] [--rate R]`

One service on the loop that serves, with a solved policy and a worker process, under open-loop load. A heartbeat asks to be
woken each millisecond and notes how late it was. Short stretches with re-solves, back to back, and without take turns, so
that both see the machine in the same states. A loop at rest can be late too: the table has both, and the verdict is of the
bar alone.
"""

import argparse
import asyncio
import gc
import os
import time
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import numpy as np
import uvloop
from rich.console import Console

import weir
from benchmarks.harness.result import Result
from weir.policy.cost import Prices, Profile
from weir.policy.solve.bank import solve_bank

BAR = 0.005  # seconds
BEAT = 0.001
PROFILE = Profile.linear(alpha_ms=0.2, tau0_ms=2.0, max_batch_size=64)


class Model(weir.Model):
    """Takes as long as PROFILE says."""

    max_batch_size = 64

    def predict(self, batch: list[int]) -> list[int]:
        time.sleep(PROFILE.service_time_ms[len(batch) - 1] / 1000.0)
        return batch


class Stretch(NamedTuple):
    """`late` is in seconds, one for each beat."""

    late: list[float]
    resolves: int


async def heartbeat(late: list[float]) -> None:
    """Note the lateness of each beat, until cancelled. The loop counts in whole milliseconds: up to one is its own way."""
    while True:
        due = time.monotonic() + BEAT
        await asyncio.sleep(BEAT)
        late.append(time.monotonic() - due)


async def load(service: weir.Service, rate: float) -> None:
    """Send as many requests a second as `rate` says, evenly, whether or not the others are answered; until cancelled."""
    due = time.monotonic()
    while True:
        due += 1.0 / rate
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        service.infer(1)


async def stretch(service: weir.Service, seconds: float, rate: float, weights: "count[int] | None") -> Stretch:
    """Serve for `seconds`; with `weights`, prices that were never asked for are put all the time."""
    late: list[float] = []
    tasks = [asyncio.create_task(heartbeat(late)), asyncio.create_task(load(service, rate))]
    resolves, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        if weights is None:
            await asyncio.sleep(seconds)
            break
        await service.set_prices(energy_weight=next(weights) / 100.0)
        resolves += 1
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)
    return Stretch(late, resolves)


async def measure(rounds: int, seconds: float, rate: float) -> dict[str, list[Stretch]]:
    """Return the stretches, by what was done in them."""
    found: dict[str, list[Stretch]] = {"re-solving": [], "at rest": []}
    weights = count(101)
    policy = weir.SolvedPolicy(solve_bank(PROFILE, Prices(1.0, 1.0)))
    async with weir.Service(Model, policy=policy, max_queue_size=4096) as service:
        # Warms up; the solving process is started in the first stretch that counts.
        await stretch(service, 1.0, rate, None)
        gc.collect()
        gc.freeze()  # as `weir serve` does when it is ready: a whole collection would hold up the loop
        for _ in range(rounds):
            found["re-solving"].append(await stretch(service, seconds, rate, weights))
            found["at rest"].append(await stretch(service, seconds, rate, None))
    return found


def judged(found: dict[str, list[Stretch]]) -> Result:
    """Return the figures, and whether the bar was kept."""
    bar = f"{1000 * BAR:g} ms"
    result = Result(["", "re-solves", "beats", "late, ms: p99", "p99.9", "p99.99", "max", f"over {bar}"])
    worst = {}
    for name, stretches in found.items():
        late = np.concatenate([each.late for each in stretches])
        worst[name] = 1000.0 * float(late.max())
        shown = [f"{1000.0 * float(np.quantile(late, share)):.2f}" for share in (0.99, 0.999, 0.9999, 1.0)]
        resolves = str(sum(each.resolves for each in stretches))
        result.rows.append([name, resolves, str(len(late)), *shown, str(np.count_nonzero(late > BAR))])
    figures = f"{worst['re-solving']:.2f} ms; at rest {worst['at rest']:.2f} ms"
    result.goal(f"late by {bar} at most while re-solving", figures, worst["re-solving"] <= 1000.0 * BAR)
    return result


def go_first() -> None:
    """As root: run this thread before all others, so that it is not other work that is measured."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def main() -> int:
    """Measure and print; 1 if a beat was later than the bar while re-solving."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default, what in (("seconds", 2.0, "of a stretch"), ("rate", 1000.0, "requests per second")):
        parser.add_argument(f"--{name}", type=float, default=default, help=what)
    parser.add_argument("--rounds", type=int, default=15, help="of a stretch with and one without re-solves")
    asked = parser.parse_args()
    go_first()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = judged(runner.run(measure(asked.rounds, asked.seconds, asked.rate)))
    result.print(Console())
    return 0 if all(goal[-1] == "yes" for goal in result.goals) else 1


if __name__ == "__main__":
    raise SystemExit(main())
