import pytest

from weir.errors import Cancelled, Overloaded
from weir.messages import Dispatch, Kind, Reason, Timing, Wakeup
from weir.telemetry.recorder import Recorder
from weir.testing import FakeRequest


def batch(*requests: FakeRequest, slices: list[tuple[int, int] | None] | None = None, attempt: int = 0) -> Dispatch:
    rows = sum(request.rows for request in requests)
    return Dispatch(
        1, 0, list(requests), slices, rows, 1.0, Reason.SIZE, rows, 0.0, None, Wakeup.ARRIVAL, 11.0, attempt
    )


def test_nothing_has_happened() -> None:
    said = Recorder().to_dict()
    assert (said["last_inference"], said["inference_count"], said["execution_count"], said["batch_stats"]) == (
        0,
        0,
        0,
        [],
    )
    assert set(said["inference_stats"]) == {
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
    }  # fmt: skip


def test_batches_are_counted_by_their_rows_and_requests_one_by_one() -> None:
    statistics = Recorder(lambda: 1234.5678)
    one, two = FakeRequest(1, arrival=10.0), FakeRequest([1, 2], arrival=10.5, kind=Kind.ITEMS, rows=2)
    timing = Timing(0.001, 0.01, 0.002)
    for dispatch in (batch(one, two), batch(FakeRequest(1, arrival=11.0))):
        statistics.dispatched("m", dispatch)
        statistics.computed("m", dispatch, timing, 12.0)
        statistics.answered("m", dispatch.requests, None, 12.0)
    said = statistics.to_dict()
    assert (said["last_inference"], said["inference_count"], said["execution_count"]) == (1234568, 4, 2)
    stats = said["inference_stats"]
    assert stats["queue"] == {"count": 3, "ns": 1_500_000_000}
    assert stats["success"] == {"count": 3, "ns": 4_500_000_000}
    assert stats["compute_infer"] == {"count": 3, "ns": 30_000_000}
    assert [(each["batch_size"], each["compute_input"]) for each in said["batch_stats"]] == [
        (1, {"count": 1, "ns": 1_000_000}), (3, {"count": 1, "ns": 1_000_000}),
    ]  # fmt: skip


def test_failures_are_counted_and_those_who_left_are_not() -> None:
    statistics = Recorder()
    statistics.refused("m", "http", Overloaded("full"))
    statistics.answered("m", [FakeRequest(1, arrival=1.0)], Overloaded("full"), 3.0)
    statistics.answered("m", [FakeRequest(1)], Cancelled("left"), 3.0)
    assert statistics.to_dict()["inference_stats"]["fail"] == {"count": 2, "ns": 2_000_000_000}
    assert statistics.success.count == 0


@pytest.mark.parametrize(("attempt", "counted"), [(0, 2), (1, 0)])
def test_a_wait_counts_once(attempt: int, counted: int) -> None:
    statistics = Recorder()
    parts = [FakeRequest(list(range(9)), kind=Kind.ITEMS, rows=9) for _ in range(3)]
    statistics.dispatched("m", batch(*parts, slices=[(0, 4), (4, 9), None], attempt=attempt))
    assert statistics.queue.count == counted


def test_without_details_the_same_is_counted_but_for_histograms() -> None:
    both = [Recorder(lambda: 7.0, detailed=detailed) for detailed in (True, False)]
    for recorder in both:
        first, second = FakeRequest(1, arrival=1.0), FakeRequest(1, arrival=2.0)
        dispatch = batch(first, second)
        recorder.dispatched("m", dispatch)
        recorder.computed("m", dispatch, Timing(0.1, 0.5, 0.2), 3.0)
        recorder.answered("m", [first, second], None, 4.0)
        recorder.answered("m", [FakeRequest(1, arrival=1.0)], Overloaded("full"), 4.0)
        recorder.answered("m", [FakeRequest(1, arrival=1.0)], Cancelled("left"), 4.0)
    detailed, plain = both
    assert plain.to_dict() == detailed.to_dict()
    assert plain.success.seconds == 5.0
    assert plain.batches == detailed.batches
    assert plain.ran
    assert detailed.queue.count == 2
    assert plain.queue.count == plain.total.count == plain.predict.count == plain.rows.count == 0
