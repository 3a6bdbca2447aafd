"""Simulated means against what is known exactly, in intervals; and what a comparison promises."""

import gc
from collections import Counter
from collections.abc import Callable
from itertools import product
from math import exp, factorial, inf
from pathlib import Path
from sys import maxsize
from typing import Any

import numpy as np
import pytest
from reproduction.response import response_time
from tests.rings import spread, subcases

from weir.batching import BatchingSettings
from weir.errors import SettingsError
from weir.policy.cost import GOOGLENET_P4, Prices, Profile
from weir.policy.decision import ControlLimit, Decision, FullBatches, Greedy, Observation, Policy, SizeOrDelay
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import Table, greedy_table, limit_table, static_table
from weir.simulation import simulator
from weir.simulation.arrivals import RecordedArrivals
from weir.simulation.engine import SimulatedRequest
from weir.simulation.results import BatchMeans
from weir.simulation.simulator import capacity_of, policy_for, settings_for, simulate

ONE = Profile.linear(alpha_ms=0.0, tau0_ms=2.0, max_batch_size=1)  # one at a time, 2 ms each
ONE_RANDOM = Profile.linear(alpha_ms=0.0, tau0_ms=2.0, max_batch_size=1, cv=1.0)
STEPPED = Profile(
    service_time_ms=np.array([1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0]),
    energy_mj=np.array([10.0, 11.0, 12.0, 13.0, 25.0, 26.0, 27.0, 28.0]), cv=np.zeros(8),
)  # fmt: skip
NOISY = Profile.linear(alpha_ms=0.5, tau0_ms=2.0, beta_mj=5.0, zeta0_mj=10.0, max_batch_size=8, cv=0.5)
PROFILES = {"googlenet": GOOGLENET_P4, "stepped": STEPPED, "noisy": NOISY}


def waiting_of_erlang(load: float, workers: int) -> float:
    """Return the probability that all of `workers` are busy in M/M/c at `load` per worker."""
    offered = load * workers
    full = offered**workers / factorial(workers) / (1.0 - load)
    return full / (sum(offered**k / factorial(k) for k in range(workers)) + full)


@subcases("workers", [2, 4])
def test_several_workers_on_one_line_are_m_m_c(workers: int) -> None:
    load = 0.7
    seen = simulate(ONE_RANDOM, ["greedy"], f"poisson:{load}", workers=workers, requests=20_000).outcomes["greedy"]
    expected = 2.0 + waiting_of_erlang(load, workers) * 2.0 / (workers * (1.0 - load))
    assert expected in seen.response_time_ms
    assert seen.busy_share == pytest.approx(load, rel=0.03)


TABLES: dict[str, Callable[[int], Table]] = {
    "greedy": greedy_table,
    "full:4": lambda _: static_table(4),
    "control-limit:3": lambda largest: limit_table(3, largest),
}


@pytest.mark.parametrize("of", spread(PROFILES))
def test_means_are_those_of_the_exact_evaluation(of: str) -> None:
    profile, prices, outside = PROFILES[of], Prices(1.0, 2.0), Counter[str]()
    for seed, (load, policy) in enumerate(product((0.2, 0.6, 0.8), TABLES)):
        compared = simulate(profile, [policy], f"poisson:{load}", requests=10_000, seed=seed, prices=prices)
        seen, table = compared.outcomes[policy], TABLES[policy](profile.max_batch_size)
        exact = evaluate(profile, compared.rate, table, prices)
        assert seen.stable is exact.stable
        if not exact.stable:
            assert seen.response_time_ms.value == seen.cost.value == inf
            continue
        assert seen.busy_share == pytest.approx(exact.busy_share, abs=0.03)
        assert seen.batch_size == pytest.approx(exact.batch_size, rel=0.1)
        for what in ("response_time_ms", "power_w", "cost"):
            outside[what] += getattr(exact, what) not in getattr(seen, what)
        law = response_time(profile, compared.rate, table)
        for what, share in (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99)):
            outside[what] += law.quantile_ms(share) not in getattr(seen, what)
    # Of 9 intervals of 95 %, more than 2 miss in 1 of 100 such tests; these are seeded, by their place in the grid.
    assert all(misses <= 2 for misses in outside.values()), outside


