"""Policies over scenarios: each policy is played on the same lines of arrivals, one line for each seed; what came of it with intervals; the page
and the pictures made of it.

A scenario declares its scenes (traffic, and the policies that are played on it) and the columns of its table. `compare` plays every scene and makes the
table, with a row for each policy or a row for each scene.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from reproduction.drawing import figure, styles

from benchmarks.harness.result import markdown
from weir.errors import SettingsError
from weir.numerics import student_quantile
from weir.policy.cost import Floats, LatencySLO, Prices, Profile
from weir.policy.decision import Policy
from weir.policy.solve.tables import limit_table
from weir.simulation.arrivals import Arrivals
from weir.simulation.engine import ServiceTimes
from weir.simulation.search import Figures, PlayedRounds, Rule, figures, play
from weir.simulation.simulator import run
from weir.simulation.statistics import LEVEL, Estimate

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "explanation" / "beyond-the-paper.md"
Player = Callable[[Floats, int], Figures | None]  # (arrivals in seconds, seed) -> what came of it; None: it cannot
SIZES = (2, 4, 8, 12, 16, 20, 24, 32)  # the grid of hand-tuned sizes and delays (seconds)
DELAYS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025)
FIRST_SEED = 101  # the banks are made with seed 1: what is measured is not what was searched on


class Effort(NamedTuple):
    """How much is played. `step(text)` moves the progress bar on, once per line and policy."""

    seeds: int
    requests: int
    step: Callable[[str], None]


Seen = dict[str, list[Figures | None]]  # by policy: one for each seed


def play_all(arrivals: Arrivals, players: Mapping[str, Player], effort: Effort) -> Seen:
    """Play every player on the same lines."""
    seen: Seen = {name: [] for name in players}
    for seed in range(FIRST_SEED, FIRST_SEED + effort.seeds):
        times = arrivals.times(np.random.default_rng([seed, 0]), effort.requests)
        for name, player in players.items():
            seen[name].append(player(times, seed))
            effort.step(f"{arrivals} seed {seed}: {name}")
    return seen


def real(profile: Profile, policy: str | Policy, *, workers: int = 1, deadline: float = np.inf) -> Player:
    """The policy itself in the real batcher."""

    def player(times: Floats, seed: int) -> Figures:
        made = run(profile, policy, times, workers=workers, services_seed=seed)
        batches = made.batches
        served = made.arrival[np.isfinite(made.end)]
        rounds = PlayedRounds(batches.start, batches.end, batches.rows, served, int(made.refused.sum()))
        return figures(rounds, profile, deadline)

    return player


def ruled(profile: Profile, rule: Rule, *, workers: int = 1, deadline: float = np.inf) -> Player:
    """A rule that nothing adapts, without the batcher."""

    def player(times: Floats, seed: int) -> Figures:
        rounds = play(times.tolist(), rule, ServiceTimes(profile, seed), profile.max_batch_size, workers)
        return figures(rounds, profile, deadline)

    return player


# The best hand-tuned rules: what someone finds who tries every setting on the very traffic that is to come.
#
# No one can do so in earnest, because the traffic is not known before. It is the hardest rival that a policy can be
# measured against, and the honest one.


EVERY_DELAY = (0.0, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05)  # seconds


class Tuned(NamedTuple):
    """The best of a family of rules on one queue. `policy` is its text form; `figures` are those of that queue."""

    policy: str
    figures: Figures


def best_limit(
    profile: Profile, arrivals: Floats, prices: Prices | None = None, *, workers: int = 1,
    objective: LatencySLO | None = None, max_waiting: int = 0, services_seed: int = 1,
) -> Tuned | None:  # fmt: skip
    """Return the control limit, of all there are, that costs least on single rows arriving at `arrivals` (seconds).

    With an `objective` it is the one with the least energy of those that keep it on this queue; None if none does. With
    `max_waiting`, arrivals are refused beyond so many waiting rows. Raises SettingsError for an empty queue.
    """
    most = profile.max_batch_size
    rules = {
        f"control-limit:{limit}": Rule(limit_table(limit, most).tolist(), max_waiting=max_waiting)
        for limit in range(1, most + 1)
    }
    return _best(profile, arrivals, rules, prices, workers, objective, services_seed)


def best_size_or_delay(
    profile: Profile, arrivals: Floats, prices: Prices | None = None, *, workers: int = 1,
    objective: LatencySLO | None = None, sizes: Iterable[int] | None = None, delays: Sequence[float] = EVERY_DELAY,
    services_seed: int = 1,
) -> Tuned | None:  # fmt: skip
    """Return the size and delay that cost least on this queue, of all pairs of `sizes` (about twelve, if left out) and
    `delays` (seconds). Otherwise as `best_limit`."""
    most = profile.max_batch_size
    rules = {}
    for size in sizes or sorted({1, *(max(1, round(most * part / 12)) for part in range(1, 13))}):
        for delay in delays:
            text = f"size-or-delay:size={size},delay={1000.0 * delay:g}ms"
            rules[text] = Rule(limit_table(size, most).tolist(), allowance=[delay] * (most + 1))
    return _best(profile, arrivals, rules, prices, workers, objective, services_seed)


def _best(
    profile: Profile, arrivals: Floats, rules: dict[str, Rule], prices: Prices | None, workers: int,
    objective: LatencySLO | None, services_seed: int,
) -> Tuned | None:  # fmt: skip
    if len(arrivals) < 2 or not arrivals[-1] > 0.0:
        raise SettingsError(f"arrivals: must be two or more, at different instants; there are {len(arrivals)}")
    prices = prices or Prices()
    weights = prices.latency_weight_at(len(arrivals) / float(arrivals[-1])), prices.energy_weight
    coming, services = arrivals.tolist(), ServiceTimes(profile, services_seed)
    best, least = None, inf
    for text, rule in rules.items():
        rounds = play(coming, rule, services, profile.max_batch_size, workers)
        if len(rounds.starts) < 2:
            continue  # it waits for more rows than there are: nothing is known of it
        seen = figures(rounds, profile, inf if objective is None else objective.deadline)
        worth = _excess_cost(seen, *weights) if objective is None else seen.excess_w
        if worth < least and (objective is None or seen.late_share <= objective.late_share):
            best, least = Tuned(text, seen), worth
    return best


def tuned_limit(
    profile: Profile, prices: Prices, *, workers: int = 1, objective: LatencySLO | None = None, max_waiting: int = 0
) -> Player:
    """The best control limit for the very line that it is played on."""
    search = partial(best_limit, workers=workers, objective=objective, max_waiting=max_waiting)
    return lambda times, seed: _of(search(profile, times, prices, services_seed=seed))


def tuned_delay(
    profile: Profile,
    prices: Prices,
    delays: Sequence[float] = DELAYS,
    *,
    sizes: Sequence[int] = SIZES,
    workers: int = 1,
    objective: LatencySLO | None = None,
) -> Player:
    """The best size and delay for the very line that it is played on."""
    search = partial(best_size_or_delay, workers=workers, objective=objective, sizes=sizes, delays=delays)
    return lambda times, seed: _of(search(profile, times, prices, services_seed=seed))


def _of(tuned: Tuned | None) -> Figures | None:
    return None if tuned is None else tuned.figures


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean over the seeds with its 95 % interval (Student's t: lines of different seeds are independent)."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, -np.inf, np.inf)
    half = student_quantile(len(values) - 1, 0.5 + LEVEL / 2) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return Estimate(mean, mean - half, mean + half)


def known(seen: Sequence[Figures | None]) -> list[Figures]:
    """Return the figures of a player that could on every line; nothing otherwise."""
    found = [each for each in seen if each is not None]
    return found if len(found) == len(seen) else []


def of(seen: Sequence[Figures | None], what: Callable[[Figures], float]) -> Estimate | None:
    """Return `what`, over the seeds; None where the player could not."""
    found = known(seen)
    return estimate([what(each) for each in found]) if found else None


def saved(
    ours: Sequence[Figures | None], theirs: Sequence[Figures | None], what: Callable[[Figures], float]
) -> Estimate | None:
    """Return the share of `what` that ours saves of theirs, line by line; None where either could not."""
    mine, other = known(ours), known(theirs)
    if not mine or not other:
        return None
    return estimate([1.0 - what(each) / what(rival) for each, rival in zip(mine, other, strict=True)])


def show(value: Estimate | None, digits: int = 2, factor: float = 1.0, unit: str = "") -> str:
    """1.234 ± 0.056, or a dash."""
    if value is None:
        return "–"
    return f"{factor * value.value:.{digits}f}{unit} ± {factor * value.half_width:.{digits}f}"


def percent(value: Estimate | None) -> str:
    """12.3 % ± 0.4"""
    return show(value, 1, 100.0, " %")


@dataclass
class Compared:
    """A table, and values for pictures."""

    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)  # what more is to be said of it


class Comparison(NamedTuple):
    """One thing to compare. `steps(seeds)` is how often it calls `Effort.step`; `exact` is what has no
    lines of several seeds: it is not simulated, or says itself what it is played on."""

    name: str
    title: str
    steps: Callable[[int], int]
    compare: Callable[[Effort], Compared]
    exact: bool = False


What = Callable[[Figures], float]


class Scene(NamedTuple):
    """Traffic, and the policies that are played on it. `heads` are the first cells of its rows; `cost` is what a policy costs here; `prefix` is put
    before the names of values for pictures."""

    heads: Sequence[str]
    arrivals: Arrivals
    players: Mapping[str, Player]
    cost: What
    prefix: str = ""


class Column(NamedTuple):
    """A column: its title, and what it shows of a scene. The last argument is the policy of the row, if it is the row of one."""

    title: str
    cell: Callable[[Scene, Seen, str], str]


def shown(title: str, what: What | None = None, digits: int = 2, factor: float = 1.0, policy: str = "") -> Column:
    """Show a figure (the cost, if none is named) of `policy`, or of the row's."""

    def cell(scene: Scene, seen: Seen, own: str) -> str:
        return show(of(seen[policy or own], what or scene.cost), digits, factor)

    return Column(title, cell)


