"""places.py: who takes the next batch."""

from weir.batching.workers import Places


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
