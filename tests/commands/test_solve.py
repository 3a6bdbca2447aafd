import json
from pathlib import Path

import pytest
from tests.policy.banks import searched
from tests.rings import subcases
from tests.served import weir_here

from weir.policy.cost import GOOGLENET_P4, Profile
from weir.policy.solve.bank import Bank


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "square.profile.toml"
    path.write_text(GOOGLENET_P4.up_to(8).to_toml())
    return path


def test_it_writes_a_bank_and_says_what_is_gained(profile: Path) -> None:
    folder = profile.parent
    weights = ["--latency-weight", 1, "--energy-weight", 1, "--reference-rate", 200]
    files = ["-o", folder / "p.npz", "--json", folder / "p.json"]
    done = weir_here("solve", profile, *weights, *files)
    assert done.returncode == 0
    bank = Bank.from_bytes((folder / "p.npz").read_bytes())
    assert bank.prices.reference_rate == 200.0
    said = json.loads((folder / "p.json").read_text())
    assert [row["rate"] for row in said["rates"]] == bank.rates.tolist()
    assert all(row["cost"] <= min(row["greedy_cost"], row["best_limit_cost"]) * (1 + 1e-9) for row in said["rates"])
    lines = done.stdout.splitlines()
    assert "greedy" in lines[1] and lines[-1].endswith(f"written: {folder / 'p.npz'}")
    assert len(lines) == 10 and lines[7].startswith(f"{len(bank.rates)} rates in all; --json PATH writes them")


def test_a_promise_is_solved_for_several_workers(profile: Path) -> None:
    small = profile.with_name("small.toml")
    small.write_text(Profile.linear(alpha_ms=1.0, tau0_ms=5.0, max_batch_size=2).to_toml())
    path = profile.parent / "p.npz"
    with searched((0.3, 0.8), 5_000):
        done = weir_here("solve", small, "--latency-objective", "p95=40ms", "--workers", 2, "-o", path)
    assert done.returncode == 0
    bank = Bank.from_bytes(path.read_bytes())
    assert (bank.workers, str(bank.objective)) == (2, "p95=40ms")
    assert "p95=40ms with the least energy" in done.stdout


def test_the_result_of_one_rate_is_a_document(profile: Path) -> None:
    done = weir_here("solve", profile, "--rate", 1000, "--json", "-")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert (found["method"], found["iterations"] < 10) == ("policy-iteration", True)
    assert found["cost"] > found["error_bound"]


def test_one_rate_is_shown_in_rows_of_equal_actions(profile: Path) -> None:
    done = weir_here("solve", profile, "--rate", 1000)
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("wait", "all", "control limit"))


@subcases(
    ("arguments", "said"),
    [
        (["--rate", "99999"], "capacity"),
        (["--latency-weight", "-1"], "latency_weight"),
        (["--latency-weight", "0", "--energy-weight", "0"], "greater than 0"),
        (["--latency-objective", "fast"], "latency_objective='fast'"),
        (["--max-batch-size", "9"], "max_batch_size=9"),
        (["--workers", "0"], "workers=0"),
        (["--workers", "two"], "weir: --workers='two': must be a valid integer\n"),
        (["--rate", "9", "--workers", "2"], "--workers"),
        (["-o", "nowhere/p.npz"], "nowhere"),
    ],
)
def test_what_is_wrong_is_reported_in_one_line(profile: Path, arguments: list[str], said: str) -> None:
    done = weir_here("solve", profile, *arguments, cwd=profile.parent)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
