"""Keeping a latency objective with the least energy: limit, mix of two limits, and bound on the line, for each rate.

A batch is cut when `limit` rows wait, or when its oldest row could not be answered in time otherwise (the guard), and
trimmed where it would make its oldest row late. The guard makes the number of waiting rows a poor state: their ages
count too. So the share of late responses is simulated, on common random numbers; docs/explanation/beyond-the-paper.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np

from weir.errors import SettingsError
from weir.policy.crew import crew_table
from weir.policy.objective import Objective
from weir.policy.profile import Profile
from weir.simulation.rounds import Figures, Rule
from weir.simulation.trials import Trials

SURE = 2.0  # standard errors by which the share of late responses must stay below ε
SPARE_REFUSALS = 0.1  # of ε: more refusals than the fewest possible that may be spent on energy
TRIED_LIMITS = 6  # where the line must be bounded
LONGEST_LINE = 2  # deadlines: no row makes it from further back in the line
MARGINS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)  # standard deviations of the service time, tried in this order
MARGIN_LOADS = (0.1, 0.3, 0.5)  # at which the guard alone must keep the objective


@dataclass(frozen=True)
class Kept:
    """How an objective is kept at one rate: `share` of the batches are decided with `limit` + 1, and arrivals refused
    beyond `max_waiting` rows (0: none). `figures` at that rate."""

    limit: int
    share: float
    max_waiting: int
    figures: Figures


class Keeper:
    """Finds, for one profile and crew, what keeps `objective`.

    Attributes: profile; objective, with the margin that random service times need.

    Raises SettingsError, naming the objective, if not even a row alone meets it.
    """

    def __init__(self, profile: Profile, objective: Objective, *, workers: int = 1, seed: int = 1) -> None:
        self.profile = profile
        self._most = profile.best_batch_size
        self._workers, self._seed = workers, seed
        self.objective = objective.checked_for(profile)
        self.objective = self._with_margin() if profile.cv.any() else self.objective

    def trials(self, requests: int) -> Trials:
        """Return trials that count what is later than the deadline."""
        return Trials(
            self.profile, workers=self._workers, requests=requests, seed=self._seed, deadline=self.objective.deadline
        )

    def rule(self, limit: int, share: float = 0.0, max_waiting: int = 0) -> Rule:
        """Return the guarded rule."""
        table = crew_table(self.profile, limit).tolist()
        second = crew_table(self.profile, min(limit + 1, self._most)).tolist() if share else None
        allowance = self.objective.allowance(self.profile).tolist()
        latest = self.objective.latest_starts(self.profile).tolist()
        return Rule(table, allowance, latest, second=second, share=share, max_waiting=max_waiting)

    def _with_margin(self) -> Objective:
        """Return the objective with the smallest margin at which the guard keeps it while load is moderate."""
        given, trials = self.objective, self.trials(20_000)
        spread = float(np.max(self.profile.cv * self.profile.service_time_ms)) / 1000.0
        capacity = self._workers * self.profile.max_rate
        for deviations in MARGINS:
            margin = max(given.margin, deviations * spread)
            if margin + self.profile.service_time_ms[0] / 1000.0 >= given.deadline:
                break
            self.objective = given._replace(margin=margin)
            if all(self.keeps(trials(load * capacity, self.rule(self._most))) for load in MARGIN_LOADS):
                break
        return self.objective

    def keeps(self, figures: Figures) -> bool:
        """Tell whether the share of late responses is surely within the objective."""
        return _at_most(figures) <= self.objective.late_share

    def at(self, rate: float, trials: Trials) -> Kept:
        """Return what keeps the objective at `rate` with the least energy. Arrivals are refused only where they must be.

        Raises SettingsError, naming objective and rate, if even a bound of one row does not keep it.
        """
        most = self._largest(lambda limit: self.keeps(trials(rate, self.rule(limit))), 1, self._most)
        if not most:
            return self._bounded(rate, trials)
        kept = Kept(most, 0.0, 0, trials(rate, self.rule(most)))
        return self._mixed(rate, trials, kept) if most < self._most else kept

    def _mixed(self, rate: float, trials: Trials, kept: Kept) -> Kept:
        """Use what `kept` leaves of ε for batches with the next limit. The share is by the chord, and checked."""
        low, high = _at_most(kept.figures), _at_most(trials(rate, self.rule(kept.limit + 1)))
        share = (self.objective.late_share - low) / (high - low)
        for tried in (share, share / 2.0):
            figures = trials(rate, self.rule(kept.limit, tried))
            if self.keeps(figures):
                return Kept(kept.limit, tried, 0, figures)
        return kept

    def _bounded(self, rate: float, trials: Trials) -> Kept:
        """Return what keeps the objective while hardly more is refused than must be, with the least energy."""
        found: list[Kept] = []
        capacity = self._workers * self.profile.max_rate
        longest = self._most + ceil(LONGEST_LINE * self.objective.deadline * capacity)
        for limit in sorted({1, *(max(1, self._most * part // TRIED_LIMITS) for part in range(1, TRIED_LIMITS + 1))}):
            kept = self._with_bound(rate, trials, limit, longest)
            if kept is None:
                break  # nor would a higher limit keep it
            found.append(kept)
            longest = min(longest, 2 * kept.max_waiting)
        if not found:
            share = trials(rate, self.rule(1, 0.0, 1)).late_share
            raise SettingsError(
                f"latency_objective={self.objective}: cannot be kept at {rate:.4g} rows/s: with one row in line "
                f"{100.0 * share:.3g} % of the responses are late; the deadline must be later"
            )
        fewest = min(kept.figures.refused_share for kept in found)
        spared = fewest + SPARE_REFUSALS * self.objective.late_share
        return min(
            (kept for kept in found if kept.figures.refused_share <= spared), key=lambda kept: kept.figures.excess_w
        )

    def _with_bound(self, rate: float, trials: Trials, limit: int, longest: int) -> Kept | None:
        """Return the longest line, of `limit` rows or more, with which `limit` keeps the objective; None if there is none."""

        def keeps(rows: int) -> bool:
            return self.keeps(trials(rate, self.rule(limit, 0.0, rows)))

        bound = self._largest(keeps, limit, longest) if limit <= longest else 0
        return Kept(limit, 0.0, bound, trials(rate, self.rule(limit, 0.0, bound))) if bound else None

    @staticmethod
    def _largest(good: Callable[[int], bool], least: int, most: int) -> int:
        """Return the largest number from `least` to `most` that is good, by halving; 0 if not even `least` is."""
        if good(most):
            return most
        if not good(least):
            return 0
        while most - least > 1:
            middle = (least + most) // 2
            if good(middle):
                least = middle
            else:
                most = middle
        return least


def _at_most(figures: Figures) -> float:
    """Return what the share of late responses surely is at most."""
    return figures.late_share + SURE * figures.late_error
