"""Solves that take a moment, where a test is not about what is solved."""

import pytest
from tests.tuning.banks import QuickSolver, solve_quickly

from weir import tuning


@pytest.fixture
def quick_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve for few rates, here and in solving processes."""
    solve_quickly(monkeypatch.setattr)
    monkeypatch.setattr(tuning, "Solver", QuickSolver)
