"""Poisson arrivals that are like the average of all: chosen by simulation alone, before anything is measured.

Near its capacity a queue takes an hour to forget its luck, and the mean of one minute says little. So, of many seeded
traces, the one is taken on which the simulated mean response times come nearest to the stationary ones, for all policies.
"""

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np

from benchmarks.runs.theory import counted, simulated_ms, trace

SEEDS = 600


def representative(policies: Mapping[str, float], rate: float, seconds: float, seeds: int = SEEDS) -> int:
    """Return the seed of the trace; `policies` are texts with the mean response times, in ms, that theory predicts."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        distances = processes.map(partial(distance, dict(policies), rate, seconds), range(1, seeds + 1), chunksize=8)
        return 1 + int(np.argmin(list(distances)))


def distance(policies: Mapping[str, float], rate: float, seconds: float, seed: int) -> float:
    """Return by what share the simulated means are off, of all policies together."""
    instants = trace(rate, seconds, seed)
    counts = counted(len(instants))
    return sum(
        abs(float(simulated_ms(policy, instants)[counts].mean()) / predicted - 1.0)
        for policy, predicted in policies.items()
    )
