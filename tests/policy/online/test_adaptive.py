"""adaptive.py: the solved policy: which table, and when a wait ends."""

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np
import pytest
from tests.policy.banks import PROFILE, RATES, Feed, bank, promised, served
from tests.policy.online.test_arrivals import poisson
from tests.rings import spread, subcases

from weir.errors import SettingsError
from weir.messages import Reason
from weir.policy.conformance import check_policy
from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.decision import Decision, Observation
from weir.policy.loading import load_policy
from weir.policy.online.adaptive import (
    ALLOWED,
    RESERVE,
    ROWS,
    SECONDS,
    Arrived,
    AutoPolicy,
    CostAccount,
    SolvedPolicy,
    SureRate,
    VirtualQueue,
    WaitBounds,
    least_energy_mj,
)
from weir.policy.online.rate import SILENCE, RateBand, RateBands, answers_of, filling_of
from weir.policy.solve.bank import Bank, solve_bank
from weir.policy.solve.tables import limit_table
from weir.simulation.arrivals import MarkovModulated
from weir.simulation.engine import Run
from weir.simulation.simulator import run


def test_what_batches_cost_is_known_before_a_bank_is_solved_for_it() -> None:
    costs = [SolvedPolicy().costs]
    policy = SolvedPolicy(bank())
    costs.append(policy.costs)
    policy.expect(GOOGLENET_P4, Prices(latency_weight=3.0))
    costs.append(policy.costs)
    assert costs == [None, (PROFILE, bank().prices), (GOOGLENET_P4, Prices(latency_weight=3.0))]


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "solved", [lambda: None, bank, promised, lambda: solve_bank(GOOGLENET_P4, rates=[200.0, 1000.0, 2800.0])]
)
def test_it_keeps_the_rules_of_policies(solved: Callable[[], Bank | None]) -> None:
    policy = SolvedPolicy(solved())
    check_policy(policy)
    Feed().arrive(policy, 300.0, 100)
    check_policy(policy)


# Which table.


def index_of(policy: SolvedPolicy) -> int:
    index: int = policy.explain()["table"]["index"]
    return index


def test_without_a_bank_it_is_greedy() -> None:
    policy = SolvedPolicy()
    assert Feed().arrive(policy, 200.0, 100, waiting=3) == Decision(3, Reason.IDLE)
    assert (policy.learning, policy.bank, policy.largest_batch, policy.max_waiting) == (True, None, None, None)
    assert policy.rate == pytest.approx(200.0)


def test_it_is_greedy_until_the_rate_is_known() -> None:
    policy, feed = SolvedPolicy(bank()), Feed()
    assert feed.arrive(policy, 200.0, 15) == Decision(1, Reason.IDLE)
    assert policy.learning
    assert feed.arrive(policy, 200.0, 10).rows == 0
    assert not policy.learning


@pytest.mark.parametrize("start", [0.0, 1.7e9])
@subcases(("rate", "index"), [(100.0, 0), (210.0, 1), (390.0, 2)])
def test_it_takes_the_table_of_the_rate(start: float, rate: float, index: int) -> None:
    policy, feed, made = SolvedPolicy(bank()), Feed(start), bank()
    feed.arrive(policy, rate, 100)
    assert policy.rate == pytest.approx(rate, rel=1e-3)
    assert index_of(policy) == index
    for waiting in range(1, 9):
        assert policy.decide(feed.seen(waiting)).rows == made.tables[index][waiting]
    for waiting in (9, 50, 100_000):
        assert policy.decide(feed.seen(waiting)) == served(8, 2 * index + 2)


def test_below_the_lowest_rate_its_table_holds() -> None:
    policy, feed = SolvedPolicy(bank()), Feed()
    decision = feed.arrive(policy, 30.0, 100)
    assert (decision.rows, decision.limit) == (0, 2)
    assert index_of(policy) == 0


def test_a_size_is_tried_as_often_as_it_should_be() -> None:
    policy, feed = SolvedPolicy(bank()), Feed()
    feed.arrive(policy, 5000.0, 300)
    policy.try_size(4, 2)
    assert [policy.decide(feed.seen(waiting)).rows for waiting in (3, 7, 9, 9)] == [3, 4, 4, 8]


