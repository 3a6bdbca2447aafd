"""The harness of the comparisons beyond the paper: intervals, what is shown, and the page. The figures are no tests."""

from collections.abc import Iterator
from math import inf

import numpy as np
import pytest
from benchmarks.policies import bursts
from benchmarks.policies.bursts import ALLOWED, arrivals, beside_greedy, recorded, traffics
from benchmarks.policies.clairvoyant import by_row, clairvoyant
from benchmarks.policies.foreseen import beside_the_optimum
from benchmarks.policies.harness import (
    Effort,
    best_limit,
    best_size_or_delay,
    estimate,
    known,
    play_all,
    real,
    response,
    ruled,
    saved,
    show,
    tuned_limit,
)
from tests.policy.compiler import needs_compiler
from tests.rings import spread

from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import GOOGLENET_P4, Floats, Profile
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import limit_table
from weir.simulation.arrivals import Poisson
from weir.simulation.rounds import Rule
from weir.simulation.simulator import run


def test_every_player_meets_the_same_lines() -> None:
    steps: list[str] = []
    process = Poisson(0.5 * GOOGLENET_P4.max_rate)
    players = {
        "batcher": real(GOOGLENET_P4, "control-limit:8"),
        "short cut": ruled(GOOGLENET_P4, Rule(limit_table(8, 32).tolist())),
        "best": tuned_limit(GOOGLENET_P4, Prices(1.0, 0.0)),
        "none can": tuned_limit(GOOGLENET_P4, Prices(), objective=LatencySLO(0.002)),
    }
    seen = play_all(process, players, Effort(2, 3_000, steps.append))
    assert len(steps) == 8
    for one, other in zip(known(seen["batcher"]), known(seen["short cut"]), strict=True):
        assert response(one) == pytest.approx(response(other), rel=0.01)
    spared = saved(seen["best"], seen["batcher"], response)
    assert spared is not None and 0.0 < spared.value < 1.0
    assert saved(seen["none can"], seen["batcher"], response) is None and show(None) == "–"


def test_an_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.value == 2.0 and found.half_width == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert show(found, 1) == "2.0 ± 2.5"
    assert estimate([1.0]).high == inf


@needs_compiler
def test_the_clairvoyant_optimum_is_the_best_of_all_partitions() -> None:
    rng = np.random.default_rng(3)
    for number in range(40):
        largest, joule = int(rng.integers(1, 5)), float(rng.uniform(0.0, 5.0))
        times, energies = (np.cumsum(rng.uniform(0.2, 3.0, largest)) for _ in range(2))
        profile = Profile(times, energies, np.zeros(largest), 0.5)
        coming = 3.0 + np.cumsum(rng.exponential(0.002 if number % 2 else 0.0005, 9))
        every = [by_row(profile, coming, np.array(sizes), joule).mean() for sizes in partitions(9, largest)]
        assert clairvoyant(profile, coming, joule).mean() == pytest.approx(min(every), rel=1e-9)


def partitions(rows: int, largest: int) -> Iterator[list[int]]:
    """Yield every way to divide `rows` into batches, in order."""
    if not rows:
        yield []
    for size in range(1, min(rows, largest) + 1):
        yield from ([size, *rest] for rest in partitions(rows - size, largest))


@needs_compiler
def test_no_policy_costs_less_than_the_clairvoyant_optimum_and_costs_are_counted_alike() -> None:
    """Also of the batches that greedy makes: by row they cost what the real batcher says."""
    rate = 0.8 * GOOGLENET_P4.max_rate
    coming = recorded("code", rate).times(np.random.default_rng(1), 2_000)
    least, seen = beside_the_optimum(coming, rate, 0.3)
    assert least > 0.0 and all(each.value > 0.0 for each in seen.values())
    sizes = run(GOOGLENET_P4, "greedy", coming).batches.rows
    alone = by_row(GOOGLENET_P4, coming, np.asarray(sizes), 0.3 * rate / 1000.0)
    assert bursts.costs(GOOGLENET_P4, "greedy", coming, rate, 0.3).mean() == pytest.approx(alone.mean(), rel=0.01)


@pytest.mark.parametrize(("name", "requests"), [("conv", 19_366), ("code", 8_819)])
def test_the_recorded_arrivals_are_scaled_to_a_rate(name: str, requests: int) -> None:
    trace = recorded(name, 250.0)
    assert trace.length == requests
    assert trace.rate == pytest.approx(250.0)


# Where solved policies cost more than greedy before they kept an account, in MMPP, on/off and recorded traffic: up to 5 %.
@pytest.mark.parametrize(
    ("name", "weight"),
    spread(
        [
            ("MMPP, load 0.1: 20 times, every 20 s", 1.0),
            ("MMPP, load 0.1: 20 times, every 0.02 s", 1.0),
            ("MMPP, load 0.3: 5 times, every 0.2 s", 0.0),
            ("on/off, load 0.1: 0.1 s on, 1 s off", 10.0),
            ("on/off, load 0.1: 0.3 s on, 1 s off", 1.0),
            ("on/off, load 0.5: 0.05 s on, 0.05 s off", 0.0),
            ("Azure code, load 0.3", 1.0),
        ],
        2,
    ),
)
def test_no_policy_costs_more_than_greedy_on_traffic_that_no_table_is_for(name: str, weight: float) -> None:
    traffic = next(each for each in traffics() if each.name == name)
    rate = traffic.load * GOOGLENET_P4.max_rate
    seen = beside_greedy(arrivals(traffic, rate, traffic.requests), rate, weight)
    assert max(seen["solved"].value, seen["auto"].value) < ALLOWED


# The best hand-tuned rules are the best: nothing in their family does better on the same line.


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


def test_a_timeout_that_never_ends_a_wait_is_a_limit() -> None:
    times, prices = poisson(0.6, 5_000), Prices(1.0, 1.0)
    limit = best_limit(P4, times, prices)
    delay = best_size_or_delay(P4, times, prices, sizes=range(1, 33), delays=[100.0])
    assert limit is not None and delay is not None
    assert delay.figures == limit.figures
    assert delay.policy == f"size-or-delay:size={limit.policy.removeprefix('control-limit:')},delay=100000ms"
