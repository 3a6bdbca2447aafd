"""The best hand-tuned rules are the best: nothing in their family does better on the same line."""

import numpy as np
import pytest

from weir.errors import SettingsError
from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import GOOGLENET_P4, Floats
from weir.policy.solve.evaluation import evaluate
from weir.policy.solve.tables import limit_table
from weir.simulation.search import DELAYS, best_limit, best_size_or_delay

P4 = GOOGLENET_P4


def poisson(load: float, count: int = 8_000) -> Floats:
    rate = load * P4.max_rate
    return np.asarray(np.cumsum(np.random.default_rng(3).exponential(1.0 / rate, count)), dtype=np.float64)


def test_finds_the_limit_that_is_best_by_the_exact_model() -> None:
    rate, prices = 0.5 * P4.max_rate, Prices(1.0, 10.0)
    exact = [evaluate(P4, rate, limit_table(limit, 32), prices).cost for limit in range(1, 33)]
    found = best_limit(P4, poisson(0.5), prices)
    assert found is not None
    limit = int(found.policy.removeprefix("control-limit:"))
    assert exact[limit - 1] <= min(exact) * 1.01


def test_the_price_of_latency_is_that_at_the_rate_of_the_line() -> None:
    """Stated at a tenth of the rate, a millisecond of the mean response time costs ten times as much there."""
    times = poisson(0.5, 4_000)
    rate = len(times) / float(times[-1])
    stated = best_limit(P4, times, Prices(1.0, 10.0, reference_rate=rate / 10.0))
    assert stated == best_limit(P4, times, Prices(10.0, 10.0)) != best_limit(P4, times, Prices(1.0, 10.0))


def test_a_timeout_that_never_ends_a_wait_is_a_limit() -> None:
    times, prices = poisson(0.6, 5_000), Prices(1.0, 1.0)
    limit = best_limit(P4, times, prices)
    delay = best_size_or_delay(P4, times, prices, sizes=range(1, 33), delays=[100.0])
    assert limit is not None and delay is not None
    assert delay.figures == limit.figures
    assert delay.policy == f"size-or-delay:size={limit.policy.removeprefix('control-limit:')},delay=100000ms"


def test_an_objective_rules_out_what_is_late_too_often() -> None:
    times, objective = poisson(0.5), LatencySLO(0.02, 0.01)
    delays = (0.01, 0.02)
    for found in (
        best_limit(P4, times, objective=objective),
        best_size_or_delay(P4, times, objective=objective, delays=delays),
    ):
        assert found is not None
        assert found.figures.late_share <= 0.01
    assert best_limit(P4, times, objective=LatencySLO(0.002, 0.01)) is None


def test_tells_how_far_it_is() -> None:
    told: list[tuple[int, int]] = []
    best_size_or_delay(P4, poisson(0.5, 200), progress=lambda done, total: told.append((done, total)))
    count = 13 * len(DELAYS)
    assert told[0] == (1, count) and told[-1] == (count, count)


def test_a_line_too_short_for_a_rule_is_no_line_for_it() -> None:
    found = best_limit(P4, np.linspace(0.01, 0.09, 9), Prices(0.0, 1.0))
    assert found is not None and int(found.policy.removeprefix("control-limit:")) <= 4


@pytest.mark.parametrize("times", [[], [1.0], [0.0, 0.0]])
def test_there_must_be_a_line(times: list[float]) -> None:
    with pytest.raises(SettingsError, match="arrivals: must be two or more"):
        best_limit(P4, np.array(times))