def test_above_the_highest_rate_it_never_idles() -> None:
    policy, feed = SolvedPolicy(bank()), Feed()
    feed.arrive(policy, 5000.0, 300)
    assert index_of(policy) == 2
    for waiting in (1, 2, 5, 8, 9, 1000):
        assert policy.decide(feed.seen(waiting)).rows == min(waiting, 8)


def test_it_follows_the_rate() -> None:
    policy, feed = SolvedPolicy(bank()), Feed()
    indices = []
    for rate in (100.0, 400.0, 200.0, 100.0):
        feed.arrive(policy, rate, 400)
        indices.append(index_of(policy))
    assert indices == [0, 2, 1, 0]


def test_a_rate_near_a_boundary_does_not_change_the_table_back_and_forth() -> None:
    policy, feed = SolvedPolicy(bank()), Feed()
    boundary = float(np.sqrt(RATES[0] * RATES[1]))
    indices = set()
    for _ in range(20):
        for rate in (0.97 * boundary, 1.03 * boundary):
            feed.arrive(policy, rate, 100)
            indices.add(index_of(policy))
    assert len(indices) == 1


@subcases("idle", [1, 2, 7])
def test_idle_places_and_draining_change_nothing(idle: int) -> None:
    policy, feed = SolvedPolicy(bank()), Feed(idle_places=idle, workers=8)
    feed.arrive(policy, 200.0, 100)
    assert policy.decide(feed.seen(5)) == served(5, 4)
    waits = policy.decide(feed.seen(3, draining=True))  # the batcher serves in spite of it
    assert waits.rows == 0


# Smaller and larger batches than it knows.


def test_with_a_smaller_largest_batch_a_full_one_is_never_held_back() -> None:
    policy, feed = SolvedPolicy(bank()), Feed(max_batch_size=3)
    feed.arrive(policy, 400.0, 200)
    assert policy.decide(feed.seen(2)).rows == 0
    for waiting in (3, 4, 5, 6, 8, 100):
        assert policy.decide(feed.seen(waiting)) == served(3, 3)


def test_it_never_asks_for_more_than_was_measured() -> None:
    policy, feed = SolvedPolicy(bank()), Feed(max_batch_size=64)
    feed.arrive(policy, 400.0, 200)
    assert policy.decide(feed.seen(50)).rows == 8
    assert policy.largest_batch == 8


def test_a_table_that_waits_beyond_the_largest_batch_is_overruled() -> None:
    table = np.zeros((3, 31), dtype=np.uint16)
    table[:, 30] = 8
    policy, feed = SolvedPolicy(bank(tables=table)), Feed(max_batch_size=64)
    feed.arrive(policy, 200.0, 100)
    assert policy.decide(feed.seen(7)).rows == 0
    assert policy.decide(feed.seen(20)) == served(8, 30)


# When a wait ends.


def wait_of(policy: SolvedPolicy, feed: Feed, waiting: int, age: float = 0.0) -> float:
    """Return until when it waits; hold that it serves then, and not a moment before."""
    answer = policy.decide(feed.seen(waiting, age=age))
    assert answer.rows == 0
    assert answer.until is not None
    seen = feed.seen(waiting, age=age)
    before = float(np.nextafter(answer.until, -np.inf))
    assert policy.decide(seen._replace(now=before)).rows == 0
    assert policy.decide(seen._replace(now=answer.until)).rows == waiting
    return answer.until


@pytest.mark.parametrize("start", [0.0, 1.7e9])
def test_a_silence_ends_a_wait(start: float) -> None:
    policy, feed = SolvedPolicy(bank()), Feed(start)
    feed.arrive(policy, 200.0, 200)
    assert wait_of(policy, feed, 3) - feed.last == pytest.approx(SILENCE / 200.0, rel=1e-3)


