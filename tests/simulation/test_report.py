import re
from math import inf, nan
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from rich.console import Console

from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.decision import Policy
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import Bank
from weir.policy.solve.tables import greedy_table, limit_table, stacked
from weir.simulation import banks
from weir.simulation.banks import make_bank
from weir.simulation.report import Compared, draw, draw_bank, heading, table
from weir.simulation.results import Comparison
from weir.simulation.simulator import simulate
from weir.simulation.statistics import Estimate

POLICIES = ["greedy", "control-limit:8", "full:1"]


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return simulate(GOOGLENET_P4, POLICIES, "poisson:0.7", requests=3_000, prices=Prices(1.0, 1.0, 2000.0))


def shown(compared: Comparison, width: int = 100) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table(compared))
    return captured.get().splitlines()


def test_the_best_is_first_and_the_others_say_how_far_they_are_from_it(compared: Comparison) -> None:
    assert heading(compared) == (
        "poisson:0.7: 2,071 rows/s, load 0.7 on 1 worker; cost = 1/ms, 1/W at 2000 rows/s; 2,666 requests counted, seed 1"
    )
    title, *rows = shown(compared)
    assert " ".join(title.split()) == "policy response ms p99 ms power W batch busy cost above best"
    assert [row.split()[0] for row in rows] == ["control-limit:8", "greedy", "full:1"]
    assert rows[0].rstrip().endswith("best")
    assert " +" in rows[1] and rows[1].count("±") == 3
    assert rows[2].split()[1] == "unstable" and "±" not in rows[2]
    assert not any("…" in row for row in shown(compared, 80))  # nothing is cut off in a narrow terminal
    html = compared._repr_html_()  # a notebook shows the same table
    assert html.startswith(f"<table><caption>{heading(compared)}</caption>")
    assert html.count("<tr><td>") == len(compared.outcomes) and "<td>best</td>" in html


def test_what_is_lost_has_a_column_where_something_is() -> None:
    compared = simulate(GOOGLENET_P4, POLICIES, "poisson:0.7", requests=3_000, deadline=0.008)
    title, *rows = shown(compared)
    assert "lost" in title
    assert all("%" in row for row in rows)
    assert [row.split()[0] for row in rows] == ["control-limit:8", "greedy", "full:1"]
    assert rows[2].rstrip().endswith("loses more")
    assert compared.best == "control-limit:8"
    assert compared.outcomes["full:1"].cost.value < compared.outcomes["control-limit:8"].cost.value


def test_with_an_objective_policies_are_compared_by_power_if_they_keep_it(tmp_path: Path) -> None:
    compared = simulate(GOOGLENET_P4, POLICIES, "poisson:0.8", requests=8_000, latency_objective="p99=6ms")
    assert "p99=6ms with the least energy" in heading(compared)
    title, *rows = shown(compared)
    assert " ".join(title.split()).endswith("busy late % in time % W above best")
    assert "cost" not in title
    assert [row.split()[0] for row in rows] == ["control-limit:8", "greedy", "full:1"]
    assert rows[0].rstrip().endswith("not kept")
    assert compared.best is None
    loose = simulate(GOOGLENET_P4, POLICIES, "poisson:0.8", requests=8_000, latency_objective="p99=40ms")
    assert (loose.best, loose.measure) == ("control-limit:8", "power_w")
    assert loose.to_dict()["objective"] == "p99=40ms"
    assert " +" in shown(loose)[2]
    draw(loose, tmp_path / "it")
    assert "p99=40ms" in (tmp_path / "it.svg").read_text()


def test_with_the_most_in_time_as_objective_that_is_compared() -> None:
    text = "in-time=6ms,refusal=0.5"
    compared = simulate(GOOGLENET_P4, POLICIES, "poisson:0.8", requests=8_000, latency_objective=text)
    assert "in-time=6ms,refusal=0.5 for the most requests" in heading(compared)
    title, *rows = shown(compared)
    assert " ".join(title.split()).endswith("late % in time % % beside best")
    assert compared.best == rows[0].split()[0] == "greedy"
    assert " -" in rows[1]
    for outcome in compared.outcomes.values():
        shares = outcome.in_time_share.value + outcome.late_share.value + outcome.refused_share
        assert shares == pytest.approx(1.0)


def test_refusing_more_than_it_takes_keeps_no_promise_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banks, "PROMISE_REQUESTS", 8_000)
    monkeypatch.setattr(banks, "PROMISE_LOADS", (0.3, 0.6, 0.8, 0.9, 0.94, 0.97))
    refusing = SolvedPolicy(make_bank(GOOGLENET_P4.up_to(8), objective=LatencySLO.parse("p99=8ms")))
    policies: dict[str, str | Policy] = {"smdp": "smdp", "strict": cast(Policy, refusing), "greedy": "greedy"}
    compared = simulate(GOOGLENET_P4.up_to(8), policies, "poisson:0.93", requests=8_000, latency_objective="p99=40ms")
    assert not compared.is_eligible("strict")
    assert any(row.rstrip().endswith("loses more") for row in shown(compared, 120))


def test_without_a_stable_policy_none_is_best() -> None:
    compared = simulate(GOOGLENET_P4, ["full:1"], "poisson:0.7", requests=1_000)
    assert "unstable" in shown(compared)[1]
    assert compared.best is None


def test_a_figure_is_written_twice(compared: Comparison, tmp_path: Path) -> None:
    draw(compared, tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 10_000
    drawing = (tmp_path / "it.svg").read_text()
    for text in ("response time (ms)", "mean power (W)", "batch size (rows)", "control-limit:8", "not drawn: full:1"):
        assert text in drawing


def test_a_comparison_is_json_able(compared: Comparison) -> None:
    document = compared.to_dict()
    assert document["best"] == "control-limit:8"
    assert document["prices"] == {"latency_weight": 1.0, "energy_weight": 1.0, "reference_rate": 2000.0}
    greedy, unstable = document["outcomes"]["greedy"], document["outcomes"]["full:1"]
    assert greedy["response_time_ms"].keys() == {"value", "low", "high"}
    assert sum(greedy["batch_sizes"].values()) == pytest.approx(1.0)
    assert sum(greedy["reasons"].values()) == pytest.approx(1.0)
    assert 0.5 < greedy["fairness"] <= 1.0
    assert unstable["cost"] == {"value": None, "low": None, "high": None}
    assert "observations" not in greedy
    assert Estimate(nan, -inf, inf).half_width == inf


def test_a_bank_stands_beside_other_policies(tmp_path: Path) -> None:
    tables = stacked([greedy_table(32), limit_table(5, 32)])
    rates, times, powers = np.array([100.0, 2000.0]), np.array([3.0, 9.0]), np.array([2.0, 40.0])
    bank = Bank(GOOGLENET_P4, Prices(), 1, None, rates, tables, np.zeros(2, dtype=np.int64), times, 3 * times, powers)
    draw_bank(tmp_path / "bank", bank, {"greedy": Compared(times, powers + 1.0)})
    assert 1_000 < (tmp_path / "bank.png").stat().st_size < 150_000
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "bank.svg").read_text())
    assert {"solved, mean", "solved, p99", "greedy, mean", "greedy", "rate (rows/s)", "power (W)"} <= set(shown)
