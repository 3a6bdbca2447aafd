"""The closed form where the search for several workers' limit starts."""

from math import sqrt

import numpy as np
import pytest

from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.solve.tables import limit_of, multi_worker_table, start_limit


def test_balances_waiting_for_company_against_batches_saved() -> None:
    rate = 1000.0  # rows/s: one row per millisecond
    assert start_limit(GOOGLENET_P4, rate, Prices(1.0, 10.0)) == round(sqrt(10.0 * 19.6 / (0.5 + 0.3051)))


def test_prices_that_hold_across_rates_change_the_weight_of_latency() -> None:
    dear = Prices(1.0, 10.0, reference_rate=500.0)
    assert start_limit(GOOGLENET_P4, 1000.0, dear) == start_limit(GOOGLENET_P4, 1000.0, Prices(2.0, 10.0))


@pytest.mark.parametrize(("prices", "limit"), [(Prices(1.0, 0.0), 1), (Prices(0.0, 1.0), 32), (Prices(1.0, 1e6), 32)])
def test_stays_between_one_row_and_the_best_batch(prices: Prices, limit: int) -> None:
    assert start_limit(GOOGLENET_P4, 1000.0, prices) == limit


def test_never_waits_for_more_than_the_batch_that_is_worth_it() -> None:
    slow_when_large = Profile(np.array([1.0, 1.5, 9.0]), np.array([9.0, 9.0, 9.0]), np.zeros(3))
    assert start_limit(slow_when_large, 1000.0, Prices(0.0, 1.0)) == 2
    assert multi_worker_table(slow_when_large, 2).tolist() == [0, 0, 2]


def test_a_crews_table_waits_for_its_limit_and_then_takes_all() -> None:
    table = multi_worker_table(GOOGLENET_P4, 5)
    assert limit_of(table) == 5
    assert table.tolist() == [0] * 5 + list(range(5, 33))