def test_rows_that_come_to_other_lines_do_not_put_a_wait_off_for_ever() -> None:
    policy, feed = SolvedPolicy(bank()), Feed()
    feed.arrive(policy, 200.0, 200)
    bound = filling_of(limit_table(4, 8)) / 200.0
    started = feed.now
    while (answer := policy.decide(feed.seen(1, age=feed.now - started))).rows == 0:
        assert answer.until is not None
        feed.now = feed.last = feed.now + 1.0 / 200.0
        feed.arrivals += 1  # in another group
    assert feed.now - started == pytest.approx(bound, abs=0.006)


def test_a_promise_ends_a_wait_in_time_for_the_batch() -> None:
    policy, feed = SolvedPolicy(promised()), Feed()
    feed.arrive(policy, 200.0, 200)
    until = wait_of(policy, feed, 3, age=0.02)
    assert until == pytest.approx(feed.now - 0.02 + 0.040 - 0.001 - 0.007)


LONGEST = 0.040 - 0.001 - 0.007  # seconds that the oldest of 3 rows may wait by `promised()`


def wait_for_promise(policy: SolvedPolicy, feed: Feed) -> tuple[float, float]:
    """Let 3 rows come, and have the policy wait. Return until when it does, and how much earlier that is than it might."""
    feed.arrive(policy, 200.0, 200, waiting=8)
    until = policy.decide(feed.seen(3, age=0.02)).until
    assert until is not None
    return until, feed.now - 0.02 + LONGEST - until


def waits_until_late(policy: SolvedPolicy, feed: Feed, late: float) -> float:
    """Have the policy wait, and ask it again `late` seconds after the end. Return how much earlier it ended than it might."""
    until, early = wait_for_promise(policy, feed)
    seen = feed.seen(3, age=0.02)._replace(now=until + late)
    assert policy.decide(seen).rows >= 2  # the less, the later
    feed.now = until + late
    return early


def test_a_wait_ends_as_much_earlier_as_waits_have_ended_late() -> None:
    policy, feed = SolvedPolicy(promised()), Feed()
    feed.arrive(policy, 200.0, 200)
    assert waits_until_late(policy, feed, 0.0007) == pytest.approx(0.0, abs=1e-8)
    assert waits_until_late(policy, feed, 0.0002) == pytest.approx(0.0007, abs=1e-8)
    until, early = wait_for_promise(policy, feed)
    assert early == pytest.approx(0.0007 - 0.01 * 0.0005, abs=1e-8)
    assert policy.decide(feed.seen(3, age=0.02)._replace(now=until - 0.0005)).until == pytest.approx(until), (
        "asked too early"
    )
    assert waits_until_late(policy, feed, 0.5) == pytest.approx(early, abs=1e-8)
    assert wait_for_promise(policy, feed)[1] == pytest.approx(0.1 * (0.040 - 0.001 - 0.005), abs=1e-8), (
        "no more, or a pause would end all waits on purpose"
    )


def test_the_lateness_of_waits_fades() -> None:
    policy, feed = SolvedPolicy(promised()), Feed()
    feed.arrive(policy, 200.0, 200)
    waits_until_late(policy, feed, 0.002)
    early = [waits_until_late(policy, feed, 0.0) for _ in range(200)]
    assert early[0] == pytest.approx(0.002, abs=1e-8)
    assert early[-1] == pytest.approx(0.002 * 0.99**199, abs=1e-8)


def test_a_wait_that_rows_ended_was_not_late() -> None:
    policy, feed = SolvedPolicy(promised()), Feed()
    feed.arrive(policy, 200.0, 200)
    wait_for_promise(policy, feed)
    assert policy.decide(feed.seen(8)).rows == 8
    feed.now += 0.1
    assert wait_for_promise(policy, feed)[1] == pytest.approx(0.0, abs=1e-8)


def test_a_promise_makes_batches_smaller_that_would_come_too_late() -> None:
    policy, feed = SolvedPolicy(promised()), Feed()
    feed.arrive(policy, 400.0, 200)
    assert policy.decide(feed.seen(8, age=0.02)).rows == 8
    assert policy.decide(feed.seen(8, age=0.03)).rows == 6  # 6 take 10 ms
    assert policy.decide(feed.seen(8, age=0.2)).rows == 8  # late it is anyhow


