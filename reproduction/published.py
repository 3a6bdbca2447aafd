"""What the paper states in numbers, and the setting of its section V."""

from typing import NamedTuple

from weir.policy.cost import GOOGLENET_P4, Prices

PROFILE = GOOGLENET_P4
MAX_RATE_PER_MS = 2.96  # section V: μ of the largest batch, as printed

# Table I and Fig. 8: the load, the weights, what RVI stops at, and what is tolerated.
LOAD = 0.9
PRICES = Prices(1.0, 1.0)
EPSILON = 0.01
MOST_SWEEPS = 10_000
TOLERANCE = 0.001  # δ, for Δ

# Fig. 4: (w1, w2) of its panels. Fig. 5: the range of w2. The static batch sizes of section V-B.
MAP_WEIGHTS = ((1.0, 0.0), (1.0, 0.1), (1.0, 1.0), (1.0, 500.0))
LARGEST_WEIGHT = 20.0
STATIC_SIZES = (8, 16, 32)
SPACE_REDUCTION, TIME_REDUCTION = 0.635, 0.98  # abstract, for c_o = 100 against c_o = 0


class Column(NamedTuple):
    """A column of Table I."""

    overflow_cost: float
    s_max: int
    iterations: int
    space: int
    time: float
    delta: float
    cost: float


TABLE = (
    Column(10_000.0, 89, 1847, 2848, 4.68e8, 9.36e-4, 66.1384),
    Column(1_000.0, 78, 1635, 2496, 3.18e8, 9.78e-4, 66.1383),
    Column(100.0, 70, 1483, 2240, 2.33e8, 8.36e-4, 66.1377),
    Column(10.0, 161, 10_000, 5152, 8.29e9, 6.14e-12, 66.1374),
    Column(0.0, 192, 10_000, 6144, 1.18e10, 1.30e-14, 66.1374),
)
