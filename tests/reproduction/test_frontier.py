import numpy as np
import pytest
from reproduction.frontier import Corner, corners, least_power_w
from reproduction.neighbours import dominating
from reproduction.published import PROFILE

from reproduction import neighbours
from weir.policy.cost import Prices
from weir.policy.solve.bank import solve
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import static_table

LOAD = 0.7


@pytest.fixture(scope="module")
def found() -> list[Corner]:
    return corners(LOAD)


def test_corners_are_convex_from_quick_to_thrifty(found: list[Corner]) -> None:
    times, powers = np.array([each[:2] for each in found]).T
    slopes = np.diff(powers) / np.diff(times)
    assert np.all(np.diff(times) > 0.0)
    assert np.all(slopes < 0.0)
    assert np.all(np.diff(slopes) > -1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.37, 2.0, 41.0])
def test_for_any_weight_the_best_corner_is_optimal(found: list[Corner], weight: float) -> None:
    best = min(each.cost(1.0, weight) for each in found)
    exact = solve(PROFILE, LOAD * PROFILE.max_rate, Prices(1.0, weight)).cost
    assert best == pytest.approx(exact, rel=1e-6)


def test_the_least_power_lies_on_the_line_between_two_corners() -> None:
    table = np.array([0], dtype=np.uint16)
    found = [Corner(1.0, 10.0, 1, table), Corner(3.0, 6.0, 2, table)]
    assert [least_power_w(found, time) for time in (0.5, 1.0, 2.0, 9.0)] == [float("inf"), 10.0, 8.0, 6.0]


def test_a_static_size_is_dominated_by_a_mix_and_by_a_neighbour(
    found: list[Corner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "STATES", 8)
    rate = LOAD * PROFILE.max_rate
    other = evaluate(PROFILE, rate, static_table(16))
    time, power = other.response_time_ms, other.power_w
    assert not [each for each in found if each.response_time_ms <= time and each.power_w <= power]
    assert least_power_w(found, other.response_time_ms) < other.power_w
    right = next(each for each in found if each.response_time_ms > other.response_time_ms)
    better, tried = dominating(LOAD, [right.table], other)
    assert tried == 36  # one to eight other actions in states 1 to 8
    assert [about for about, _ in better] == ["3 instead of wait with 5 waiting"]
