"""account.py: what a policy pays for its waits, held against the simulator; and when it has to be greedy."""

from math import inf

import numpy as np
import pytest
from tests.policy.banks import PROFILE, bank
from tests.policy.online.test_rate import poisson

from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile
from weir.policy.decision import Observation
from weir.policy.online.adaptive import (
    ALLOWED,
    RESERVE,
    ROWS,
    SECONDS,
    Arrived,
    CostAccount,
    SureRate,
    VirtualQueue,
    WaitBounds,
    least_energy_mj,
)
from weir.policy.online.rate import RateBand, Stages, answers_of
from weir.policy.solve.tables import limit_table
from weir.simulation.engine import Run
from weir.simulation.simulator import run

GREEDY = WaitBounds(None, inf, inf, 8)
ALONE = Arrived(0, 0.0, 0.0)


def waits(limit: int, silence: float = inf, filling: float = inf, largest: int = 8) -> WaitBounds:
    """Return the waits of a table with that limit."""
    return WaitBounds(answers_of(limit_table(limit, 8), limit), silence, filling, largest)


def costs(profile: Profile, made: Run) -> tuple[float, float]:
    """Return the time that rows spent, in ms, and the energy beyond the least, in mJ."""
    sizes = made.batches.rows
    energy = float(profile.energy_mj[sizes - 1].sum()) - int(sizes.sum()) * least_energy_mj(profile)
    return 1000.0 * float((made.end - made.arrival).sum()), energy


# A queue in virtual time.


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("rate", [50.0, 300.0, 600.0])
@pytest.mark.parametrize("limit", [0, 3, 8])
def test_a_virtual_queue_is_the_simulators(limit: int, rate: float, workers: int) -> None:
    times = poisson(workers * rate, 2000)
    queue, rule = VirtualQueue(PROFILE, workers, 0.0), waits(limit) if limit else GREEDY
    for now in times:
        queue.advance(now, Arrived(1, now, 0.0), rule)
    queue.advance(times[-1] + 100.0, ALONE, waits(8, silence=0.0))  # who still waits when the last has come
    made = run(PROFILE, f"control-limit:{limit}" if limit else "greedy", np.array(times), workers=workers)
    late = made.batches.rows[-1] < limit
    spent, energy = costs(PROFILE, made)
    if not late:
        assert queue.area_ms == pytest.approx(spent)
    assert queue.energy_mj == pytest.approx(energy)


def test_many_rows_may_be_seen_at_once() -> None:
    one, other = VirtualQueue(PROFILE, 1, 0.0), VirtualQueue(PROFILE, 1, 0.0)
    for number in range(100):
        one.advance(0.001 * number, Arrived(1, 0.001 * number, 0.0), GREEDY)
    other.advance(0.099, Arrived(100, 0.0, 0.001), GREEDY)
    for queue in (one, other):
        queue.advance(10.0, ALONE, GREEDY)
    assert other.area_ms == pytest.approx(one.area_ms)
    assert other.energy_mj == pytest.approx(one.energy_mj)
    together = VirtualQueue(PROFILE, 1, 0.0)
    together.advance(0.0, Arrived(5, 0.0, 0.0), GREEDY)
    together.advance(1.0, ALONE, GREEDY)
    assert together.area_ms == pytest.approx(5.0 + 4 * (5.0 + 8.0))  # the first alone, the others behind it


def test_waits_end_with_the_silence_or_when_the_oldest_has_waited_enough() -> None:
    for rule, spent in (
        (waits(4, silence=0.02), 2 * 6.0 + 30.0 + 20.0),
        (waits(4, filling=0.025), 2 * 6.0 + 25.0 + 15.0),
    ):
        queue = VirtualQueue(PROFILE, 1, 0.0)
        queue.advance(0.01, Arrived(2, 0.0, 0.01), rule)
        queue.advance(1.0, ALONE, rule)
        assert queue.area_ms == pytest.approx(spent)


