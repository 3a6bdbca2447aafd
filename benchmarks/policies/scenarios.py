"""The scenarios: what solved policies gain, each against the best hand-tuned rules on the same traffic. All but one are simulated."""

from collections.abc import Iterator
from math import inf

import numpy as np
from numpy.typing import ArrayLike
from reproduction.response import response_time

from benchmarks.policies.harness import (
    Column,
    Compared,
    Comparison,
    Effort,
    Player,
    Scene,
    cost_of,
    excess,
    late,
    p99,
    percent,
    power,
    real,
    refused,
    response,
    ruled,
    saved,
    saves,
    scenario,
    shown,
    tuned_delay,
    tuned_limit,
)
from weir.policy.cost import GOOGLENET_P4, Floats, LatencySLO, Prices, Profile, unavoidable_power_w
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.online.rate import SILENCE
from weir.policy.solve.bank import solve, solve_bank
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import Table, greedy_table, limit_table, multi_worker_table
from weir.simulation.arrivals import Arrivals, GammaRenewal, OnOff, Poisson, Sine
from weir.simulation.banks import make_bank
from weir.simulation.search import Figures, Rule

PROFILE = GOOGLENET_P4
CAPACITY = PROFILE.max_rate
COST = "cost beyond the unavoidable"

# Constant prices: a day's rate swings, and a row·millisecond costs the same at noon as at night.

MEAN_LOAD, DEPTH, SWINGS = 0.45, 0.95, 4
ENERGY_WEIGHTS = (1.0, 10.0)
CONSTANT = "solved, constant weights"


def _day(effort: Effort) -> Iterator[Scene]:
    """Play tables with constant weights, with the paper's, the one of the mean rate, and the best fixed rules."""
    rate = MEAN_LOAD * CAPACITY
    for weight in ENERGY_WEIGHTS:
        constant, paper = Prices(1.0, weight, reference_rate=rate), Prices(1.0, weight)
        players: dict[str, Player] = {
            CONSTANT: real(PROFILE, SolvedPolicy(solve_bank(PROFILE, constant))),
            "solved, the paper's weights at each rate": real(PROFILE, SolvedPolicy(solve_bank(PROFILE, paper))),
            "table of the mean rate": real(PROFILE, SolvedPolicy(solve_bank(PROFILE, paper, rates=[rate]))),
            "best limit": tuned_limit(PROFILE, constant),
            "best size and delay": tuned_delay(PROFILE, constant),
            "greedy": real(PROFILE, "greedy"),
        }
        arrivals = Sine(rate, depth=DEPTH, period=effort.requests / rate / SWINGS)
        yield Scene((f"{weight:g}",), arrivals, players, cost_of(paper))


DAY = scenario(
    "day",
    "A day of varying rate",
    _day,
    plays=6 * len(ENERGY_WEIGHTS),
    heads=("energy weight", "policy"),
    columns=(
        shown("mean response, ms", response),
        shown("p99, ms", p99, 1),
        shown("power, W", power),
        shown(COST),
        saves("solved saves", CONSTANT),
    ),
)


# The bank: what follows from estimating the rate.

RATE_LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
EVEN = Prices(1.0, 1.0)


def _rates(effort: Effort) -> Iterator[Scene]:
    """Play the bank, an oracle that knows the rate, and the best fixed rules."""
    bank = solve_bank(PROFILE, EVEN)
    for load in RATE_LOADS:
        rate = load * CAPACITY
        players = {
            "bank": real(PROFILE, SolvedPolicy(bank)),
            "oracle": real(PROFILE, SolvedPolicy(solve_bank(PROFILE, EVEN, rates=[rate]))),
            "limit": tuned_limit(PROFILE, EVEN),
            "delay": tuned_delay(PROFILE, EVEN),
        }
        yield Scene((f"{load:g}",), Poisson(rate), players, cost_of(EVEN))


