"""The command against a real server."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.served import MODELS, Served, described, serving, weir

from weir.bench import bench
from weir.errors import SettingsError

pytestmark = pytest.mark.usefixtures("nothing_is_left_by_module")

# How late requests leave on a busy machine is not what is tested here.
ANY_LAG = ("--max-lag-ms", 1e9)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(f"{MODELS}:Square", f"{MODELS}:Power") as (running, _):
        yield running


def test_a_server_is_measured_with_its_own_example_and_its_own_counts(served: Served, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "a.json")
    load = ("--arrivals", "poisson", "--rate", 800, "--duration", 0.5, *ANY_LAG)
    done = weir("bench", f"{served.url}/infer/square", *load, *files)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and "send lag, ms: p50 / p99 / max" in done.stdout and "mean batch size" in done.stdout
    (outcome,) = json.loads((tmp_path / "a.json").read_text())["outcomes"].values()
    assert outcome["answered"] == outcome["requests"] > 300 and outcome["errors"] == {}
    # All were counted by the server: those of the warm-up too, but not the first, which only looked.
    rows = outcome["batches"]["count"] * outcome["batches"]["mean_rows"]
    assert rows == pytest.approx(round(rows)) and rows > outcome["requests"]


def command(*arguments: object) -> int:
    """Run `weir bench` here: to start Python takes longer than all the rest."""
    code: int = described("bench")(["bench", *map(str, arguments)], standalone_mode=False)
    return code


def test_a_run_that_left_late_fails(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    code = command(f"{served.url}/infer/square", "--rate", 200, "--duration", 0.3, "--max-lag-ms", 1e-6)
    shown = capsys.readouterr()
    assert code == 1 and "answered" in shown.out
    assert shown.err.startswith("weir: ") and "requests were sent late" in shown.err


def test_a_closed_loop_has_a_connection_for_each_caller(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{served.url}/infer/square"
    assert bench(url, concurrency=3, duration=0.1).outcome.connections == 3
    assert command(url, "--concurrency", 20, "--duration", 0.1, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["outcomes"][url]["connections"] == 20


def test_what_is_wrong_takes_one_line_and_is_reported_before_any_load(served: Served, tmp_path: Path) -> None:
    square = f"{served.url}/infer/square"
    for arguments, wrong in (
        (("http://127.0.0.1:1/x", "--rate", 5), "no server there: Connection refused"),
        ((f"{served.url}/infer/circle", "--rate", 5, "--data", 3), "404 ModelNotFound: .*available: square, power"),
        ((f"{served.url}/infer/circle", "--rate", 5), "accepts no requests at this path, but at /infer/square"),
        ((square, "--rate", 5, "--data", "three"), "400 InvalidRequest"),
        ((square, "--rate", 5, "-H", "nothing"), "--header='nothing': must be NAME: VALUE"),
        ((square, "--rate", 5, "--json", tmp_path / "no" / "a.json"), "must be a writable directory"),
        (("--rate", 5), "nothing to measure: give a URL"),
    ):
        with pytest.raises(SettingsError, match=wrong) as caught:
            command(*arguments)
        assert "\n" not in str(caught.value) and "/load" not in str(caught.value)


def test_what_a_server_has_recorded_can_be_played_again(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "arrivals.csv"
    with serving(f"{MODELS}:Square", "--record", file) as (running, _):
        first = bench(f"{running.url}/infer/square", rate=300, duration=0.5, warm_up=0.0, max_lag_ms=1e9)
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    recorded = file.read_text().splitlines()[1:]
    assert len(recorded) == first.outcome.requests + 1  # the first, which only looked
    again = bench(f"{served.url}/infer/square", arrivals=f"trace:{file}", warm_up=0.0, max_lag_ms=1e9)
    assert again.outcome.requests == again.outcome.answered == len(recorded)


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="speed"):
        bench("http://127.0.0.1:1/x", speed=5)
    with pytest.raises(SettingsError, match=r"rate=-1\.0"):
        bench("http://127.0.0.1:1/x", rate=-1.0)