def test_a_full_batch_is_never_held_back_and_none_is_larger() -> None:
    queue = VirtualQueue(PROFILE, 1, 0.0)
    queue.advance(0.0, Arrived(5, 0.0, 0.0), waits(8, largest=3))
    queue.advance(1.0, ALONE, waits(2, largest=3))
    assert queue.area_ms == pytest.approx(5 * 7.0 + 2 * 6.0)
    assert queue.energy_mj == pytest.approx(7.0 + 6.0 - 5 * 12.0 / 8)


def test_service_times_vary_by_the_profiles_deviation() -> None:
    steady, varying = (Profile(np.array([10.0]), np.array([1.0]), np.array([cv])) for cv in (0.0, 0.5))
    spent = []
    for profile in (steady, varying):
        queue = VirtualQueue(profile, 1, 0.0)
        for now in poisson(50.0, 40_000):
            queue.advance(now, Arrived(1, now, 0.0), GREEDY._replace(largest=1))
        spent.append(queue.area_ms / 40_000)
    # M/D/1 and M/G/1 (Pollaczek and Khinchine) at load 0.5: 10 + 5 ms, and 10 + 6.25.
    assert spent == pytest.approx([15.0, 16.25], rel=0.03)


def test_who_is_in_service_has_spent_only_what_has_passed() -> None:
    queue = VirtualQueue(PROFILE, 2, 0.0)
    queue.advance(0.001, Arrived(2, 0.0, 0.001), GREEDY)
    assert queue.spent_ms(0.003) == pytest.approx(3.0 + 2.0)
    assert queue.spent_ms(9.0) == queue.area_ms == 10.0


# The account.


class Traffic:
    """Rows that come to an account, one look at each, a worker always idle."""

    def __init__(self, prices: Prices, start: float = 0.0, limit: int = 4) -> None:
        self.bank = bank(prices=prices, tables=np.stack([limit_table(limit, 8)] * 3))
        self.account = CostAccount(self.bank)
        self.stage: RateBand = Stages(self.bank).at(200.0)
        self.now = start
        self.arrivals = 0

    def look(self, gap: float, count: int = 1, *, oldest: float | None = None, waiting: int = 1) -> bool:
        """Let `count` rows arrive in `gap` seconds, and look."""
        self.now += gap
        self.arrivals += count
        first = self.now if oldest is None else oldest
        seen = Observation(self.now, waiting, first, 1e18, self.arrivals, self.now, 1, 1, 8, 1.0, False)
        return self.account.observe(seen, self.stage, self.stage.first, 200.0)

    def looks(self, gap: float, times: int) -> float:
        """Look so many times; return the share of looks that told to be greedy."""
        return float(np.mean([self.look(gap) for _ in range(times)]))


@pytest.mark.parametrize("start", [0.0, 1.7e9])
def test_waits_that_pay_are_left_alone(start: float) -> None:
    traffic = Traffic(Prices(1.0, 100.0, 200.0), start)
    assert traffic.looks(0.005, 3000) == 0.0
    assert traffic.account.excess == pytest.approx(-RESERVE, abs=0.002)


@pytest.mark.parametrize("reference_rate", [200.0, None])
@pytest.mark.parametrize("start", [0.0, 1.7e9])
def test_waits_that_do_not_pay_cost_no_more_than_is_allowed(start: float, reference_rate: float | None) -> None:
    traffic = Traffic(Prices(1.0, 0.0, reference_rate), start)
    traffic.looks(0.02, 100)
    assert traffic.looks(0.02, 10_000) > 0.97
    assert 0.0 < traffic.account.excess < 1.5 * ALLOWED


def test_without_a_reference_rate_that_of_the_traffic_counts() -> None:
    dear = Traffic(Prices(1.0, 100.0))  # a joule saved in 5 ms, and in half a second
    assert dear.looks(0.005, 2000) == 0.0
    slow = Traffic(Prices(1.0, 100.0))
    slow.looks(0.5, 20)
    assert slow.looks(0.5, 2000) > 0.97