# Whom it lets in.


def close() -> Bank:
    """Return the bank with a promise of 22 ms: two batches of 7 are in time, one of 8 with one of 6."""
    return bank(objective=LatencySLO(0.022))


def test_a_promise_bounds_the_line_by_what_was_dispatched() -> None:
    """A batch of n rows takes n + 4 ms. What comes behind 8 rows has 10 ms to be served in: it may be 6 rows."""
    policy, feed = SolvedPolicy(close()), Feed()
    feed.arrive(policy, 400.0, 200)
    bounds = {}
    for rows in (6, 7, 8):
        assert policy.decide(feed.seen(rows)).rows == rows
        assert policy.max_waiting == 0, "a row that comes now is asked for"
        bounds[rows] = policy.full(feed.now + 0.001)
    assert bounds == {6: 8, 7: 8, 8: 7}
    assert policy.decide(feed.seen(3)).rows == 0
    assert policy.max_waiting == 8  # while the worker is free


def test_a_promise_lets_more_in_who_come_late() -> None:
    policy, feed = SolvedPolicy(close()), Feed()
    feed.arrive(policy, 400.0, 200)
    start = feed.now
    assert policy.decide(feed.seen(8)).rows == 8
    assert policy.full(start) == 6
    assert policy.full(start + 0.0089) == 6, "behind 12 + 10 ms, 5 rows are in time from 9 ms on"
    assert policy.full(start + 0.009) == 6 + 5
    assert policy.full(start + 0.0119) == 6 + 5
    # Of 8 rows that wait then, two began the third batch 3 ms ago, and 3 more may join them.
    feed.now = start + 0.012
    assert policy.decide(feed.seen(8, age=0.012)).rows == 6
    assert policy.max_waiting == 5


@pytest.mark.parametrize("rate", [1e-3, 5000.0])
def test_a_promise_holds_at_rates_that_are_not_known_or_cannot_be_served(rate: float) -> None:
    policy, feed = SolvedPolicy(close()), Feed()
    feed.arrive(policy, rate, 300 if rate > 1.0 else 10)
    assert policy.decide(feed.seen(3)).rows == 3
    assert policy.decide(feed.seen(8)).rows == 8
    assert policy.full(feed.now + 0.002) == 8


def test_a_bank_whose_promise_cannot_be_kept_under_overload_has_its_own_bounds() -> None:
    policy, feed = SolvedPolicy(bank(objective=LatencySLO(0.0049), max_waiting=[0, 4, 4])), Feed()
    feed.arrive(policy, 200.0, 10)
    assert policy.learning
    feed.arrive(policy, 200.0, 200)
    policy.decide(feed.seen(8))
    assert policy.max_waiting == 4
    assert policy.full(feed.now + 1.0) == 4


def test_batches_of_several_workers_start_apart() -> None:
    """With 15 ms for a batch of 8, which takes 12, four workers start one every 3 ms."""
    policy, feed = SolvedPolicy(bank(workers=4, objective=LatencySLO(0.015))), Feed(workers=4)
    feed.arrive(policy, 400.0, 200)
    feed.now += 1.0
    start = feed.now
    assert policy.decide(feed.seen(8)).rows == 8
    feed.now = start + 0.001
    waits = policy.decide(feed.seen(8))
    assert waits.rows == 0 and waits.until is not None
    assert waits.until == pytest.approx(start + 0.003)
    feed.now = waits.until
    assert policy.decide(feed.seen(8)).rows == 8
    feed.now -= 1.0  # another clock
    assert policy.decide(feed.seen(8)).rows == 8


def test_the_rate_stays_while_nothing_comes() -> None:
    policy, feed = SolvedPolicy(bank()), Feed()
    feed.arrive(policy, 200.0, 200)
    before = policy.decide(feed.seen(2))
    feed.now += 0.01
    assert policy.decide(feed.seen(2, age=0.01)).until == before.until


# The life of a policy.