def saves(title: str, ours: str, theirs: str = "") -> Column:
    """Show how much of the cost `ours` saves beside `theirs`, or beside the row's policy."""

    def cell(scene: Scene, seen: Seen, own: str) -> str:
        return "" if own == ours else percent(saved(seen[ours], seen[theirs or own], scene.cost))

    return Column(title, cell)


def response(figures: Figures) -> float:
    """The mean response time, in ms."""
    return figures.response_time_ms


def p99(figures: Figures) -> float:
    """The 99th percentile of the response time, in ms."""
    return figures.p99_ms


def power(figures: Figures) -> float:
    """The mean power, in watts."""
    return figures.power_w


def excess(figures: Figures) -> float:
    """The power beyond what no policy can avoid, in watts."""
    return figures.excess_w


def late(figures: Figures) -> float:
    """The share that is late, of those served."""
    return figures.late_share


def refused(figures: Figures) -> float:
    """The share that is refused, of those that arrived."""
    return figures.refused_share


def cost_of(prices: Prices) -> What:
    """Return what a policy costs beyond the unavoidable, at these prices."""
    return lambda figures: _excess_cost(figures, prices.latency_weight, prices.energy_weight)


def _excess_cost(figures: Figures, latency_weight: float, energy_weight: float) -> float:
    return latency_weight * figures.response_time_ms + energy_weight * figures.excess_w


