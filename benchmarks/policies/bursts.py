"""Traffic that no table was solved for: bursts, silences, a swinging rate and two recorded hours, beside `greedy`.

Each policy meets the same arrivals, in the real batcher and virtual time. The clairvoyant optimum knows every arrival
beforehand: no policy can cost less (clairvoyant.py).
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.result import resumed
from benchmarks.policies.clairvoyant import clairvoyant
from benchmarks.policies.event_loop import Interval, interval
from benchmarks.policies.harness import ROOT, Compared, Comparison, Effort
from benchmarks.policies.random_models import SHAPES, Drawn, drawn
from weir.policy.cost import GOOGLENET_P4, Floats, Prices, Profile
from weir.policy.decision import Policy
from weir.policy.online.adaptive import AutoPolicy, SolvedPolicy
from weir.policy.solve.bank import Bank, solve_bank
from weir.simulation.arrivals import Arrivals, MarkovModulated, OnOff, Poisson, RecordedArrivals, Sine, read_trace
from weir.simulation.simulator import run
from weir.simulation.statistics import STRETCHES, Estimate, estimate

PROFILE = GOOGLENET_P4
TRACES = Path(__file__).with_name("traces")
SOURCES = [
    *(ROOT / "src" / "weir" / each for each in ("policy", "simulation", "batching")),
    *(Path(__file__).with_name(each) for each in ("bursts.py", "clairvoyant.py", "clairvoyant.c")),
]
WEIGHTS = (0.0, 1.0, 10.0)
LOADS, FACTORS, PERIODS = (0.1, 0.3, 0.5, 0.7, 0.9), (5.0, 10.0, 20.0), (0.02, 0.2, 2.0, 20.0)
LEAST, MOST, CYCLES = 20_000, 60_000, 8.0  # requests of each traffic, and the bursts that they should reach for
PRICED = 1.0  # the energy weight of those whose clairvoyant optimum is computed
FORESEEN = 20_000  # requests of it
ALLOWED = 0.5  # per cent, that no policy may cost more than greedy


class Traffic(NamedTuple):
    """`kind` is the row of the table that it counts to; `shown` if it has a row of its own, with the clairvoyant optimum."""

    kind: str
    name: str
    load: float
    make: Callable[[float], Arrivals]
    requests: int
    shown: bool


def traffics() -> Iterator[Traffic]:
    """Yield every traffic."""
    for load in LOADS:
        for burst in FACTORS:
            for period in PERIODS:
                yield Traffic(
                    f"MMPP, load {load:g}", f"MMPP, load {load:g}: {burst:g} times, every {period:g} s", load,
                    lambda rate, burst=burst, period=period: MarkovModulated(rate, burst=burst, period=period),  # type: ignore[misc]
                    _requests(load, period), burst == 20.0 and period in (0.02, 2.0) and load < 0.9,
                )  # fmt: skip
    for load in LOADS[:-1]:
        for on, off in ((0.05, 0.05), (0.1, 1.0), (0.3, 1.0)):
            yield Traffic(
                "on/off", f"on/off, load {load:g}: {on:g} s on, {off:g} s off", load,
                lambda rate, on=on, off=off: OnOff(rate, on=on, off=off),  # type: ignore[misc]
                _requests(load, on + off), (on, load) == (0.1, 0.1),
            )  # fmt: skip
        for period in (0.1, 10.0):
            yield Traffic(
                "diurnal", f"diurnal, load {load:g}: swings by 90 % in {period:g} s", load,
                lambda rate, period=period: Sine(rate, depth=0.9, period=period),  # type: ignore[misc]
                _requests(load, period), (period, load) == (10.0, 0.5),
            )  # fmt: skip
    for load in LOADS:
        yield Traffic("Poisson", f"Poisson, load {load:g}", load, Poisson, LEAST, load == 0.5)
    for name in ("conv", "code"):
        for load in (0.3, 0.5, 0.7, 0.9):
            title = f"Azure {name}, load {load:g}"
            yield Traffic(f"Azure {name}", title, load, lambda rate, name=name: recorded(name, rate), MOST, True)  # type: ignore[misc]


def _requests(load: float, period: float) -> int:
    return int(np.clip(CYCLES * period * load * PROFILE.max_rate, LEAST, MOST))


def arrivals(traffic: Traffic, rate: float, requests: int) -> Floats:
    """Return arrivals, stretched so that their mean rate is just `rate`: it is what prices are constant at."""
    times = traffic.make(rate).times(np.random.default_rng([7, 0]), requests)
    return times * (RecordedArrivals(times).rate / rate)


def recorded(name: str, rate: float) -> RecordedArrivals:
    """Return the recorded arrivals, as quick as makes `rate`."""
    times, _ = read_trace(TRACES / f"azure-{name}.csv")
    return RecordedArrivals(times * (RecordedArrivals(times).rate / rate))


COLUMNS = ["traffic", "w2", "greedy costs", "solved, beside it", "auto, beside it", "clairvoyant, beside it"]
SHOWN = [traffic.name for traffic in traffics() if traffic.shown]


def shown(number: int) -> list[str]:
    """Return the row of that number of those that are shown: on how many rows it is, what each policy costs, and the
    clairvoyant optimum."""
    traffic = next(each for each in traffics() if each.name == SHOWN[number])
    rate = traffic.load * PROFILE.max_rate
    times = arrivals(traffic, rate, traffic.requests)
    return _row(traffic.name, PRICED, beside_greedy(times, rate, PRICED), _foreseen(times, rate, PRICED))


def compare(effort: Effort) -> Compared:
    """Hold `solved`, with constant weights, and `auto`, without, against greedy on all traffic."""
    worst: dict[str, list[tuple[float, float, str]]] = {}
    made = Compared(COLUMNS)
    for traffic in traffics():
        rate = traffic.load * PROFILE.max_rate
        times = arrivals(traffic, rate, min(traffic.requests, effort.requests))
        for weight in WEIGHTS:
            seen = beside_greedy(times, rate, weight)
            worst.setdefault(traffic.kind, []).extend(
                (seen[each].value, weight, traffic.name) for each in ("solved", "auto")
            )
            if traffic.shown and weight == PRICED:
                made.rows.append(_row(traffic.name, weight, seen, _foreseen(times, rate, weight)))
        effort.step(traffic.name)
    for kind, runs in worst.items():
        more, weight, name = max(runs)
        made.values[kind] = [each for each, _, _ in runs]
        over = sum(each > ALLOWED for each in made.values[kind])
        where = f"worst {more:+.2f} % ({name}, w2 = {weight:g})"
        made.rows.append(
            [
                f"{kind}: {len(runs)} runs",
                "all",
                "",
                f"mean {np.mean(made.values[kind]):+.1f} %",
                where,
                f"{over} above +{ALLOWED:g} %",
            ]
        )
    return made


Beside = dict[str, Estimate]


def beside_greedy(times: Floats, rate: float, weight: float) -> Beside:
    """Return by how many per cent each policy costs more than greedy, with its 95 % interval; of greedy the cost itself."""
    auto = AutoPolicy(energy_weight=weight)
    auto.adopt(bank(weight, None))
    greedy = costs(PROFILE, "greedy", times, rate, weight)
    beside = {"greedy": estimate(greedy)}
    for name, policy in (("solved", SolvedPolicy(bank(weight, rate))), ("auto", auto)):
        beside[name] = estimate(100.0 * (costs(PROFILE, policy, times, rate, weight) - greedy) / greedy.mean())
    return beside


def costs(
    profile: Profile, policy: str | Policy, times: Floats, rate: float, weight: float, services_seed: int = 1
) -> Floats:
    """Return the mean cost by row of each stretch of the arrivals. A batch's energy is its rows' in equal parts."""
    made = run(profile, policy, times, services_seed=services_seed)
    rows = made.batches.rows
    energy_mj = np.repeat(profile.energy_mj[rows - 1] / rows, rows)
    response = np.sort(made.end) - np.sort(made.arrival)  # in the order of arrival, which is that of service
    by_row = 1000.0 * response + weight * rate / 1000.0 * energy_mj
    return np.array([part.mean() for part in np.array_split(by_row, STRETCHES)])


_BANKS: dict[tuple[float, float | None], Bank] = {}


def bank(weight: float, reference_rate: float | None) -> Bank:
    """Return the bank for these prices, solved once."""
    key = weight, reference_rate
    if key not in _BANKS:
        _BANKS[key] = solve_bank(PROFILE, Prices(1.0, weight, reference_rate))
    return _BANKS[key]


def _row(name: str, weight: float, seen: Beside, foreseen: float) -> list[str]:
    more = ["{:+.2f} % ({:+.2f} to {:+.2f})".format(*seen[each]) for each in ("solved", "auto")]
    return [name, f"{weight:g}", f"{seen['greedy'].value:.2f}", *more, f"{100.0 * foreseen:+.1f} %"]


def _foreseen(times: Floats, rate: float, weight: float) -> float:
    """Return by which share the clairvoyant optimum of the first requests costs less than greedy does on them."""
    first = times[:FORESEEN]
    greedy = float(costs(PROFILE, "greedy", first, rate, weight).mean())
    return float(clairvoyant(PROFILE, first, weight * rate / 1000.0).mean()) / greedy - 1.0


BURSTS = Comparison(
    "bursts", "Bursts and recorded traffic", lambda seeds: sum(1 for _ in traffics()), compare, exact=True
)


# Random models under random bursts, beside `greedy`: does a solved policy ever cost more?
#
# A model is one of benchmarks/policies/random_models.py with batches of up to 2 to 64 rows, in time that is scaled so that its largest batch
# takes 10 ms. Its traffic is drawn too: two phases (MMPP), on/off, or a rate that swings. All policies meet the same lines of
# arrivals and the same luck of service times, so that a line's difference says more than its costs. Lines are added until
# the mean difference is surely on one side of what is allowed, or there are MOST_LINES. What was found is kept: a run that was
# stopped goes on.

FEWEST_LINES, MOST_LINES = 4, 32
LEVEL = 0.99  # of the intervals that decide
LARGEST, LARGEST_MS = (2, 64), 10.0  # batches, and what the largest takes
BY_SEED = 25  # models for each of `--seeds`
WORST = 5  # that are shown
SOLVED = ("solved", "auto")
MODEL_SOURCES = [*SOURCES, *(ROOT / "tests" / "policy" / each for each in ("random_models.py", "event_loop.py"))]
MODEL_COLUMNS = [
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


def compare_models(effort: Effort) -> Compared:
    """Play as many cases as the effort says."""
    wanted = BY_SEED * effort.seeds
    seen: list[Found] = []
    for each in islice(resumed("bursts", MODEL_SOURCES, lambda first: _all(first, wanted)), wanted):
        seen.append(Found(*each))
        effort.step(f"{wanted} models")
    return table_of(seen)


def _all(first: int, wanted: int) -> Iterable[Any]:
    return (found(number) for number in range(first, wanted))


def table_of(seen: list[Found]) -> Compared:
    """Return the table: by kind of traffic, by shape, by whether service times vary, and the worst cases."""
    cases = [case(each.number) for each in seen]
    made = Compared(
        MODEL_COLUMNS,
        about={"models": f"{len(seen):,} models (`--seeds {len(seen) / BY_SEED:g}`)", "intervals": f"{LEVEL:.0%}"},
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


RANDOM_BURSTS = Comparison(
    "random-bursts", "Random models under random bursts", lambda seeds: BY_SEED * seeds, compare_models, exact=True
)