RATES = scenario(
    "rates",
    "Poisson arrivals of a rate that must be estimated",
    _rates,
    plays=4 * len(RATE_LOADS),
    heads=("load",),
    columns=(
        shown("bank, rate estimated", digits=3, policy="bank"),
        shown("p99, ms", p99, policy="bank"),
        shown("oracle: the table of the true rate", digits=3, policy="oracle"),
        saves("estimating costs", "oracle", "bank"),
        shown("best limit", digits=3, policy="limit"),
        saves("bank saves", "bank", "limit"),
        shown("best size and delay", digits=3, policy="delay"),
        saves("bank saves", "bank", "delay"),
    ),
)


# A table at a rate that it was not made for, with and without the full-batch rule. Exact: nothing is simulated.

MADE_FOR = (0.05, 0.1, 0.3, 0.5)
USED_AT = (0.5, 0.7, 0.9)


def _foreign(effort: Effort) -> Compared:
    """Evaluate raw and filled tables at higher rates."""
    made = Compared(
        ["energy weight", "made for load", "used at load", "as solved: costs more", "with full batches: costs more"]
    )
    for weight in ENERGY_WEIGHTS:
        for low in MADE_FOR:
            for high in USED_AT:
                if high > low:
                    made.rows.append([f"{weight:g}", f"{low:g}", f"{high:g}", *_losses(weight, low, high)])
            effort.step(f"weight {weight:g}, made for {low:g}")
    return made


def _losses(weight: float, low: float, high: float) -> list[str]:
    profile, prices = GOOGLENET_P4, Prices(1.0, weight)
    rate = high * profile.max_rate

    def excess(table: ArrayLike) -> float:
        return evaluate(profile, rate, np.asarray(table, dtype=np.uint16), prices).cost - weight * unavoidable_power_w(
            profile, rate
        )

    best = excess(solve(profile, rate, prices).table)
    # Without the overflow state; the last then holds for all above.
    raw = solve(profile, low * profile.max_rate, prices).actions[:-1]
    filled = solve_bank(profile, prices, rates=[low * profile.max_rate]).tables[0]
    losses = [excess(table) / best - 1.0 for table in (raw, filled)]
    return [f"{100.0 * loss:.1f} %" if loss < inf else "the line grows for ever" for loss in losses]


FOREIGN = Comparison(
    "foreign",
    "A table at a foreign rate",
    lambda seeds: len(MADE_FOR) * len(ENERGY_WEIGHTS),
    _foreign,
    exact=True,
)


# Several workers: one line for all, with one limit, against random splitting and against the best hand-tuned rules.

CREWS = (2, 4)
CREW_LOADS = (0.3, 0.5, 0.7, 0.9)


def split(workers: int, rate: float) -> Player:
    """Each worker has a line of its own, rows choose theirs by chance, and each line has the table that is best for it.

    The line of one worker draws 1/workers of the power, so its energy weighs `workers` times as much against latency.
    """
    profile = GOOGLENET_P4
    bank = solve_bank(profile, Prices(1.0, float(workers)), rates=[rate / workers])
    play_one = real(profile, SolvedPolicy(bank))

    def player(times: Floats, seed: int) -> Figures:
        chosen = np.random.default_rng([seed, 7]).integers(workers, size=len(times))
        parts = [play_one(times[chosen == worker], seed) for worker in range(workers)]
        return _together([part for part in parts if part is not None])

    return player


def _together(parts: list[Figures]) -> Figures:
    """Return the means over the lines; power is their sum."""
    columns = np.mean(np.array(parts, dtype=np.float64), axis=0).tolist()
    middle = Figures(*columns)
    return middle._replace(power_w=middle.power_w * len(parts), excess_w=middle.excess_w * len(parts))


def _closed_form(rate: float) -> int:
    """Return the limit, in rows, at which latency and energy balance if a worker is always free."""
    fit = PROFILE.fit()
    slope = EVEN.latency_weight * (500.0 / rate + max(fit.alpha_ms, 0.0))
    balanced = float((EVEN.energy_weight * rate / 1000.0 * max(fit.zeta0_mj, 0.0) / slope) ** 0.5)
    return min(max(round(balanced), 1), PROFILE.best_batch_size)


