"""Random models under random bursts, beside `greedy`: does a solved policy ever cost more?

A model is one of tests/policy/random_models.py with batches of up to 2 to 64 rows, in time that is scaled so that its largest batch
takes 10 ms. Its traffic is drawn too: two phases (MMPP), on/off, or a rate that swings. All policies meet the same lines of
arrivals and the same luck of service times, so that a line's difference says more than its costs. Lines are added until
the mean difference is surely on one side of what is allowed, or there are MOST_LINES. What was found is kept: a run that was
stopped goes on.
"""

from collections.abc import Iterable
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
from tests.policy.event_loop import Interval, interval
from tests.policy.random_models import SHAPES, Drawn, drawn

from benchmarks.harness.result import resumed
from benchmarks.policies.bursts import ALLOWED, CYCLES, LEAST, MOST, costs
from benchmarks.policies.lines import Effort
from benchmarks.policies.table import ROOT, Compared, Comparison
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.decision import Policy
from weir.policy.online.adaptive import AutoPolicy, SolvedPolicy
from weir.policy.solve.bank import solve_bank
from weir.simulation.arrivals import Arrivals, MarkovModulated, OnOff, RecordedArrivals, Sine

FEWEST_LINES, MOST_LINES = 4, 32
LEVEL = 0.99  # of the intervals that decide
LARGEST, LARGEST_MS = (2, 64), 10.0  # batches, and what the largest takes
BY_SEED = 25  # models for each of `--seeds`
WORST = 5  # that are shown
SOLVED = ("solved", "auto")
SOURCES = [
    *(ROOT / "src" / "weir" / each for each in ("policy", "simulation", "batching")),
    *(ROOT / "tests" / "policy" / each for each in ("random_models.py", "event_loop.py")),
    *(ROOT / "benchmarks" / "policies" / each for each in ("bursts.py", "sample.py")),
]
COLUMNS = [
    "of the models",
    "policy",
    "number",
    "costs beside greedy, mean",
    "the worst, and its interval",
    "above +0.5 %",
    "surely",
]


class Case(NamedTuple):
    """A model under traffic of a mean `rate`, in rows per second."""

    number: int
    kind: str
    about: str
    model: Drawn
    rate: float
    process: Arrivals
    requests: int


class Found(NamedTuple):
    """What greedy costs on each line, and by how many per cent of that mean the others cost more."""

    number: int
    greedy: list[float]
    solved: list[float]
    auto: list[float]


def case(number: int) -> Case:
    """Return the model of that number, and its traffic."""
    rng, model = np.random.default_rng([number, 11]), _model(number)
    load = float(rng.uniform(0.1, 0.9))
    rate = load * model.profile.max_rate
    kind = str(rng.choice(["MMPP", "on/off", "diurnal"], p=[0.6, 0.2, 0.2]))
    low, high = {"MMPP": (0.02, 20.0), "on/off": (0.02, 2.0), "diurnal": (0.1, 20.0)}[kind]
    period = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    process: Arrivals
    if kind == "MMPP":
        burst = float(rng.uniform(5.0, 20.0))
        process, more = MarkovModulated(rate, burst=burst, period=period), f"{burst:.0f} times, every {period:.2g} s"
    elif kind == "on/off":
        on = period * float(rng.uniform(0.1, 0.6))
        process, more = OnOff(rate, on=on, off=period - on), f"{on:.2g} s of each {period:.2g} s"
    else:
        depth = float(rng.uniform(0.5, 0.95))
        process, more = Sine(rate, depth=depth, period=period), f"swings by {depth:.0%} in {period:.2g} s"
    profile = model.profile
    about = (
        f"{number}: {model.shape}, B {profile.max_batch_size}, CV {profile.cv[0]:.2f}, w2 {model.prices.energy_weight:.2g}, "
        f"{kind} of load {load:.2f}, {more}"
    )
    return Case(number, kind, about, model, rate, process, int(np.clip(CYCLES * period * rate, LEAST, MOST)))


def _model(number: int) -> Drawn:
    """Return a random model whose largest batch takes LARGEST_MS, with prices that weigh the same as before."""
    low, high = LARGEST
    found = (drawn(each) for each in count(1000 * number + number % len(SHAPES), len(SHAPES)))
    model = next(each for each in found if low <= each.profile.max_batch_size <= high)
    profile = model.profile
    scale = LARGEST_MS / float(profile.service_time_ms[-1])
    scaled = Profile(scale * profile.service_time_ms, profile.energy_mj, profile.cv)
    return model._replace(profile=scaled, prices=Prices(1.0, scale**2 * model.prices.energy_weight))