def test_another_bank_is_adopted_and_the_rate_stays() -> None:
    policy, feed = SolvedPolicy(bank()), Feed()
    feed.arrive(policy, 200.0, 200)
    assert policy.decide(feed.seen(3)).rows == 0
    other = bank(tables=np.array([limit_table(3, 8)] * 3), max_waiting=[9, 9, 9])
    policy.adopt(other)
    assert policy.bank is other
    assert policy.explain()["table"]["limit"] == 3  # before the next decision
    assert policy.decide(feed.seen(3)) == served(3, 3)
    assert policy.max_waiting == 9
    policy.adopt(bank())
    assert policy.decide(feed.seen(3)).rows == 0
    assert policy.max_waiting is None


def test_a_bank_can_come_later() -> None:
    policy, feed = SolvedPolicy(), Feed()
    feed.arrive(policy, 200.0, 200)
    before = policy.learning
    policy.adopt(bank())
    assert (before, policy.learning, index_of(policy)) == (True, False, 1)
    assert policy.decide(feed.seen(3)).limit == 4


def test_a_fresh_one_has_the_bank_and_no_memory() -> None:
    policy, feed = SolvedPolicy(bank()), Feed()
    feed.arrive(policy, 200.0, 200)
    fresh = policy.fresh()
    assert fresh.bank is policy.bank
    assert (fresh.rate, fresh.learning) == (0.0, True)
    assert (fresh.prices, fresh.objective) == (policy.prices, policy.objective) == (bank().prices, None)
    fresh.adopt(promised())
    assert policy.bank is not fresh.bank
    empty = SolvedPolicy().fresh()
    assert (empty.bank, empty.prices, empty.objective) == (None, Prices(), None)


def test_its_objective_is_that_of_its_bank() -> None:
    assert SolvedPolicy(promised()).objective == promised().objective is not None


def test_a_line_that_starts_anew_keeps_the_rate() -> None:
    policy, feed = SolvedPolicy(bank()), Feed()
    feed.arrive(policy, 200.0, 200)
    feed.arrivals = 0
    assert feed.arrive(policy, 200.0, 3, waiting=3).rows == 0
    assert policy.rate == pytest.approx(200.0, rel=1e-3)


@pytest.mark.no_cover
def test_the_same_object_decides_for_any_scale_of_time() -> None:
    for factor in (1e-3, 1.0, 1e3):
        profile = Profile.linear(alpha_ms=factor, tau0_ms=4.0 * factor, max_batch_size=8)
        made = bank(profile=profile, rates=np.array(RATES) / factor)
        policy, feed = SolvedPolicy(made), Feed()
        feed.arrive(policy, 200.0 / factor, 20_000)
        wait: Any = policy.decide(feed.seen(3)).until
        assert wait - feed.last == pytest.approx(SILENCE * factor / 200.0, rel=1e-3)


# What it says of itself.


def test_it_explains_itself() -> None:
    policy, feed = SolvedPolicy(promised()), Feed()
    feed.arrive(policy, 200.0, 2000)
    said = policy.explain()
    assert said["learning"] is False
    assert said["rate"] == pytest.approx(200.0)
    assert said["capacity"] == pytest.approx(PROFILE.max_rate)
    assert said["workers"] == 1
    assert said["prices"] == {"latency_weight": 1.0, "energy_weight": 2000.0, "reference_rate": 200.0}
    assert said["objective"] == {
        "text": "p99=40ms", "deadline": 0.04, "late_share": 0.01, "margin": 0.001, "slack": 0.0, "refusal_price": 0.0,
    }  # fmt: skip
    assert said["table"] == {"index": 1, "rate": 200.0, "limit": 4}
    assert said["guards"]["silence"] == pytest.approx(SILENCE / 200.0)
    assert said["guards"]["deadline"] == pytest.approx(0.034)
    predicted = {"response_time_ms": 12.0, "p99_ms": 24.0, "power_w": 1.5, "cost": 12.0 + 2000.0 * 1.5}
    assert said["predicted"] == pytest.approx(predicted)


