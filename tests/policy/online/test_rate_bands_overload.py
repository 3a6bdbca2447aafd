"""How long the line may be where a latency is promised."""

import numpy as np
import pytest

from weir.policy.cost.objective import LatencySLO
from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.online.rate import OPEN, AdmissionGate, admission

P4 = GOOGLENET_P4


def test_two_batches_after_each_other_are_in_time() -> None:
    """29 rows take 9.9 ms; of 2 batches of 18, 36 rows might wait, but they serve 6 % fewer rows per second."""
    made = admission(P4, LatencySLO(0.02))
    assert made is not None
    assert (made.steady, made.max_waiting, made.largest) == (29, 29, 32)
    times = P4.service_time_ms
    for rows, bound in enumerate(made.gate.bounds[1:], 1):
        assert bound is not None
        assert times[rows - 1] + times[bound - 1] <= 20.0
        assert bound == 32 or times[rows - 1] + times[bound] > 20.0


def test_with_time_for_more_batches_the_line_is_longer() -> None:
    made = admission(P4, LatencySLO(0.06))  # of five batches of 32, one runs
    assert made is not None
    assert (made.steady, made.max_waiting, made.largest) == (32, 128, 32)
    assert made.gate.bounds == (160, *[128] * 32)


def test_a_little_less_is_served_for_a_line_of_two_batches() -> None:
    made = admission(P4, LatencySLO(0.03))  # two batches of 32 cannot wait, of 29 they can
    assert made is not None
    assert (made.steady, made.max_waiting, made.largest) == (29, 58, 29)


def test_each_worker_has_its_part_of_the_line() -> None:
    made = admission(P4, LatencySLO(0.02), workers=3)
    assert made is not None
    assert (made.steady, made.max_waiting, made.largest) == (29, 87, 29)


def test_batches_in_flight_take_their_time() -> None:
    profile = Profile(P4.service_time_ms, P4.energy_mj, np.zeros(32), latency_offset_ms=2.0, pipeline_depth=2)
    made = admission(profile, LatencySLO(0.03))  # three of 27 take 27.9 ms
    assert made is not None
    assert (made.steady, made.max_waiting) == (27, 27)


@pytest.mark.parametrize("changes", [{"margin": 0.002}, {"slack": 0.002}, {"margin": 0.002, "slack": 0.001}])
def test_what_is_spared_shortens_the_line(changes: dict[str, float]) -> None:
    made = admission(P4, LatencySLO(0.02)._replace(**changes))
    assert made is not None
    assert (made.steady, made.max_waiting) == (26, 26)  # two take 18 ms


def test_none_is_possible_where_a_row_behind_one_alone_is_late() -> None:
    assert admission(P4, LatencySLO(0.0027)) is None
    made = admission(P4, LatencySLO(0.0028))
    assert made is not None
    assert (made.steady, made.max_waiting) == (1, 1)


def test_tables_take_no_larger_batch_than_there_is_time_for() -> None:
    made = admission(P4, LatencySLO(0.012))
    assert made is not None
    assert (made.steady, made.largest) == (16, 31)
    assert made.table(P4, 4).tolist() == [0, 0, 0, 0, *range(4, 32)]
    table, gate = made.overloaded(P4)
    assert table.tolist() == list(range(17))
    assert gate.bounds == (16,) * 17


def test_under_overload_a_batch_is_never_split_by_a_step() -> None:
    """17 to 20 rows take longer than 16 do, and serve fewer per second; a line of 20 is served all the same."""
    times = np.where(np.arange(1, 33) <= 16, 5.0, 9.0)
    made = admission(Profile(times, times, np.zeros(32)), LatencySLO(0.01))
    assert made is not None
    assert (made.steady, made.max_waiting) == (16, 16)
    table, _ = made.overloaded(Profile(times, times, np.zeros(32)))
    assert table[-1] == 16


GATE = AdmissionGate((6, 4, 4, 3, 3), (0.0, 1.0, 2.0, 3.0, 4.0), 8.0, 2, (0.0, 1.0, 0.0, 0.0, 0.0))


def test_who_stays_behind_keeps_others_out() -> None:
    assert GATE.after(3, 3, 0.0) == 3  # none does
    assert GATE.after(3, 4, 0.5) == 3
    assert GATE.after(3, 4, 2.5) == 2  # 8 - 3 - 2.5 are left for the next batch
    assert GATE.after(3, 4, 4.0) == 1
    assert GATE.after(1, 4, 19.0) == 3  # those who are in stay in
    assert AdmissionGate((9, 9)).after(1, 5, 10.0) == 9
    assert OPEN.after(0, 5, 10.0) is None


def test_a_third_batch_waits_if_it_comes_late_enough() -> None:
    assert [GATE.more(2, since) for since in (0.0, 1.9, 2.0, 3.5, 9.0)] == [0, 0, 2, 3, 4]
    assert GATE.more(1, 1.0) == 2  # one second is to spare behind a batch of one
    assert GATE._replace(third=0).more(2, 9.0) == 0
    assert OPEN.more(0, 9.0) == 0


def test_behind_several_batches_only_a_whole_one_may_come() -> None:
    profile = Profile(np.array([2.0]), np.array([3.0]), np.zeros(1))
    made = admission(profile, LatencySLO(0.009))
    assert made is not None
    assert (made.steady, made.max_waiting) == (1, 3)
    assert [made.gate.more(1, since) for since in (0.0009, 0.001, 0.0019)] == [0, 1, 1]
    crew = admission(profile, LatencySLO(0.009), workers=2)
    assert crew is not None
    assert crew.gate.more(1, 1.0) == 0


def test_where_hardly_any_may_be_late_nothing_is_tried() -> None:
    made = admission(P4, LatencySLO(0.02, 1e-4))
    assert made is not None
    assert made.gate.third == 0
