"""workers.py: which worker takes the next batch, and which model gets a worker that several share."""

from collections import Counter
from math import inf
from operator import itemgetter
from typing import Any

import pytest
from tests.batching.mill import many
from tests.rings import subcases

from weir.batching import BatchingSettings
from weir.batching.batcher import Batcher, BatcherUser
from weir.batching.workers import Places, Reservation, SharedWorkers
from weir.messages import Dispatch, Wakeup
from weir.policy.decision import ControlLimit, Greedy


def test_fewest_batches_then_the_first_of_busy_workers() -> None:
    places = Places()
    for index, now in ((0, 5.0), (1, 3.0), (2, 4.0)):
        places.add(index, 2, now)
    order = []
    for batch_id in range(6):
        worker = places.pick()
        assert worker is not None
        places.give(worker, batch_id)
        order.append(worker.index)
    assert order == [0, 1, 2, 1, 2, 0]
    assert places.free == 0
    assert places.pick() is None
    assert places.take_back(2, 2, 9.0) == 4.0
    assert places.free == 1
    assert [worker.index for worker in places if worker.free] == [2]


# The batches with the workers, and their deadlines.


# Workers that several models share, in virtual time.


class Sharer(BatcherUser):
    """A model that shares workers: a real batcher, whose batches take `seconds` each."""

    def __init__(self, name: str, course: "Course", seconds: float, **settings: Any) -> None:
        self.name = name
        self.seconds = seconds
        policy = settings.pop("own_policy", Greedy())
        self.batcher = Batcher(BatchingSettings(**settings), policy)
        self._course = course

    def poll_worker(self) -> None:
        self.poll(Wakeup.WORKER)

    def poll(self, wakeup: Wakeup) -> None:
        for cut in self.batcher.poll(self._course.now, wakeup):
            self._course.began(self, cut)

    def ask(self, count: int, **rest: Any) -> None:
        for request in many(count, self._course.now, timeout=1e6, **rest):
            self.batcher.submit(request, self._course.now)
        self.poll(Wakeup.ARRIVAL)


class Course:
    """Virtual time in which models share workers. `ran` has (end, model, rows) of each batch."""

    def __init__(self, workers: int, places: int = 1, order: str = "fair") -> None:
        self.now = 0.0
        self.places = places
        self.shared: SharedWorkers[Sharer] = SharedWorkers(order)
        self.ran: list[tuple[float, str, int]] = []
        self.workers = range(workers)
        self._ends: list[tuple[float, int, Sharer, Dispatch]] = []
        self._lost: set[int] = set()

    def join(self, name: str, seconds: float = 1.0, **settings: Any) -> Sharer:
        sharer = Sharer(name, self, seconds, max_batch_size=4, max_queue_size=10_000, **settings)
        for worker in self.workers:
            sharer.worker_away(worker)
            sharer.batcher.worker_ready(worker, self.places, self.now)
        self.shared.add(sharer)
        for worker in self.workers:
            if not self.shared.holders(worker):
                sharer.worker_back(worker)
        return sharer

    def began(self, sharer: Sharer, cut: Dispatch) -> None:
        assert self.shared.holders(cut.worker) in ([], [sharer]), "a worker runs batches of one model at a time"
        self.shared.began(sharer, cut.worker, self.now)
        self._ends.append((self.now + sharer.seconds, cut.batch_id, sharer, cut))

    def run(self, until: float = inf) -> None:
        """Let time pass until then, or until nothing runs."""
        while self._ends and min(self._ends, key=itemgetter(0))[0] <= until:
            end = min(self._ends, key=itemgetter(0))
            self._ends.remove(end)
            self.now, _, sharer, cut = end
            self.ran.append((self.now, sharer.name, cut.rows))
            self.shared.ends(sharer, cut.worker, self.now)
            sharer.batcher.finished(cut.batch_id, self.now)
            sharer.poll(Wakeup.WORKER)
            self.shared.ended(cut.worker, self.now)
        self.now = max(self.now, until) if until < inf else self.now

    def lose(self, worker: int) -> None:
        self._ends = [end for end in self._ends if end[3].worker != worker]
        self.shared.lost(worker, self.now)
        for sharer in self.shared.users:
            sharer.batcher.worker_lost(worker, self.now)
            sharer.poll(Wakeup.WORKER)


