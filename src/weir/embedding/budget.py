"""The best size of a batch of texts, from how long batches of each size have taken."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

SHORTEST = 8  # tokens of a short text: so many times may a batch have fewer texts than tokens
MAX_ROWS = 256
GOOD_ENOUGH = 0.97  # of the best throughput: the smallest batch that reaches it makes callers wait least
LITTLE = 1 / 16  # of a batch is its price whatever was measured: a batch costs the server something too
PADDING = 0.5  # of the price of a batch may be padding: with it texts cost least (`python -m benchmarks padding`)
# What a batch costs the server besides: to cut it, to send it, to hand out its answers. It has the CPU of its workers.
SERVER_SECONDS = 3e-4
NEAR = 4  # times the budget: the sizes from which the price of a batch is learned


class Timed(NamedTuple):
    """So many texts, filled up to this length, took so many seconds in one batch; so many of their tokens were padding."""

    rows: int
    length: int
    seconds: float
    padding: int = 0


@dataclass(frozen=True)
class Budget:
    """What a batch may be. `max_batch_cost` is in tokens, padding included; `max_padding` is half of what a batch costs beyond its tokens, as tokens;
    `padding_cost` is the share of a token's time that padding takes; `tokens_per_second` is what one worker then reaches, 0 if that is not known."""

    max_batch_cost: float
    max_batch_size: int
    max_padding: float
    tokens_per_second: float
    padding_cost: float = 1.0

    def settings(self) -> dict[str, Any]:
        """Return the settings of a service that has it."""
        said = asdict(self)
        del said["tokens_per_second"]
        return {"padded": True, **said}


def choose(measured: Sequence[Timed]) -> Budget:
    """Return the smallest budget with which short texts and long ones, as many tokens of each, are computed about as fast as with any."""
    even = [timed for timed in measured if not timed.padding]
    budgets = sorted({timed.rows * timed.length for timed in even})
    speeds = {budget: _speed(even, budget, SERVER_SECONDS) for budget in budgets}
    best = max(speeds.values())
    budget = next(budget for budget in budgets if speeds[budget] >= GOOD_ENOUGH * best)
    price, padding_cost = _prices(measured, budget)
    return Budget(
        max_batch_cost=float(budget),
        max_batch_size=min(MAX_ROWS, max(1, budget // SHORTEST)),
        max_padding=round(PADDING * min(max(price, LITTLE * budget), budget / 2), 1),
        tokens_per_second=round(_speed(even, budget), 1),
        padding_cost=padding_cost,
    )


def safe(tokens: int) -> Budget:
    """Return a budget of so many tokens that is right nowhere and wrong nowhere by much: padding counts in full."""
    return Budget(
        max_batch_cost=float(tokens),
        max_batch_size=min(MAX_ROWS, max(1, tokens // SHORTEST)),
        max_padding=PADDING * LITTLE * tokens,
        tokens_per_second=0.0,
    )


def _speed(measured: Iterable[Timed], budget: int, besides: float = 0.0) -> float:
    """Return the tokens per second within `budget`, over all lengths, where each batch takes so many seconds `besides`: a text that is
    longer goes alone."""
    by_length: dict[int, list[Timed]] = {}
    for timed in measured:
        by_length.setdefault(timed.length, []).append(timed)
    seconds = 0.0
    for length, timings in by_length.items():
        fitting = [timed for timed in timings if timed.rows == 1 or timed.rows * length <= budget]
        chosen = max(fitting, key=lambda timed: timed.rows)
        seconds += (chosen.seconds + besides) / (chosen.rows * length)
    return len(by_length) / seconds


def _prices(measured: Iterable[Timed], budget: int) -> tuple[float, float]:
    """Return what a batch costs whatever is in it, in tokens, and the share of a token's time that padding takes, 1 where none was measured: seconds
    are fitted as a + b * tokens + c * padding, each point by its relative error."""
    near = [timed for timed in measured if timed.padding or timed.rows * timed.length <= NEAR * budget]
    seconds = np.array([timed.seconds for timed in near])
    padding = np.array([timed.padding for timed in near], float)
    tokens = np.array([timed.rows * timed.length for timed in near], float) - padding
    columns = np.stack([1 / seconds, tokens / seconds, padding / seconds], axis=1)
    fixed, each, beside = np.linalg.lstsq(columns, np.ones(len(near)), rcond=None)[0]
    if each <= 0:
        return 0.0, 1.0
    share = min(max(beside / each, 0.0), 1.0) if padding.any() else 1.0
    return max(0.0, float(fixed / each)), round(float(share), 3)