def _crew(effort: Effort) -> Iterator[Scene]:
    """Play every way at each load; power is that of all workers."""
    for workers in CREWS:
        bank = make_bank(PROFILE, EVEN, workers=workers)
        for load in CREW_LOADS:
            rate = load * workers * CAPACITY
            first = multi_worker_table(PROFILE, _closed_form(rate)).tolist()
            players = {
                "solved": real(PROFILE, SolvedPolicy(bank), workers=workers),
                "closed form": ruled(PROFILE, Rule(first), workers=workers),
                "split": split(workers, rate),
                "limit": tuned_limit(PROFILE, EVEN, workers=workers),
                "delay": tuned_delay(PROFILE, EVEN, workers=workers),
            }
            yield Scene((str(workers), f"{load:g}"), Poisson(rate), players, cost_of(EVEN), f"{workers} ")


CREW = scenario(
    "crew",
    "Several workers, one line",
    _crew,
    plays=5 * len(CREW_LOADS) * len(CREWS),
    heads=("workers", "load"),
    columns=(
        shown("solved, one line", policy="solved"),
        shown("limit by closed form alone", policy="closed form"),
        shown("random splitting", policy="split"),
        saves("solved saves", "solved", "split"),
        shown("best limit", policy="limit"),
        saves("solved saves", "solved", "limit"),
        shown("best size and delay", policy="delay"),
        saves("solved saves", "solved", "delay"),
    ),
    loads=CREW_LOADS,
)


# A latency objective: the energy beyond the unavoidable, against plain limits and timeouts that keep the same tail.

PROMISE_LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
OBJECTIVE = LatencySLO.parse("p99=20ms")
# Finer than any hand would: the rival must not lose for want of a setting.
SIZES = (8, 16, 24, 32)
DELAYS = tuple(half / 2000.0 for half in range(10, 38))


def exact_limit(rate: float) -> Table | None:
    """Return the table of the largest control limit that keeps the objective, by the exact law of its response time."""
    for limit in range(GOOGLENET_P4.max_batch_size, 0, -1):
        table = limit_table(limit, GOOGLENET_P4.max_batch_size)
        if response_time(GOOGLENET_P4, rate, table).beyond(1000.0 * OBJECTIVE.deadline) <= OBJECTIVE.late_share:
            return table
    return None


def exact(rate: float) -> Player:
    """That limit; it cannot where none keeps the objective."""
    table = exact_limit(rate)
    if table is None:
        return lambda times, seed: None
    return ruled(GOOGLENET_P4, Rule(table.tolist()))


def _promise(effort: Effort) -> Iterator[Scene]:
    """Play the solved policy, the best limit and the best size and delay at each load."""
    bank = make_bank(PROFILE, objective=OBJECTIVE)
    for load in PROMISE_LOADS:
        players = {
            "solved": real(PROFILE, SolvedPolicy(bank), deadline=OBJECTIVE.deadline),
            "exact": exact(load * CAPACITY),
            "limit": tuned_limit(PROFILE, Prices(), objective=OBJECTIVE),
            "delay": tuned_delay(PROFILE, Prices(), DELAYS, sizes=SIZES, objective=OBJECTIVE),
        }
        yield Scene((f"{load:g}",), Poisson(load * CAPACITY), players, excess)


PROMISE = scenario(
    "promise",
    "A latency objective",
    _promise,
    plays=4 * len(PROMISE_LOADS),
    heads=("load",),
    columns=(
        shown("solved: excess, W", policy="solved"),
        shown("late, %", late, factor=100.0, policy="solved"),
        shown("refused, %", refused, factor=100.0, policy="solved"),
        shown("best limit, by its exact law: excess, W", policy="exact"),
        saves("saved", "solved", "exact"),
        shown("best limit on the line: excess, W", policy="limit"),
        saves("saved", "solved", "limit"),
        shown("best size and delay on the line: excess, W", policy="delay"),
        saves("saved", "solved", "delay"),
    ),
    loads=PROMISE_LOADS,
)