def test_a_model_with_nothing_to_do_leaves_all_workers_to_the_other() -> None:
    course = Course(workers=2)
    busy, _ = course.join("busy"), course.join("idle")
    busy.ask(16)
    course.run()
    assert (course.now, len(course.ran)) == (2.0, 4)  # both workers all the time: 4 batches in 2 s


def test_busy_models_get_equal_shares_of_the_time() -> None:
    course = Course(workers=2)
    quick, slow = course.join("quick", 1.0), course.join("slow", 3.0)
    quick.ask(400)
    slow.ask(400)
    course.run(60.0)
    counts = Counter(name for _, name, _ in course.ran)
    assert counts["quick"] + 3 * counts["slow"] == pytest.approx(120, abs=6)
    assert counts["quick"] == pytest.approx(3 * counts["slow"], abs=6)


def test_a_model_with_little_to_do_waits_for_one_batch() -> None:
    course = Course(workers=1)
    busy, rare = course.join("busy"), course.join("rare")
    busy.ask(400)
    course.run(10.5)
    rare.ask(8)  # it has had nothing for ten seconds, and gets every second batch
    course.run(16.0)
    assert [name for end, name, _ in course.ran if end > 10.5] == ["busy", "rare", "busy", "rare", "busy", "busy"]


def test_a_policy_that_waits_leaves_the_worker_to_the_next_model() -> None:
    course = Course(workers=1)
    waits = course.join("waits", own_policy=ControlLimit(4), max_queue_delay=100.0)
    other = course.join("other")
    waits.ask(1)
    other.ask(1)
    assert course.shared.holders(0) == [other]
    waits.ask(2)
    other.ask(1)
    course.run()
    assert [name for _, name, _ in course.ran] == ["other", "other"]
    waits.ask(1)
    course.run()
    assert course.ran[-1][1:] == ("waits", 4)


def test_bulk_work_of_one_model_comes_after_the_requests_of_another() -> None:
    course = Course(workers=1)
    bulk, other = course.join("bulk"), course.join("other")
    bulk.ask(1)
    bulk.ask(4, priority=-1)
    other.ask(2)
    assert (bulk.claim, other.claim) == (1, 2)
    course.run()
    assert [name for _, name, _ in course.ran][:2] == ["bulk", "other"]
    assert (bulk.claim, other.claim) == (0, 0)
    assert sum(rows for _, name, rows in course.ran if name == "bulk") == 5


def test_the_batch_of_a_lost_worker_runs_again_on_another() -> None:
    course = Course(workers=2)
    first, second = course.join("first"), course.join("second")
    first.ask(2)
    second.ask(1)
    course.lose(0)
    assert first.claim == 2
    course.run()
    assert sorted(name for _, name, _ in course.ran) == ["first", "first", "second"]
    assert course.shared.holders(0) == []


def test_a_model_that_leaves_gives_its_workers_up() -> None:
    course = Course(workers=3)
    leaves, stays = course.join("leaves"), course.join("stays")
    leaves.ask(2)
    leaves.ask(2)
    stays.ask(8)
    assert [course.shared.holders(worker) for worker in course.workers] == [[leaves], [leaves], [stays]]
    course.shared.remove(leaves, course.now)
    assert [course.shared.holders(worker) for worker in course.workers] == [[stays], [], [stays]]
    stays.ask(4)
    assert course.shared.holders(1) == [stays]
    assert course.shared.users == [stays]


def test_a_worker_with_a_batch_ahead_ends_both_before_another_model_has_it() -> None:
    course = Course(workers=1, places=2)
    busy, other = course.join("busy"), course.join("other")
    busy.ask(16)
    other.ask(1)
    course.run()
    assert [name for _, name, _ in course.ran] == ["busy", "busy", "other", "busy", "busy"]


@subcases(
    ("order", "names"),
    [
        ("oldest", ["first", "few", "many", "many"]),
        ("longest", ["first", "many", "few", "many"]),
        ("solved", ["first", "many", "few", "many"]),  # no policy has an urgency
    ],
)
def test_the_order_of_models_that_share_a_worker(order: str, names: list[str]) -> None:
    course = Course(workers=1, order=order)
    first, few, many = (course.join(name, max_queue_delay=1e3) for name in ("first", "few", "many"))
    first.ask(1)
    few.ask(3)
    course.now = 0.1
    many.ask(6)
    course.run()
    assert [name for _, name, _ in course.ran] == names


class Urgent(Greedy):
    """Calls each row as urgent as it is told."""

    def __init__(self, each: float) -> None:
        self.each = each

    def urgency(self, waiting: int) -> float:
        return self.each * waiting


