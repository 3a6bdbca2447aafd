"""auto.py: the settings of a policy that the server solves for."""

import pytest
from tests.policy.banks import Feed, bank

from weir.errors import SettingsError
from weir.policy.conformance import check_policy
from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.loading import load_policy
from weir.policy.online.adaptive import AutoPolicy, SolvedPolicy


def test_it_starts_greedy_with_a_price_for_latency_alone() -> None:
    policy = load_policy("auto", max_batch_size=64, max_queue_delay=0.1)
    assert isinstance(policy, AutoPolicy)
    assert isinstance(policy, SolvedPolicy)
    assert (policy.prices, policy.objective, policy.bank) == (Prices(1.0, 0.0), None, None)
    assert (policy.power, policy.profile, policy.seconds) == (None, None, 3.0)
    check_policy(policy)


def test_its_settings_in_a_text() -> None:
    policy = load_policy(
        "auto:latency_weight=1,energy_weight=0.5,reference_rate=200,power=50,p99=20ms,profile=square.profile.toml,seconds=500ms"
    )
    assert isinstance(policy, AutoPolicy)
    assert policy.prices == Prices(1.0, 0.5, 200.0)
    assert policy.objective == LatencySLO(0.02, 0.01)
    assert (policy.power, policy.profile, policy.seconds) == (50.0, "square.profile.toml", 0.5)
    assert "energy_weight=0.5" in repr(policy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto:energy_weight=-1", "energy_weight=-1.0: must be 0 or more"),
        ("auto:latency_weight=0", "latency_weight=0, energy_weight=0: one of them"),
        ("auto:reference_rate=0", "reference_rate=0.0: must be greater than 0"),
        ("auto:power=0", "power=0.0: must be greater than 0"),
        ("auto:p99=0", "p99=0.0: must be greater than 0"),
        ("auto:p99=inf", "deadline=inf: must be a number of seconds"),
        ("auto:seconds=0", "seconds=0.0: must be greater than 0"),
        ("auto:profile=", "profile='': must be the path of a file"),
        ("auto:speed=9", "no setting 'speed'; it has latency_weight, energy_weight"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=f"policy='{text}': {message}"):
        load_policy(text)


def test_a_fresh_one_has_the_settings_and_the_bank() -> None:
    policy, feed = AutoPolicy(energy_weight=2.0, p99=0.05), Feed()
    feed.arrive(policy, 200.0, 100)
    policy.adopt(bank())
    fresh = policy.fresh()
    assert isinstance(fresh, AutoPolicy)
    assert fresh is not policy
    assert (fresh.energy_weight, fresh.objective, fresh.bank) == (2.0, policy.objective, policy.bank)
    assert fresh.rate == 0.0
    assert policy.rate == pytest.approx(200.0)
    check_policy(policy)


def test_its_objective_is_a_percentile_or_the_most_in_time() -> None:
    assert AutoPolicy(p99=0.02).objective == LatencySLO.parse("p99=20ms")
    assert AutoPolicy(in_time=0.02).objective == LatencySLO.parse("in-time=20ms")
    with pytest.raises(SettingsError, match=r"p99=0\.02, in_time=0\.05: must be one of them, not both"):
        AutoPolicy(p99=0.02, in_time=0.05)
