"""Banks for the tests of this part: solved for real, in a moment."""

from functools import cache

from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile
from weir.policy.solve.bank import Bank, solve_bank
from weir.tuning import SolveRequest

PRICES = Prices()
PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=4.0, max_batch_size=4)


@cache
def small_bank(prices: Prices = PRICES) -> Bank:
    """Return a bank of three tables for PROFILE."""
    return solve_bank(PROFILE, prices, rates=[50.0, 200.0, 400.0])


def bank_for(wish: SolveRequest) -> Bank:
    """Return the tables of small_bank as if they had been solved for `wish`."""
    bank = small_bank(wish.prices)
    arrays = {name: getattr(bank, name) for name in ("rates", "tables", "max_waiting")}
    predicted = {name: getattr(bank, name) for name in ("response_time_ms", "p99_ms", "power_w")}
    return Bank(wish.profile, wish.prices, wish.workers, wish.objective, **arrays, **predicted)
