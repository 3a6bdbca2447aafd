"""forecast.py: which requests are started while more wait than can be answered in time."""

from collections import deque
from contextlib import suppress

import pytest
from tests.batching.mill import Asked, Mill, filled, listed, many
from tests.rings import spread, subcases

from weir.batching import BatchingSettings
from weir.batching.batcher import Batcher
from weir.errors import DeadlineExceeded, Overloaded
from weir.messages import Dispatch, Wakeup
from weir.policy.decision import Greedy, Observation

ROWS, SERVICE = 4, 0.02
CAPACITY = ROWS / SERVICE  # requests/s


def good_share(lag: float, *, timeout: float = 0.3, times: int = 10, seconds: float = 8.0) -> float:
    """Offer `times` what one worker can do, for so many seconds; return the share of its capacity that is answered in time.

    The clocks of callers are ahead by `lag`: that long has a request been on its way when it arrives. They give up at their
    own deadlines. The first quarter does not count.
    """
    batcher = Batcher(BatchingSettings(max_batch_size=ROWS), Greedy())
    batcher.worker_ready(0, 1, 0.0)
    callers: deque[Asked] = deque()
    running: Dispatch | None = None
    good, now = 0, 0.0
    for step in range(int(seconds * times * CAPACITY)):
        now = step / (times * CAPACITY)
        while callers and callers[0].deadline - lag <= now:
            batcher.cancel(callers.popleft(), now)
        if running is not None and running.at + SERVICE * (1.05 if step % 2 else 0.95) <= now:
            batcher.finished(running.batch_id, now)
            alive = [request for request in running.requests if not request.settled]
            good += sum(request.deadline - lag >= now for request in alive) if now > seconds / 4 else 0
            for request in alive:
                request.settled = True
            running = None
        request = Asked(step, now, timeout)
        with suppress(DeadlineExceeded, Overloaded):
            batcher.submit(request, now)
            callers.append(request)
        for late in batcher.expire(now):
            assert late.settled
        for cut in batcher.poll(now, Wakeup.ARRIVAL):
            running = cut
    return good / (0.75 * seconds * CAPACITY)


@pytest.mark.no_cover
@pytest.mark.parametrize("lag", spread([0.0, 0.005, 0.03, 0.1]))
@pytest.mark.parametrize("times", [2, 10, 20])
def test_overload_leaves_time_for_the_way_there_and_back(lag: float, times: int) -> None:
    assert good_share(lag, times=times) >= 0.9


def overloaded(timeout: float = 1.0, waiting: int = 40) -> Mill:
    """Two workers whose batches of two take 0.1 s, known by now; one has such a batch, and more wait than can be done in time."""
    mill = Mill(workers=1, max_batch_size=2)
    for _ in range(5):
        (cut,) = mill.submit(*many(2, mill.now))
        mill.advance(mill.now + 0.1)
        mill.finish(cut)
    mill.submit(*many(2, mill.now, timeout=timeout))
    for request in many(waiting, mill.now, timeout=timeout):
        with suppress(DeadlineExceeded):
            mill.submit(request)
    return mill


def test_a_request_given_up_late_is_a_miss() -> None:
    mill = overloaded(waiting=0)
    (running,) = mill.batcher.running.values()
    mill.advance(mill.now + 0.05)
    mill.cancel(mill.accepted[-2])  # with 0.95 s of 1 s left: its caller had other reasons
    assert not running.missed
    mill.advance(running.at + 0.6)
    mill.cancel(mill.accepted[-1])
    assert running.missed


def test_a_request_past_its_deadline_is_a_miss_of_each_of_its_batches() -> None:
    mill = Mill(workers=2, max_batch_size=2)
    one, other = mill.submit(listed(4, timeout=1.0))
    mill.advance(1.0)
    assert one.missed and other.missed