def test_the_same_seed_gives_the_same_and_another_another() -> None:
    first, again = (simulate(NOISY, ["greedy"], "poisson:0.5", requests=3_000) for _ in range(2))
    other = simulate(NOISY, ["greedy"], "poisson:0.5", requests=3_000, seed=2)
    assert first.to_dict() == again.to_dict()
    assert first.to_dict() != other.to_dict()


def test_policies_meet_the_same_luck_whatever_else_is_compared() -> None:
    alone = simulate(NOISY, ["control-limit:3"], "poisson:0.6", requests=5_000)
    among = simulate(NOISY, ["greedy", "full:4", "control-limit:3"], "poisson:0.6", requests=5_000)
    assert alone.outcomes["control-limit:3"].to_dict() == among.outcomes["control-limit:3"].to_dict()


def test_differences_are_surer_than_what_they_are_of() -> None:
    compared = simulate(GOOGLENET_P4, ["greedy", "control-limit:8"], "poisson:0.7", requests=20_000)
    difference = compared.difference("greedy", "control-limit:8")
    assert difference.low > 0.0
    assert difference.half_width < 0.5 * compared.outcomes["greedy"].cost.half_width
    back = compared.difference("control-limit:8", "greedy")
    assert (back.value, back.low, back.high) == pytest.approx((-difference.value, -difference.high, -difference.low))
    exact = [evaluate(GOOGLENET_P4, compared.rate, table).cost for table in (greedy_table(32), limit_table(8, 32))]
    assert exact[0] - exact[1] in difference
    assert compared.difference("greedy", "greedy", "p99_ms") == (0.0, 0.0, 0.0)


def test_the_price_of_latency_is_that_at_the_rate() -> None:
    """At half of the rate that the price is stated for, a millisecond of the mean response time costs half."""
    prices = Prices(3.0, 2.0, reference_rate=0.8 * NOISY.max_rate)
    seen = simulate(NOISY, ["greedy"], "poisson:0.4", requests=2_000, prices=prices).outcomes["greedy"]
    assert seen.cost.value == pytest.approx(1.5 * seen.response_time_ms.value + 2.0 * seen.power_w.value)


def test_smdp_is_solved_for_the_very_case() -> None:
    compared = simulate(STEPPED, ["smdp", "greedy"], "poisson:0.5", requests=5_000, prices=Prices(0.1, 1.0))
    assert compared.best == "smdp"
    assert compared.difference("greedy", "smdp").low > 0.0


def test_what_cannot_keep_up_is_unstable() -> None:
    compared = simulate(GOOGLENET_P4, ["greedy", "full:1"], "poisson:0.7", requests=5_000)
    seen = compared.outcomes["full:1"]
    assert not seen.stable
    assert seen.response_time_ms.value == seen.p99_ms.value == seen.cost.value == seen.queue_time_ms == inf
    assert seen.busy_share == pytest.approx(1.0)
    assert seen.power_w.value == pytest.approx(39.5 / 1.3571)
    assert compared.best == "greedy"
    assert simulate(ONE, ["greedy"], "poisson:1.2", requests=1_000).best is None


class Lazy:
    """Serves one at a time however many wait, and does not say so beforehand."""

    def decide(self, seen: Observation) -> Decision:
        """Serve one, unless asked about a very long line."""
        return Decision(1 if seen.waiting < 500_000 else 0)


def test_growth_is_seen_where_the_policy_does_not_say() -> None:
    compared = simulate(GOOGLENET_P4, {"lazy": Lazy(), "greedy": Greedy()}, "poisson:0.7", requests=5_000)
    assert not compared.outcomes["lazy"].stable
    assert simulate(GOOGLENET_P4, {"lazy": Lazy()}, "poisson:0.1", requests=5_000).outcomes["lazy"].stable


@subcases("requests", [2, 20, 100, 500])
def test_few_batches_are_no_growth(requests: int) -> None:
    compared = simulate(GOOGLENET_P4, ["full:32", "greedy"], "poisson:0.5", requests=requests)
    assert all(each.stable for each in compared.outcomes.values())


def test_a_bounded_line_is_stable_and_refuses() -> None:
    settings = BatchingSettings(max_batch_size=1, max_queue_size=20, max_queue_delay=inf)
    seen = simulate(ONE, ["greedy"], "poisson:2", requests=10_000, settings=settings).outcomes["greedy"]
    assert seen.stable
    assert seen.refused_share == pytest.approx(0.5, abs=0.02)
    assert seen.longest_ms <= 21 * 2.0 + 1e-9
    assert seen.busy_share == pytest.approx(1.0, abs=0.01)


