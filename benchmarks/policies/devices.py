"""Several models on one device: what each order costs, against the exact optimum for two, and in the real batchers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tests.policy.two_models import Rule, TwoModels

from benchmarks.policies.harness import Compared, Comparison, Effort
from weir.policy.cost.profile import Profile
from weir.policy.decision import Policy
from weir.policy.online.device import DevicePolicy
from weir.policy.rules import Greedy
from weir.policy.solve.device import DeviceLoad, DeviceTable
from weir.simulation.device import DeviceModel, share, solve_device

PAIRS = 50  # of each kind
DRAWS = 8  # of each setting in the real batchers
ORDERS = ("oldest", "longest", "solved")
RIVALS = ORDERS[:2]


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


def _row(name: str, excess: Sequence[float]) -> list[str]:
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
        made.rows += [_row(f"{kind}: {name}", found) for name, found in excess.items()]
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
