"""online/joint.py: the policy of a model with two kinds of workers."""

import json
from math import inf

import numpy as np
import pytest
from tests.policy import banks
from tests.policy.banks import Feed
from tests.rings import subcases

from weir.messages import Reason
from weir.policy.cost import Prices, Profile
from weir.policy.decision import Decision, Greedy, KindState, Observation, complete
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.online.joint import DevicePolicy, UnevenPolicy
from weir.policy.online.rate import SILENCE, filling_of
from weir.policy.solve.device import DeviceLoad, DeviceTable, solve_device
from weir.policy.solve.tables import limit_of
from weir.policy.solve.uneven import STEPS, UnevenBank, UnevenTable, WorkerKind
from weir.testing import check_policy

FAST = Profile.linear(alpha_ms=0.0, tau0_ms=24.0, max_batch_size=8)  # 1 ms a step
SLOW = Profile.linear(alpha_ms=0.0, tau0_ms=120.0, max_batch_size=8)  # 10 ms a step
RATE = 100.0
STATES = 17
IDLE = KindState(1, ())


def table(first_from: int, second_from: int, after: int) -> UnevenTable:
    """Return a table: the first kind starts with so many rows, the second with so many if the first is busy for `after` steps."""
    rows = np.minimum(np.arange(STATES), 8)
    first = np.tile(np.where(rows >= first_from, rows, 0), (STEPS[1] + 1, 1))
    second = np.tile(np.where(rows >= second_from, rows, 0), (STEPS[0] + 1, 1))
    second[:after] = 0
    return UnevenTable(first, second)


def bank(*tables: UnevenTable, numbers: tuple[int, int] = (0, 1)) -> UnevenBank:
    rates = tuple(RATE * 4.0**number for number in range(len(tables)))
    kinds = WorkerKind(FAST, 1, numbers[0], "large"), WorkerKind(SLOW, 1, numbers[1], "small")
    return UnevenBank(kinds, Prices(1.0, 0.0), rates, tables)


class Asked:
    """A policy that has seen rows arrive at RATE."""

    def __init__(self, *tables: UnevenTable, numbers: tuple[int, int] = (0, 1), rate: float = RATE) -> None:
        self.policy = UnevenPolicy(bank(*tables, numbers=numbers))
        self.now, self.arrivals, self.numbers = 0.0, 0, numbers
        for _ in range(200):
            self.now += 1.0 / rate
            self.arrivals += 1
            self.ask(1, IDLE, KindState(0, ((1, self.now),)))

    def ask(self, waiting: int, first: KindState, second: KindState, by: float = inf, now: float = 0.0) -> Decision:
        kinds = (first, second) if self.numbers == (0, 1) else (second, first)
        at, last = now or self.now, self.now
        return self.policy.decide(Observation(at, waiting, last, by, self.arrivals, last, 1, 2, 8, 1e9, False, kinds))


def busy(*, until_ms: float, now: float) -> KindState:
    """Return the state of the fast kind if its batch is done in so many ms."""
    return KindState(0, ((4, now + (until_ms - 24.0) / 1000.0),))


def test_it_keeps_the_rules_of_policies_and_is_greedy_for_one_kind() -> None:
    policy = UnevenPolicy(bank(table(1, 2, 4)))
    check_policy(policy)
    seen = Observation(1.0, 3, 0.9, inf, 3, 0.9, 1, 1, 8, 0.1, False)
    assert policy.decide(seen) == Decision(3, Reason.IDLE)
    assert policy.decide(seen._replace(kinds=(IDLE, IDLE))) == Decision(3, Reason.IDLE, kind=0), "the rate is unknown"
    assert policy.fresh().decide(seen) == Decision(3, Reason.IDLE)
    other = UnevenPolicy(bank(table(1, 2, 4), numbers=(1, 0)))
    assert other.decide(seen._replace(kinds=(IDLE, IDLE))) == Decision(3, Reason.IDLE, kind=1)


