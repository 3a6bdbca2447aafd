"""retry.py and what the batcher makes of it: after a death, halves, each alone with its worker, until the guilty is found."""

import pytest
from tests.batching.mill import Asked, Mill, crashed, listed, many
from tests.rings import subcases

from weir.batching.collate import Entry, entries_of
from weir.batching.retry import draft_of
from weir.errors import DeadlineExceeded, ModelCrashed, WorkerLost
from weir.messages import EventKind, Events, Kind, Reason, Wakeup


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("killer", [0, 31, 63])
def test_the_killer_fails_alone_and_its_63_neighbours_get_their_answers(workers: int, places: int, killer: int) -> None:
    mill = Mill(workers=workers, places=places)
    requests = many(64)
    requests[killer].killers = frozenset([0])
    mill.submit(*requests)
    mill.run_all()
    for number, request in enumerate(requests):
        (end,) = request.ends
        assert isinstance(end, ModelCrashed) if number == killer else end == number
    assert max(cut.attempt for cut in mill.cuts) == 7  # 64, 32, ..., 2, 1 and once more


def test_an_unlucky_one_gets_another_try() -> None:
    mill = Mill()
    (request,) = many(1)
    mill.submit(request)
    (again,) = mill.lose(0)
    assert (again.reason, again.attempt, again.requests) == (Reason.RETRY, 1, [request])
    mill.run_all()
    assert request.ends == [0]


def test_suspects_go_before_the_line_and_share_with_nobody() -> None:
    mill = Mill(places=2, max_batch_size=4)
    first, second = mill.submit(*many(8))
    waiting = many(8)
    mill.submit(*waiting)
    cut = mill.lose(0)
    assert [each.reason for each in cut] == [Reason.RETRY]
    for _ in range(4):
        assert len(mill.batcher.running) == 1
        mill.run(next(iter(mill.batcher.running.values())))
    assert {each.reason for each in mill.batcher.running.values()} == {Reason.SIZE}
    assert len(mill.batcher.running) == 2
    assert all(request.ends for request in first.requests + second.requests if isinstance(request, Asked))


def test_a_busy_worker_runs_empty_for_a_suspect() -> None:
    mill = Mill(workers=2, places=2, max_batch_size=1, max_queue_size=100)
    mill.submit(*many(20))
    mill.lose(0, replace=False)
    assert mill.batcher.suspects == 2
    assert len(mill.batcher.running) == 2
    mill.finish(next(iter(mill.batcher.running.values())))
    assert len(mill.batcher.running) == 1, "worker 1 got a new batch while suspects wait for an empty one"
    mill.finish(next(iter(mill.batcher.running.values())))
    assert {each.reason for each in mill.batcher.running.values()} == {Reason.RETRY}
    mill.run_all()
    assert all(len(request.ends) == 1 for request in mill.accepted)


def test_entries_with_an_answer_do_not_run_again() -> None:
    mill = Mill()
    item, items = Asked("item"), listed(3)
    (cut,) = mill.submit(item, items)
    mill.give(cut, Events(cut.batch_id, ["item", 1], indices=[0, 2], final=False))
    (first,) = mill.lose(0)
    assert entries_of(first) == [(items, 0, 1)]
    mill.run_all()
    assert items.ends == [[0, 1, 2]]


def test_who_has_had_a_part_does_not_run_again() -> None:
    mill = Mill()
    requests = many(2)
    (cut,) = mill.submit(*requests)
    mill.give(cut, Events(cut.batch_id, ["part"], indices=[0], kinds=[EventKind.PART], final=False))
    mill.lose(0)
    assert isinstance(requests[0].ends[0], WorkerLost)
    mill.run_all()
    assert requests[1].ends == [1]


def test_a_worker_that_is_ready_before_the_timer_runs_no_expired_suspects() -> None:
    mill = Mill(max_batch_size=8)
    early, late = many(2, timeout=1.0), many(2)
    mill.submit(*early, *late)
    mill.lose(0, replace=False)
    mill.batcher.worker_ready(0, 1, 1.0)
    (again,) = mill.batcher.poll(1.0, Wakeup.WORKER)
    assert again.requests == late
    assert mill.batcher.has_left_out and mill.batcher.next_wakeup == 1.0
    assert mill.batcher.expire(1.0) == early
    assert not mill.batcher.has_left_out


@subcases("rest", [{}, {"priority": -1}])
def test_an_expired_suspect_of_which_a_part_still_waits_ends_once(rest: dict[str, int]) -> None:
    mill = Mill(max_batch_size=2)
    request, other = listed(4, timeout=1.0, **rest), Asked("other")
    mill.submit(request)
    mill.lose(0, replace=False)
    mill.submit(other)
    mill.batcher.worker_ready(0, 1, 1.0)
    (cut,) = mill.batcher.poll(1.0, Wakeup.WORKER)
    assert (cut.requests, mill.batcher.expire(1.0)) == ([other], [request])
    assert (mill.batcher.waiting_rows, mill.batcher.waiting_requests, mill.batcher.suspects) == (0, 0, 0)


def test_a_killer_within_a_list_costs_only_its_own_place() -> None:
    mill = Mill(max_batch_size=16)
    request = listed(40, killers=[21])
    neighbours = many(5)
    mill.submit(*neighbours, request)
    mill.run_all()
    (answers,) = request.ends
    assert crashed(request) == 1
    assert isinstance(answers[21], ModelCrashed)
    assert [answer for answer in answers if not isinstance(answer, ModelCrashed)] == [n for n in range(40) if n != 21]
    assert [neighbour.ends for neighbour in neighbours] == [[n] for n in range(5)]


def test_neighbouring_entries_become_one_slice() -> None:
    items, uneven = listed(9, cost=18.0), Asked([1, 2, 3], kind=Kind.ITEMS, rows=7)
    load = draft_of([(items, 1, 2), (items, 2, 3), (items, 5, 6), (uneven, 0, 1)])
    assert load.requests == [items, items, uneven]
    assert load.slices == [(1, 3), (5, 6), (0, 1)]
    assert (load.rows, load.undivided) == (6, False)
    assert load.cost == pytest.approx(6.0 + 1 / 3)
    longer = Asked(1, cost=10.0)
    entries: list[Entry] = [(items, 1, 2), (longer, 0, 1)]
    assert [draft_of(entries, share).cost for share in (None, 0.0, 0.25, 1.0)] == [12.0, 12.0, 14.0, 20.0]
    assert draft_of(entries, 0.25).padding == 2.0


def test_tensors_are_one_suspect() -> None:
    mill = Mill(max_batch_size=8)
    killer = Asked({"x": [1, 2, 3]}, kind=Kind.TENSORS, rows=3, killers=[1])
    mill.submit(killer, *many(3))
    mill.run_all()
    assert isinstance(killer.ends[0], ModelCrashed)
    assert [request.ends for request in mill.accepted[1:]] == [[0], [1], [2]]


def test_cancelled_and_expired_suspects_do_not_run_again() -> None:
    mill = Mill(max_batch_size=8)
    requests = [*many(4), *many(4, timeout=1.0)]
    mill.submit(*requests)
    mill.lose(0, replace=False)
    for request in requests[:2]:
        mill.cancel(request)
    assert mill.batcher.next_wakeup == 1.0
    mill.advance(1.0)
    assert [type(request.ends[0]) for request in requests[4:]] == [DeadlineExceeded] * 4
    mill.ready(0)
    mill.run_all()
    assert [len(cut.requests) for cut in mill.cuts] == [8, 2]
