"""Profiles, weights and loads at random, such as are met: straight, concave, convex and stepped service times."""

from typing import NamedTuple

import numpy as np

from weir.policy.cost import Floats, Prices, Profile

SHAPES = ("linear", "concave", "convex", "staircase")


class Drawn(NamedTuple):
    """A model of some shape, the weights and the rate in rows per second."""

    number: int
    shape: str
    profile: Profile
    prices: Prices
    load: float

    @property
    def rate(self) -> float:
        """Rows per second."""
        return self.load * self.profile.max_rate


def drawn(number: int) -> Drawn:
    """Return the model of that number: each shape in turn, up to 256 rows, cv 0 to 2, energy weights from 10⁻³ to 10³ per
    mean power and loads of 0.01 to 0.99."""
    rng, shape = np.random.default_rng(number), SHAPES[number % len(SHAPES)]
    largest = round(256.0 ** rng.uniform(0.0, 1.0))
    sizes = np.arange(1, largest + 1, dtype=np.float64)
    times = _times(rng, shape, sizes) * 10.0 ** rng.uniform(-1.0, 2.0)
    energies = (
        rng.uniform(0.1, 3.0) * times + rng.uniform(0.0, 1.0) * sizes * times[0] + rng.uniform(0.0, 5.0) * times[0]
    )
    cv = np.full(largest, rng.choice([0.0, rng.uniform(0.0, 0.3), rng.uniform(0.0, 2.0)]))
    profile = Profile(times, 10.0 ** rng.uniform(0.0, 3.0) * energies / times[0], cv)
    load = float(rng.choice([rng.uniform(0.01, 0.99), rng.uniform(0.8, 0.99)], p=[0.8, 0.2]))
    # A weight of 1 makes power as dear as time where each is what a full batch has.
    even = float(times[-1] / (profile.energy_mj[-1] / times[-1]))
    return Drawn(number, shape, profile, Prices(1.0, even * 10.0 ** rng.uniform(-3.0, 3.0)), load)


def _times(rng: np.random.Generator, shape: str, sizes: Floats) -> Floats:
    """Return service times that are about 1 for one row."""
    largest = len(sizes)
    fixed = rng.uniform(0.2, 0.95)
    if shape == "staircase":
        step = int(rng.integers(2, max(3, largest // 2 + 1)))
        sizes = np.ceil(sizes / step)
    power = {"concave": rng.uniform(0.5, 0.95), "convex": rng.uniform(1.05, 1.8)}.get(shape, 1.0)
    return np.asarray(fixed + (1.0 - fixed) * sizes**power, dtype=np.float64)


# Models whose lines forget soon enough for short runs to be worth something.
MODERATE = tuple(n for n in range(40) if drawn(n).load < 0.85 and drawn(n).profile.cv[0] < 1.0)
