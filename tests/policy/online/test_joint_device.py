"""Models that share a device: the policy of one of them."""

import pytest
from tests.policy.banks import Feed, bank

from weir.messages import Reason
from weir.policy.conformance import check_policy
from weir.policy.cost.profile import Profile
from weir.policy.decision import Decision, complete
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.online.joint import DevicePolicy
from weir.policy.online.rate import SILENCE, filling_of
from weir.policy.rules import Greedy
from weir.policy.solve.device import DeviceLoad, DeviceTable
from weir.policy.solve.tables import limit_of
from weir.simulation.device import solve_device

PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=8.0, beta_mj=1.0, zeta0_mj=60.0, max_batch_size=8)
RATE = 300.0


def table() -> DeviceTable:
    found, _ = solve_device([DeviceLoad(PROFILE, RATE, 1.0, 2.0), DeviceLoad(PROFILE, 40.0, 1.0, 2.0)])
    assert limit_of(found.table) > 2
    return found


def test_it_keeps_the_rules_of_policies_and_is_greedy_at_first() -> None:
    policy = DevicePolicy(table())
    check_policy(policy)
    assert Feed().arrive(policy, RATE, 1) == Decision(1, Reason.IDLE)
    Feed().arrive(policy, RATE, 100)
    check_policy(policy)


def test_it_waits_for_the_limit_of_its_table_and_serves_what_that_says() -> None:
    policy, feed = DevicePolicy(table()), Feed()
    limit = limit_of(policy.table.table)
    waits = feed.arrive(policy, RATE, 100, waiting=1)
    assert (waits.rows, waits.reason, waits.limit) == (0, Reason.POLICY, limit)
    assert feed.arrive(policy, RATE, 1, waiting=limit).rows == policy.table.table[limit]
    assert feed.arrive(policy, RATE, 1, waiting=500).rows == policy.table.table[-1]


def test_a_wait_ends_when_the_traffic_has_stopped() -> None:
    policy, feed = DevicePolicy(table()), Feed()
    until = feed.arrive(policy, RATE, 100, waiting=1).until
    assert until is not None
    gone = min(SILENCE, filling_of(policy.table.table)) / RATE
    assert until - feed.now == pytest.approx(gone, rel=0.2)
    served = Decision(1, Reason.POLICY, None, limit_of(policy.table.table))
    assert policy.decide(feed.seen(waiting=1)._replace(now=until)) == served
    assert policy.decide(feed.seen(waiting=2)._replace(max_batch_size=2)).rows == 2  # a full batch never waits


def test_its_urgency_and_what_it_explains_are_those_of_the_table() -> None:
    policy = DevicePolicy(table())
    limit = limit_of(policy.table.table)
    urgency = {str(rows): policy.table.urgency_of(rows) for rows in (limit, 2 * limit)}
    assert policy.explain() == {"limit": limit, "urgency": urgency}
    assert policy.urgency(limit) == policy.table.urgency_of(limit)
    assert policy.fresh().table is policy.table


def test_a_solved_policy_decides_by_the_table_of_a_device_while_it_has_one() -> None:
    policy, feed = SolvedPolicy(bank()), Feed()
    own = feed.arrive(policy, RATE, 100, waiting=1)
    assert policy.urgency(3) is None and policy.explain()["device"] is None
    policy.share(table())
    assert feed.arrive(policy, RATE, 1, waiting=1).limit == limit_of(table().table)
    assert policy.urgency(3) == table().urgency_of(3)
    assert policy.explain()["device"]["limit"] == limit_of(table().table)
    policy.share(None)
    assert (feed.arrive(policy, RATE, 1, waiting=1).limit, policy.urgency(3)) == (own.limit, None)


def test_other_policies_have_no_urgency_unless_they_define_it() -> None:
    class Own:
        def decide(self, seen: object) -> Decision:
            return Decision(1)

    class Urgent(Own):
        def urgency(self, waiting: int) -> float:
            return 2.0 * waiting

    assert (Greedy().urgency(3), complete(Own()).urgency(3), complete(Urgent()).urgency(3)) == (None, None, 6.0)