def test_the_most_urgent_model_is_first_where_policies_have_an_urgency() -> None:
    course = Course(workers=1, order="solved")
    calm = course.join("calm", own_policy=Urgent(0.1), max_queue_delay=1e3)
    urgent = course.join("urgent", own_policy=Urgent(1.0), max_queue_delay=1e3)
    calm.ask(1)
    calm.ask(8)
    urgent.ask(1)
    course.run()
    assert [name for _, name, _ in course.ran] == ["calm", "urgent", "calm", "calm"]


def test_requests_that_must_begin_now_go_before_those_that_are_more_urgent() -> None:
    course = Course(workers=1, order="solved")
    calm = course.join("calm", own_policy=Urgent(0.1), max_queue_delay=3.0)
    urgent = course.join("urgent", own_policy=Urgent(1.0), max_queue_delay=1e3)
    urgent.ask(1)
    calm.ask(1)
    urgent.ask(40)
    course.run()
    names = [name for _, name, _ in course.ran]
    assert names.index("calm") == 2  # the next batch of the other would end when it has waited for its bound


def test_a_batch_that_is_to_run_again_goes_before_all_others() -> None:
    course = Course(workers=2, order="longest")
    few, many = course.join("few"), course.join("many")
    few.ask(1)
    many.ask(12)
    course.lose(0)  # it had the batch of `few`
    course.run()
    assert [name for _, name, _ in course.ran] == ["many", "few", "many", "many"]


def test_a_model_that_loses_its_own_worker_gives_the_place_to_the_others() -> None:
    course = Course(workers=1, order="oldest")
    loses, waits = course.join("loses"), course.join("waits")
    loses.ask(4)
    waits.ask(1)
    assert course.shared.is_others(waits, 0) and not course.shared.is_others(loses, 0)
    course.shared.gave_up(waits, 0, course.now)  # it has nothing there
    assert course.shared.holders(0) == [loses]
    course.shared.gave_up(loses, 0, course.now)
    assert course.shared.holders(0) == [waits]


def test_a_worker_may_be_away_before_it_is_ready() -> None:
    places = Places()
    places.set_away(0, True)
    places.add(0, 2, 0.0)
    assert (places.free, len(places), places.pick()) == (0, 1, None)
    places.set_away(0, False)
    assert places.free == 2


def test_how_long_each_model_had_the_workers_and_why_it_was_next() -> None:
    course = Course(workers=1, order="longest")
    first, few, many = (
        course.join(name, seconds, max_queue_delay=1e3)
        for name, seconds in (("first", 1.0), ("few", 2.0), ("many", 4.0))
    )
    assert course.shared.last(first) == ("", None) and course.shared.busy(first, 3.0) == 0.0
    first.ask(1)
    assert course.shared.last(first) == ("free", None)
    few.ask(3)
    many.ask(6)
    course.run()
    taken = {each.name: {why: n for why, n in course.shared.taken(each).items() if n} for each in (first, few, many)}
    assert taken == {"first": {"free": 1}, "few": {"first": 1}, "many": {"first": 1, "alone": 1}}
    assert [course.shared.busy(each, 99.0) for each in (first, few, many)] == [1.0, 2.0, 8.0]
    why, compared = course.shared.last(few)
    assert why == "first" and compared is not None
    assert [each.name for each in compared.order] == ["few", "many", "first"] and not compared.due
    assert [turn and turn.waiting for turn in compared.turns.values()] == [None, 3, 2]


def test_why_a_model_is_next_that_must_begin_or_whose_rivals_wait() -> None:
    course = Course(workers=1, order="solved")
    pressed = course.join("pressed", own_policy=Urgent(0.1), max_queue_delay=0.5)
    patient = course.join("patient", own_policy=ControlLimit(4), max_queue_delay=1e3)
    other = course.join("other", own_policy=Urgent(1.0), max_queue_delay=1e3)
    other.ask(1)
    other.ask(2)
    pressed.ask(1)
    course.run(1.0)
    assert course.shared.last(pressed)[0] == "due"
    patient.ask(3)
    course.run(2.5)
    assert course.shared.last(other)[0] == "others_wait"
    assert course.shared.present(2.5).order[0] is patient


