"""objective.py: what latency and energy are worth."""

import pytest

from weir.errors import SettingsError
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.solve.bank import solve
from weir.policy.solve.evaluation import evaluate
from weir.policy.solve.tables import greedy_table


def test_the_papers_weight_is_the_same_at_every_rate() -> None:
    assert [Prices(2.0, 1.0).latency_weight_at(rate) for rate in (1.0, 100.0)] == [2.0, 2.0]


def test_a_constant_price_grows_with_the_rate() -> None:
    prices = Prices(2.0, 1.0, reference_rate=200.0)
    assert [prices.latency_weight_at(rate) for rate in (100.0, 200.0, 400.0)] == [1.0, 2.0, 4.0]


def test_at_the_reference_rate_both_are_the_same_problem() -> None:
    rate = 0.7 * GOOGLENET_P4.max_rate
    plain, constant = solve(GOOGLENET_P4, rate), solve(GOOGLENET_P4, rate, Prices(reference_rate=rate))
    assert plain.table.tolist() == constant.table.tolist()
    assert plain.cost == constant.cost


def test_constant_prices_add_up_over_rates() -> None:
    """The cost per ms is price·rows in the system + power: at twice the rate a row·ms costs the same."""
    prices = Prices(1.0, 0.0, reference_rate=1000.0)
    for rate in (500.0, 1000.0):
        seen = evaluate(GOOGLENET_P4, rate, greedy_table(32), prices)
        assert seen.cost == pytest.approx(rate / 1000.0 * seen.response_time_ms)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((-1.0, 1.0), "latency_weight=-1.0: must be a number, 0 or more"),
        ((1.0, float("inf")), "energy_weight=inf: must be a number, 0 or more"),
        ((0.0, 0.0), "latency_weight=0, energy_weight=0: one of them must be greater than 0"),
        ((1.0, 1.0, 0.0), "reference_rate=0.0: must be a number of rows per second, greater than 0"),
        ((1.0, 1.0, float("nan")), "reference_rate=nan"),
    ],
)
def test_impossible_prices_are_named(arguments: tuple[float, ...], says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Prices(*arguments)
    assert says in raised.value.message
