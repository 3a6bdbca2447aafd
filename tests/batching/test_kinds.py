"""Batches for workers of several kinds."""

from math import inf
from typing import Any

import pytest

from weir.batching import BatchingSettings
from weir.batching.batcher import Batcher
from weir.batching.forecast import MARGIN
from weir.batching.service_time import KindTimes
from weir.messages import Wakeup
from weir.policy.decision import Decision, Greedy, KindState, Observation, complete
from weir.simulation.engine import SimulatedRequest

ARRIVAL = Wakeup.ARRIVAL


class Scripted:
    """Answers with the decisions in turn, and keeps what it has seen."""

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = list(decisions)
        self.seen: list[Observation] = []

    def decide(self, seen: Observation) -> Decision:
        self.seen.append(seen)
        return self.decisions.pop(0)


def batcher(policy: Any, kinds: tuple[int, ...] = (0, 1), workers: int = 2, **settings: Any) -> Batcher:
    made = Batcher(BatchingSettings(**{"max_batch_size": 8, "max_queue_delay": 0.1} | settings), policy, kinds)
    for worker in range(workers):
        made.worker_ready(worker, 1, 0.0)
    return made


def arrive(made: Batcher, now: float, count: int = 1, timeout: float = 100.0) -> None:
    for number in range(count):
        made.submit(SimulatedRequest(number, now, timeout), now)


def test_the_policy_sees_the_kinds_and_chooses_one() -> None:
    policy = Scripted(Decision(2, kind=1), Decision(0), Decision(1, kind=0))
    made = batcher(policy)
    arrive(made, 1.0, 3)
    first = made.poll(1.0, ARRIVAL)
    assert [(cut.worker, cut.rows) for cut in first] == [(1, 2)]
    assert policy.seen[0].kinds == (KindState(1, ()), KindState(1, ()))
    assert policy.seen[1].kinds == (KindState(1, ()), KindState(0, ((2, 1.0),)))
    made.finished(first[0].batch_id, 1.5)
    assert [cut.worker for cut in made.poll(1.5, Wakeup.WORKER)] == [0]


def test_another_kind_is_taken_if_none_of_the_chosen_one_is_free() -> None:
    made = batcher(Scripted(Decision(1, kind=1), Decision(1, kind=1)))
    arrive(made, 1.0, 2)
    assert [cut.worker for cut in made.poll(1.0, ARRIVAL)] == [1, 0]


def test_the_bound_on_waits_holds_and_the_awaited_kind_is_preferred() -> None:
    policy = Scripted(Decision(0, kind=1), Decision(0, kind=1))
    made = batcher(policy)
    arrive(made, 1.0)
    assert made.poll(1.0, ARRIVAL) == []
    assert made.next_wakeup == 1.1
    assert [cut.worker for cut in made.poll(1.1, Wakeup.TIMER)] == [1]


def test_workers_beyond_the_list_go_round_it() -> None:
    policy = Scripted(Decision(0))
    made = batcher(policy, kinds=(0, 1), workers=5)
    arrive(made, 1.0)
    made.poll(1.0, ARRIVAL)
    assert policy.seen[0].kinds == (KindState(3, ()), KindState(2, ()))


def test_a_worker_that_leaves_counts_for_no_kind() -> None:
    policy = Scripted(Decision(1, kind=0), Decision(0))
    made = batcher(policy, kinds=(0, 1), workers=3)
    arrive(made, 1.0, 2)
    made.poll(1.0, ARRIVAL)
    made.worker_leaves(0)
    arrive(made, 1.01)
    policy.decisions = [Decision(0)]
    made.poll(1.01, ARRIVAL)
    assert policy.seen[-1].kinds == (KindState(1, ()), KindState(1, ()))


def test_alike_workers_have_no_kinds() -> None:
    policy = Scripted(Decision(1))
    made = batcher(policy, kinds=())
    arrive(made, 1.0)
    made.poll(1.0, ARRIVAL)
    assert policy.seen[0].kinds == ()
    assert Greedy().decide(policy.seen[0]).kind is None


def served(made: Batcher, now: float, seconds: float, rows: int = 1, **calls: Any) -> int:
    """Let `rows` rows be served in one batch that takes so long. Return its worker."""
    arrive(made, now, rows, **calls)
    (cut,) = made.poll(now, ARRIVAL)
    made.finished(cut.batch_id, now + seconds)
    return cut.worker


def knowing(policy: Any = None, kinds: tuple[int, ...] = (0, 1), workers: int = 2, **settings: Any) -> Batcher:
    """Return a batcher whose workers of kind 0 take 4 s for a batch, and those of kind 1 take 1 s."""
    teacher = Scripted(*[Decision(1, kind=kind) for _ in range(4) for kind in (0, 1)])
    made = batcher(policy or Greedy(), kinds, workers, **settings)
    made._policy, own = complete(teacher), made._policy
    for number in range(8):
        served(made, 10.0 * number, 1.0 if number % 2 else 4.0)
    made._policy = own
    return made


