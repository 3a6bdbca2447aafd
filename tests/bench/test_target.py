import asyncio
import time

import pytest
from tests.telemetry.test_recorder import ask, code_of, dispatch

from weir.bench import LoadSettings, run_bench
from weir.bench.target import OK, CallTarget, HttpOptions, batches_of, read_counts
from weir.errors import DeadlineExceeded, Overloaded, SettingsError
from weir.messages import Reason, Timing
from weir.telemetry.exposition import Exposition
from weir.telemetry.recorder import Metrics


def shown(metrics: Metrics, namespace: str = "weir") -> str:
    return Exposition(metrics, code_of, namespace=namespace).render()[0].decode()


def run_batch(metrics: Metrics, size: int, reason: Reason) -> None:
    requests = [ask(1.0)] * size
    batch = dispatch(requests, at=1.25, reason=reason)
    metrics.own("square").dispatched("square", batch)
    metrics.own("square").computed("square", batch, Timing(0.0, 0.5, 0.0), 2.0)
    metrics.own("square").answered("square", requests, None, 2.0)


def test_batches_are_what_was_counted_in_between() -> None:
    metrics = Metrics()
    run_batch(metrics, 7, Reason.DELAY)
    before = read_counts(shown(metrics), "square")
    for size, reason in ((1, Reason.IDLE), (3, Reason.SIZE), (4, Reason.SIZE)):
        run_batch(metrics, size, reason)
    found = batches_of(read_counts(shown(metrics), "square") - before)
    assert found.count == 3 and found.reasons == {"size": 2, "idle": 1} and found.sizes == {"1": 1, "4": 2}
    assert batches_of(read_counts(shown(metrics, "own_name"), "square")) == batches_of(
        read_counts(shown(metrics), "square")
    )
    assert found.mean_rows == pytest.approx(8 / 3)
    assert [found.queue_time_ms, found.predict_time_ms, found.total_time_ms] == pytest.approx([250.0, 500.0, 1000.0])


def test_what_is_no_metrics_page_is_reported() -> None:
    with pytest.raises(SettingsError, match="/metrics cannot be read"):
        read_counts('weir_batches_total{model="square" 5', "square")


class Calls(CallTarget):
    """Requests end as the test says: with None, they do not end by themselves."""

    def __init__(self, end: str | Exception | None, *, sent: bool = True) -> None:
        super().__init__("calls", HttpOptions(timeout=0.2), time.monotonic)
        self._end = end
        self._sent = sent

    async def _call(self, index: int) -> str:
        if self._sent:
            self._ledger.sent[index] = self._clock()
        if isinstance(self._end, Exception):
            raise self._end
        return await asyncio.Future() if self._end is None else self._end


@pytest.mark.parametrize(
    ("target", "field", "value"),
    [
        (Calls(OK), "answered", 9),
        (Calls(None), "timeouts", 9),
        (Calls(None, sent=False), "unfinished", 9),
        (Calls(DeadlineExceeded("late")), "timeouts", 9),
        (Calls(Overloaded("full")), "errors", {"Overloaded": 9}),
        (Calls(ConnectionResetError("connection reset")), "errors", {"connection reset": 9}),
        (Calls(ZeroDivisionError()), "errors", {"ZeroDivisionError": 9}),
    ],
)
async def test_every_call_ends_and_counts_once(target: Calls, field: str, value: object) -> None:
    """A call that does not end by itself is given up: the time of a request is the target's own."""
    load = LoadSettings("constant", rate=100, duration=0.1, warm_up=0.0, max_lag_ms=1e9)
    outcome = (await run_bench([target], load)).outcome
    assert getattr(outcome, field) == value
    assert outcome.answered + outcome.timeouts + outcome.unfinished + sum(outcome.errors.values()) == 9