def test_a_deadline_is_kept_or_counted() -> None:
    kept = simulate(ONE, ["greedy"], "poisson:1.2", requests=10_000, deadline=0.02).outcomes["greedy"]
    assert kept.stable
    assert 0.1 < kept.late_share.value + kept.refused_share < 0.35
    counted = simulate(ONE_RANDOM, ["greedy"], "poisson:0.5", requests=20_000, latency_objective="p90=10ms").outcomes[
        "greedy"
    ]
    assert exp(-10.0 / 4.0) in counted.late_share
    assert counted.refused_share == 0.0


def test_rows_of_a_request_count_as_load() -> None:
    seen = simulate(NOISY, ["greedy"], "poisson:0.5,rows=3", requests=5_000)
    assert seen.rate == pytest.approx(0.5 * NOISY.max_rate)
    assert seen.outcomes["greedy"].batch_size > 3.0
    large = simulate(NOISY, ["greedy"], "poisson:0.5,rows=20", requests=1_000).outcomes["greedy"]
    assert large.batch_sizes.keys() >= {4, 8}  # 20 rows are two full batches and a half
    assert large.requests <= 1_000


def test_the_latency_offset_adds_to_the_response_only() -> None:
    late = Profile(ONE.service_time_ms, ONE.energy_mj, ONE.cv, latency_offset_ms=5.0)
    plain, seen = (simulate(each, ["greedy"], "poisson:0.5", requests=2_000).outcomes["greedy"] for each in (ONE, late))
    assert seen.response_time_ms.value == pytest.approx(plain.response_time_ms.value + 5.0)
    assert seen.queue_time_ms == pytest.approx(plain.queue_time_ms)
    assert seen.power_w == pytest.approx(plain.power_w)


def test_a_trace_is_played_whole() -> None:
    trace = RecordedArrivals(np.cumsum(np.random.default_rng(1).exponential(0.004, 1_000)))
    seen = simulate(ONE, ["greedy"], trace, warm_up=0.0)
    assert seen.rate == pytest.approx(250.0, rel=0.1)
    assert 960 <= seen.outcomes["greedy"].requests <= 1_000  # what does not fill a stretch is left out
    assert simulate(ONE, ["greedy"], trace, requests=300, warm_up=0.0).outcomes["greedy"].requests <= 300
    fast = simulate(ONE, ["greedy"], RecordedArrivals(np.linspace(0.0, 0.1, 1_000)), warm_up=0.0).outcomes["greedy"]
    assert not fast.stable


def test_progress_is_reported_to_the_end() -> None:
    told: list[tuple[str, int, int]] = []
    policies = {"a": "greedy", "b": "full:4"}
    simulate(NOISY, policies, "poisson:0.5", requests=20_000, progress=lambda *each: told.append(each))
    assert told == [(name, done, 20_000) for name in policies for done in (16_384, 20_000)]