def found(number: int) -> Found:
    """Return what the policies cost in the case of that number."""
    given = case(number)
    profile, weight = given.model.profile, given.model.prices.energy_weight
    auto = AutoPolicy(energy_weight=weight)
    auto.adopt(solve_bank(profile, Prices(1.0, weight)))
    solved = SolvedPolicy(solve_bank(profile, Prices(1.0, weight, given.rate)))
    policies: dict[str, str | Policy] = {"greedy": "greedy", "solved": solved, "auto": auto}
    spent: dict[str, list[float]] = {name: [] for name in policies}
    for line in range(MOST_LINES):
        times = _line(given, line)
        for name, policy in policies.items():
            spent[name].append(float(costs(profile, policy, times, given.rate, weight, line + 1).mean()))
        greedy = np.array(spent["greedy"])
        beside = [(100.0 * (np.array(spent[name]) - greedy) / greedy.mean()).tolist() for name in SOLVED]
        if line + 1 >= FEWEST_LINES and all(_decided(interval(np.array(each), LEVEL)) for each in beside):
            break
    return Found(number, spent["greedy"], *beside)


def _line(given: Case, line: int) -> Floats:
    """Return that line of arrivals, stretched so that its mean rate is just the case's: prices are constant at it."""
    times = given.process.times(np.random.default_rng([given.number, 12, line]), given.requests)
    return times * (RecordedArrivals(times).rate / given.rate)


def _decided(seen: Interval) -> bool:
    return not seen.low <= ALLOWED <= seen.high


def compare(effort: Effort) -> Compared:
    """Play as many cases as the effort says."""
    wanted = BY_SEED * effort.seeds
    seen: list[Found] = []
    for each in islice(resumed("bursts", SOURCES, lambda first: _all(first, wanted)), wanted):
        seen.append(Found(*each))
        effort.step(f"{wanted} models")
    return shown(seen)


def _all(first: int, wanted: int) -> Iterable[Any]:
    return (found(number) for number in range(first, wanted))


def shown(seen: list[Found]) -> Compared:
    """Return the table: by kind of traffic, by shape, by whether service times vary, and the worst cases."""
    cases = [case(each.number) for each in seen]
    made = Compared(
        COLUMNS, about={"models": f"{len(seen):,} (`--seeds {len(seen) / BY_SEED:g}`)", "intervals": f"{LEVEL:.0%}"}
    )
    groups = {kind: [given.kind == kind for given in cases] for kind in ("MMPP", "on/off", "diurnal")}
    groups |= {shape: [given.model.shape == shape for given in cases] for shape in SHAPES}
    groups["fixed service times"] = [not given.model.profile.cv.any() for given in cases]
    groups["service times that vary"] = [bool(given.model.profile.cv.any()) for given in cases]
    groups["all"] = [True] * len(cases)
    for name, chosen in groups.items():
        some = [each for each, of in zip(seen, chosen, strict=True) if of]
        made.rows += [[name, policy, *_summary(some, policy)] for policy in SOLVED if some]
    every = [
        (interval(np.array(getattr(each, policy)), LEVEL), policy, given)
        for each, given in zip(seen, cases, strict=True)
        for policy in SOLVED
    ]
    for seen_of, policy, given in sorted(every, key=lambda one: -one[0].mean)[:WORST]:
        made.rows.append([given.about, policy, "", "", _text(seen_of), "", ""])
    return made


def _summary(some: list[Found], policy: str) -> list[str]:
    intervals = [interval(np.array(getattr(each, policy)), LEVEL) for each in some]
    worst = max(intervals, key=lambda each: each.mean)
    above, surely = (sum(getattr(each, name) > ALLOWED for each in intervals) for name in ("mean", "low"))
    return [
        f"{len(some):,}",
        f"{np.mean([each.mean for each in intervals]):+.2f} %",
        _text(worst),
        f"{above}",
        f"{surely}",
    ]


def _text(seen: Interval) -> str:
    return f"{seen.mean:+.2f} % ({seen.low:+.2f} to {seen.high:+.2f})"


COMPARISON = Comparison(
    "random-bursts", "Random models under random bursts", lambda seeds: BY_SEED * seeds, compare, exact=True
)
