"""A model on a fast and a slow worker: what the solved tables cost above the exact optimum, and what using both always does."""

from collections.abc import Callable
from itertools import product

from benchmarks.policies.devices import row_of
from benchmarks.policies.harness import Compared, Comparison, Effort
from benchmarks.policies.uneven_workers import Workers
from weir.policy.cost import Prices
from weir.policy.solve.uneven import WorkerKind, solve_uneven

# Steps that a batch of so many rows takes on the fast worker.
SHAPES: dict[str, Callable[[int], int]] = {
    "constant": lambda rows: 5,
    "affine": lambda rows: 4 + rows,
    "linear": lambda rows: 3 * rows,
    "in fours": lambda rows: 4 * -(-rows // 4),
}
LARGEST = 8
RATIOS, LOADS = (2, 4, 8), (0.05, 0.2, 0.35, 0.5)


def compare(effort: Effort) -> Compared:
    """Compare the solved tables, and starting whatever waits on any idle worker, with the least mean response time."""
    made = Compared(["a slow worker", "mean, %", "90 % of the cases, %", "worst, %"])
    for ratio in RATIOS:
        excess: dict[str, list[float]] = {"solved": [], "both always": []}
        for (name, shape), load in product(SHAPES.items(), LOADS):
            times = tuple(shape(rows) for rows in range(1, LARGEST + 1))
            fastest = max(rows / time for rows, time in enumerate(times, 1))
            case = Workers(times, tuple(ratio * time for time in times), load * fastest * (1.0 + 1.0 / ratio))
            first, second = case.profiles()
            bank = solve_uneven((WorkerKind(first, 1), WorkerKind(second, 1)), Prices(1.0, 0.0), [load])
            least = case.best()
            excess["solved"].append(case.cost_of(bank.tables[0]) / least - 1.0)
            excess["both always"].append(case.greedy() / least - 1.0)
            effort.step(f"1 : {ratio}, {name}")
        made.rows += [row_of(f"1 : {ratio}, {name}", found) for name, found in excess.items()]
    return made


UNEVEN = Comparison(
    "uneven", "A fast and a slow worker, above the exact optimum",
    lambda seeds: len(RATIOS) * len(SHAPES) * len(LOADS), compare, exact=True,
)  # fmt: skip
