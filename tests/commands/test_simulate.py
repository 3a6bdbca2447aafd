import json
from pathlib import Path

import pytest
from tests.policy.banks import searched
from tests.rings import subcases
from tests.served import weir, weir_here

from weir.policy.cost import GOOGLENET_P4

ISSUED = "smdp,greedy,size-or-delay:size=8,delay=5ms,full:4"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "square.profile.toml"
    path.write_text(GOOGLENET_P4.up_to(8).to_toml())
    return path


def test_it_compares_the_policies_and_writes_what_is_requested(profile: Path) -> None:
    folder = profile.parent
    files = ["--json", folder / "it.json"]
    done = weir_here("simulate", profile, "--policy", ISSUED, "--requests", 3_000, *files, env={"COLUMNS": "120"})
    assert done.returncode == 0
    assert "poisson:0.7: 1,603 rows/s" in done.stdout
    assert "size-or-delay:size=8,delay=5ms" in done.stdout
    assert done.stderr == ""  # no bars: it is no terminal
    document = json.loads((folder / "it.json").read_text())
    assert list(document["outcomes"]) == ["smdp", "greedy", "size-or-delay:size=8,delay=5ms", "full:4"]
    assert document["best"] == "smdp"


def test_options_reach_the_simulation(profile: Path) -> None:
    options = [
        "--policy",
        "greedy",
        "--policy",
        "full:4",
        "--arrivals",
        "gamma:rate=900,cv=2",
        "--workers",
        2,
        "--seed=7",
    ]
    more = ["--requests", 2_000, "--latency-weight", 2, "--energy-weight", 0, "--reference-rate", 300, "--warm-up", 0.2]
    limits = ["--max-queue-delay", "3ms", "--deadline", "50ms"]
    done = weir_here("simulate", profile, *options, *more, *limits, "--json", "-")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert (document["workers"], document["seed"], document["rate"]) == (2, 7, 900.0)
    assert document["prices"] == {"latency_weight": 2.0, "energy_weight": 0.0, "reference_rate": 300.0}
    assert document["outcomes"]["full:4"]["reasons"]["delay"] > 0.0
    assert document["outcomes"]["greedy"]["requests"] <= 1_600


def test_policies_are_compared_by_what_a_promise_takes(profile: Path) -> None:
    it = ["--latency-objective", "p99=15ms", "--arrivals", "poisson:0.5", "--requests", 10_000, "--json", "-"]
    with searched((0.3, 0.5, 0.8), 8_000):
        done = weir_here("simulate", profile, "--policy", "smdp,greedy", *it)
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert (document["objective"], document["best"]) == ("p99=15ms", "smdp")
    outcomes = document["outcomes"]
    assert outcomes["smdp"]["late_share"]["value"] <= 0.01
    assert outcomes["smdp"]["power_w"]["value"] < outcomes["greedy"]["power_w"]["value"]


@subcases(
    ("arguments", "message"),
    [
        (["--policy", "greedyy"], "policy='greedyy': must be one of"),
        (["--policy", "greedy,size=3"], "'size=3' is a setting"),
        (["--arrivals", "poisson:0"], "load=0: must be greater than 0"),
        (["--deadline", "soon"], "--deadline='soon': must be a duration greater than 0, such as 20ms"),
        (["--max-queue-delay", "0"], "--max-queue-delay='0': must be a duration greater than 0"),
        (["--latency-weight", "-1"], "latency_weight=-1.0: must be a number, 0 or more"),
        (["--workers", "0"], "workers='0': must be 1 or more"),
        (["--seed", "-1"], "seed=-1: must be 0 or more"),
        (["--latency-objective", "20ms"], "latency_objective='20ms': must be a percentile and a duration"),
        (["--latency-objective", "p99=1ms"], "latency_objective=p99=1ms: a row alone takes"),
        (["--json", "."], "is a directory"),
        (["--json", "nowhere/it.json"], "nowhere"),
        (["--workers", "3..1"], "workers='3..1': must be 1 or more, or the fewest and the most"),
        (["--workers=2", "--scaling=hpa"], "--scaling=hpa: needs a range of workers, as in --workers 1..16"),
        (["--workers=2", "--target-load=0.5"], "--target-load=0.5: needs a range of workers"),
        (["--workers=1..2", "--scaling=hpa"], "scaling='hpa': must be weir, or a number of workers as in fixed:4"),
        (["--workers=1..2", "--scaling=weir,,hpa"], "has an empty entry between commas"),
        (["--workers=1..2", "--target-load=2"], "target_load=2.0: must be a share"),
        (["--workers=1..2", "--policy=greedy", "--policy=full:2"], "--policy: given 2 times"),
        (["--workers=1..2", "--start-up-time=soon"], "--start-up-time='soon': must be a duration"),
    ],
)
def test_what_is_wrong_is_reported_in_one_line(profile: Path, arguments: list[str], message: str) -> None:
    done = weir_here("simulate", profile, *arguments, cwd=profile.parent)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_table_is_printed_in_any_encoding(profile: Path) -> None:
    done = weir("simulate", profile, "--policy", "greedy", "--requests", 1_000, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "") and " ? " in done.stdout


def test_range_of_workers_compares_rules_for_their_number(profile: Path) -> None:
    folder = profile.parent
    files = ["--json", folder / "rules.json"]
    rules = ["--scaling", "weir,fixed:2", "--scaling", "fixed:3"]
    asked = ["--workers", "1..3", "--start-up-time", "100ms", "--latency-objective", "p99=20ms", "--requests", 3_000]
    done = weir_here("simulate", profile, *asked, *rules, *files, env={"COLUMNS": "160"})
    assert done.returncode == 0
    shown = done.stdout.splitlines()
    assert shown[0] == (
        "poisson:0.7: 4,868 rows/s on 1..3 workers, which start in 0.1 s; goal p99=20ms; late after 0.02 s; policy greedy"
    )
    assert shown[1].split()[:4] == ["rule", "worker-hours", "mean", "most"]
    assert [line.split()[0] for line in shown[2:]] == ["weir", "fixed:2", "fixed:3"]
    document = json.loads((folder / "rules.json").read_text())
    assert document["goal"] == "p99=20ms"
