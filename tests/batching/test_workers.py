"""workers.py: which worker takes the next batch."""

from math import inf

from tests.batching.mill import Asked

from weir.batching.workers import Places, Running
from weir.messages import Dispatch, Reason, Wakeup


def test_nobody_is_there() -> None:
    places = Places()
    assert places.pick() is None
    assert places.free == len(places) == 0
    assert places.remove(3) == []


def test_fewest_batches_then_longest_idle() -> None:
    places = Places()
    for index, now in ((0, 5.0), (1, 3.0), (2, 4.0)):
        places.add(index, 2, now)
    order = []
    for batch_id in range(6):
        worker = places.pick()
        assert worker is not None
        places.give(worker, batch_id)
        order.append(worker.index)
    assert order == [1, 2, 0, 1, 2, 0]
    assert places.free == 0
    assert places.pick() is None
    assert places.take_back(2, 1, 9.0) == 4.0
    assert places.free == 1
    assert [worker.index for worker in places if worker.free] == [2]


def test_a_worker_that_must_be_alone_takes_nothing_else() -> None:
    places = Places()
    places.add(0, 2, 0.0)
    places.add(1, 2, 0.0)
    first = places.pick(empty=True)
    assert first is not None
    places.give(first, 1, alone=True)
    assert places.free == 2
    second = places.pick()
    assert second is not None
    assert second.index == 1
    places.give(second, 2)
    assert places.pick(empty=True) is None
    places.take_back(0, 1, 1.0)
    assert places.free == 3


def test_a_lost_worker_takes_its_places_along() -> None:
    places = Places()
    places.add(0, 2, 0.0)
    places.add(1, 1, 0.0)
    for batch_id in (1, 2):
        worker = places.pick()
        assert worker is not None
        places.give(worker, batch_id)
    assert places.remove(0) == [1]
    assert places.free == 0
    places.add(0, 2, 1.0)
    assert (places.free, len(places)) == (2, 2)


def test_a_worker_that_leaves_gets_no_more() -> None:
    places = Places()
    places.add(0, 2, 0.0)
    places.add(1, 2, 1.0)
    worker = places.pick()
    assert worker is not None
    places.give(worker, 1)
    assert not places.leave(0)
    assert not places.leave(0)
    assert (places.free, len(places)) == (2, 1)
    assert places.take_back(0, 1, 2.0) == 0.0
    assert places.leave(0)
    assert (places.free, len(places)) == (2, 1)
    assert places.remove(0) == []
    assert (places.free, len(places)) == (2, 1)
    assert places.leave(0)
    assert places.remove(1) == []
    assert (places.free, len(places)) == (0, 0)


# The batches with the workers, and their deadlines.


def dispatch(batch_id: int, *requests: Asked) -> Dispatch:
    """Return a dispatch of these."""
    count = len(requests)
    return Dispatch(
        batch_id, 0, list(requests), None, count, float(count), Reason.IDLE, count, 0.0, None, Wakeup.ARRIVAL, 0.0
    )


def test_deadlines_of_running_batches() -> None:
    running = Running()
    assert running.earliest_deadline() == inf
    soon, later, gone = Asked(0, 0.0, 1.0), Asked(0, 0.0, 5.0), Asked(0, 0.0, 1.0)
    gone.settled = True
    running.add(dispatch(1, soon, later, gone), 1.0)
    running.add(dispatch(2, Asked(0, 0.0, 9.0)), 3.0)  # an instant too early is put right when it has come
    assert running.earliest_deadline() == 1.0
    assert running.passed(0.5) == []
    assert running.passed(1.0) == [soon]
    assert running.earliest_deadline() == 3.0
    soon.settled = True
    assert running.passed(3.0) == []
    assert running.earliest_deadline() == 5.0
    running.pop(1)
    assert running.earliest_deadline() == 9.0


def test_finding_a_request() -> None:
    running = Running()
    request = Asked(0)
    first, second = dispatch(1, Asked(0), request), dispatch(2, Asked(0))
    running.add(first, 30.0)
    running.add(second, 30.0)
    assert running.find(request) == [first]
    assert running.find(Asked(0)) == []
    assert running.pop(2) is second
    assert running.batches == {1: first}


def test_only_a_batch_that_runs_can_be_late() -> None:
    running = Running()
    running.add(dispatch(1), 5.0)
    assert (running.is_late(1, 4.9), running.is_late(1, 5.0), running.is_late(2, 9.0)) == (False, True, False)
