"""profile.py: what a profile says, and that a file says the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.rings import subcases

from weir.errors import SettingsError
from weir.policy.cost.profile import GOOGLENET_P4, Profile, read_profile


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