@subcases(
    ("changed", "message"),
    [
        ({"workers": 0}, "workers=0: must be 1 or more"),
        ({"workers": 2.5}, "workers=2.5: must be 1 or more, a whole number"),
        ({"seed": -1}, "seed=-1: must be 0 or more"),
        ({"requests": 1}, "requests=1: must be 2 or more"),
        ({"requests": 50.5}, "requests=50.5: must be 2 or more, a whole number"),
        ({"deadline": -1.0}, "deadline=-1.0: must be a number of seconds, greater than 0"),
        ({"deadline": float("nan")}, "deadline=nan: must be a number of seconds, greater than 0"),
        ({"warm_up": 1.0}, "warm_up=1.0: must be a share, from 0 to below 1"),
        ({"policies": []}, "must be one or more"),
        ({"policies": ["greedy", "greedy"]}, "policy='greedy': given twice"),
        ({"policies": ["greedyy"]}, "policy='greedyy': must be one of"),
        ({"settings": BatchingSettings(max_batch_size=9)}, "max_batch_size=9: must not be greater than the profile's 8"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"policies": ["greedy"], "arrivals": "poisson:0.5", "requests": 100, **changed}
    with pytest.raises(SettingsError) as caught:
        simulate(NOISY, **given)
    assert message in caught.value.message


def test_policies_have_names_and_an_unknown_one_in_a_difference_is_named() -> None:
    compared = simulate(NOISY, [Greedy(), "greedy", ControlLimit(3)], "poisson:0.5", requests=200)
    assert list(compared.outcomes) == ["Greedy()", "greedy", "ControlLimit(limit=3)"]
    for names, message in ((("greedy", "full"), "policy='full'"), (("greedy", "greedy", "speed"), "what='speed'")):
        with pytest.raises(SettingsError, match=message):
            compared.difference(*names)


# The best batch is 4: 4000 rows/s; a full one of 8 serves 2667.
PEAKED = Profile(np.array([1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0]), np.ones(8), np.zeros(8))


@subcases(
    ("policy", "capacity"),
    [
        (Greedy(), 8 / 0.003), (FullBatches(4), 4000.0), (FullBatches(1), 1000.0), (ControlLimit(2), 8 / 0.003),
        (SizeOrDelay(), 8 / 0.003),
    ],
)  # fmt: skip
def test_a_long_line_is_served_in_the_batches_that_the_policy_cuts(policy: Policy, capacity: float) -> None:
    assert capacity_of(policy, PEAKED, settings_for(PEAKED)) == pytest.approx(capacity)
    assert capacity_of(policy, PEAKED, settings_for(PEAKED), workers=3) == pytest.approx(3.0 * capacity)


def test_profile_and_policies_may_be_as_on_the_command_line(tmp_path: Path) -> None:
    (path := tmp_path / "it.toml").write_text(NOISY.to_toml())
    for profile in (path, str(path)):
        compared = simulate(profile, "greedy,size-or-delay:size=8,delay=5ms", "poisson:0.5", requests=500)
        assert list(compared.outcomes) == ["greedy", "size-or-delay:size=8,delay=5ms"]


@subcases(
    "text",
    [
        "greedy",
        "smdp|greedy|size-or-delay:size=32,delay=5ms|full:16",
        "full:size=16|full:size=8",
        "mine:Policy:patience=20ms,limit=3|greedy",
        "square.policy.npz|greedy",
        "size-or-delay:32,delay=5ms",
    ],
)
def test_commas_separate_policies_and_their_settings(text: str) -> None:
    assert simulator.split_policies(text.replace("|", ",")) == text.split("|")


@subcases("text", ["a=b.npz,greedy", "greedy,delay=5ms", "delay=5ms", "greedy,,full", ""])
def test_what_is_no_list_of_policies(text: str) -> None:
    with pytest.raises(SettingsError, match="policy="):
        simulator.split_policies(text)


def test_without_settings_nothing_bounds_the_policy() -> None:
    assert settings_for(NOISY) == BatchingSettings(max_batch_size=8, max_queue_delay=inf, max_queue_size=maxsize)
    smaller = BatchingSettings(max_batch_size=4)
    assert settings_for(NOISY, smaller) is smaller


class Counting:
    """A policy that remembers, and does not know how to forget."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, seen: Observation) -> Decision:
        """Count."""
        self.asked += 1
        return Decision(seen.waiting)


def test_no_run_sees_the_memory_of_another() -> None:
    policy = Counting()
    used = simulator.fresh(policy)
    used.decide(Observation(0.0, 1, 0.0, inf, 1, 0.0, 1, 1, 8, inf, False))
    assert isinstance(used, Counting)
    assert (policy.asked, used.asked) == (0, 1)
    solved = policy_for("smdp", ONE)
    assert isinstance(solved, SolvedPolicy)
    assert simulator.fresh(solved) is not solved


# The memory of a simulation does not grow with its length.


def test_requests_that_had_their_end_are_forgotten() -> None:
    alive: list[int] = []

    def look(policy: str, done: int, total: int) -> None:
        alive.append(sum(type(each) is SimulatedRequest for each in gc.get_objects()))

    simulate(GOOGLENET_P4, ["control-limit:8"], "poisson:0.7", requests=50_000, progress=look)
    assert len(alive) == 4
    assert max(alive) < 200  # those that wait or run, and the few that are still referred to


def test_what_is_kept_of_a_run_has_one_size() -> None:
    def kept(requests: int) -> int:
        seen = BatchMeans(GOOGLENET_P4, requests // 10, requests)
        responses = seen.responses
        arrays = [seen.starts, seen.sizes, seen.reasons, responses.counts, responses.by_stretch]
        return sum(each.nbytes for each in [*seen.sums.values(), *arrays])

    assert kept(10**9) <= kept(10**5) * 1.05
