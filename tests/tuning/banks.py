"""Banks for the tests of this part: solved for real, in a moment."""

from collections.abc import Callable
from functools import cache

from weir.policy.cost import Prices, Profile
from weir.policy.solve import bank
from weir.policy.solve.bank import Bank, default_rates, solve_bank
from weir.simulation import banks
from weir.tuning import Solver, SolveRequest

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


def solve_quickly(change: Callable[[object, str, object], None] = setattr) -> None:
    """Have banks solved for fewer rates, and from fewer requests, than a server's are."""
    change(bank, "default_rates", lambda capacity: default_rates(capacity)[::8])
    change(banks, "PROMISE_LOADS", (0.3, 0.8))
    change(banks, "PROMISE_REQUESTS", 3_000)


class QuickSolver(Solver):
    """Solves quickly, in the solving process."""

    def load(self) -> None:
        super().load()
        solve_quickly()