def scenario(
    name: str,
    title: str,
    scenes: Callable[[Effort], Iterable[Scene]],
    plays: int,
    heads: Sequence[str],
    columns: Sequence[Column],
    *,
    loads: Sequence[float] = (),
) -> Comparison:
    """Declare a comparison: in all, `plays` policies are played in its scenes.

    Where the last of `heads` is "policy", each policy has a row. With `loads` the costs of all policies are kept for a picture over these loads.
    """

    def compare(effort: Effort) -> Compared:
        made = Compared([*heads, *(column.title for column in columns)])
        for scene in scenes(effort):
            seen = play_all(scene.arrivals, scene.players, effort)
            for policy in seen if heads[-1] == "policy" else ("",):
                cells = [column.cell(scene, seen, policy) for column in columns]
                made.rows.append([*scene.heads, *([policy] if policy else []), *cells])
            if loads:
                for policy, found in seen.items():
                    value = of(found, scene.cost)
                    made.values.setdefault(scene.prefix + policy, []).append(value.value if value else float("nan"))
        if loads:
            made.values["load"] = list(loads)
        return made

    return Comparison(name, title, lambda seeds: plays * seeds, compare)


def keep(name: str, compared: Compared, about: dict[str, Any]) -> None:
    """Store one comparison; it replaces an earlier one."""
    stored = stored_results()
    stored[name] = {**asdict(compared), "about": {**about, **compared.about}}
    RESULTS.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


def stored_results() -> dict[str, Any]:
    """Return what is stored, by name."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write_page() -> None:
    """Put every stored table between its marks in the page."""
    if not PAGE.exists():
        return
    text = PAGE.read_text()
    for name, stored in stored_results().items():
        begin, end = marks(name)
        if begin in text:
            before, _, rest = text.partition(begin)
            _, _, after = rest.partition(end)
            text = f"{before}{begin}\n{_section(name, stored)}\n{end}{after}"
    PAGE.write_text(text)


def marks(name: str) -> tuple[str, str]:
    """Return the lines between which a table stands in the page."""
    return f"<!-- {name}: written by `python -m benchmarks.policies` -->", f"<!-- end of {name} -->"


# The columns that the page shows, by their place in the stored table; all, if a comparison is not here.
ON_PAGE: dict[str, dict[str, int]] = {
    "day": {"w2": 0, "policy": 1, "p99, ms": 3, "solved saves": 6},
    "promise": {
        "load": 0, "solved: excess, W": 1, "refused, %": 3, "saved: than the best limit": 5, "than the best size and delay": 9,
    },
    "random-bursts": {"models": 0, "policy": 1, "number": 2, "beside greedy, mean": 3, "the worst": 4, "surely above +0.5 %": 6},
    "foreseen": {"cost above the optimum": 0, "solved": 4, "greedy": 6, "best size and delay": 7},
}  # fmt: skip
INTERVAL = re.compile(r" \([^()]* to [^()]*\)")  # of a long table the page shows none; results.json has them
WITHOUT_INTERVALS = {"foreseen"}
# By their first cell; all, if a comparison is not here.
ROWS_ON_PAGE = {"day": ("10",), "foreseen": ("all",), "random-bursts": ("all",)}


def shown_on_page(name: str, stored: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return what the page shows of a stored table: the titles of the columns, and the rows."""
    columns, rows = stored["columns"], stored["rows"]
    if name not in ON_PAGE:
        return columns, rows
    return [title.strip() for title in ON_PAGE[name]], [
        [INTERVAL.sub("", row[place]) if name in WITHOUT_INTERVALS else row[place] for place in ON_PAGE[name].values()]
        for row in rows
        if name not in ROWS_ON_PAGE or row[0] in ROWS_ON_PAGE[name]
    ]


