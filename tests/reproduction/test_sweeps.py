import pytest
from reproduction.findings import Findings
from reproduction.published import TABLE, Column
from reproduction.sweeps import sweep
from tests.rings import spread


@pytest.mark.parametrize("column", spread(TABLE[1:3]), ids=lambda column: f"c_o={column.overflow_cost:g}")
def test_the_search_finds_the_papers_column(column: Column) -> None:
    found = Findings().minimum(column.overflow_cost)
    ours = found.accepted
    assert (ours.s_max, ours.space) == (column.s_max, column.space)
    assert abs(ours.iterations - column.iterations) <= 2
    assert ours.cost == pytest.approx(column.cost, rel=1e-4)
    assert ours.delta == pytest.approx(column.delta, rel=0.01)
    assert ours.time == ours.iterations * 32 * ours.s_max**2
    assert [each.s_max for each in found.tried] == list(range(32, column.s_max + 1))


def test_a_small_cost_of_overflow_waits_for_ever_where_the_paper_says_so() -> None:
    waits, serves = sweep(10.0, 160), sweep(10.0, 161)
    assert waits.waits
    assert waits.delta == pytest.approx(waits.cost)
    assert serves.accepted
    assert serves.delta == pytest.approx(6.14e-12, rel=0.01)


def test_the_larger_eta_the_fewer_sweeps() -> None:
    counts = [sweep(100.0, 70, eta_share=share, load=0.3).iterations for share in (0.2, 0.5, 0.9, 0.99)]
    assert counts == sorted(counts, reverse=True)
