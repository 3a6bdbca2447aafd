"""Several models on one device: what each order costs, against the exact optimum for two, and in the real batchers."""

from collections.abc import Sequence
from heapq import merge
from typing import NamedTuple

import numpy as np

from benchmarks.policies.bursts import TRACES
from benchmarks.policies.deadlines import by_arrival, by_deadline, late_shares
from benchmarks.policies.harness import Compared, Comparison, Effort
from benchmarks.policies.two_models import Rule, TwoModels
from weir.batching import BatchingSettings
from weir.batching.workers import SharedWorkers
from weir.messages import Dispatch
from weir.policy.cost import Floats, Profile
from weir.policy.decision import Greedy, Policy
from weir.policy.online.joint import DevicePolicy
from weir.policy.solve.device import DeviceLoad, DeviceTable, solve_device
from weir.simulation.arrivals import read_trace
from weir.simulation.engine import (
    Engine,
    Run,
    ServiceTimes,
    SimulatedModel,
    SimulatedRequest,
    SimulatedWorkers,
    Whole,
)

PAIRS = 50  # of each kind
DRAWS = 8  # of each setting in the real batchers
ORDERS = ("oldest", "longest", "solved")
RIVALS = ORDERS[:2]


# Models that share a device in virtual time: a real Batcher for each, and the real order of turns. Instants and durations are in seconds.


class DeviceModel(NamedTuple):
    """A model of the simulation: its profile, its policy, the instants of its arrivals (ascending), and its bound on waits."""

    profile: Profile
    policy: Policy
    arrivals: Floats
    max_queue_delay: float = 1e6
    timeout: float = 1e9


class DeviceWorkers(SimulatedWorkers):
    """Workers that several models share, one after another; `order` is one of batching/workers.py's ORDERS."""

    def __init__(self, order: str, ready: int) -> None:
        super().__init__(ready)
        self._shared: SharedWorkers[SimulatedModel] = SharedWorkers(order)

    def serve(self, model: SimulatedModel) -> None:
        """See SimulatedWorkers."""
        super().serve(model)
        self._shared.add(model)

    def begin(self, model: SimulatedModel, cut: Dispatch) -> None:
        """See SimulatedWorkers."""
        self._shared.began(model, cut.worker, model.engine.now)
        super().begin(model, cut)

    def end(self, model: SimulatedModel, cut: Dispatch) -> None:
        """See SimulatedWorkers."""
        self._shared.ends(model, cut.worker, model.engine.now)
        super().end(model, cut)
        self._shared.ended(cut.worker, model.engine.now)


def share(models: Sequence[DeviceModel], order: str, *, workers: int = 1, seed: int = 0) -> list[Run]:
    """Return what happens to each model. `order` is one of batching/workers.py's ORDERS.

    All requests have one row. The same `seed` gives the same service times.
    """
    engine, device, wholes = Engine(), DeviceWorkers(order, workers), [Whole() for _ in models]
    for number, (each, whole) in enumerate(zip(models, wholes, strict=True)):
        size = each.profile.max_batch_size
        settings = BatchingSettings(max_batch_size=size, max_queue_delay=each.max_queue_delay, max_queue_size=1 << 30)
        times = ServiceTimes(each.profile, seed + number)
        SimulatedModel(engine, settings, each.policy, times, whole, device, timeout=each.timeout)
    streams = [
        [(at, number, index) for index, at in enumerate(model.arrivals.tolist())] for number, model in enumerate(models)
    ]
    for at, number, index in merge(*streams):
        engine.models[number].accept([SimulatedRequest(index, at, models[number].timeout)])
    engine.finish()
    return [whole.run(each.profile, workers, each.arrivals) for whole, each in zip(wholes, models, strict=True)]


class Drawn(NamedTuple):
    """Models with Poisson arrivals on one device."""

    profiles: list[Profile]
    rates: list[float]
    energy_weight: float

    def loads(self, wrong: Sequence[float] | None = None) -> list[DeviceLoad]:
        """Return what the order is solved for; rates are multiplied by `wrong`."""
        factors = wrong or [1.0] * len(self.rates)
        return [
            DeviceLoad(profile, rate * factor, 1.0, self.energy_weight)
            for profile, rate, factor in zip(self.profiles, self.rates, factors, strict=True)
        ]


def draw(rng: np.random.Generator, count: int, *, energy: bool, cv: float = 0.0) -> Drawn:
    """Draw models whose times are up to 1 : 8, with batches of up to 4 to 32 rows, at loads of 0.3 to 0.84."""
    profiles = []
    for _ in range(count):
        size = int(rng.choice([4, 8, 16, 32]))
        scale, slope, fixed = np.exp(rng.uniform(0.0, np.log(8.0))), rng.uniform(0.05, 1.0), rng.uniform(0.5, 4.0)
        times = scale * (slope * np.arange(1, size + 1) ** rng.choice([1.0, 0.8]) + fixed)
        profiles.append(Profile(times, times * rng.uniform(0.5, 2.0), np.full(size, cv), energy_source="stated"))
    parts = rng.dirichlet(np.full(count, 2.0)) * rng.uniform(0.3, 0.84)
    rates = [float(part) * each.max_rate for part, each in zip(parts, profiles, strict=True)]
    return Drawn(profiles, rates, float(rng.uniform(0.3, 3.0)) if energy else 0.0)


