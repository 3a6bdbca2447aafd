"""The harness of the comparisons beyond the paper: intervals, what is shown, and the page. The figures are no tests."""

from math import inf
from pathlib import Path

import pytest
from benchmarks.policies import table
from benchmarks.policies.__main__ import COMPARISONS
from benchmarks.policies.lines import Effort, estimate, known, play_all, real, ruled, saved, show, tuned_limit
from benchmarks.policies.table import Compared, keep, marks, write_page

from weir.policy.objective import Objective
from weir.policy.prices import Prices
from weir.policy.profile import GOOGLENET_P4
from weir.policy.tables import limit_table
from weir.simulation.processes import Poisson
from weir.simulation.rounds import Figures, Rule


def response(figures: Figures) -> float:
    return figures.response_time_ms


def test_every_player_meets_the_same_lines() -> None:
    steps: list[str] = []
    arrivals = Poisson(0.5 * GOOGLENET_P4.max_rate)
    players = {
        "batcher": real(GOOGLENET_P4, "control-limit:8"),
        "short cut": ruled(GOOGLENET_P4, Rule(limit_table(8, 32).tolist())),
        "best": tuned_limit(GOOGLENET_P4, Prices(1.0, 0.0)),
        "none can": tuned_limit(GOOGLENET_P4, Prices(), objective=Objective(0.002)),
    }
    seen = play_all(arrivals, players, Effort(2, 3_000, steps.append))
    assert len(steps) == 8
    for one, other in zip(known(seen["batcher"]), known(seen["short cut"]), strict=True):
        assert response(one) == pytest.approx(response(other), rel=0.01)
    spared = saved(seen["best"], seen["batcher"], response)
    assert spared is not None and 0.0 < spared.value < 1.0
    assert saved(seen["none can"], seen["batcher"], response) is None and show(None) == "–"


def test_an_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.value == 2.0 and found.half_width == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert show(found, 1) == "2.0 ± 2.5"
    assert estimate([1.0]).high == inf


def test_the_page_gets_the_tables_between_their_marks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(table, "PAGE", tmp_path / "page.md")
    keep("crew", Compared(["workers"], [["2"]]), {"seeds": 3})
    write_page()  # there is none yet
    begin, end = marks("crew")
    (tmp_path / "page.md").write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write_page()
    text = (tmp_path / "page.md").read_text()
    assert "| workers |\n| --- |\n| 2 |" in text and "seeds: 3" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_says_how_many_steps_it_has(name: str) -> None:
    assert COMPARISONS[name].name == name and COMPARISONS[name].steps(2) > 0
