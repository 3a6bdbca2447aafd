from dataclasses import replace
from pathlib import Path

from weir.policy.cost.profile import ENERGY_SOURCES, GOOGLENET_P4, Profile
from weir.profiling.picture import ENERGIES, draw_profile, measured_sizes


def test_it_is_drawn_as_png_and_svg(tmp_path: Path) -> None:
    draw_profile(GOOGLENET_P4, tmp_path / "profile.png", "GoogLeNet")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "profile.svg").read_text()
    for text in ("τ(b) (ms)", "ζ(b) (mJ)", "b / τ(b) (rows/s)", "b* = 32", "GoogLeNet"):
        assert text in drawn


def test_where_the_energy_is_from_is_reported_and_at_which_sizes_it_was_read(tmp_path: Path) -> None:
    assert set(ENERGIES) == set(ENERGY_SOURCES)
    read = replace(GOOGLENET_P4, energy_source="nvml", about={"energy_sizes": [1, 8, 32]})
    draw_profile(read, tmp_path / "profile.png")
    assert ENERGIES["nvml"] in (tmp_path / "profile.svg").read_text()


def test_one_size_can_be_drawn(tmp_path: Path) -> None:
    draw_profile(GOOGLENET_P4.up_to(1), tmp_path / "profile.png")
    assert (tmp_path / "profile.png").exists()


def test_the_sizes_that_were_measured_are_known_or_all() -> None:
    assert measured_sizes(GOOGLENET_P4).tolist() == list(range(1, 33))
    measured = Profile.linear(alpha_ms=1.0, tau0_ms=1.0, max_batch_size=8, about={"sizes_measured": [1, 4, 8, 16]})
    assert measured_sizes(measured).tolist() == [1, 4, 8]
