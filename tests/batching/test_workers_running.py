"""running.py: the batches with the workers, and their deadlines."""

from math import inf

from tests.batching.mill import Asked

from weir.batching.workers import Running
from weir.messages import Dispatch, Reason, Wakeup


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
