"""The batcher with a solved policy: traffic that comes and goes, many groups, several workers; nobody waits for ever."""

from collections.abc import Hashable, Sequence

import numpy as np
import pytest
from tests.batching.mill import Asked, Mill
from tests.policy.banks import PROFILE, RATES, bank
from tests.rings import subcases

from weir.errors import Overloaded
from weir.messages import Dispatch, Reason
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.online.rate import SILENCE, filling_of

FOR_EVER = 1e9


def mill_of(policy: SolvedPolicy, workers: int = 1) -> Mill:
    """Return a mill in which nothing but the policy ends a wait."""
    return Mill(policy, workers=workers, max_batch_size=8, max_queue_delay=FOR_EVER)


def drive(mill: Mill, times: Sequence[float], keys: Sequence[Hashable] = (None,)) -> None:
    """Let requests arrive at `times`, of the groups `keys` in turn, and every batch take the profile's time."""
    for number, instant in enumerate(times):
        mill.play(seconds, instant)
        mill.submit(Asked(number, instant, FOR_EVER, key=keys[number % len(keys)]))
    mill.play(seconds)


def seconds(cut: Dispatch) -> float:
    """Return how long a batch takes."""
    return float(PROFILE.service_time_ms[cut.rows - 1]) / 1000.0


def waits(mill: Mill) -> list[float]:
    """Return how long each request waited until its batch began."""
    return [cut.at - request.arrival for cut in mill.cuts for request in cut.requests]


def bursts(rate: float, on: float, off: float, count: int, seed: int = 1) -> list[float]:
    """Return Poisson arrivals while on, and none while off."""
    within = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, count))
    return [float(each + off * (each // on)) for each in within]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("off", [0.05, 10.0, 3600.0])
def test_when_traffic_stops_nobody_waits_for_ever(workers: int, off: float) -> None:
    mill = mill_of(SolvedPolicy(bank()), workers=workers)
    drive(mill, bursts(300.0, 0.2, off, 700))
    assert len(waits(mill)) == 700
    # The last of a burst wait for a silence at the estimated rate, which a burst raises to 40 % of the lowest rate at least.
    assert max(waits(mill)) < SILENCE / (0.4 * RATES[0]) + 0.012
    assert np.quantile(waits(mill), 0.99) < SILENCE / 150.0


def test_it_does_wait_as_long_as_traffic_lasts() -> None:
    mill = mill_of(SolvedPolicy(bank()))
    drive(mill, bursts(200.0, 1e9, 0.0, 1000))
    sizes = [cut.rows for cut in mill.cuts]
    assert np.mean(sizes) > 3.0
    assert sum(cut.rows < 4 for cut in mill.cuts[20:]) < 0.05 * len(sizes)  # guards are for silences


@subcases("groups", [2, 10, 100])
def test_of_many_groups_none_waits_longer_than_its_line_may_take_to_fill(groups: int) -> None:
    mill = mill_of(SolvedPolicy(bank()))
    drive(mill, bursts(60.0, 1e9, 0.0, 600), keys=range(groups))
    assert len(waits(mill)) == 600
    longest = max(filling_of(table) for table in bank().tables)
    assert max(waits(mill)) < 2.0 * longest / 60.0 + 1.0


def test_an_arrival_beyond_the_bound_of_the_table_is_refused() -> None:
    mill = mill_of(SolvedPolicy(bank(max_waiting=[0, 0, 12])))
    drive(mill, bursts(100.0, 1e9, 0.0, 100))
    assert mill.batcher.max_waiting == mill.settings.max_queue_size
    start, refused = mill.now, 0
    for number in range(2000):
        instant = start + number / 2000.0
        mill.play(seconds, instant)
        try:
            mill.submit(Asked(number, instant, FOR_EVER))
        except Overloaded as error:
            refused += 1
            assert "rows wait, max_waiting of the policy=12" in error.message
            assert error.retry_after is not None
    assert mill.batcher.max_waiting == 12
    # It serves 667 rows a second, and those that were let in waited for hardly more than a batch and a half.
    assert refused == pytest.approx(2000 - 667, abs=100)
    assert max(waits(mill)[-300:]) < 0.03
    mill.play(seconds)
    drive(mill, [mill.now + 10.0 + number / 50.0 for number in range(60)])
    assert mill.batcher.max_waiting == mill.settings.max_queue_size


def test_a_bank_that_is_adopted_while_rows_wait_is_called_at_once() -> None:
    policy = SolvedPolicy(bank())
    mill = mill_of(policy)
    drive(mill, bursts(200.0, 1e9, 0.0, 200))
    mill.submit(Asked(0, mill.now, FOR_EVER), Asked(1, mill.now, FOR_EVER))
    assert mill.batcher.waiting_rows == 2
    eager = bank(tables=np.tile(np.arange(9, dtype=np.uint16), (3, 1)))
    policy.adopt(eager)
    mill.batcher.reconsider()
    assert mill.batcher.poll(mill.now, mill.cuts[-1].wakeup)[0].reason is Reason.POLICY


def test_draining_leaves_nobody_behind() -> None:
    policy = SolvedPolicy(bank())
    mill = mill_of(policy)
    drive(mill, bursts(200.0, 1e9, 0.0, 200))
    mill.submit(Asked(0, mill.now, FOR_EVER))
    mill.batcher.drain()
    assert mill.turn(mill.cuts[-1].wakeup)[0].reason is Reason.DRAIN
