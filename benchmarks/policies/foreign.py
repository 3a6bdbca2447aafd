"""A table at a rate that it was not made for, with and without the full-batch rule. Exact: nothing is simulated."""

from math import inf

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.policies.lines import Effort
from benchmarks.policies.table import Compared, Comparison
from weir.policy.cost.objective import Prices, unavoidable_power_w
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.solve.bank import solve, solve_bank
from weir.policy.solve.smdp import evaluate

MADE_FOR = (0.05, 0.1, 0.3, 0.5)
USED_AT = (0.5, 0.7, 0.9)
ENERGY_WEIGHTS = (1.0, 10.0)


def compare(effort: Effort) -> Compared:
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
    raw = solve(profile, low * profile.max_rate, prices).actions[
        :-1
    ]  # without the overflow state; the last then holds for all above
    filled = solve_bank(profile, prices, rates=[low * profile.max_rate]).tables[0]
    losses = [excess(table) / best - 1.0 for table in (raw, filled)]
    return [f"{100.0 * loss:.1f} %" if loss < inf else "the line grows for ever" for loss in losses]


COMPARISON = Comparison(
    "foreign", "A table at a foreign rate", lambda seeds: len(MADE_FOR) * len(ENERGY_WEIGHTS), compare, exact=True
)