def test_between_rates_the_prediction_is_between() -> None:
    policy, feed = SolvedPolicy(bank(prices=Prices())), Feed()
    feed.arrive(policy, 300.0, 3000)
    assert policy.explain()["predicted"] == pytest.approx(
        {"response_time_ms": 16.0, "p99_ms": 32.0, "power_w": 2.0, "cost": 18.0}, rel=1e-3
    )
    low, feed = SolvedPolicy(bank()), Feed()
    feed.arrive(low, 10.0, 300)
    assert low.explain()["predicted"]["power_w"] == pytest.approx(0.1, rel=1e-3)


def test_what_is_not_known_is_none() -> None:
    nothing = SolvedPolicy().explain()
    assert nothing["learning"] is True
    assert nothing["rate"] is nothing["capacity"] is nothing["prices"] is nothing["objective"] is None
    assert set(nothing["predicted"].values()) == {None}
    assert SolvedPolicy(bank()).explain()["capacity"] == pytest.approx(PROFILE.max_rate)
    policy, feed = SolvedPolicy(bank(p99_ms=[np.nan] * 3)), Feed()
    feed.arrive(policy, 200.0, 300)
    assert policy.explain()["predicted"]["p99_ms"] is None
    assert policy.explain()["guards"]["deadline"] is None
    feed.arrive(policy, 900.0, 900)
    assert set(policy.explain()["predicted"].values()) == {None}  # more than one worker can serve


# The account: see test_account.py.


def test_it_is_greedy_where_waiting_has_cost_too_much() -> None:
    """Of latency alone, every wait of these tables is a loss."""
    policy, feed = SolvedPolicy(bank(prices=Prices(1.0, 0.0))), Feed()
    feed.arrive(policy, 100.0, 1000)
    assert policy.explain()["beside_greedy"]["greedy"]
    assert policy.decide(feed.seen(1)) == Decision(1, Reason.IDLE)
    assert 0.0 < policy.explain()["beside_greedy"]["excess"] < 0.02
    policy.adopt(bank())
    assert policy.explain()["beside_greedy"] == {"greedy": None, "excess": None}
    assert feed.arrive(policy, 100.0, 1).rows == 0
    assert policy.explain()["beside_greedy"] == {"greedy": False, "excess": 0.0}


def test_a_promise_is_kept_whatever_it_costs() -> None:
    policy, feed = SolvedPolicy(promised()), Feed()
    feed.arrive(policy, 200.0, 1000)
    assert policy.explain()["beside_greedy"] == {"greedy": None, "excess": None}


# account.py: what a policy pays for its waits, held against the simulator; and when it has to be greedy.


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


@pytest.mark.no_cover
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
        self.stage: RateBand = RateBands(self.bank).at(200.0)
        self.now = start
        self.arrivals = 0

    def look(self, gap: float, count: int = 1, *, oldest: float | None = None, waiting: int = 1) -> bool:
        """Let `count` rows arrive in `gap` seconds, and look."""
        self.now += gap
        self.arrivals += count
        first = self.now if oldest is None else oldest
        seen = Observation(self.now, waiting, first, 1e18, self.arrivals, self.now, 1, 1, 8, 1.0, False)
        return self.account.observe(seen, self.stage, self.stage.answers, 200.0)

    def looks(self, gap: float, times: int) -> float:
        """Look so many times; return the share of looks that told to be greedy."""
        return float(np.mean([self.look(gap) for _ in range(times)]))


@pytest.mark.parametrize("start", [0.0, 1.7e9])
def test_waits_that_pay_are_left_alone(start: float) -> None:
    traffic = Traffic(Prices(1.0, 100.0, 200.0), start)
    assert traffic.looks(0.005, 3000) == 0.0
    assert traffic.account.excess == pytest.approx(-RESERVE, abs=0.002)


@pytest.mark.no_cover
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


