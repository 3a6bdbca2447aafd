import re
from pathlib import Path

import numpy as np

from weir.commands.drawings import Compared, draw, draw_bank
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.solve.bank import Bank
from weir.policy.solve.tables import greedy_table, limit_table, stacked
from weir.simulation.simulator import simulate


def test_a_figure_is_written_twice(tmp_path: Path) -> None:
    policies, prices = ["greedy", "control-limit:8", "full:1"], Prices(1.0, 1.0, 2000.0)
    compared = simulate(GOOGLENET_P4, policies, "poisson:0.7", requests=3_000, prices=prices)
    draw(compared, tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 10_000
    drawing = (tmp_path / "it.svg").read_text()
    for text in ("response time (ms)", "mean power (W)", "batch size (rows)", "control-limit:8", "not drawn: full:1"):
        assert text in drawing


def test_a_figure_has_the_objective(tmp_path: Path) -> None:
    policies = ["greedy", "control-limit:8"]
    draw(simulate(GOOGLENET_P4, policies, "poisson:0.8", requests=2_000, latency_objective="p99=40ms"), tmp_path / "it")
    assert "p99=40ms" in (tmp_path / "it.svg").read_text()


def test_a_bank_stands_beside_other_policies(tmp_path: Path) -> None:
    tables = stacked([greedy_table(32), limit_table(5, 32)])
    rates, times, powers = np.array([100.0, 2000.0]), np.array([3.0, 9.0]), np.array([2.0, 40.0])
    bank = Bank(GOOGLENET_P4, Prices(), 1, None, rates, tables, np.zeros(2, dtype=np.int64), times, 3 * times, powers)
    draw_bank(tmp_path / "bank", bank, {"greedy": Compared(times, powers + 1.0)})
    assert 1_000 < (tmp_path / "bank.png").stat().st_size < 150_000
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "bank.svg").read_text())
    assert {"solved, mean", "solved, p99", "greedy, mean", "greedy", "rate (rows/s)", "power (W)"} <= set(shown)