def most_of(drawn: Drawn) -> int:
    """Return so many rows of each queue in the exact chain that longer queues hardly ever occur."""
    return 32 + max(each.max_batch_size for each in drawn.profiles)


def longest_first(exact: TwoModels) -> Rule:
    """Return the rule that never waits and serves the longer queue."""
    rule = np.zeros((exact.states, exact.states), dtype=np.int64)
    for i, j in np.ndindex(rule.shape):
        if i or j:
            model = int(j > i)
            rule[i, j] = 1 + exact.actions.index((model, min((i, j)[model], exact.profiles[model].max_batch_size)))
    return rule


def row_of(name: str, excess: Sequence[float]) -> list[str]:
    """Return the row of a table with mean, 90 % quantile and worst of `excess`, as percentages."""
    found = 100.0 * np.array(excess)
    return [name, *(f"{each:.1f}" for each in (found.mean(), np.quantile(found, 0.9), found.max()))]


def compare_exactly(effort: Effort) -> Compared:
    """Compare the solved order and the longest queue with the least cost of random pairs."""
    made = Compared(["two models", "mean, %", "90 % of the pairs, %", "worst, %"])
    for energy in (False, True):
        excess: dict[str, list[float]] = {"solved": [], "longest queue": []}
        for seed in range(PAIRS):
            drawn = draw(np.random.default_rng([seed, energy]), 2, energy=energy)
            exact = TwoModels(drawn.profiles, drawn.rates, drawn.energy_weight, most_of(drawn))
            rules = {"solved": exact.rule(solve_device(drawn.loads())), "longest queue": longest_first(exact)}
            least = exact.least(rules["solved"])
            for name, rule in rules.items():
                excess[name].append(exact.evaluate(rule)[0] / least - 1.0)
            effort.step(f"pair {seed}")
        kind = "latency and energy" if energy else "latency"
        made.rows += [row_of(f"{kind}: {name}", found) for name, found in excess.items()]
        made.values |= {f"{kind}: {name}": found for name, found in excess.items()}
    return made


def cost_of(drawn: Drawn, order: str, tables: Sequence[DeviceTable], requests: int, seed: int) -> float:
    """Return the mean response time in ms, plus the weighted power, of `order` in the real batchers."""
    seconds = requests / sum(drawn.rates)
    models = []
    for number, (profile, rate, table) in enumerate(zip(drawn.profiles, drawn.rates, tables, strict=True)):
        gaps = np.random.default_rng([seed, number]).exponential(1.0 / rate, max(2, int(rate * seconds)))
        policy: Policy = DevicePolicy(table) if order == "solved" else Greedy()
        models.append(DeviceModel(profile, policy, np.cumsum(gaps)))
    found = share(models, order, seed=seed)
    response = float(np.concatenate([each.response_time_ms for each in found]).mean())
    span = max(float(np.nanmax(each.end)) for each in found)
    return response + drawn.energy_weight * sum(each.energy_mj for each in found) / 1000.0 / span


def compare_live(effort: Effort) -> Compared:
    """Compare the solved order with the two others where service times vary, rates are wrong, or models are many."""
    made = Compared(["models on one device", *(f"above {each} first: mean, worst, %" for each in RIVALS)])
    for title, count, cv, off in SETTINGS:
        above: dict[str, list[float]] = {name: [] for name in RIVALS}
        for seed in range(DRAWS):
            rng = np.random.default_rng([seed, count])
            drawn = draw(rng, count, energy=False, cv=cv)
            wrong = [1.0 + off * sign for sign in rng.choice([-1.0, 1.0], count)]
            tables = solve_device(drawn.loads(wrong))
            costs = {}
            for order in ORDERS:
                costs[order] = cost_of(drawn, order, tables, effort.requests, seed)
                effort.step(f"{title}, seed {seed}: {order}")
            for rival in RIVALS:
                above[rival].append(costs["solved"] / costs[rival] - 1.0)
        cells = [f"{100.0 * np.mean(found):+.1f}, {100.0 * max(found):+.1f}" for found in above.values()]
        made.rows.append([title, *cells])
        made.values |= {f"{title}: {name}": found for name, found in above.items()}
    return made


def played(
    order: str, loads: Sequence[DeviceLoad], arrivals: Sequence[Floats], timeouts: Sequence[float] = ()
) -> list[Run]:  # fmt: skip
    """Return what becomes of the requests of each model in the real batchers."""
    models = [
        DeviceModel(load.profile, DevicePolicy(table) if order == "solved" else Greedy(), times)
        for load, table, times in zip(loads, solve_device(loads), arrivals, strict=True)
    ]
    if timeouts:
        models = [each._replace(timeout=timeout) for each, timeout in zip(models, timeouts, strict=True)]
    return share(models, order)