# The most answers in time: what is lost of all requests, beside a promise of a percentile and `greedy`.

IN_TIME_LOADS, VARIED_LOADS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99, 1.1), (0.6, 0.8, 0.85, 0.9)
OBJECTIVES = {"most in time": "in-time", "p99": "p99"}
CV = 0.3
VARIED = Profile(PROFILE.service_time_ms, PROFILE.energy_mj, np.full(PROFILE.max_batch_size, CV))


def lost(figures: Figures) -> float:
    """Of all that arrived: late, or refused."""
    return figures.late_share * (1.0 - figures.refused_share) + figures.refused_share


def _in_time(effort: Effort) -> Iterator[Scene]:
    """Play both objectives and greedy at each load; then with service times that vary."""
    kinds = ((PROFILE, 0.02, IN_TIME_LOADS, ""), (VARIED, 0.03, VARIED_LOADS, f", CV {CV:g}, 30 ms"))
    for profile, deadline, loads, more in kinds:
        objectives = {name: LatencySLO.parse(f"{text}={1000.0 * deadline:g}ms") for name, text in OBJECTIVES.items()}
        players: dict[str, Player] = {
            name: real(profile, SolvedPolicy(make_bank(profile, objective=each)), deadline=deadline)
            for name, each in objectives.items()
        }
        players["greedy"] = real(profile, "greedy", deadline=deadline)
        for load in loads:
            yield Scene((f"{load:g}{more}",), Poisson(load * profile.max_rate), players, lost)


IN_TIME = scenario(
    "in-time",
    "The most answers in time",
    _in_time,
    plays=3 * len((*IN_TIME_LOADS, *VARIED_LOADS)),
    heads=("load",),
    columns=tuple(
        column
        for name in (*OBJECTIVES, "greedy")
        for column in (
            shown(f"{name}: lost, %", lost, factor=100.0, policy=name),
            shown("refused, %", refused, factor=100.0, policy=name),
            shown("power, W", power, 1, policy=name),
        )
    ),
)


# A promise under overload: who is let in is answered in time, and the worker hardly serves fewer for it.

LINES = (32, 64, 128)  # rows that may wait under greedy
TRAFFIC: dict[str, Arrivals] = {  # more than can be served, all the time or now and then
    "steady, 1.05 times what can be served": Poisson(1.05 * CAPACITY),
    "steady, 1.5 times": Poisson(1.5 * CAPACITY),
    "steady, twice": Poisson(2.0 * CAPACITY),
    "steady, 10 times": Poisson(10.0 * CAPACITY),
    "twice for 0.3 s, nothing for 0.3 s": OnOff(CAPACITY, on=0.3, off=0.3),
    "10 times for 0.1 s, nothing for 1 s": OnOff(10.0 * CAPACITY / 11.0, on=0.1, off=1.0),
    "twice for 30 ms, nothing for 30 ms": OnOff(CAPACITY, on=0.03, off=0.03),
    "clumps (gaps of CV 3), 0.9 times": GammaRenewal(0.9 * CAPACITY, cv=3.0),
}


def in_time(figures: Figures) -> float:
    """The share that is served in time, of those that arrived."""
    return (1.0 - figures.refused_share) * (1.0 - figures.late_share)


def _overload(effort: Effort) -> Iterator[Scene]:
    """Play the solved policy against greedy with lines of several lengths."""
    greedy, deadline = greedy_table(PROFILE.max_batch_size).tolist(), OBJECTIVE.deadline
    solved = SolvedPolicy(make_bank(PROFILE, objective=OBJECTIVE))
    players: dict[str, Player] = {"solved": real(PROFILE, solved, deadline=deadline)}
    for rows in LINES:
        players[f"greedy, line of {rows}"] = ruled(PROFILE, Rule(greedy, max_waiting=rows), deadline=deadline)
    for name, arrivals in TRAFFIC.items():
        yield Scene((name,), arrivals, players, late)