def _section(name: str, stored: dict[str, Any]) -> str:
    lines = [stored["about"][key] for key in ("lines", "models", "versions") if key in stored["about"]]
    return f"{markdown(*shown_on_page(name, stored))}\n\n<sub>`python -m benchmarks.policies {name}`; {'; '.join(lines)}.</sub>"


# The pictures of the page.

FOLDER = ROOT / "docs" / "pictures"
PROMISE = {"exact": "best control limit", "delay": "best size and delay", "solved": "solved, guarded"}
CREW = {
    "split": "random splitting",
    "closed form": "limit by closed form",
    "limit": "best control limit",
    "solved": "solved",
}


def draw() -> None:
    """Draw what is stored."""
    stored = stored_results()
    if "promise" in stored:
        with figure(FOLDER / "latency-objective", size=(5.2, 3.4)) as (_, axes):
            _lines(axes[0, 0], stored["promise"]["values"], PROMISE, "")
            axes[0, 0].set_ylabel("power beyond the unavoidable, W")
    if "crew" in stored:
        with figure(FOLDER / "several-workers", 1, 2, size=(8.4, 3.4)) as (_, axes):
            for axis, workers in zip(axes[0], ("2", "4"), strict=True):
                _lines(axis, stored["crew"]["values"], CREW, f"{workers} ")
                axis.set_title(f"{workers} workers")
            axes[0, 0].set_ylabel("cost beyond the unavoidable")
    if "device" in stored:
        with figure(FOLDER / "device-orders", 1, 2, size=(8.4, 3.4)) as (_, axes):
            for axis, kind in zip(axes[0], ("latency", "latency and energy"), strict=True):
                _pairs(axis, stored["device"]["values"], kind)
    if "bursts" in stored:
        with figure(FOLDER / "bursts", size=(6.4, 3.8)) as (_, axes):
            _runs(axes[0, 0], stored["bursts"]["values"])


def _pairs(axis: Any, values: dict[str, list[float]], kind: str) -> None:
    """Pairs of models in the order of what they cost above the optimum, for each order of the device."""
    for order, style in zip(("longest queue", "solved"), styles(), strict=False):
        found = sorted(100.0 * each for each in values[f"{kind}: {order}"])
        axis.plot([100.0 * (place + 0.5) / len(found) for place in range(len(found))], found, label=order, **style)
    axis.set_title(kind)
    axis.set_xlabel("pairs of models, %")
    axis.set_ylabel("cost above the optimum, %")
    axis.set_ylim(bottom=0.0)
    axis.legend()


def _runs(axis: Any, values: dict[str, list[float]]) -> None:
    """A dot for each run, on a scale that is linear up to a per cent; and the line that none may pass."""
    for place, runs in enumerate(values.values()):
        style = next(styles()) | {"linestyle": "", "marker": "o", "markersize": 2.5}
        axis.plot(runs, [place + 0.3 * (index / len(runs) - 0.5) for index in range(len(runs))], **style)
    axis.axvline(0.5, color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale("symlog", linthresh=1.0)
    axis.set_xticks([-30, -10, -3, -1, 0, 0.5, 1], ["-30", "-10", "-3", "-1", "0", "0.5", "1"])
    axis.set_yticks(range(len(values)), list(values))
    axis.invert_yaxis()
    axis.set_xlabel("cost beyond greedy's, %")


def _lines(axis: Any, values: dict[str, list[float]], names: dict[str, str], prefix: str) -> None:
    for (key, label), style in zip(names.items(), styles(), strict=False):
        axis.plot(values["load"], values[prefix + key], label=label, **style)
    axis.set_xlabel("load")
    axis.set_ylim(bottom=0.0)
    axis.legend()
