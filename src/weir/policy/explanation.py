"""What a solved policy does, and what that is predicted to bring, as a JSON-able document."""

from math import isfinite
from typing import Any

import numpy as np

from weir.policy.account import Account
from weir.policy.bank import Bank
from weir.policy.prices import Prices
from weir.policy.profile import Floats
from weir.policy.rate_bands import SILENCE, RateBand


def explain(bank: Bank | None, stage: RateBand | None, rate: float, account: Account | None = None) -> dict[str, Any]:
    """Return the document of a policy that decides by `stage` of `bank` at `rate`; 0, None and None while it learns."""
    return {
        "learning": stage is None,
        "rate": rate or None,
        "capacity": None if bank is None else bank.capacity,
        "workers": None if bank is None else bank.workers,
        "prices": None if bank is None else prices_of(bank.prices),
        "objective": None if bank is None or bank.objective is None else {"text": str(bank.objective)} | bank.objective._asdict(),
        "table": {"index": None, "rate": None, "limit": None} if bank is None or stage is None else _table(bank, stage),
        "guards": {"silence": None, "filling": None, "deadline": None} if stage is None else _guards(stage, rate),
        "max_waiting": None if stage is None else stage.max_waiting,
        "predicted": predict(bank, rate),
        "beside_greedy": {"greedy": None, "excess": None} if account is None else {"greedy": account.greedy, "excess": account.excess},
    }  # fmt: skip


def prices_of(prices: Prices) -> dict[str, float | None]:
    """Return `prices` as a dict, by the names of its settings."""
    names = ("latency_weight", "energy_weight", "reference_rate")
    return {name: getattr(prices, name) for name in names}


def predict(bank: Bank | None, rate: float) -> dict[str, float | None]:
    """Return the mean response time, its 99th percentile, power and cost predicted for `rate`: between the bank's rates
    by interpolation, below them those of the lowest, and None at rates that the workers cannot serve."""
    if bank is None or not 0.0 < rate < bank.capacity:
        return dict.fromkeys(("response_time_ms", "p99_ms", "power_w", "cost"))
    response, p99 = (_between(bank, values, rate) for values in (bank.response_time_ms, bank.p99_ms))
    power = _between(bank, bank.power_w, rate) * min(rate / float(bank.rates[0]), 1.0)
    cost = bank.prices.latency_weight_at(rate) * response + bank.prices.energy_weight * power
    values = {"response_time_ms": response, "p99_ms": p99, "power_w": power, "cost": cost}
    return {name: value if isfinite(value) else None for name, value in values.items()}


def _between(bank: Bank, values: Floats, rate: float) -> float:
    return float(np.interp(rate, bank.rates, values))


def _table(bank: Bank, stage: RateBand) -> dict[str, Any]:
    return {
        "index": stage.entry,
        "rate": float(bank.rates[stage.entry]),
        "limit": stage.limits[0],
        "share_of_second": stage.share,
    }


def _guards(stage: RateBand, rate: float) -> dict[str, float | None]:
    """For how long: since the last arrival, since the oldest, and since the oldest if it is alone."""
    return {
        "silence": SILENCE / rate,
        "filling": stage.filling / rate,
        "deadline": None if stage.allowance is None else stage.allowance[1],
    }
