"""Batches for workers of several kinds."""

from typing import Any

from weir.batching.batcher import Batcher
from weir.batching.settings import BatchingSettings
from weir.batching.workers import Places
from weir.messages import Wakeup
from weir.policy.decision import Decision, KindState, Observation
from weir.policy.rules import Greedy
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


def arrive(made: Batcher, now: float, count: int = 1) -> None:
    for number in range(count):
        made.submit(SimulatedRequest(number, now, 10.0), now)


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


def test_the_bound_on_waits_holds_and_the_kind_that_was_waited_for_is_preferred() -> None:
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


def test_places_prefer_a_kind_over_the_worker_whose_turn_it_is() -> None:
    places = Places()
    for index in range(4):
        places.add(index, 1, float(index), kind=index % 2)
    picked = places.pick_of(1)
    assert picked is not None and picked.index == 1
    picked = places.pick()
    assert picked is not None and picked.index == 0
