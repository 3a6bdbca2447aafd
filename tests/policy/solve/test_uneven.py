"""Tables for two kinds of workers against the exact optimum, which uneven.c computes."""

from collections.abc import Callable

import numpy as np
import pytest
from benchmarks.policies.uneven_workers import Workers
from tests.policy.compiler import needs_compiler
from tests.rings import spread

from weir.errors import SettingsError
from weir.policy.cost import Prices, Profile
from weir.policy.solve import uneven
from weir.policy.solve.uneven import LOADS, QUEUES, STEPS, UnevenBank, WorkerKind, solve_uneven

LATENCY = Prices(latency_weight=1.0, energy_weight=0.0)
SHAPES: dict[str, Callable[[int], int]] = {
    "flat": lambda rows: 4,
    "affine": lambda rows: 4 + rows,
    "linear": lambda rows: 3 * rows,
    "steps": lambda rows: 4 * -(-rows // 4),
}
LARGEST = 8


def workers(shape: str, ratio: int, load: float, energies: tuple[float, float] = (0.0, 0.0)) -> Workers:
    times = [SHAPES[shape](rows) for rows in range(1, LARGEST + 1)]
    best = max(rows / time for rows, time in enumerate(times, 1)) * (1.0 + 1.0 / ratio)
    return Workers(tuple(times), tuple(ratio * time for time in times), load * best, energies)


def kinds_of(case: Workers, counts: tuple[int, int] = (1, 1)) -> tuple[WorkerKind, WorkerKind]:
    first, second = case.profiles()
    return WorkerKind(first, counts[0]), WorkerKind(second, counts[1])


def solved(case: Workers, prices: Prices = LATENCY) -> UnevenBank:
    kinds = kinds_of(case)
    return solve_uneven(kinds, prices, [case.rate * 1000.0 / sum(each.max_rate for each in kinds)])


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "ratio", "load"),
    spread([
        ("linear", 2, 0.05), ("flat", 2, 0.2), ("affine", 2, 0.35), ("steps", 2, 0.5),
        ("flat", 4, 0.05), ("steps", 4, 0.2), ("linear", 4, 0.35), ("affine", 4, 0.5),
        ("affine", 8, 0.05), ("steps", 8, 0.2), ("affine", 8, 0.35), ("flat", 8, 0.5),
    ], 3),
)  # fmt: skip
def test_up_to_half_load_no_policy_is_much_better(shape: str, ratio: int, load: float) -> None:
    case = workers(shape, ratio, load)
    found, best = case.cost_of(solved(case).tables[0]), case.best()
    assert found <= 1.01 * best, "the bar is 3 %"
    assert case.greedy() > found, "who always uses the slow worker pays for it"


@needs_compiler
def test_energy_is_weighed_too() -> None:
    """The slow worker takes a tenth of the energy of the fast one per row, and a row of it is worth much."""
    case = workers("affine", 2, 0.3, energies=(8.0, 0.4))
    bank = solved(case, Prices(latency_weight=1.0, energy_weight=1.0 / case.rate))  # 1 per mJ, as in uneven.c
    assert bank.tables[0].second[0].any(), "the slow one starts first where both are idle"
    assert case.cost_of(bank.tables[0]) <= 1.01 * case.best()


def test_a_much_slower_worker_stays_idle_while_few_rows_wait() -> None:
    table = solved(workers("linear", 8, 0.2)).tables[0]
    half = STEPS[0] // 2
    assert not table.second[1:half, 1:3].any(), "the fast one is done sooner"
    assert table.first[:, 1:].all(), "the fast one never waits: only latency counts"
    assert table.second[STEPS[0], -1] > 0, "but many rows are worth it"


def test_a_slow_worker_starts_sooner_the_longer_the_fast_one_is_busy() -> None:
    second = solved(workers("affine", 4, 0.5)).tables[0].second
    limits = [int(np.argmax(row > 0)) for row in second[1 : STEPS[0] // 2]]
    assert limits == sorted(limits, reverse=True) and limits[0] > limits[-1] > 0


def test_one_of_the_kinds_is_first_where_both_are_idle() -> None:
    for table in solve_uneven(kinds_of(workers("affine", 2, 0.5)), LATENCY, LOADS[::4]).tables:
        assert not (table.first[0] * table.second[0]).any()
        rows = np.arange(table.first.shape[1])
        for each in table[:2]:
            assert ((each >= 0) & (each <= np.minimum(rows, LARGEST))).all()


def test_more_fast_workers_need_the_slow_one_less() -> None:
    case = workers("affine", 4, 0.5)
    load = [0.5]
    few, many = (solve_uneven(kinds_of(case, counts), LATENCY, load).tables[0] for counts in ((1, 1), (4, 1)))
    first, last = STEPS[0] // 2, LARGEST // 2
    assert many.second[first, last] < few.second[first, last]


def test_large_batches_are_counted_in_units() -> None:
    times = 10.0 + 0.1 * np.arange(1.0, 101.0)
    profile, none = Profile(times, times, np.zeros(100)), np.zeros(100)
    slow = Profile(3.0 * times, times, none)
    bank = solve_uneven((WorkerKind(profile, 1), WorkerKind(slow, 1)), LATENCY, [0.4])
    table = bank.tables[0]
    assert table.first.shape == (STEPS[1] + 1, QUEUES * 25 * 4 + 1), "4 rows are a unit"
    assert set(table.first[0, 20:101] - np.arange(20, 101)) == {0}, "and yet all that waits is taken"
    assert table.first[0, -1] == 100


def test_a_bank_has_the_table_of_the_nearest_rate() -> None:
    bank = solve_uneven(kinds_of(workers("linear", 2, 0.1)), LATENCY, [0.1, 0.4])
    low, high = bank.rates
    assert [bank.at(rate) for rate in (0.0, low, 1.9 * low, 2.1 * low, high, 10.0 * high)] == [0, 0, 0, 1, 1, 1]
    assert [each.step_ms(12) for each in bank.kinds] == pytest.approx([2.0, 4.0])


def test_an_iteration_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uneven, "IMPROVEMENTS", 2)
    assert solved(workers("affine", 2, 0.5)).tables[0].first.any()


def test_profiles_of_different_batches_are_refused() -> None:
    small = Workers((3, 4), (6, 8), 0.1).profiles()[1]
    fast = workers("flat", 2, 0.1).profiles()[0]
    with pytest.raises(SettingsError, match="max_batch_size=8 and 2: the profiles of both kinds"):
        solve_uneven((WorkerKind(fast, 1), WorkerKind(small, 1)), LATENCY)