def test_time_is_counted_while_a_batch_runs_and_forgotten_with_its_model() -> None:
    course = Course(workers=2)
    leaves, stays = course.join("leaves"), course.join("stays")
    leaves.ask(8)
    assert course.shared.busy(leaves, 0.75) == 1.5
    course.shared.remove(leaves, 0.75)
    assert course.shared.busy(leaves, 0.75) == 0.0 and course.shared.last(leaves) == ("", None)
    stays.ask(1)
    assert course.shared.taken(stays)["free"] == 1 and not any(course.shared.taken(leaves).values())


class Reserving:
    """A reservation of worker 0 of `course` for a model."""

    def __init__(self, course: Course, sharer: Sharer) -> None:
        self.granted = 0
        self.course = course
        self.reservation = Reservation(sharer, 0, self._note)
        course.shared.reserve(self.reservation, course.now)

    def _note(self) -> None:
        self.granted += 1

    def release(self) -> None:
        self.course.shared.release(self.reservation, self.course.now)


def test_a_reserved_worker_runs_no_batch_of_another_model() -> None:
    course = Course(workers=1)
    first, second = course.join("first"), course.join("second")
    reserving = Reserving(course, first)
    assert reserving.granted == 1
    course.shared.began(first, 0, course.now)  # what is done with the reservation is one batch to the others,
    course.shared.ends(first, 0, course.now)
    course.shared.ended(0, course.now)
    second.ask(1)
    course.now = 3.0
    assert (course.ran, course.shared.busy(first, course.now)) == ([], 3.0)  # and its time counts once
    reserving.release()
    course.run()
    assert course.ran == [(4.0, "second", 1)]
    assert course.shared.busy(first, course.now) == 3.0
    assert sum(course.shared.taken(first).values()) == 0
    reserving.release()
    assert course.shared.holders(0) == []


@subcases("end", ["release", "lost"])
def test_a_reservation_does_not_count_against_the_models_requests(end: str) -> None:
    course = Course(workers=1)
    first, second = course.join("first"), course.join("second")
    reserving = Reserving(course, first)
    second.ask(40)
    course.now = 30.0
    if end == "lost":
        course.shared.lost(0, course.now)
        course.shared.offer(0, course.now)
    reserving.release()
    first.ask(8)
    course.run()
    assert Counter(name for _, name, _ in course.ran[:4]) == {"first": 2, "second": 2}
    assert course.shared.busy(first, course.now) > 30.0


def test_reservations_and_batches_alternate() -> None:
    course = Course(workers=1)
    measured, busy = course.join("measured"), course.join("busy")
    busy.ask(40)
    one, two = Reserving(course, measured), Reserving(course, measured)
    assert (one.granted, two.granted) == (0, 0)
    course.run(1.0)
    assert (one.granted, two.granted, len(course.ran)) == (1, 0, 1)
    one.release()
    assert two.granted == 0  # first a batch of the model that waits
    course.run(2.0)
    assert (two.granted, len(course.ran)) == (1, 2)
    two.release()
    course.run()
    assert len(course.ran) == 10


def test_a_reservation_ends_with_its_worker_or_its_model() -> None:
    course = Course(workers=1)
    first, second = course.join("first"), course.join("second")
    lost, waits = Reserving(course, first), Reserving(course, second)
    course.shared.remove(second, course.now)
    course.shared.lost(0, course.now)
    lost.release()
    course.shared.offer(0, course.now)
    assert (waits.granted, course.shared.holders(0), course.shared.busy(first, 9.0)) == (0, [], 0.0)
    again = Reserving(course, first)
    course.shared.gave_up(first, 0, course.now)
    again.release()
    assert (again.granted, course.shared.holders(0)) == (1, [])


def test_a_batch_of_a_broken_reservation_holds_its_worker_to_its_end() -> None:
    course = Course(workers=1)
    first, second = course.join("first"), course.join("second")
    broken = Reserving(course, first)
    course.shared.began(first, 0, course.now)
    broken.release()
    waits = Reserving(course, second)
    assert (course.shared.holders(0), waits.granted) == ([first], 0)
    course.now = 2.0
    course.shared.ends(first, 0, course.now)
    course.shared.ended(0, course.now)
    assert (waits.granted, course.shared.busy(first, 9.0)) == (1, 2.0)
    waits.release()
    assert course.shared.holders(0) == []


def test_a_reservation_may_be_given_up_before_it_is_granted() -> None:
    course = Course(workers=1)
    measured, busy = course.join("measured"), course.join("busy")
    busy.ask(8)
    reserving = Reserving(course, measured)
    reserving.release()
    course.run()
    assert (reserving.granted, len(course.ran)) == (0, 2)
