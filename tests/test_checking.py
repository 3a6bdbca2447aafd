"""`weir check` and `weir profile` of a streaming model."""

from pathlib import Path

from tests.served import weir

COUNT = f"{Path(__file__).parent / 'streaming_models.py'}:Count"


def test_check_shows_all_answers() -> None:
    done = weir("check", COUNT)
    assert done.returncode == 0, done.stderr
    assert "[1, 2]" in done.stdout


def test_profile_measures_whole_streams(tmp_path: Path) -> None:
    path = tmp_path / "count.toml"
    done = weir("profile", COUNT, "--sizes", "1,8", "--seconds", "0.2", "--output", path)
    assert done.returncode == 0, done.stderr
    assert path.exists()