def compare_traces(effort: Effort) -> Compared:
    """Compare the orders on a recorded hour of two services, as two models whose times make the load."""
    made = Compared(
        ["load", "part of the chat model", "longer times of the code model", *(f"above {each}, %" for each in RIVALS)]
    )
    arrivals = [read_trace(TRACES / f"azure-{name}.csv")[0] for name in ("conv", "code")]
    until = min(float(each[-1]) for each in arrivals)
    arrivals = [each[each < until] for each in arrivals]
    base = Profile.linear(alpha_ms=1.0, tau0_ms=4.0, max_batch_size=16)
    for load, part in TRACE_LOADS:
        loads = []
        for times, own in zip(arrivals, (part, 1.0 - part), strict=True):
            rate = len(times) / until
            loads.append(DeviceLoad(base.scaled(time=base.max_rate * own * load / rate), rate))
        means = {}
        for order in ORDERS:
            found = played(order, loads, arrivals)
            means[order] = float(np.concatenate([each.response_time_ms for each in found]).mean())
            effort.step(f"load {load}: {order}")
        above = [100.0 * (means["solved"] / means[rival] - 1.0) for rival in RIVALS]
        slower = loads[1].profile.service_time_ms[0] / loads[0].profile.service_time_ms[0]
        made.rows.append([f"{load:g}", f"{part:g}", f"{slower:.1f}", *(f"{each:+.1f}" for each in above)])
        made.values[f"{load:g} {part:g}"] = above
    return made


def compare_deadlines(effort: Effort) -> Compared:
    """Compare how many requests of a tight class and of a loose one are late, at a load of 0.95 in equal parts."""
    late = ("oldest first", "earliest deadline", "Weir")
    made = Compared(
        ["times", "within, ms", *(f"tight late, %: {each}" for each in late), *(f"loose: {each}" for each in late[1:])]
    )
    tight = Profile.linear(alpha_ms=1.0, tau0_ms=4.0, max_batch_size=8)
    for slower, timeouts in CLASSES:
        loads = [DeviceLoad(each, 0.475 * each.max_rate) for each in (tight, tight.scaled(time=slower))]
        seconds = min(20_000, effort.requests) / sum(each.rate for each in loads)
        arrivals = [
            np.cumsum(np.random.default_rng([5, k]).exponential(1.0 / each.rate, int(each.rate * seconds)))
            for k, each in enumerate(loads)
        ]
        profiles, instants = [each.profile for each in loads], [each.tolist() for each in arrivals]
        oldest, earliest = (late_shares(profiles, instants, timeouts, rank) for rank in (by_arrival, by_deadline))
        found = played("solved", loads, arrivals, timeouts)
        ours = [each.late_share(timeout) for each, timeout in zip(found, timeouts, strict=True)]
        cells = [f"{100.0 * each:.1f}" for each in (oldest[0], earliest[0], ours[0], earliest[1], ours[1])]
        made.rows.append([f"1 : {slower:g}", ", ".join(f"{1000.0 * each:g}" for each in timeouts), *cells])
        made.values[f"{slower:g} {timeouts[0]:g}"] = [oldest[0], earliest[0], ours[0]]
        effort.step(f"1 : {slower:g}")
    return made


TRACE_LOADS = ((0.4, 0.5), (0.4, 0.25), (0.6, 0.5), (0.6, 0.25), (0.8, 0.5), (0.8, 0.25))
CLASSES = ((1.0, (0.03, 0.3)), (1.0, (0.06, 0.6)), (3.0, (0.06, 0.6)), (3.0, (0.1, 1.0)))
SETTINGS = (
    ("two, times with cv 0.5", 2, 0.5, 0.0),
    ("two, rates wrong by 20 %", 2, 0.0, 0.2),
    ("three", 3, 0.0, 0.0),
    ("five", 5, 0.0, 0.0),
    ("eight", 8, 0.0, 0.0),
)
DEVICE = Comparison(
    "device", "Two models on one device, above the exact optimum", lambda seeds: 2 * PAIRS, compare_exactly, exact=True
)
DEVICE_LIVE = Comparison(
    "device-live", "Several models on one device, in the real batchers",
    lambda seeds: len(SETTINGS) * DRAWS * len(ORDERS), compare_live,
)  # fmt: skip
DEVICE_TRACES = Comparison(
    "device-traces", "Two recorded services on one device, in the real batchers",
    lambda seeds: len(TRACE_LOADS) * len(ORDERS), compare_traces, exact=True,
)  # fmt: skip
DEVICE_DEADLINES = Comparison(
    "device-deadlines", "Two classes with deadlines on one device, in the real batchers",
    lambda seeds: len(CLASSES), compare_deadlines, exact=True,
)  # fmt: skip
