"""What the claims are held against: each quantity is computed when it is first asked for, and kept."""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from reproduction.frontier import Corner, corners
from reproduction.published import LARGEST_WEIGHT, LOAD, PRICES, PROFILE, STATIC_SIZES, TABLE
from reproduction.sweeps import Sweep, sweep
from weir.policy.cost import Prices
from weir.policy.solve.bank import Solution, solve
from weir.policy.solve.smdp import Performance, evaluate
from weir.policy.solve.tables import Table, greedy_table, static_table

LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
WORK_CONSERVING = "work-conserving"


class Minimum(NamedTuple):
    """The search for the least s_max of one c_o: what came of each size from the largest batch on, the last accepted."""

    tried: list[Sweep]

    @property
    def accepted(self) -> Sweep:
        """The first that is accurate enough."""
        return self.tried[-1]


class Findings:
    """Everything that was computed. `step(what)` is called as each part of the work begins."""

    def __init__(self, step: Callable[[str], None] = lambda what: None) -> None:
        self._step = step
        self._solved: dict[tuple[float, float, float], Solution] = {}
        self._benchmarks: dict[tuple[float, str], Performance] = {}
        self._sweeps: dict[tuple[float, int], Sweep] = {}
        self._minima: dict[float, Minimum] = {}
        self._corners: dict[float, list[Corner]] = {}

    @cached_property
    def tables(self) -> dict[str, Table]:
        """The policies that the paper compares with (section V-B), by name."""
        named = {f"static {size}": static_table(size) for size in STATIC_SIZES}
        return {WORK_CONSERVING: greedy_table(PROFILE.max_batch_size), **named}

    def solved(self, load: float, latency_weight: float, energy_weight: float) -> Solution:
        """Return the optimal policy of the paper's example."""
        key = (load, latency_weight, energy_weight)
        if key not in self._solved:
            self._solved[key] = solve(PROFILE, load * PROFILE.max_rate, Prices(latency_weight, energy_weight))
        return self._solved[key]

    def optimum(self, load: float, energy_weight: float) -> float:
        """Return the least cost that any policy attains with w1 = 1."""
        return self.solved(load, 1.0, energy_weight).cost

    def benchmark(self, load: float, name: str) -> Performance:
        """Return what a policy of `tables` does."""
        key = (load, name)
        if key not in self._benchmarks:
            self._benchmarks[key] = evaluate(PROFILE, load * PROFILE.max_rate, self.tables[name], PRICES)
        return self._benchmarks[key]

    def cost(self, load: float, name: str, energy_weight: float) -> float:
        """Return the cost of a policy of `tables` with w1 = 1; infinite where it is unstable."""
        found = self.benchmark(load, name)
        return found.response_time_ms + energy_weight * found.power_w if found.stable else float("inf")

    def frontier(self, load: float) -> list[Corner]:
        """Return the corners of the convex hull of all attainable (response time, power), quickest first."""
        if load not in self._corners:
            self._step(f"trade-off at load {load:g}")
            self._corners[load] = corners(load)
        return self._corners[load]

    def swept(self, overflow_cost: float, s_max: int) -> Sweep:
        """Return what relative value iteration finds for one truncation, in the setting of section V-C."""
        key = (overflow_cost, s_max)
        if key not in self._sweeps:
            self._sweeps[key] = sweep(overflow_cost, s_max)
        return self._sweeps[key]

    def minimum(self, overflow_cost: float) -> Minimum:
        """Return the search for the least s_max, upwards from the largest batch: the first whose policy serves and whose
        Δ is tolerated (Table I)."""
        if overflow_cost not in self._minima:
            self._step(f"least s_max for c_o = {overflow_cost:g}")
            tried = [self.swept(overflow_cost, PROFILE.max_batch_size)]
            while not tried[-1].accepted:
                tried.append(self.swept(overflow_cost, tried[-1].s_max + 1))
            self._minima[overflow_cost] = Minimum(tried)
        return self._minima[overflow_cost]

    @cached_property
    def accuracy(self) -> dict[float, list[Sweep]]:
        """Fig. 8: sweeps for s_max from 32 to 250, by c_o: every tenth, and all of the searches for Table I."""
        found = {}
        for column in TABLE:
            searched = self.minimum(column.overflow_cost).tried
            self._step(f"accuracy for c_o = {column.overflow_cost:g}")
            sizes = sorted({each.s_max for each in searched} | set(range(40, 251, 10)))
            found[column.overflow_cost] = [self.swept(column.overflow_cost, size) for size in sizes]
        return found

    @cached_property
    def exact(self) -> Solution:
        """The setting of Table I, solved exactly."""
        return self.solved(LOAD, PRICES.latency_weight, PRICES.energy_weight)

    @cached_property
    def weights(self) -> list[float]:
        """The values of w2 in Fig. 5."""
        return [LARGEST_WEIGHT * index / 40 for index in range(41)]