def test_a_batch_of_which_something_left_teaches_only_longer_times() -> None:
    def after(seconds: float) -> float:
        mill = overloaded(waiting=0)
        (running,) = mill.batcher.running.values()
        before = mill.batcher.service.expected(2)
        mill.cancel(mill.accepted[-1])
        mill.advance(running.at + seconds)
        mill.finish(running)
        return mill.batcher.service.expected(2) - before

    assert after(0.001) == 0.0  # the worker may have had less to do than the batch says
    assert after(0.9) > 0.0


def test_the_margin_grows_with_misses_and_shrinks_without() -> None:
    mill = overloaded()
    forecast, request = mill.batcher._forecast, mill.accepted[-1]
    forecast.missed(request)
    first = forecast.margin
    assert first == pytest.approx(0.01, rel=0.01)  # a tenth of a batch
    forecast.missed(request)
    assert forecast.margin == 1.5 * first
    for _ in range(100):
        forecast.missed(request)
    assert forecast.margin == pytest.approx(0.45, rel=0.01)  # half of what a request has to spare
    for _ in range(500):
        forecast.made_it()
    assert forecast.margin < first


@subcases(("misses", "slack"), [(0, 0.0), (1, 0.01), (100, 0.45)])
def test_who_is_started_has_the_margin_to_spare(misses: int, slack: float) -> None:
    mill = overloaded()
    for _ in range(misses):
        mill.batcher._forecast.missed(mill.accepted[-1])
    group = filled(*many(9, mill.now, timeout=1.0))
    seen = Observation(mill.now, 9, mill.now, mill.now + 1.0, 0, 0.0, 1, 1, 2, 0.1, False)
    assert mill.batcher._forecast.start_cutoff(seen, 2, group, mill.batcher.service) == pytest.approx(
        mill.now + 0.1 + slack, abs=0.001
    )
    mill.batcher.took_turn(0.1)  # of the loop, on the way here and on the way back
    mill.batcher.took_turn(0.0)
    assert mill.batcher._forecast.start_cutoff(seen, 2, group, mill.batcher.service) == pytest.approx(
        mill.now + 0.1 + max(slack, 0.18), abs=0.001
    )
    few = seen._replace(waiting=2)
    assert mill.batcher._forecast.start_cutoff(few, 2, group, mill.batcher.service) == pytest.approx(
        mill.now + 0.1, abs=0.001
    )
    hasty = seen._replace(earliest_deadline=mill.now + 0.05)  # less than a batch takes: nothing to spare
    assert mill.batcher._forecast.start_cutoff(hasty, 2, group, mill.batcher.service) == pytest.approx(
        mill.now + 0.1, abs=0.001
    )


def test_where_none_has_so_much_to_spare_the_last_that_came_are_started() -> None:
    mill = overloaded()
    forecast = mill.batcher._forecast
    for _ in range(100):
        forecast.missed(mill.accepted[-1])
    now = mill.now + 0.7
    seen = Observation(now, 9, mill.now, mill.now + 1.0, 0, 0.0, 1, 1, 2, 0.1, False)
    old, new = many(7, mill.now, timeout=1.0), many(2, mill.now + 0.01, timeout=1.0)
    cutoff = forecast.start_cutoff(seen, 2, filled(*old, *new), mill.batcher.service)
    assert [request.deadline > cutoff for request in (*old, *new)] == [False] * 7 + [True] * 2
    assert forecast.start_cutoff(seen, 2, filled(*new), mill.batcher.service) < new[0].deadline
    # Too few to choose from.
    assert forecast.start_cutoff(seen, 2, filled(new[0]), mill.batcher.service) == pytest.approx(now + 0.1, abs=0.001)
    # Too late for all.
    assert (
        forecast.start_cutoff(seen._replace(now=now + 0.25), 2, filled(*old, *new), mill.batcher.service)
        > new[0].deadline
    )


def test_a_batch_is_late_from_its_first_deadline_on() -> None:
    mill = Mill(workers=1, max_batch_size=2)
    (cut,) = mill.submit(Asked(0, timeout=1.0))
    assert cut.due == 1.0
