"""cost.py: what a profile says, and that a file says the same; the latency objective: its text form, its guard, what it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.late import scipy
from tests.rings import subcases

from weir.errors import SettingsError
from weir.policy.cost import GOOGLENET_P4, LatencySLO, Prices, Profile, read_profile, trimmed, unavoidable_power_w
from weir.policy.solve.bank import solve
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import greedy_table


def profile(**changes: Any) -> Profile:
    """Return a profile of three sizes, the third of them slower, with changes."""
    fields: dict[str, Any] = {
        "service_time_ms": [2.0, 3.0, 6.0],
        "energy_mj": [1.0, 1.5, 4.0],
        "cv": [0.0, 0.1, 0.2],
        "latency_offset_ms": 0.5,
        "pipeline_depth": 2,
        "energy_source": "rapl",
        "about": {"model": "square:Square"},
    }
    return Profile(**fields | changes)


def test_the_papers_profile() -> None:
    assert GOOGLENET_P4.max_batch_size == GOOGLENET_P4.best_batch_size == 32
    assert GOOGLENET_P4.max_rate == pytest.approx(2959.0, abs=0.5)
    fit = GOOGLENET_P4.fit()
    assert fit[:4] == pytest.approx((0.3051, 1.052, 19.90, 19.60))
    assert fit[4:] == pytest.approx((1.0, 1.0))


def test_the_best_size_may_not_be_the_largest() -> None:
    assert (profile().best_batch_size, profile().max_rate) == pytest.approx((2, 2000.0 / 3.0))
    with pytest.raises(ValueError, match="read-only"):
        profile().cv[0] = 1.0


def test_without_energies_energy_is_time() -> None:
    made = Profile.linear(alpha_ms=1.0, tau0_ms=2.0, max_batch_size=2)
    assert made.energy_source == "time"
    assert made.energy_mj.tolist() == made.service_time_ms.tolist() == [3.0, 4.0]
    assert Profile.linear(alpha_ms=1.0, tau0_ms=2.0, zeta0_mj=1.0, max_batch_size=1).energy_source == "stated"
    with pytest.raises(SettingsError, match="max_batch_size=0: must be 1 or more"):
        Profile.linear(alpha_ms=1.0, tau0_ms=1.0, max_batch_size=0)


def test_scaled_and_cut() -> None:
    scaled = profile().scaled(time=10.0, energy=2.0)
    assert scaled.service_time_ms.tolist() == [20.0, 30.0, 60.0]
    assert scaled.energy_mj.tolist() == [2.0, 3.0, 8.0]
    assert (scaled.latency_offset_ms, scaled.cv.tolist(), scaled.pipeline_depth) == (5.0, [0.0, 0.1, 0.2], 2)
    assert profile().up_to(2).service_time_ms.tolist() == [2.0, 3.0]
    for size in (0, 4):
        with pytest.raises(SettingsError, match=f"max_batch_size={size}: the profile has sizes 1 to 3"):
            profile().up_to(size)


@subcases("made", [profile(), GOOGLENET_P4])
def test_a_file_says_the_same(made: Profile) -> None:
    read = Profile.from_toml(made.to_toml())
    for name in ("service_time_ms", "energy_mj", "cv", "latency_offset_ms", "pipeline_depth", "energy_source"):
        assert np.array_equal(getattr(read, name), getattr(made, name))
    assert dict(read.about) == dict(made.about)


def test_a_file_need_only_have_times() -> None:
    read = Profile.from_toml("weir_profile = 1\n[table]\nservice_time_ms = [1.0, 1.5]\n")
    assert (read.energy_mj.tolist(), read.cv.tolist(), read.energy_source) == ([1.0, 1.5], [0.0, 0.0], "time")


@subcases(
    ("changes", "says"),
    [
        ({"service_time_ms": []}, "service_time_ms: must have one value for each batch size"),
        ({"cv": [0.0]}, "cv: must have one value for each batch size, 3 of them; has shape (1,)"),
        ({"service_time_ms": [[1.0, 1.0, 1.0]]}, "has shape (1, 3)"),
        ({"service_time_ms": [1.0, 0.0, 1.0]}, "the value for batch size 2 is 0.0; must be from 1e-06 to 1e+09"),
        ({"energy_mj": [1.0, 1.0, -1.0]}, "energy_mj: the value for batch size 3 is -1.0; must be from 0 to 1e+12"),
        ({"service_time_ms": [1.0, 1e300, 1.0]}, "the value for batch size 2 is 1e+300; must be from 1e-06 to 1e+09"),
        ({"cv": [float("nan"), 0.0, 0.0]}, "cv: the value for batch size 1 is nan"),
        ({"latency_offset_ms": -1.0}, "latency_offset_ms=-1.0: must be a number, 0 or more"),
        ({"energy_source": "guess"}, "energy_source='guess': must be one of nvml, rapl, stated, time"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        profile(**changes)
    assert says in raised.value.message


TIMES = "[table]\nservice_time_ms = [1.0]"


@subcases(
    ("text", "says"),
    [
        ("weir_profile = ", "must be a profile made by `weir profile`"),
        ("weir_profile = 2", "weir_profile=2: must be 1"),
        ("weir_profile = 1", "must be a profile made by `weir profile`: 'table'"),
        ("weir_profile = 1\ntable = 3", "must be a profile made by `weir profile`"),
        (f"weir_profile = 1\nofset_ms = 3.0\n{TIMES}", "ofset_ms: unknown key in a profile; available: about, best_ba"),
        (f"weir_profile = 1\n{TIMES}\nenergy_mJ = [2.0]", "energy_mJ: unknown key in a profile; available: cv, energy"),
        ("weir_profile = 1\n[table]\nservice_time_ms = ['x']", "must be a profile made by `weir profile`"),
        ("weir_profile = 1\n[table]\nservice_time_ms = [-1.0]", "batch size 1 is -1.0"),
    ],
)
def test_a_bad_file_is_named(text: str, says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Profile.from_toml(text, "x.profile.toml")
    assert raised.value.message.startswith("x.profile.toml: ")
    assert says in raised.value.message


def test_a_file_of_any_editor_is_read_and_one_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "square.profile.toml"
    path.write_text(profile().to_toml(), encoding="utf-8-sig")
    assert read_profile(path).to_toml() == profile().to_toml()
    with pytest.raises(SettingsError, match=r"nothing\.toml: cannot be read: No such file or directory$"):
        read_profile(tmp_path / "nothing.toml")
    path.write_bytes(b"\xff")
    with pytest.raises(SettingsError, match=r"^profile=x: must be a profile made by `weir profile`"):
        read_profile(path, "profile=x")


def test_lines_through_one_point_and_through_equal_ones() -> None:
    assert profile().up_to(1).fit()[:2] == (0.0, 2.0)
    flat = Profile(np.full(3, 2.0), np.full(3, 1.0), np.zeros(3)).fit()
    assert flat.time_r2 == 1.0
    assert flat.alpha_ms == pytest.approx(0.0, abs=1e-12)


@subcases(
    ("text", "objective"),
    [
        ("p99=20ms", LatencySLO(0.02, 0.01)),
        ("p95=1s", LatencySLO(1.0, 0.05)),
        ("p99.9=250us", LatencySLO(250e-6, 0.001)),
        ("p50=0.3", LatencySLO(0.3, 0.5)),
        ("in-time=20ms", LatencySLO(0.02, refusal_price=1.0)),
        (" in-time=250us,refusal=2 ", LatencySLO(250e-6, refusal_price=2.0)),
    ],
)
def test_reads_what_users_write_and_says_it_again(text: str, objective: LatencySLO) -> None:
    read = LatencySLO.parse(text)
    assert read == pytest.approx(objective)
    assert read.counts_refusals == ("in-time" in text)
    assert LatencySLO.parse(str(read)) == read


def test_where_refusals_count_and_service_times_vary_no_batch_is_trimmed() -> None:
    varying = Profile(np.array([2.0, 3.0]), np.ones(2), np.array([0.1, 0.1]))
    steady = Profile(np.array([2.0, 3.0]), np.ones(2), np.zeros(2))
    most, p99 = LatencySLO.parse("in-time=20ms"), LatencySLO.parse("p99=20ms")
    assert np.isinf(most.trimmed_by(varying)).all()
    for objective, profile in ((most, steady), (p99, varying), (p99, steady)):
        assert objective.trimmed_by(profile) == pytest.approx([0.018, 0.018, 0.017])


NO_OBJECTIVES = "p99 20ms p99= p99=fast p99=0 p99=-1ms p100=20ms p0=20ms p99=inf q9=1ms in-time=0 in-time="


@subcases(
    "text", ["", *NO_OBJECTIVES.split(), *(f"in-time=20ms,{more}" for more in ("refusal=0", "refusal=", "price=1"))]
)
def test_refuses_what_is_no_objective(text: str) -> None:
    with pytest.raises(SettingsError, match=r"latency_objective=.*as in p99=20ms"):
        LatencySLO.parse(text)


def test_a_batch_must_start_early_enough_for_its_own_service_time() -> None:
    profile = Profile(np.array([2.0, 3.0]), np.ones(2), np.zeros(2), latency_offset_ms=4.0)
    assert LatencySLO(0.02, 0.01, 0.001).latest_starts(profile) == pytest.approx([0.014, 0.014, 0.013])
    assert LatencySLO(0.02, 0.01, 0.001).allowance(profile) == pytest.approx([0.013, 0.013, 0.012])
    latest = LatencySLO(0.02).latest_starts(GOOGLENET_P4)
    assert len(latest) == 33
    assert latest[32] == pytest.approx(0.02 - 0.0108152)


@subcases(
    ("given", "margin"), [(LatencySLO(0.02), 0.0002), (LatencySLO(2.0), 0.001), (LatencySLO(0.02, margin=0.005), 0.005)]
)
def test_a_server_has_a_margin_in_which_to_send_answers(given: LatencySLO, margin: float) -> None:
    assert given.as_served() == given._replace(margin=margin)


def test_a_batch_is_trimmed_so_that_its_oldest_row_is_in_time() -> None:
    latest = LatencySLO(0.02).latest_starts(GOOGLENET_P4).tolist()
    for rows, at, left in ((32, latest[32], 32), (32, latest[31], 31), (32, latest[16], 16), (1, 1.0, 1)):
        assert trimmed(rows, at, latest) == left
    assert (trimmed(32, latest[15], latest), trimmed(2, 1.0, latest)) == (32, 2)


def test_an_objective_that_no_row_meets_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"latency_objective=p99=1ms: a row alone takes 1\.357 ms"):
        LatencySLO(0.001, 0.01).checked_for(GOOGLENET_P4)
    assert LatencySLO(0.002).checked_for(GOOGLENET_P4) == LatencySLO(0.002)


def test_full_batches_draw_the_power_that_none_can_do_without() -> None:
    rate = GOOGLENET_P4.max_rate
    assert unavoidable_power_w(GOOGLENET_P4, rate) == pytest.approx((19.9 * 32 + 19.6) / 10.8152)


@subcases("load", [0.3, 0.84, 0.9, 0.97])
def test_where_the_thriftiest_size_is_too_slow_a_mix_of_two_is_the_least(load: float) -> None:
    """8 rows are the thriftiest, and serve 85 % of what 16 do; held against a linear program."""
    sizes = np.arange(1, 17, dtype=np.float64)
    profile = Profile(1.0 + 0.3 * sizes, 5.0 + sizes + np.maximum(0, sizes - 8) ** 2, np.zeros(16))
    rate = load * profile.max_rate
    program = scipy.optimize.linprog(
        profile.energy_mj, A_ub=[profile.service_time_ms], b_ub=[1.0], A_eq=[sizes], b_eq=[rate / 1000.0]
    )
    assert unavoidable_power_w(profile, rate) == pytest.approx(program.fun, rel=1e-9)


@subcases(
    ("objective", "says"),
    [
        (LatencySLO(0.02, refusal_price=-1.0), r"refusal_price=-1.0: must be a number, 0 or more"),
        (LatencySLO(0.0), "deadline=0.0: must be a number of seconds, greater than 0"),
        (LatencySLO(float("inf")), "deadline=inf"),
        (LatencySLO(0.02, 1.0), "late_share=1.0: must be between 0 and 1"),
        (LatencySLO(0.02, 0.01, 0.02), "margin=0.02: must be 0 or more, and less than the deadline 0.02"),
        (LatencySLO(0.02, 0.01, -1.0), "margin=-1.0"),
        (LatencySLO(0.02, 0.01, 0.0, 0.02), "slack=0.02: must be 0 or more, and less than the deadline 0.02"),
    ],
)
def test_what_cannot_be_promised_is_named(objective: LatencySLO, says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        objective.checked()
    assert says in raised.value.message


# objective.py: what latency and energy are worth.


def test_a_constant_price_grows_with_the_rate_unlike_the_papers_weight() -> None:
    assert [Prices(2.0, 1.0).latency_weight_at(rate) for rate in (1.0, 100.0)] == [2.0, 2.0]
    prices = Prices(2.0, 1.0, reference_rate=200.0)
    assert [prices.latency_weight_at(rate) for rate in (100.0, 200.0, 400.0)] == [1.0, 2.0, 4.0]


def test_at_the_reference_rate_both_are_the_same_problem() -> None:
    rate = 0.7 * GOOGLENET_P4.max_rate
    plain, constant = solve(GOOGLENET_P4, rate), solve(GOOGLENET_P4, rate, Prices(reference_rate=rate))
    assert (plain.table.tolist(), plain.cost) == (constant.table.tolist(), constant.cost)


def test_constant_prices_add_up_over_rates() -> None:
    """The cost per ms is price·rows in the system + power: at twice the rate a row·ms costs the same."""
    prices = Prices(1.0, 0.0, reference_rate=1000.0)
    for rate in (500.0, 1000.0):
        seen = evaluate(GOOGLENET_P4, rate, greedy_table(32), prices)
        assert seen.cost == pytest.approx(rate / 1000.0 * seen.response_time_ms)


@subcases(
    ("arguments", "says"),
    [
        ((-1.0, 1.0), "latency_weight=-1.0: must be a number, 0 or more"),
        ((1.0, float("inf")), "energy_weight=inf: must be a number, 0 or more"),
        ((1.0, 1e308), "energy_weight=1e+308: must be a number, 0 or more, at most 1e+12"),
        ((0.0, 0.0), "latency_weight=0, energy_weight=0: one of them must be greater than 0"),
        ((1.0, 1.0, 0.0), "reference_rate=0.0: must be a number of rows per second, greater than 0"),
        ((1.0, 1.0, 1e-300), "reference_rate=1e-300"),
        ((1.0, 1.0, float("nan")), "reference_rate=nan"),
    ],
)
def test_impossible_prices_are_named(arguments: tuple[float, ...], says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Prices(*arguments)
    assert says in raised.value.message
