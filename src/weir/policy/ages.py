"""Distributions of a time on a grid of cells: mass by cell, evenly spread within it."""

from dataclasses import dataclass

import numpy as np

from weir.policy.profile import Floats


@dataclass(frozen=True)
class Grid:
    """`count` cells of `width` ms from 0 on. What lies beyond the last is counted in it."""

    width: float
    count: int

    @property
    def edges(self) -> Floats:
        """Return the count + 1 edges of the cells."""
        return np.asarray(self.width * np.arange(self.count + 1), dtype=np.float64)

    @property
    def middles(self) -> Floats:
        """Return the middle of each cell."""
        return np.asarray(self.width * (np.arange(self.count) + 0.5), dtype=np.float64)

    def uniform(self, longest: Floats) -> Floats:
        """Return the masses of times uniform on 0 ... longest[i]; shape [i, count]."""
        below = np.minimum(self.edges / longest[:, None], 1.0)
        below[:, -1] = 1.0
        return np.diff(below, axis=1)

    def shifted(self, masses: Floats, by: float) -> Floats:
        """Return the masses of times that are longer by `by`."""
        whole, part = divmod(by / self.width, 1.0)
        start = min(int(whole), self.count - 1)
        padded = np.zeros((*masses.shape[:-1], self.count + start + 1))
        padded[..., start:-1] += (1.0 - part) * masses
        padded[..., start + 1 :] += part * masses
        return self._folded(padded)

    def added(self, masses: Floats, kernel: Floats) -> Floats:
        """Return the masses of the sum of two independent times, `kernel` in such cells too."""
        length = 2 * self.count
        product = np.fft.irfft(np.fft.rfft(masses, length) * np.fft.rfft(kernel, length), length)
        # Two uniform places within cells add up to a triangle over two cells: half in each.
        product = (product + np.roll(product, 1, axis=-1)) / 2.0
        return self._folded(np.maximum(product, 0.0))

    def erlangs(self, most: int, rate_per_ms: float) -> Floats:
        """Return the masses of the time in which i + 1 rows arrive, i = 0 ... most - 1; shape [most, count]."""
        below = 1.0 - np.cumsum(poisson(most - 1, rate_per_ms * self.edges), axis=0)
        below[:, -1] = 1.0
        return np.maximum(np.diff(below, axis=1), 0.0)

    @property
    def none(self) -> Floats:
        """Return the masses of a time of 0: half a cell more, on average."""
        first = np.zeros(self.count)
        first[0] = 1.0
        return first

    def with_service(self, masses: Floats, mean: float, cv: float) -> Floats:
        """Return the masses of times with that of a batch added, which is Gamma distributed, or fixed if cv is 0."""
        return self.shifted(masses, mean) if cv == 0.0 else self.added(masses, self.gamma(mean, cv))

    def gamma(self, mean: float, cv: float) -> Floats:
        """Return the masses of a Gamma distributed time."""
        from scipy.special import gammainc  # evaluating needs it, serving does not

        below = gammainc(1.0 / cv**2, self.edges / (mean * cv**2))
        below[-1] = 1.0
        return np.diff(below)

    def _folded(self, padded: Floats) -> Floats:
        kept = padded[..., : self.count].copy()
        kept[..., -1] += padded[..., self.count :].sum(axis=-1)
        return kept


def poisson(most: int, means: Floats) -> Floats:
    """Return P[N = k] for k = 0 ... most by row, for each of `means` by column."""
    counts = np.arange(most + 1)
    factorials = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, most + 1)))))
    with np.errstate(divide="ignore"):
        logs = np.log(means)
    with np.errstate(invalid="ignore"):
        table = np.exp(counts[:, None] * logs - means - factorials[:, None])
    table[:, means == 0.0] = (counts == 0)[:, None]
    return np.asarray(table, dtype=np.float64)


def longer_services(mean: float, cv: float) -> tuple[Floats, Floats]:
    """Return times and shares that stand for the service under way as an arriving row meets it, which is longer than most:
    Gauss's nodes for the length-biased Gamma distribution."""
    if cv == 0.0:
        return np.array([mean]), np.array([1.0])
    return _nodes(mean, cv, 1.0 / cv**2)


def services(mean: float, cv: float) -> tuple[Floats, Floats]:
    """Return times and shares that stand for those of all batches: Gauss's nodes for the Gamma distribution."""
    if cv == 0.0:
        return np.array([mean]), np.array([1.0])
    return _nodes(mean, cv, 1.0 / cv**2 - 1.0)


def _nodes(mean: float, cv: float, power: float) -> tuple[Floats, Floats]:
    """Return Gauss's nodes for the density x^power·e^-x (generalised Laguerre), in units of mean·cv²."""
    orders = np.arange(8 if cv <= 0.3 else 24)
    off = np.sqrt(orders[1:] * (orders[1:] + power))
    jacobi = np.diag(2.0 * orders + 1.0 + power) + np.diag(off, 1) + np.diag(off, -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    return nodes * mean * cv**2, vectors[0] ** 2