@subcases("numbers", [(0, 1), (1, 0)])
def test_the_fast_kind_is_first_and_the_slow_one_waits_for_it(numbers: tuple[int, int]) -> None:
    asked = Asked(table(1, 3, 10), numbers=numbers)
    now = asked.now
    assert asked.ask(2, IDLE, IDLE) == Decision(2, Reason.POLICY, None, 1, numbers[0])
    assert asked.ask(5, busy(until_ms=20.0, now=now), IDLE) == Decision(5, Reason.POLICY, None, 3, numbers[1])
    assert asked.ask(2, busy(until_ms=20.0, now=now), IDLE).rows == 0, "too few rows"
    waits = asked.ask(5, busy(until_ms=4.0, now=now), IDLE)
    assert (waits.rows, waits.kind) == (0, numbers[0]), "the fast one is soon idle"
    assert asked.ask(100, IDLE, KindState(0, ((1, now),))).rows == 8, "beyond the table its last entry holds"


def test_a_batch_that_is_late_is_expected_to_go_on_as_long_as_it_is_late() -> None:
    asked = Asked(table(1, 3, 10))
    began = busy(until_ms=4.0, now=asked.now)
    waits = asked.ask(5, began, IDLE)
    assert waits.until == pytest.approx(asked.now + 0.004 + 0.010)
    assert waits.until is not None
    assert asked.ask(5, began, IDLE, now=waits.until).kind == 1
    assert asked.ask(2, began, IDLE, now=waits.until).until is None, "so few rows never start there"


def test_no_wait_is_in_the_past() -> None:
    strange = table(1, 3, 2)
    strange.second[4:] = 0  # not what the solver makes: a worker that is later is waited for
    asked = Asked(strange)
    late = busy(until_ms=-20.0, now=asked.now)
    assert asked.ask(5, late, IDLE)[:3] == (0, Reason.POLICY, None)


def test_a_kind_without_a_worker_that_is_ready_is_not_waited_for() -> None:
    asked = Asked(table(1, 3, 10))
    assert asked.ask(2, KindState(0, ()), IDLE) == Decision(2, Reason.IDLE)  # of which the table would start 3
    assert asked.ask(5, IDLE, KindState(0, ())).kind == 0


def test_a_deadline_that_only_the_fast_kind_keeps_is_waited_for() -> None:
    asked = Asked(table(1, 3, 10))
    soon = busy(until_ms=15.0, now=asked.now)
    assert asked.ask(5, soon, IDLE, by=asked.now + 0.05).rows == 0
    assert asked.ask(5, soon, IDLE, by=asked.now + 0.2).kind == 1, "both keep it"
    assert asked.ask(5, soon, IDLE, by=asked.now + 0.03).kind == 1, "neither keeps it"


def test_a_wait_for_rows_ends_when_they_do_not_come() -> None:
    asked = Asked(table(3, 9, 0))
    waits = asked.ask(2, IDLE, IDLE)
    assert (waits.rows, waits.limit, waits.kind) == (0, 3, 0)
    assert waits.until == pytest.approx(asked.now + SILENCE / RATE, rel=0.05)
    assert waits.until is not None
    assert asked.ask(2, IDLE, IDLE, now=waits.until) == Decision(2, Reason.POLICY, None, 3, 0)


def test_the_table_follows_the_rate() -> None:
    tables = table(1, 9, 0), table(3, 9, 0)
    assert Asked(*tables).ask(2, IDLE, IDLE).rows == 2
    assert Asked(*tables, rate=4.0 * RATE).ask(2, IDLE, IDLE).rows == 0


def test_it_explains_which_kind_is_left_idle_and_why() -> None:
    asked = Asked(table(1, 3, 10))
    assert asked.policy.explain()["left_idle"] is None
    asked.ask(5, busy(until_ms=4.0, now=asked.now), IDLE)
    explained = json.loads(json.dumps(asked.policy.explain()))
    assert explained["left_idle"] == {"kind": "small", "waiting": 5, "first_idle_in": pytest.approx(0.004)}
    assert explained["first_starts_at"] == 1
    assert explained["second_starts_at"] == {"0.25": None, "0.5": 3, "1": 3}
    assert [each["kind"] for each in explained["kinds"]] == ["large", "small"]