OVERLOAD = scenario(
    "overload",
    "A promise under overload",
    _overload,
    plays=(1 + len(LINES)) * len(TRAFFIC),
    heads=("traffic", "policy"),
    columns=(
        shown("p99, ms", p99),
        shown("late, % of those served", late, factor=100.0),
        shown("in time, % of those that arrived", in_time, factor=100.0),
    ),
)


# The silence guard: what a pure table does when traffic stops, and what the guard costs when it does not.

SILENCE_LOAD, ON, OFF = 0.3, 0.1, 1.0  # of the busy times; seconds
FRUGAL = Prices(1.0, 10.0)
ALONE, GUARDED = "the table alone", "the table with the guard"


def _silence(effort: Effort) -> Iterator[Scene]:
    """Play the same table with and without the guard, and the whole policy, on both kinds of traffic."""
    rate = SILENCE_LOAD * CAPACITY
    table = solve_bank(PROFILE, FRUGAL, rates=[rate]).tables[0].tolist()
    traffic: dict[str, Arrivals] = {
        "Poisson": Poisson(rate),
        f"on for {ON:g} s, off for {OFF:g} s": OnOff(rate * ON / (ON + OFF), on=ON, off=OFF),
    }
    for name, arrivals in traffic.items():
        players: dict[str, Player] = {
            ALONE: ruled(PROFILE, Rule(table)),
            GUARDED: ruled(PROFILE, Rule(table, silence=SILENCE / rate)),
            "solved policy (bank, estimated rate, guards)": real(PROFILE, SolvedPolicy(solve_bank(PROFILE, FRUGAL))),
            "best limit": tuned_limit(PROFILE, FRUGAL),
            "best size and delay": tuned_delay(PROFILE, FRUGAL),
        }
        yield Scene((name,), arrivals, players, cost_of(FRUGAL))


GUARD_SAVES = Column(
    "the guard saves",
    lambda scene, seen, own: percent(saved(seen[GUARDED], seen[ALONE], scene.cost)) if own == GUARDED else "",
)
SILENCES = scenario(
    "silence",
    "When traffic stops",
    _silence,
    plays=5 * 2,
    heads=("traffic", "policy"),
    columns=(
        shown("mean response, ms", response),
        shown("p99, ms", p99, 1),
        shown("power, W", power),
        shown(COST),
        GUARD_SAVES,
    ),
)


# Latency only, and energy only.

EXTREME_LOADS = (0.1, 0.5, 0.9)
LATENCY, ENERGY = Prices(1.0, 0.0), Prices(0.0, 1.0)


def _extremes(effort: Effort) -> Iterator[Scene]:
    """Play both at each load."""
    fastest, frugal = (SolvedPolicy(make_bank(PROFILE, prices)) for prices in (LATENCY, ENERGY))
    for load in EXTREME_LOADS:
        players: dict[str, Player] = {
            "latency only, solved": real(PROFILE, fastest),
            "latency only, best limit": tuned_limit(PROFILE, LATENCY),
            "latency only, best size and delay": tuned_delay(PROFILE, LATENCY),
            "greedy": real(PROFILE, "greedy"),
            "energy only, solved": real(PROFILE, frugal),
            "full batches": real(PROFILE, "full"),
        }
        yield Scene((f"{load:g}",), Poisson(load * CAPACITY), players, excess)


EXTREMES = scenario(
    "extremes",
    "Latency only, energy only",
    _extremes,
    plays=6 * len(EXTREME_LOADS),
    heads=("load", "policy"),
    columns=(
        shown("mean response, ms", response, 3),
        shown("p99, ms", p99),
        shown("power beyond the unavoidable, W", excess, 3),
    ),
)