def test_the_tables_have_their_turn_again_once_they_pay() -> None:
    traffic = Traffic(Prices(1.0, 0.5, 200.0))
    traffic.looks(0.02, 3000)
    assert traffic.looks(0.02, 3000) > 0.9
    object.__setattr__(traffic.bank, "prices", Prices(1.0, 100.0, 200.0))
    assert traffic.looks(0.005, 20_000) < 0.5
    assert traffic.looks(0.005, 1000) == 0.0


def test_old_savings_do_not_pay_for_long() -> None:
    traffic = Traffic(Prices(1.0, 100.0, 200.0))
    traffic.looks(0.005, 10_000)
    object.__setattr__(traffic.bank, "prices", Prices(1.0, 0.0, 200.0))
    traffic.looks(0.02, 1000)
    assert traffic.looks(0.02, 100) == 1.0


def test_the_past_is_forgotten_by_halves() -> None:
    traffic = Traffic(Prices(1.0, 100.0, 200.0))
    gap = 1.1 * SECONDS / ROWS
    traffic.looks(gap, int(ROWS) - 10)
    before = traffic.account.excess
    traffic.looks(gap, 20)
    assert traffic.account.excess == pytest.approx(before, abs=1e-3)
    assert traffic.account._rows == pytest.approx(ROWS / 2.0, rel=0.01)


def test_another_clock_or_count_starts_it_anew() -> None:
    traffic = Traffic(Prices(1.0, 0.0, 200.0))
    traffic.looks(0.02, 1000)
    assert traffic.account.greedy
    traffic.arrivals = 0
    assert not traffic.look(0.02)
    traffic.looks(0.02, 1000)
    assert traffic.account.greedy
    traffic.now = 0.0
    assert not traffic.look(0.02)


@pytest.mark.parametrize(
    ("waiting", "oldest", "first"), [(4, 0.15, 0.15), (9, 0.02, 0.15), (4, 9.0, 0.3), (4, 0.05, 0.1)]
)
def test_rows_seen_together_came_between_the_first_and_the_last(waiting: int, oldest: float, first: float) -> None:
    """The first is known if all who wait are new; else they came evenly since the last look. Nobody came before that."""
    traffic = Traffic(Prices())
    traffic.look(0.1)
    seen = Observation(0.3, waiting, oldest, 1e18, 5, 0.3, 1, 1, 8, 1.0, False)
    assert traffic.account._spread(4, seen) == pytest.approx((4, first, (0.3 - first) / 3))


# The rate that arrivals surely have had.


def sure(times: list[float]) -> float | None:
    """Return the rate after a look at each arrival."""
    rate, last = SureRate(), 0.0
    for now in times:
        rate.observe(1, now - last)
        last = now
    return rate.value


@pytest.mark.parametrize("mean", [0.1, 30.0, 5000.0])
def test_of_steady_traffic_the_sure_rate_is_nearly_the_mean(mean: float) -> None:
    assert 0.9 * mean < (sure(poisson(mean, 10_000)) or 0.0) < 1.01 * mean


def test_of_bursts_it_is_below_the_mean_and_the_nearer_the_more_there_were() -> None:
    def bursts(count: int) -> list[float]:
        """One second of 100 rows/s in ten."""
        return [10.0 * burst + 0.01 * row for burst in range(count) for row in range(100)]

    few, many = sure(bursts(3)) or 0.0, sure(bursts(1000)) or 0.0
    assert 0.0 <= few < 5.0
    assert 8.0 < many < 10.1


def test_the_sure_rate_is_not_known_before_there_are_four_stretches() -> None:
    assert sure([0.06, 0.11, 0.16]) is None
    assert sure([0.06, 0.11, 0.16, 0.21]) is not None


def test_it_forgets_the_older_half() -> None:
    rate = SureRate()
    for seen in (1000, 1):
        for _ in range(100):
            rate.observe(seen, 1.0)
        rate.forget()
    rate.observe(1, 20.0)
    assert rate.value is not None and rate.value < 2.0
