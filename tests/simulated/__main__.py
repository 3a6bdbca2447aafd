"""Runs the simulated server: `python -m tests.simulated [--seconds 60] [--jobs 2] [--first SEED]`.

Each seed is a server, its clients and what befalls them. The first seed that breaks a promise is made as small as it can be, and the command that
replays it is printed and kept in seeds/; the exit code is 1 then. `--seed SEED` runs one seed; `--mutant NAME` with a fault that is planted (see mutants.py).
"""

import argparse
import gc
import json
import multiprocessing
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulated.world import Result


def main() -> int:
    """Run one seed, or many; return the exit code."""
    parser = argparse.ArgumentParser(prog="tests.simulated", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for how much CPU time each process runs")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--seed", type=int, help="run only this one")
    parser.add_argument("--kept", help="what is left of the seed's plan, as it is printed for a seed that fails")
    parser.add_argument("--disk", action="store_true", help="run batch jobs, on a disk that fails (see jobs.py)")
    parser.add_argument("--mutant", help="plant this fault first")
    chosen = parser.parse_args()
    if chosen.mutant:
        from tests.simulated.mutants import plant

        plant(chosen.mutant)
    if chosen.disk:
        return search_jobs(chosen.first, chosen.seconds) if chosen.seed is None else search_jobs(chosen.seed, 0.0)
    if chosen.seed is not None:
        return replay(chosen.seed, json.loads(chosen.kept) if chosen.kept else None, chosen.mutant)
    from tests.simulated.__main__ import search as by_name  # a spawned process does not have what is in a __main__

    tasks = [(chosen.first + job, chosen.jobs, chosen.seconds, chosen.mutant) for job in range(chosen.jobs)]
    if chosen.jobs == 1:
        return by_name(*tasks[0])
    with multiprocessing.get_context("spawn").Pool(chosen.jobs) as pool:
        return max(pool.starmap(by_name, tasks))


def replay(seed: int, kept: dict[str, Any] | None, mutant: str | None) -> int:
    """Run one seed, and print its trace."""
    from tests.simulated.plans import draw_plan
    from tests.simulated.shrinking import narrowed
    from tests.simulated.world import simulate

    plan = draw_plan(seed)
    result = simulate(plan if kept is None else narrowed(plan, kept))
    print(f"seed {seed}: {result.requests} requests in {result.seconds:.1f} s of virtual time, trace {result.trace}")
    if result.fault:
        print(f"seed {seed}: {result.fault}")
    return int(bool(result.fault))


def search(first: int, step: int, seconds: float, mutant: str | None = None) -> int:
    """Run every `step`-th seed from `first` on, until the time is over or a mutant is found; return the exit code."""
    from tests.simulated.plans import draw_plan
    from tests.simulated.shrinking import promise_of
    from tests.simulated.world import simulate

    began, seed, requests, hours, quiet = time.process_time(), first, 0, 0.0, 0.0
    broken: set[str] = set()
    gc.set_threshold(50_000, 20, 50)  # what a simulation leaves is much, and soon garbage
    while time.process_time() < began + seconds:
        plan = draw_plan(seed)
        if mutant is not None and plan.quiet:  # hours in which little happens find no more faults than minutes do
            seed += step
            continue
        result = simulate(plan)
        requests += result.requests
        hours += result.seconds / 3600
        quiet += result.seconds / 3600 if plan.quiet else 0.0
        if result.fault:
            print(f"seed {seed}: {result.fault}", flush=True)
            if (promise := promise_of(result.fault)) not in broken:
                report(result, mutant)
                broken.add(promise)
            if mutant is not None:
                return 1
        seed += step
    said = f"{(seed - first) // step} seeds from {first}: {requests} requests, {hours:.1f} simulated hours"
    print(f"{said} ({quiet:.1f} quiet), {time.process_time() - began:.0f} s of CPU", flush=True)
    return int(bool(broken))


def report(failed: "Result", mutant: str | None) -> None:
    """Print the command that replays a seed, as small as it can be made unless a fault is planted; then it is kept, too."""
    from tests.simulated.shrinking import command, keep, shrunk

    smallest = shrunk(failed.plan) if mutant is None else failed
    print(f"the smallest plan that fails: {smallest.fault}\n{command(smallest.plan, mutant)}", flush=True)
    if mutant is None:
        keep(smallest)


def search_jobs(first: int, seconds: float) -> int:
    """Run the batch jobs of the seeds from `first` on, at least of that one, until the time is over; return the exit code."""
    from tests.simulated.jobs import simulate_jobs

    began, seed, requests, failed = time.process_time(), first, 0, 0
    while seed == first or time.process_time() < began + seconds:
        result = simulate_jobs(seed)
        requests += result.requests
        if result.fault:
            print(f"seed {seed}: {result.fault}\n.venv/bin/python -m tests.simulated --disk --seed {seed}", flush=True)
            failed = 1
        seed += 1
    print(f"{seed - first} seeds of batch jobs from {first}: {requests} requests, trace {result.trace}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
