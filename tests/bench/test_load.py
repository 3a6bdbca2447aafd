from pathlib import Path

import numpy as np
import pytest

from weir.bench.load import LoadSettings, make_load
from weir.errors import SettingsError
from weir.simulation.arrivals import Poisson


def refused(targets: int = 1, **settings: object) -> str:
    with pytest.raises(SettingsError) as caught:
        make_load(LoadSettings(**settings), targets)  # type: ignore[arg-type]  # wrong on purpose
    return str(caught.value)


def test_a_rate_and_a_duration_make_a_schedule() -> None:
    load = make_load(LoadSettings("constant", rate=100.0, duration=2.0), 1)
    assert load.times is not None and load.rounds == 1 and load.round_seconds == 2.0
    assert np.allclose(load.times[0], np.arange(1, 200) / 100.0)
    assert load.warm_up == pytest.approx(0.2) and load.rate == pytest.approx(99.5)


def test_poisson_arrivals_come_at_the_rate_and_the_same_for_the_same_seed() -> None:
    one, same, other = (make_load(LoadSettings(rate=5000.0, duration=20.0, seed=seed), 1).times for seed in (1, 1, 2))
    assert one is not None and same is not None and other is not None
    assert np.array_equal(one[0], same[0]) and not np.array_equal(one[0], other[0])
    assert len(one[0]) == pytest.approx(100_000, abs=5 * 100_000**0.5)  # five standard deviations, and seeded
    assert one[0][-1] < 20.0 and np.all(np.diff(one[0]) >= 0.0)


def test_rounds_are_consecutive_parts_of_one_schedule() -> None:
    whole = make_load(LoadSettings(rate=100.0, duration=4.0, rounds=1), 1).times
    parts = make_load(LoadSettings(rate=100.0, duration=4.0), 2)
    assert whole is not None and parts.times is not None
    assert parts.rounds == len(parts.times) == 5 and parts.round_seconds == pytest.approx(0.8)
    assert all(part.min() >= 0.0 and part.max() < 0.8 for part in parts.times)
    again = np.concatenate([part + index * 0.8 for index, part in enumerate(parts.times)])
    assert np.allclose(again, whole[0])


@pytest.mark.parametrize(
    ("arrivals", "count"),
    [("gamma:cv=3", 2000), ("on-off:on=50ms,off=50ms", 2000), ("poisson:rate=200", 2000), (Poisson(200.0), 2000)],
)
def test_any_arrivals_take_the_rate_where_they_state_none(arrivals: str | Poisson, count: int) -> None:
    stated = isinstance(arrivals, Poisson) or "rate=" in arrivals
    load = make_load(LoadSettings(arrivals, rate=None if stated else 200.0, duration=10.0), 1)
    assert load.times is not None and len(load.times[0]) == pytest.approx(count, rel=0.2)


def test_a_trace_is_played_as_it_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("arrival_s,rows\n0.000000,1\n0.250000,4\n0.250000,1\n1.000000,1\n")
    load = make_load(LoadSettings(f"trace:{file}"), 1)
    assert load.times is not None and load.times[0].tolist() == [0.0, 0.25, 0.25, 1.0]
    cut = make_load(LoadSettings(f"trace:{file}", duration=0.5), 1)
    assert cut.times is not None and cut.times[0].tolist() == [0.0, 0.25, 0.25]


def test_a_closed_loop_has_no_schedule() -> None:
    load = make_load(LoadSettings(concurrency=8), 2)
    assert load.times is None and load.concurrency == 8 and load.rate is None and load.round_seconds == 2.0


def test_wrong_settings_say_what_is_wrong() -> None:
    assert "how many a second? Give --rate" in refused()
    assert "a load needs a profile" in refused(arrivals="poisson:0.7")
    assert "state their own; state one of them" in refused(arrivals="poisson:rate=5", rate=5.0)
    assert "must be one of poisson" in refused(arrivals="pois", rate=5.0)
    assert "a closed loop (concurrency) has none" in refused(rate=5.0, concurrency=2)
    assert "none within 0.1 s" in refused(arrivals="constant", rate=5.0, duration=0.1)
    assert "duration=0.1: must be at least 0.25 s for 5 rounds" in refused(2, rate=500.0, duration=0.1)
    assert "trace 'nowhere.csv' cannot be read" in refused(arrivals="trace:nowhere.csv")
    assert "warm_up=1.0: must be 0 or more, and less than 1" in refused(rate=5.0, warm_up=1.0)
    assert "max_lag_ms=0.0: must be greater than 0" in refused(rate=5.0, max_lag_ms=0.0)


def test_what_would_never_end_or_fit_into_memory_is_refused() -> None:
    for value in (float("inf"), float("nan")):
        assert f"rate={value!r}: must be greater than 0, and finite" in refused(rate=value)
        assert f"duration={value!r}: must be greater than 0, and finite" in refused(rate=5.0, duration=value)
    assert "are 1e+10 requests; must be at most 20,000,000" in refused(rate=1e9)
    assert "duration=inf" in refused(concurrency=4, duration=float("inf"))