def test_a_solved_policy_decides_by_the_tables_of_both_kinds() -> None:
    policy = SolvedPolicy()
    policy.adopt_kinds(bank(table(1, 2, 4), numbers=(1, 0)))
    assert policy.learning
    small, large = IDLE, busy(until_ms=20.0, now=2.0)
    for number in range(200):
        now = 0.01 * (number + 1)
        decision = policy.decide(Observation(now, 1, now, inf, number + 1, now, 1, 2, 8, 1e9, False, (small, large)))
    assert (decision.rows, decision.kind) == (0, 1)
    explained = policy.explain()
    assert (explained["learning"], explained["workers"], explained["table"]["limit"]) == (False, 2, 1)
    assert explained["kinds"]["left_idle"]["kind"] == "small"
    assert explained["device"] is None
    policy.share(None)
    assert (policy.learning, policy.explain()["kinds"]) == (True, None)


# Models that share a device: the policy of one of them.


PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=8.0, beta_mj=1.0, zeta0_mj=60.0, max_batch_size=8)
DEVICE_RATE = 300.0


def device_table() -> DeviceTable:
    found, _ = solve_device([DeviceLoad(PROFILE, DEVICE_RATE, 1.0, 2.0), DeviceLoad(PROFILE, 40.0, 1.0, 2.0)])
    assert limit_of(found.table) > 2
    return found


def test_it_keeps_the_rules_of_policies_and_is_greedy_at_first() -> None:
    policy = DevicePolicy(device_table())
    check_policy(policy)
    assert Feed().arrive(policy, DEVICE_RATE, 1) == Decision(1, Reason.IDLE)
    Feed().arrive(policy, DEVICE_RATE, 100)
    check_policy(policy)


def test_it_waits_for_the_limit_of_its_table_and_serves_what_that_says() -> None:
    policy, feed = DevicePolicy(device_table()), Feed()
    limit = limit_of(policy.table.table)
    waits = feed.arrive(policy, DEVICE_RATE, 100, waiting=1)
    assert (waits.rows, waits.reason, waits.limit) == (0, Reason.POLICY, limit)
    assert feed.arrive(policy, DEVICE_RATE, 1, waiting=limit).rows == policy.table.table[limit]
    assert feed.arrive(policy, DEVICE_RATE, 1, waiting=500).rows == policy.table.table[-1]


def test_a_wait_ends_when_the_traffic_has_stopped() -> None:
    policy, feed = DevicePolicy(device_table()), Feed()
    until = feed.arrive(policy, DEVICE_RATE, 100, waiting=1).until
    assert until is not None
    gone = min(SILENCE, filling_of(policy.table.table)) / DEVICE_RATE
    assert until - feed.now == pytest.approx(gone, rel=0.2)
    served = Decision(1, Reason.POLICY, None, limit_of(policy.table.table))
    assert policy.decide(feed.seen(waiting=1)._replace(now=until)) == served
    assert policy.decide(feed.seen(waiting=2)._replace(max_batch_size=2)).rows == 2  # a full batch never waits


def test_its_urgency_and_what_it_explains_are_those_of_the_table() -> None:
    policy = DevicePolicy(device_table())
    limit = limit_of(policy.table.table)
    urgency = {str(rows): policy.table.urgency_of(rows) for rows in (limit, 2 * limit)}
    assert policy.explain() == {"limit": limit, "urgency": urgency}
    assert policy.urgency(limit) == policy.table.urgency_of(limit)
    assert policy.fresh().table is policy.table


def test_a_solved_policy_decides_by_the_table_of_a_device_while_it_has_one() -> None:
    policy, feed = SolvedPolicy(banks.bank()), Feed()
    own = feed.arrive(policy, DEVICE_RATE, 100, waiting=1)
    assert policy.urgency(3) is None and policy.explain()["device"] is None
    policy.share(device_table())
    assert feed.arrive(policy, DEVICE_RATE, 1, waiting=1).limit == limit_of(device_table().table)
    assert policy.urgency(3) == device_table().urgency_of(3)
    assert policy.explain()["device"]["limit"] == limit_of(device_table().table)
    policy.share(None)
    assert (feed.arrive(policy, DEVICE_RATE, 1, waiting=1).limit, policy.urgency(3)) == (own.limit, None)


def test_other_policies_have_no_urgency_unless_they_define_it() -> None:
    class Own:
        def decide(self, seen: object) -> Decision:
            return Decision(1)

    class Urgent(Own):
        def urgency(self, waiting: int) -> float:
            return 2.0 * waiting

    assert (Greedy().urgency(3), complete(Own()).urgency(3), complete(Urgent()).urgency(3)) == (None, None, 6.0)
