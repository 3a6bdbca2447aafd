"""The clairvoyant optimum: what rows cost at least where every arrival is known beforehand. Exact, by clairvoyant.c.

It is the shortest path through the states (rows served, when the worker is free), as in arXiv 2309.16911.
"""

import ctypes
from pathlib import Path

import numpy as np

from benchmarks.policies.event_loop import compiled, pointer
from weir.policy.cost import Floats, Profile
from weir.simulation.arrivals import Ints

SOURCE = Path(__file__).with_suffix(".c")
ROUNDING = 1e-9  # of the cost of a row: paths whose costs differ by less are the same


def clairvoyant(profile: Profile, arrivals: Floats, joule: float) -> Floats:
    """Return what each row costs, in ms of response time + `joule` · mJ of energy, where rows arriving at `arrivals` (seconds,
    ascending) are served by one worker for the least sum. Service times are taken to be the profile's means."""
    sizes = np.empty(len(arrivals), dtype=np.intc)
    energies = np.ascontiguousarray(joule * profile.energy_mj)
    solve = compiled(SOURCE).clairvoyant
    solve.restype = ctypes.c_long
    batches = solve(
        ctypes.c_long(len(arrivals)), pointer(np.ascontiguousarray(1000.0 * arrivals)), ctypes.c_int(profile.max_batch_size),
        pointer(profile.service_time_ms), pointer(energies), ctypes.c_double(ROUNDING * float(profile.service_time_ms[0] + energies[0])),
        sizes.ctypes.data_as(ctypes.POINTER(ctypes.c_int)),
    )  # fmt: skip
    if batches < 0:
        raise MemoryError(SOURCE.name)
    return by_row(profile, arrivals, sizes[:batches].astype(np.int64), joule)


def by_row(profile: Profile, arrivals: Floats, sizes: Ints, joule: float) -> Floats:
    """Return what each row costs if batches of these sizes are served in order, each as soon as it can be. A batch's energy is
    its rows' in equal parts."""
    ends, free = np.empty(len(sizes)), -np.inf
    for number, (size, last) in enumerate(zip(sizes.tolist(), (np.cumsum(sizes) - 1).tolist(), strict=True)):
        free = max(free, float(arrivals[last])) + float(profile.service_time_ms[size - 1]) / 1000.0
        ends[number] = free
    energy = np.repeat(profile.energy_mj[sizes - 1] / sizes, sizes)
    taken = np.repeat(ends, sizes) - arrivals + profile.latency_offset_ms / 1000.0
    return np.asarray(1000.0 * taken + joule * energy, dtype=np.float64)
