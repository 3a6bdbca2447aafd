"""admission.py: which rows are admitted where a latency is promised, and that most are that can be."""

from itertools import pairwise

import numpy as np
import pytest
from tests.policy.banks import searched
from tests.rings import spread

from weir.policy.cost import GOOGLENET_P4, LatencySLO, Profile
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.online.admission import Admission, AdmissionGate, AdmissionPlan, admission
from weir.policy.solve.bank import Bank
from weir.simulation.banks import make_bank
from weir.simulation.simulator import run

P4 = GOOGLENET_P4
SLEEPS = Profile.linear(alpha_ms=0.5, tau0_ms=21.0, max_batch_size=64)
# A batch of n rows takes n + 1 seconds; 10 seconds may pass; a batch must be able to grow to 3 rows.
GATE = AdmissionGate((0.0, 2.0, 3.0, 4.0, 5.0), 10.0, 3)


def planned(
    gate: AdmissionGate = GATE, rows: int = 4, waiting: int = 4, workers: int = 1, **at: float
) -> AdmissionPlan:
    plan = AdmissionPlan()
    plan.dispatch(gate, rows, waiting, 0.0, at.get("oldest", 0.0), at.get("last", 0.0), 1, workers)
    return plan


def test_nothing_is_planned_before_the_first_decision() -> None:
    assert (AdmissionPlan().full(1e9), AdmissionPlan().first) == (0, None)


def test_a_row_begins_a_batch_that_could_grow_and_the_next_ones_join_it() -> None:
    plan = planned()
    assert plan.bound == 0 and plan.opens == pytest.approx(5.0 + 4.0 - 10.0)
    assert plan.full(0.0) == 4  # it ends after 5 + 5 seconds
    assert plan.opens == pytest.approx(10.0 + 4.0 - 10.0)
    assert [plan.full(now) for now in (1.0, 3.9, 4.0, 4.5)] == [4, 4, 7, 7]
    assert plan.first == 4


def test_a_batch_is_as_large_as_leaves_its_first_row_in_time() -> None:
    assert [planned(GATE._replace(within=within)).full(0.0) for within in (9.5, 8.9)] == [3, 0]


def test_rows_that_stay_are_planned_by_when_they_came() -> None:
    """Of 5 rows, one came 6 seconds ago and the others at even gaps until now."""
    plan = planned(rows=2, waiting=5, oldest=-6.0, last=0.0)  # the batch ends at 3, the third row came 3 seconds ago
    assert (plan.bound, plan.first) == (3, 3)
    late = planned(rows=1, waiting=5, oldest=-80.0, last=-70.0)
    assert late.bound == 4, "those who are in stay in, though late"


def test_who_began_a_batch_is_known() -> None:
    plan = planned()
    plan.full(0.0), plan.full(4.0)
    plan.dispatch(GATE, 4, 6, 5.0, 0.0, 4.9, 1, 1)
    assert plan.bound == 3  # the first came at 4, and its batch starts at 10: it has 4 seconds


def test_while_the_policy_waits_a_whole_batch_may_come() -> None:
    plan = planned(rows=0, waiting=2)
    assert plan.bound == 4
    assert plan.full(7.0) == 4 + 4, "the worker is free until then"


def test_workers_take_turns() -> None:
    plan = planned(workers=2)
    assert [plan.full(0.0) for _ in range(3)] == [4, 8, 12]  # the other one is free
    plan.dispatch(GATE, 4, 12, 0.0, 0.0, 0.0, 1, 2)
    assert plan.bound == 8
    plan.dispatch(GATE, 4, 8, -100.0, -100.0, -100.0, 1, 2)  # on another clock
    assert plan.bound >= 4


def made_for(profile: Profile, deadline: float, workers: int = 1, **changes: float) -> Admission:
    made = admission(profile, LatencySLO(deadline)._replace(**changes), workers)
    assert made is not None
    return made


def test_two_batches_after_each_other_are_in_time() -> None:
    made = made_for(P4, 0.02)
    assert (made.largest, made.max_waiting, made.overload.least) == (32, 29, 29)
    assert P4.service_time_ms[28] * 2 <= 20.0 < P4.service_time_ms[29] * 2
    assert made_for(P4, 0.06).max_waiting >= 128
    assert made_for(P4, 0.02, 3).max_waiting == 87


def test_what_is_spared_and_batches_in_flight_shorten_the_line() -> None:
    assert made_for(P4, 0.02, margin=0.002).within == pytest.approx(0.018)
    assert made_for(P4, 0.02, margin=0.002, slack=0.003).within == pytest.approx(0.017)
    deep = Profile(P4.service_time_ms, P4.energy_mj, np.zeros(32), latency_offset_ms=2.0, pipeline_depth=2)
    assert made_for(deep, 0.03).overload.depth == 2 and made_for(deep, 0.03).within == pytest.approx(0.028)
    assert made_for(deep, 0.06).max_waiting < made_for(P4, 0.06).max_waiting


def test_none_is_possible_where_a_row_alone_is_late() -> None:
    assert admission(P4, LatencySLO(0.0013)) is None
    assert made_for(P4, 0.0014).largest == 1


def test_with_little_time_rows_are_admitted_by_what_is_left_of_it() -> None:
    """Of 45 ms, a batch of 48 takes all. The more rows come, the less time may be left for them."""
    made = made_for(SLEEPS, 0.045)
    assert (made.largest, made.max_waiting) == (48, 48)
    sizes = [made.gate_at(rate).least for rate in (10.0, 100.0, 400.0, 1600.0)]
    assert all(low <= high for low, high in pairwise(sizes)) and sizes[0] < 3 and sizes[-1] > 15
    waits = LatencySLO(0.045).allowance(SLEEPS)
    assert made.waits(waits).tolist() == [*waits[1:].tolist(), waits[-1]]
    assert made_for(P4, 0.02).waits(waits) is waits


@pytest.fixture(scope="module")
def promised() -> Bank:
    profile = Profile(1.0 + 0.3 * np.arange(1.0, 33.0), P4.energy_mj, np.zeros(32))
    with searched((0.5, 0.88, 0.9, 0.92, 0.94, 0.96, 0.97), 15_000):
        return make_bank(profile, objective=LatencySLO.parse("p99=20ms"))


@pytest.mark.no_cover
@pytest.mark.parametrize(("load", "most"), spread([(0.97, 0.025), (0.9, 0.01), (0.93, 0.01)]))
def test_near_saturation_only_what_nothing_could_save_is_lost(promised: Bank, load: float, most: float) -> None:
    """Knowing the future, 0.02, 0.26 and 1.47 % are lost; refusing by the length of the queue, 1.8, 2.5 and 3.7 %."""
    gaps = np.random.default_rng(5).exponential(1.0 / (load * promised.profile.max_rate), 40_000)
    made = run(promised.profile, SolvedPolicy(promised), np.cumsum(gaps))
    late = made.refused | (made.end - made.arrival > 0.02 + 1e-6)
    seen = np.array([part.mean() for part in np.array_split(late, 20)])
    assert seen.mean() - 2.0 * seen.std(ddof=1) / 20**0.5 <= most
