import math

import numpy as np
import pytest

from weir.bench.load import Load
from weir.bench.outcome import Outcome, make_outcome
from weir.bench.rounds import Round
from weir.bench.target import OK, TIMEOUT, UNSENT, Ledger


def load(seconds: float = 10.0, rounds: int = 1, warm_up: float = 0.0) -> Load:
    return Load("constant", 10.0, seconds, rounds, warm_up, [np.empty(0)] * rounds, None)


def books(*requests: tuple[float, float | None, float | None, str], start: float = 100.0) -> Ledger:
    """Each request: when it was meant to leave, left and ended (in seconds from the start), and how."""
    ledger = Ledger([start + intended for intended, *_ in requests])
    ledger.begun = len(requests)
    for index, (_, sent, ended, kind) in enumerate(requests):
        if sent is not None:
            ledger.sent[index] = start + sent
        if ended is not None:
            ledger.end(index, start + ended, kind)
    return ledger


def outcome(*requests: tuple[float, float | None, float | None, str], warm_up: float = 0.0) -> Outcome:
    return make_outcome("it", load(warm_up=warm_up), [Round(books(*requests), 100.0, None)], 3, 0)


def test_a_response_time_counts_from_the_intended_instant() -> None:
    found = outcome((1.0, 1.5, 2.0, OK), (2.0, 2.0, 2.5, OK))
    assert found.times_ms.tolist() == pytest.approx([1000.0, 500.0])
    assert found.response_time_ms.value == pytest.approx(750.0) and found.max_ms == pytest.approx(1000.0)
    assert list(found.lag) == pytest.approx([250.0, 495.0, 500.0])


def test_each_end_is_counted_once() -> None:
    found = outcome(
        (1.0, 1.0, 1.5, OK), (2.0, 2.0, 2.5, "429 Overloaded"), (3.0, 3.0, 3.5, "429 Overloaded"),
        (4.0, 4.0, 4.5, "connection reset"), (5.0, 5.0, 8.0, TIMEOUT), (6.0, None, 9.0, UNSENT), (7.0, 7.0, None, ""),
    )  # fmt: skip
    assert (found.requests, found.answered, found.timeouts, found.unfinished) == (7, 1, 1, 2)
    assert found.errors == {"429 Overloaded": 2, "connection reset": 1}
    # What was given up took at least so long: it must not vanish from the percentiles. Errors are no answers.
    assert found.times_ms.tolist() == pytest.approx([500.0, 3000.0, 3000.0])
    assert found.sent_rate == pytest.approx(0.6) and found.throughput == pytest.approx(0.1)


def test_a_request_for_which_there_was_no_connection_is_our_lag() -> None:
    assert outcome((1.0, 1.0, 2.0, OK), (1.0, None, 4.0, UNSENT)).lag.max_ms == pytest.approx(3000.0)


def test_warm_up_is_cut_by_the_intended_instant() -> None:
    found = outcome((1.0, 1.0, 9.0, OK), (2.0, 2.0, 3.0, OK), (3.0, 3.0, 4.0, "500"), warm_up=2.0)
    assert found.requests == 2 and found.answered == 1 and found.times_ms.tolist() == pytest.approx([1000.0])
    assert found.throughput == pytest.approx(2 / 8)  # answers that came meanwhile, whenever they were asked for
    assert found.instants.tolist() == pytest.approx([2.0])


def test_answers_after_the_end_of_the_load_are_no_throughput() -> None:
    assert outcome((9.0, 9.0, 9.5, OK), (9.0, 9.0, 10.5, OK)).throughput == pytest.approx(0.1)


def test_rounds_are_laid_end_to_end() -> None:
    rounds = [Round(books((1.0, 1.0, 2.0, OK), start=start), start, None) for start in (100.0, 200.0)]
    found = make_outcome("it", load(rounds=2), rounds, None, 0)
    assert found.instants.tolist() == pytest.approx([1.0, 11.0]) and found.requests == 2
    assert found.sent_rate == pytest.approx(0.1)


def test_nothing_counted_is_no_number_and_no_error() -> None:
    found = outcome((1.0, 1.0, 2.0, "500"))
    assert math.isnan(found.response_time_ms.value) and math.isnan(found.p99_ms.value) and math.isnan(found.max_ms)


def test_percentiles_and_their_intervals() -> None:
    rng = np.random.default_rng(1)
    times = rng.exponential(0.1, 20_000)
    requests = [(index / 2000, index / 2000, index / 2000 + time, OK) for index, time in enumerate(times)]
    found = outcome(*requests)
    for estimate, true in ((found.response_time_ms, 100.0), (found.p50_ms, 69.3), (found.p99_ms, 460.5)):
        assert true in estimate and estimate.half_width < 0.2 * true
    assert math.isinf(outcome(*requests[:50]).p99_ms.high)  # too few to say
