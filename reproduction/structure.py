"""Is an optimal policy a control limit? A search for policies that wait in a state above one that they serve."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from reproduction.published import PROFILE
from reproduction.truncated import law_of, model_of
from weir.policy.cost import Prices, Profile
from weir.policy.solve.bank import Solution, solve

VISITED = 1e-6  # share of the decisions from which on a state counts
MATTERS = 1e-6  # ms of the mean cost: a choice that is worth less is a tie
GRID_LOADS = tuple(round(0.05 * index, 2) for index in range(1, 20))
GRID_WEIGHTS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 500.0)
STEP = 8
_LARGEST = 12  # rows of the batches of random tables


@dataclass(frozen=True)
class Case:
    """One model that was solved, in words, with its solution."""

    about: str
    solution: Solution


@dataclass
class Search:
    """How many cases were solved, and those whose policy is no control limit: the state that waits, and what serving there
    would cost more, in ms of the mean cost g."""

    cases: int = 0
    exceptions: list[tuple[Case, int, float]] = field(default_factory=list)
    smaller_batches: int = 0

    @property
    def clearest(self) -> tuple[Case, int, float]:
        """The exception with the largest difference."""
        return max(self.exceptions, key=lambda each: each[2])


def search(cases: Iterable[Case]) -> Search:
    """Look at the policy of each case."""
    found = Search()
    for case in cases:
        found.cases += 1
        waiting, smaller = look(case.solution)
        found.exceptions += [(case, state, gap) for state, gap in waiting[:1]]
        found.smaller_batches += smaller
    return found


def look(solution: Solution) -> tuple[list[tuple[int, float]], bool]:
    """Return the visited states above the control limit that wait, each with what serving would cost more, in ms of the
    mean cost g, clearest first; and whether a visited state above the limit serves fewer rows than it could."""
    model = model_of(solution.profile, solution.rate, solution.prices, solution.s_max)
    choices = model.costs - solution.cost * model.sojourn[:, None] + model.expected(solution.values)
    states, actions = np.arange(len(solution.actions)), solution.actions
    counts = (law_of(model, actions) >= VISITED) & (states > int(np.argmax(actions > 0)))
    serving, waiting = choices[1:].min(axis=0), choices[0]
    gaps = (serving - waiting) / solution.cost
    waits = [(int(n), float(gaps[n])) for n in np.flatnonzero(counts & (actions == 0) & (gaps > MATTERS))]
    all_of = np.minimum(states, solution.profile.max_batch_size)
    all_of[-1] = min(solution.s_max, solution.profile.max_batch_size)
    dearer = (choices[all_of, states] - choices.min(axis=0)) / solution.cost
    smaller = counts & (actions > 0) & (actions < all_of) & (dearer > MATTERS)
    return sorted(waits, key=lambda each: -each[1]), bool(smaller.any())


def paper_grid() -> Iterator[Case]:
    """Yield the paper's profile over a grid of loads and weights."""
    yield from _grid("the paper's profile", PROFILE)


def stepped_grid() -> Iterator[Case]:
    """Yield the same profile padded to multiples of 8 rows, over the same grid."""
    padded = -(-PROFILE.sizes // STEP) * STEP - 1
    yield from _grid(
        f"the paper's profile, batches padded to multiples of {STEP}",
        Profile(PROFILE.service_time_ms[padded], PROFILE.energy_mj[padded], PROFILE.cv),
    )


def _grid(about: str, profile: Profile) -> Iterator[Case]:
    for load in GRID_LOADS:
        for weight in GRID_WEIGHTS:
            solution = solve(profile, load * profile.max_rate, Prices(1.0, weight))
            yield Case(f"{about}, ρ = {load:g}, w2 = {weight:g}", solution)


def random_lines(count: int, seed: int = 1) -> Iterator[Case]:
    """Yield random straight lines, loads and weights."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        size = int(rng.integers(2, 33))
        alpha, tau0, beta, zeta0 = (float(value) for value in rng.exponential((0.3, 1.0, 20.0, 20.0)))
        profile = Profile.linear(alpha_ms=alpha, tau0_ms=tau0, beta_mj=beta, zeta0_mj=zeta0, max_batch_size=size)
        yield _random_case(f"straight line {index}", profile, rng)


def random_tables(count: int, seed: int = 2) -> Iterator[Case]:
    """Yield random tables of times and energies that rise with the batch size, loads and weights."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        size = int(rng.integers(2, _LARGEST + 1))
        rises = rng.exponential(1.0, (2, size)) * (rng.random((2, size)) < 0.5)
        rises[:, 0] = rng.exponential(1.0, 2) + 0.1
        times, energies = np.cumsum(rises, axis=1)
        yield _random_case(f"random table {index}", Profile(times, 10.0 * energies, np.zeros(size)), rng)


def _random_case(about: str, profile: Profile, rng: np.random.Generator) -> Case:
    load, weight = float(rng.uniform(0.05, 0.95)), float(10.0 ** rng.uniform(-2.0, 2.0))
    solution = solve(profile, load * profile.max_rate, Prices(1.0, weight))
    return Case(f"{about} (up to {profile.max_batch_size} rows), ρ = {load:.2f}, w2 = {weight:.3g}", solution)
