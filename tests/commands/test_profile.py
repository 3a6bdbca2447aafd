import re
import tomllib
from pathlib import Path

import pytest
from tests.rings import subcases
from tests.served import MODELS, weir, weir_here

from weir.commands.profile import command_line
from weir.policy.cost import Profile

ROOT = Path(__file__).parents[2]
SQUARE = f"{ROOT / 'examples' / 'square.py'}:Square"
QUICK = ("--max-batch-size", 4, "--seconds", 0.5, "--executor", "inline")


def test_a_model_is_profiled_from_end_to_end(tmp_path: Path) -> None:
    ended = weir("profile", SQUARE, "-o", "mine.toml", "--max-batch-size", 8, "--seconds", 1, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    text = (tmp_path / "mine.toml").read_text()
    profile = Profile.from_toml(text)
    assert profile.max_batch_size == 8 and profile.energy_source in ("time", "nvml", "rapl")
    document = tomllib.loads(text)
    assert document["best_batch_size"] == profile.best_batch_size
    assert set(document["linear_fit"]) >= {"alpha_ms", "tau0_ms", "beta_mj", "zeta0_mj", "time_r2", "energy_r2"}
    about = document["about"]
    assert about["target"] == SQUARE and about["executor"] == "process" and about["spin"] == 0.0005
    assert about["command"] == f"weir profile {SQUARE} -o mine.toml --max-batch-size 8 --seconds 1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.toml"]
    for shown in (
        f"in batches of b\\* = {profile.best_batch_size}",
        r"rows/s",
        r"R²",
        r"energy source: ",
        r"written: mine.toml",
    ):
        assert re.search(shown, ended.stdout)
    assert ended.stderr == ""  # no progress bar but on a terminal


def test_the_file_is_named_after_the_model_and_the_stated_power_is_in_it(tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text("1\n2\n")
    ended = weir_here(
        "profile", SQUARE, *QUICK, "--power", 65, "--sizes", "1,2-4", "--items", items,
        "--seed", 7, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    profile = Profile.from_toml((tmp_path / "square.profile.toml").read_text())
    assert profile.energy_source == "stated"
    assert profile.about["items"] == 2 and profile.about["seed"] == 7
    assert profile.energy_mj == pytest.approx(65.0 * profile.service_time_ms)


def test_the_file_of_settings_that_will_serve_can_be_given(tmp_path: Path) -> None:
    config = tmp_path / "weir.toml"
    config.write_text('workers = 3\npolicy = "square.policy.npz"\nmax_batch_size = 4\nexecutor = "inline"\n')
    ended = weir_here("profile", SQUARE, "--config", config, "--seconds", 0.3, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    profile = Profile.from_toml((tmp_path / "square.profile.toml").read_text())
    assert profile.max_batch_size == 4 and profile.about["executor"] == "inline"


@subcases(
    ("arguments", "message"),
    [
        ((f"{MODELS}:Square", "--power", 0), "--power=0.0: must be greater than 0"),
        ((f"{MODELS}:Square", "--sizes", "1,x"), "--sizes='1,x': must be whole numbers and ranges like 0,1,4-7"),
        ((f"{MODELS}:Square", "-o", "missing/x.toml"), "must be a writable directory"),
        ((f"{MODELS}:Square", "--items", "none.jsonl"), "items=none.jsonl: cannot be read"),
        ((f"{MODELS}:Square", "--max-batch-size", 4, "--sizes", 9), "sizes=9: must be at most max_batch_size=4"),
        ((f"{MODELS}:Plain",), "Plain: there is nothing to measure it with: give the class `examples = [...]`"),
    ],
)
def test_what_is_wrong_is_reported_in_one_line_before_anything_is_measured(
    arguments: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    ended = weir_here("profile", *arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("weir: ") and ended.stderr.count("\n") == 1
    assert message in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_fails_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(
        "import weir\n\n\nclass Fails(weir.Model):\n    examples = [3]\n    warmup_sizes = []\n\n"
        "    def predict(self, batch):\n        raise ValueError('not today')\n"
    )
    ended = weir_here("profile", "failing:Fails", *QUICK, cwd=tmp_path)
    assert ended.returncode == 1
    assert "ValueError: not today" in ended.stderr
    assert not list(tmp_path.glob("*.toml"))


def test_secrets_stay_out_of_the_command_that_is_noted() -> None:
    arguments = ["profile", "m:M", "--param", "api_token=ab=cd", "--param=password=x", "--param", "n=3", "-o", "a b"]
    assert command_line(arguments) == ("weir profile m:M --param 'api_token=***' '--param=***' --param n=3 -o 'a b'")
