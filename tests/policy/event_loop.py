"""event_loop.c from Python: what a table does, simulated by a program that shares nothing with Weir."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import numpy as np
import pytest
from scipy.stats import t as student

from weir.policy.profile import Floats, Profile
from weir.policy.tables import Table, checked_table

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc") or shutil.which("gcc")


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler: event_loop.c")


class Interval(NamedTuple):
    """A mean over the stretches and its interval, by Student's t."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Seen:
    """What was seen in each of some stretches of one long run: the mean response time, the mean power, a quantile of the
    response time, and the shares [stretch, limit] of the rows that took longer than some limits."""

    means: Floats
    powers: Floats
    quantiles: Floats
    shares: Floats

    @property
    def later(self) -> list[Interval]:
        """The share of the rows that took longer, by limit."""
        return [interval(each) for each in self.shares.T]


@cache
def _library() -> ctypes.CDLL:
    folder = Path(mkdtemp(prefix="weir-event-loop-"))
    made = folder / "event_loop.so"
    assert COMPILER
    subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-lm"], check=True)
    library = ctypes.CDLL(str(made))
    shutil.rmtree(folder)
    return library


def served(
    profile: Profile, rate: float, table: Table, rows: int, *, parts: int = 20, warm: int = 0, share: float = 0.99,
    late: Sequence[float] = (), seed: int = 1,
) -> Seen:  # fmt: skip
    """Serve `parts` stretches of `rows` rows that arrive at `rate` per second (Poisson) by `table`, after `warm` others.
    The shares are those of the rows that took longer than each of `late`, in ms."""
    results = [np.empty(parts) for _ in range(3)] + [np.empty(parts * len(late))]
    entries = np.ascontiguousarray(checked_table(table, profile.max_batch_size), dtype=np.intc)
    limits = np.array(late, dtype=np.float64) - profile.latency_offset_ms
    failed = _library().serve(
        ctypes.c_int(profile.max_batch_size), _pointer(profile.service_time_ms), _pointer(profile.energy_mj),
        _pointer(profile.cv), ctypes.c_int(len(entries)), entries.ctypes.data_as(ctypes.POINTER(ctypes.c_int)),
        ctypes.c_double(rate / 1000.0), ctypes.c_long(warm), ctypes.c_long(rows), ctypes.c_int(parts),
        ctypes.c_double(share), ctypes.c_int(len(late)), _pointer(limits), ctypes.c_uint64(seed),
        *map(_pointer, results),
    )  # fmt: skip
    if failed:
        raise MemoryError("event_loop.c")
    means, powers, quantiles, shares = results
    offset = profile.latency_offset_ms
    return Seen(means + offset, powers, quantiles + offset, shares.reshape(parts, len(late)))


def _pointer(values: Floats) -> object:
    return values.ctypes.data_as(ctypes.POINTER(ctypes.c_double))


def interval(parts: Floats, confidence: float = 0.999) -> Interval:
    """Return the mean of `parts` and its interval, by Student's t."""
    mean, of = float(np.mean(parts)), len(parts)
    half = float(student.ppf(0.5 + confidence / 2.0, of - 1)) * float(np.std(parts, ddof=1)) / of**0.5
    return Interval(mean, mean - half, mean + half)