def test_without_a_kind_the_fastest_with_a_free_place_serves() -> None:
    made = knowing()
    assert [served(made, 100.0 + 10.0 * number, 1.0) for number in range(3)] == [1, 1, 1]
    arrive(made, 200.0)
    (first,) = made.poll(200.0, ARRIVAL)
    arrive(made, 200.1)
    (second,) = made.poll(200.1, ARRIVAL)
    assert (first.worker, second.worker) == (1, 0)


def test_a_kind_of_which_little_is_known_is_tried() -> None:
    made = batcher(Greedy())
    assert [served(made, 10.0 * number, 5.0 - 0.1 * number) for number in range(8)] == [0, 0, 0, 1, 1, 1, 1, 1]


def test_times_are_learned_by_kind() -> None:
    made = knowing()
    assert isinstance(made.service, KindTimes)
    slow, fast = made.service.of
    assert (slow.count, fast.count, made.service.count) == (4, 4, 8)
    assert [slow.expected(1), fast.expected(1)] == pytest.approx([4.0, 1.0])
    assert 1.0 < made.service.expected(1) < 4.0
    assert made.service.rate(1) == pytest.approx((0.25 + 1.0) / 2)
    assert made.service.alone(1, 1.0) == pytest.approx(1.0)
    assert made.service.upper(1) == pytest.approx(4.0)


def test_a_kind_without_batches_counts_as_the_others() -> None:
    times = KindTimes(2, lambda: [1, 3])
    assert (times.rate(1), times.alone(1, 1.0), times.upper(1)) == (inf, 0.0, 0.0)
    for each in (times, times.of[0]):
        each.learn(1, 2.0, 0.0, 1.0)
    assert (times.rate(1), times.alone(1, 1.0), times.upper(1)) == (0.5, 2.0, 2.0)
    times.of[1].learn(1, 1.0, 0.0, 1.0)
    assert times.rate(1) == pytest.approx((0.5 + 3 * 1.0) / 4)
    assert KindTimes(2, lambda: [0, 0]).rate(1) == inf


def test_waiting_rows_are_shared_among_idle_workers_of_one_kind() -> None:
    made = knowing(kinds=(0, 1, 1), workers=3)
    arrive(made, 100.0, 6)
    assert [(cut.worker, cut.rows) for cut in made.poll(100.0, ARRIVAL)] in ([(1, 3), (2, 3)], [(2, 3), (1, 3)])
    made = knowing()
    arrive(made, 100.0, 6)
    assert [(cut.worker, cut.rows) for cut in made.poll(100.0, ARRIVAL)] == [(1, 6)]


def test_a_wait_for_a_busy_kind_ends_in_time_for_the_idle_one() -> None:
    policy = Scripted(Decision(1, kind=1), Decision(0, kind=1), Decision(0, kind=1))
    made = knowing(policy, max_queue_delay=1000.0)
    arrive(made, 100.0)
    made.poll(100.0, ARRIVAL)
    arrive(made, 100.1, timeout=10.0)
    assert made.poll(100.1, ARRIVAL) == []
    assert made.next_wakeup == pytest.approx(100.1 + 10.0 - 4.0 - MARGIN)
    now = made.next_wakeup
    assert now is not None and [cut.worker for cut in made.poll(now, Wakeup.TIMER)] == [0]


def test_a_wait_whose_deadline_only_the_busy_kind_can_meet_goes_on() -> None:
    policy = Scripted(Decision(1, kind=1), Decision(0, kind=1))
    made = knowing(policy, max_queue_delay=1000.0)
    arrive(made, 100.0)
    made.poll(100.0, ARRIVAL)
    arrive(made, 100.1, timeout=3.0)
    assert made.poll(100.1, ARRIVAL) == []
    assert made.next_wakeup == pytest.approx(100.1 + 3.0 - 1.0 - MARGIN)


def test_a_request_that_the_kind_cannot_serve_in_time_is_not_started_on_it() -> None:
    made = knowing(Scripted(Decision(1, kind=0)))
    arrive(made, 100.0, timeout=3.0)
    assert made.poll(100.0, ARRIVAL) == []
    assert len(made.expire(100.0)) == 1


def test_a_batch_of_which_callers_have_left_counts_but_its_time_does_not() -> None:
    made = knowing()
    assert made.kinds is not None
    arrive(made, 100.0, 2)
    (cut,) = made.poll(100.0, ARRIVAL)
    cut.shorter = True
    made.finished(cut.batch_id, 100.1)
    assert (made.kinds.batches, made.kinds.rows) == ([4, 5], [4, 6])
    assert [each.count for each in made.kinds.times.of] == [4, 4]
