"""Response times of sampled rows, where lines are too long, or service times vary too much, to follow them all.

Each row arrives in a line drawn from its law, so that nothing has to settle first, and is followed until it is answered. Past
the length from which all lines are served alike it moves up in one step. The numbers drawn are always the same.
"""

import numpy as np

from weir.policy.long_lines import Found
from weir.policy.profile import Floats
from weir.policy.rules_in_line import Rules
from weir.policy.smdp import Actions

ROWS = 16_384  # their 99th percentile is right to about 2 %


class Sampler:
    """Draws the rows that meet the lines of `found`."""

    def __init__(self, found: Found) -> None:
        self._model, self._found = found.model, found
        self._rules = Rules(np.append(found.improved.actions, found.model.size).astype(np.uint16))
        self._draw = np.random.default_rng(1)

    def response_times_ms(self, rows: int = ROWS) -> Floats:
        """Return the response times of so many rows, without the profile's latency offset."""
        rate, rules = self._model.rate_per_ms, self._rules
        place, behind, age = self._arrive(rows)
        result, index = np.empty(rows), np.arange(rows)
        while len(index):
            far = np.maximum(
                -(-(place - rules.steady) // rules.last), 0
            )  # batches of the size of long lines, all ahead
            time = self._services(np.full(len(far), rules.last), far)
            place, age, behind = place - far * rules.last, age + time, behind + self._draw.poisson(rate * time)
            length = np.minimum(place + behind, rules.steady)
            missing = rules.served_at[length] - length
            age, behind = age + self._draw.standard_gamma(missing) / rate, behind + missing
            size = rules.batch[length]
            time = self._services(size, np.ones_like(size))
            age, place, behind = age + time, place - size, behind + self._draw.poisson(rate * time)
            done = place <= 0
            result[index[done]] = age[done]
            index, place, behind, age = (part[~done] for part in (index, place, behind, age))
        return result

    def _arrive(self, rows: int) -> tuple[Actions, Actions, Floats]:
        """Return each row's place in line, the rows behind it and its age at the first decision after it arrived."""
        model, law = self._model, self._found.law
        actions = np.append(self._found.improved.actions, model.size)
        spent = np.append(law, self._found.beyond) * model.sojourn[actions]
        # One from each of as many equal shares: the longest lines are met as often as they should be.
        even = (np.arange(rows) + self._draw.random(rows)) / rows
        state = np.minimum(np.searchsorted(np.cumsum(spent) / spent.sum(), even), model.longest + 1)
        size = actions[state]
        over = np.rint(self._draw.exponential(self._found.mean_above, rows)).astype(np.int64)
        state += np.where(state > model.longest, over, 0)
        met = self._services(size, np.ones_like(size), longer=True)
        part = self._draw.random(rows)
        before, after = (self._draw.poisson(model.rate_per_ms * met * share) for share in (part, 1.0 - part))
        return state - size + before + 1, after, met * (1.0 - part)

    def _services(self, size: Actions, count: Actions, *, longer: bool = False) -> Floats:
        """Return the time that `count` batches of `size` rows take, 0 for size 0; `longer`: as long as a row meets them."""
        profile = self._model.profile
        mean, cv = profile.service_time_ms[size - 1], profile.cv[size - 1]
        varied = np.where(cv > 0.0, cv**2, 1.0)
        drawn = self._draw.standard_gamma(np.where(cv > 0.0, count / varied + longer, 0.0)) * varied
        return np.where(size > 0, mean * np.where(cv > 0.0, drawn, count), 0.0)