@pytest.mark.no_cover
@pytest.mark.parametrize("cv", [0.6, 1.0])
@pytest.mark.parametrize("seed", spread([7, 8, 9]))
def test_the_luck_of_service_times_does_not_stop_waits_that_pay(seed: int, cv: float) -> None:
    """Bursts beyond capacity make long queues, in which luck weighs far more than what the account looks for."""
    profile = Profile(np.full(8, 10.0), np.full(8, 100.0), np.full(8, cv))
    rate = 0.4 * profile.max_rate
    prices = Prices(1.0, 20.0, rate)
    times = MarkovModulated(rate, burst=16.0, period=0.3).times(np.random.default_rng(seed), 10_000)
    solved = SolvedPolicy(solve_bank(profile, prices, rates=[0.1 * rate, rate, 2.0 * rate]))

    def cost(policy: str | SolvedPolicy) -> float:
        spent, energy = costs(profile, run(profile, policy, times))
        return spent + prices.energy_weight * rate / 1000.0 * energy

    assert cost(solved) < 0.8 * cost("greedy")


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


@subcases(("waiting", "oldest", "first"), [(4, 0.15, 0.15), (9, 0.02, 0.15), (4, 9.0, 0.3), (4, 0.05, 0.1)])
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


# auto.py: the settings of a policy that the server solves for.


def test_it_starts_greedy_with_a_price_for_latency_alone() -> None:
    policy = load_policy("auto", max_batch_size=64, max_queue_delay=0.1)
    assert isinstance(policy, AutoPolicy)
    assert isinstance(policy, SolvedPolicy)
    assert (policy.prices, policy.objective, policy.bank) == (Prices(1.0, 0.0), None, None)
    assert (policy.power, policy.profile, policy.seconds) == (None, None, 3.0)
    check_policy(policy)


def test_its_settings_in_a_text() -> None:
    policy = load_policy(
        "auto:latency_weight=1,energy_weight=0.5,reference_rate=200,power=50,p99=20ms,profile=square.profile.toml,seconds=500ms"
    )
    assert isinstance(policy, AutoPolicy)
    assert policy.prices == Prices(1.0, 0.5, 200.0)
    assert policy.objective == LatencySLO(0.02, 0.01)
    assert (policy.power, policy.profile, policy.seconds) == (50.0, "square.profile.toml", 0.5)
    assert "energy_weight=0.5" in repr(policy)


@subcases(
    ("text", "message"),
    [
        ("auto:energy_weight=-1", "energy_weight=-1.0: must be 0 or more"),
        ("auto:latency_weight=0", "latency_weight=0, energy_weight=0: one of them"),
        ("auto:reference_rate=0", "reference_rate=0.0: must be greater than 0"),
        ("auto:power=0", "power=0.0: must be greater than 0"),
        ("auto:p99=0", "p99=0.0: must be greater than 0"),
        ("auto:p99=inf", "deadline=inf: must be a number of seconds"),
        ("auto:seconds=0", "seconds=0.0: must be greater than 0"),
        ("auto:profile=", "profile='': must not be empty"),
        ("auto:speed=9", "no setting 'speed'; it has latency_weight, energy_weight"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=f"policy='{text}': {message}"):
        load_policy(text)


def test_a_fresh_one_has_the_settings_and_the_bank() -> None:
    policy, feed = AutoPolicy(energy_weight=2.0, p99=0.05), Feed()
    feed.arrive(policy, 200.0, 100)
    policy.adopt(bank())
    fresh = policy.fresh()
    assert isinstance(fresh, AutoPolicy)
    assert fresh is not policy
    assert (fresh.energy_weight, fresh.objective, fresh.bank) == (2.0, policy.objective, policy.bank)
    assert fresh.rate == 0.0
    assert policy.rate == pytest.approx(200.0)
    check_policy(policy)


def test_its_objective_is_a_percentile_or_the_most_in_time() -> None:
    assert AutoPolicy(p99=0.02).objective == LatencySLO.parse("p99=20ms")
    assert AutoPolicy(in_time=0.02).objective == LatencySLO.parse("in-time=20ms")
    with pytest.raises(SettingsError, match=r"p99=0\.02, in_time=0\.05: must be one of them, not both"):
        AutoPolicy(p99=0.02, in_time=0.05)
